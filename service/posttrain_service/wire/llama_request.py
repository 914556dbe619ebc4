"""What llama-stack's post-training routes may be sent, field by field as its own server has it. Pure.

The models are those of llama-stack 0.2.12 to 0.6.1. Fields that nothing is known of are let through, as that server does,
and told in the job's warnings. What the fields mean here stands in `llama_translate`.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, FiniteFloat

from posttrain_service.wire.base import NAME, Lenient, Name

Count = Annotated[int, Field(ge=0, le=1_000_000_000)]
Positive = Annotated[int, Field(ge=1, le=1_000_000)]
ModelName = Annotated[str, Field(min_length=1, max_length=600, pattern=NAME)]
JobId = Annotated[str, Field(min_length=1, max_length=128, pattern=NAME)]
"""Any text that can be shown; ids outside the form of ours are percent-encoded in the other APIs."""


class DataConfig(Lenient):
    """Which rows are trained on, and how they are taken."""

    dataset_id: Name
    """A registered data set, or the id of an uploaded file."""
    batch_size: Positive
    """Rows in one micro-batch; times gradient_accumulation_steps = rows in one optimizer step."""
    shuffle: bool
    """A new order each epoch; false = the data set's order."""
    data_format: Literal["instruct", "dialog"]
    """instruct: the last answer of each row is learned. dialog: every answer is."""
    validation_dataset_id: Name | None = None
    """Rows to validate on."""
    packed: bool | None = False
    """Rows share sequences without padding; false = each is padded to the longest of its micro-batch."""
    train_on_input: bool | None = False
    """Questions are learned too."""


class OptimizerConfig(Lenient):
    """The optimizer."""

    optimizer_type: Literal["adam", "adamw", "sgd"]
    """adam, adamw or sgd."""
    lr: Annotated[FiniteFloat, Field(gt=0, le=10)]
    """Peak learning rate."""
    weight_decay: Annotated[FiniteFloat, Field(ge=0, le=1)]
    """Weight decay."""
    num_warmup_steps: Count
    """Steps over which the learning rate rises."""


class EfficiencyConfig(Lenient):
    """What is given up to save memory."""

    enable_activation_checkpointing: bool | None = False
    """Recompute activations in the backward pass."""
    enable_activation_offloading: bool | None = False
    """Keep activations in host memory until the backward pass."""
    memory_efficient_fsdp_wrap: bool | None = False
    """Shard embedding and head apart from the rest; refused by this server."""
    fsdp_cpu_offload: bool | None = False
    """Keep weights and optimizer state in host memory."""


class TrainingConfig(Lenient):
    """How the training goes."""

    n_epochs: Annotated[int, Field(ge=1, le=10_000)]
    """Times that the data set is passed through."""
    max_steps_per_epoch: Count = 1
    """Optimizer steps after which an epoch ends; 0 = at the end of the data. The default is llama-stack's, and trains little."""
    gradient_accumulation_steps: Positive = 1
    """Micro-batches in one optimizer step."""
    max_validation_steps: Count | None = 1
    """Micro-batches in one validation; null or 0 = all."""
    data_config: DataConfig | None = None
    """Which rows; needed."""
    optimizer_config: OptimizerConfig | None = None
    """The optimizer; null = AdamW with this server's defaults."""
    efficiency_config: EfficiencyConfig | None = None
    """What is given up to save memory."""
    dtype: Annotated[str, Field(max_length=40)] | None = "bf16"
    """bf16, fp16 or fp32; null = what the device computes fast."""


class LoraConfig(Lenient):
    """Train a low-rank adapter."""

    type: Literal["LoRA"]
    """LoRA."""
    lora_attn_modules: Annotated[tuple[Name, ...], Field(max_length=100)]
    """Names of attention layers to adapt, such as q_proj."""
    apply_lora_to_mlp: bool
    """Adapt gate_proj, up_proj and down_proj too."""
    apply_lora_to_output: bool
    """Adapt lm_head too."""
    rank: Annotated[int, Field(ge=1, le=1024)]
    """Rank of the factors."""
    alpha: Annotated[int, Field(ge=1, le=65536)]
    """Scale: the adapter's output is multiplied by alpha / rank."""
    use_dora: bool | None = False
    """DoRA."""
    quantize_base: bool | None = False
    """Keep the frozen weights in 4 bits."""


class QatConfig(Lenient):
    """Train all weights for being quantised afterwards."""

    type: Literal["QAT"]
    """QAT."""
    quantizer_name: Annotated[str, Field(max_length=100)]
    """8da4w, int4 or int8 (torchtune's 8da4w-qat and 4w-qat are the first two)."""
    group_size: Annotated[int, Field(ge=8, le=65536)]
    """Weights that share a scale."""


class DpoConfig(Lenient):
    """Preference training. Up to 0.2.15 its fields were the four rewards' floats, from 0.2.16 on beta and loss_type."""

    beta: Annotated[FiniteFloat, Field(gt=0, le=100)] | None = None
    """How closely the model is held to its reference."""
    loss_type: Literal["sigmoid", "hinge", "ipo", "kto_pair"] = "sigmoid"
    """The loss."""
    reward_scale: FiniteFloat | None = None
    """Of the old form; has no effect."""
    reward_clip: FiniteFloat | None = None
    """Of the old form; has no effect."""
    epsilon: FiniteFloat | None = None
    """Of the old form; has no effect."""
    gamma: FiniteFloat | None = None
    """Of the old form; has no effect."""


class SupervisedFineTune(Lenient):
    """A request for supervised fine-tuning."""

    job_uuid: JobId
    """The job's id."""
    training_config: TrainingConfig
    """How the training goes."""
    hyperparam_search_config: dict[str, Any]
    """Must be empty: this server searches no hyperparameters."""
    logger_config: dict[str, Any]
    """Where metrics go besides: empty, or one of posttrain's loggers, such as {"kind": "tensorboard"}."""
    model: ModelName | None = None
    """Name of a model on the server or the hub, or what another job made; needed."""
    checkpoint_dir: Annotated[str, Field(max_length=4096)] | None = None
    """Must be left out: where checkpoints are is told by the job's artifacts."""
    algorithm_config: Annotated[LoraConfig | QatConfig, Field(discriminator="type")] | None = None
    """LoRA or QAT; null = all weights."""


class PreferenceOptimize(Lenient):
    """A request for preference training."""

    job_uuid: JobId
    """The job's id."""
    finetuned_model: ModelName
    """Name of a model on the server or the hub, or what another job made."""
    algorithm_config: DpoConfig
    """The loss."""
    training_config: TrainingConfig
    """How the training goes."""
    hyperparam_search_config: dict[str, Any]
    """Must be empty: this server searches no hyperparameters."""
    logger_config: dict[str, Any]
    """Where metrics go besides: empty, or one of posttrain's loggers."""


class CancelJob(Lenient):
    """Which job is meant, where the address does not say it."""

    job_uuid: JobId
    """The job's id."""


class RowsSource(Lenient):
    """Rows that come with the request."""

    type: Literal["rows"]
    """rows."""
    rows: Annotated[tuple[dict[str, Any], ...], Field(min_length=1)]
    """The rows."""


class UriSource(Lenient):
    """Rows that are at an address."""

    type: Literal["uri"]
    """uri."""
    uri: Annotated[str, Field(min_length=1, max_length=64 * 1024 * 1024)]
    """A data: address, or file: and a name in the data sets' folder of the server."""


class RegisterDataset(Lenient):
    """A request to register a data set."""

    purpose: Literal["post-training/messages", "eval/question-answer", "eval/messages-answer"]
    """What it is for; told back, and no more."""
    source: Annotated[RowsSource | UriSource, Field(discriminator="type")]
    """Where its rows are."""
    metadata: dict[str, Any] | None = None
    """Notes."""
    dataset_id: Name | None = None
    """Its name; null = the server makes one."""
