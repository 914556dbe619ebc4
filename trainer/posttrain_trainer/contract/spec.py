"""`FullTrainingArguments` and `TorchrunArguments`: everything a run can be told, with bounds and a sentence each.

Frozen pydantic trees that refuse unknown names. The names of InstructLab's train profile are taken over unchanged.
Numbers given as text are accepted (`2e-6` is text in YAML 1.1). A default of None means "decided when the run starts";
`resolved()` fills in what can be decided without the model, and the trainer records the rest in its result.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import Field, FiniteFloat, model_validator

from posttrain_trainer.contract.base import Disagreement
from posttrain_trainer.contract.loggers import Logger as Logger
from posttrain_trainer.contract.methods import Arguments, DpoMethod, Method, PretrainMethod, QatArguments, SftMethod

PositiveInt = Annotated[int, Field(ge=1, le=1_000_000_000)]
Count = Annotated[int, Field(ge=0, le=1_000_000_000)]
Ratio = Annotated[FiniteFloat, Field(ge=0.0, le=1.0)]
Path_ = Annotated[str, Field(min_length=1, max_length=4096, pattern=r"^[^\x00]+$")]


class LoraArguments(Arguments):
    """Train a low-rank adapter beside frozen weights (Hu et al. 2021, arXiv:2106.09685)."""

    rank: Annotated[int, Field(ge=1, le=1024)] = 16
    """Rank of the two factors."""
    alpha: Annotated[FiniteFloat, Field(gt=0, le=65536)] = 32.0
    """Scale: the adapter's output is multiplied by alpha / rank (alpha / sqrt(rank) with use_rslora)."""
    dropout: Annotated[FiniteFloat, Field(ge=0, lt=1)] = 0.0
    """Dropout in front of the adapter."""
    target_modules: Annotated[tuple[Annotated[str, Field(min_length=1, max_length=200)], ...], Field(min_length=1)] | None = None
    """Names (or endings of names) of the linear layers to adapt; None = all linear layers but the output head."""
    use_dora: bool = False
    """Weight-decomposed adaptation, DoRA (Liu et al. 2024, arXiv:2402.09353)."""
    use_rslora: bool = False
    """Rank-stabilised scaling (Kalajdzievski 2023, arXiv:2312.03732)."""
    quantize_base: bool = False
    """Keep the frozen weights in 4 bits (NF4 by bitsandbytes): QLoRA (Dettmers et al. 2023, arXiv:2305.14314)."""


class FsdpArguments(Arguments):
    """How model state is spread over the ranks (PyTorch FSDP2)."""

    sharding: Literal["full", "grad_op", "hybrid", "none"] = "full"
    """full: parameters, gradients and optimizer state sharded over all ranks, parameters freed after each use. grad_op: parameters stay gathered between forward and backward. hybrid: sharded like full within groups of ranks, each of which holds a copy (HSDP). none: every rank holds a whole copy."""
    shard_ranks: Annotated[int, Field(ge=2, le=65536)] | None = None
    """With hybrid: ranks that share one copy of the model, a divisor of their number; None = the ranks of one host."""
    cpu_offload: bool = False
    """Keep parameters, gradients and optimizer state in host memory; refused where the device is the CPU itself."""

    @model_validator(mode="after")
    def _agree(self) -> Self:
        if self.shard_ranks is not None and self.sharding != "hybrid":
            raise Disagreement("{shard_ranks} has no effect with {sharding} {kind}; use hybrid or leave it out", kind=repr(self.sharding))
        return self


class FullTrainingArguments(Arguments):
    """One training run."""

    # The train profile's names, as InstructLab has them.
    model_path: Path_
    """Folder of a model in Hugging Face layout, or an id on the Hugging Face hub."""
    data_path: Path_
    """File of training rows (JSONL, JSON, CSV or Parquet, optionally .gz or .zst)."""
    ckpt_output_dir: Path_
    """The run's folder: attempts, logs, metrics and checkpoints are written below it."""
    data_output_dir: Path_ | None = None
    """Folder for processed data; None = `data` below ckpt_output_dir."""
    max_seq_len: Annotated[int, Field(ge=8, le=10_000_000)] | None = None
    """Longest sample in tokens; None = 4096 or the model's own limit, whichever is less."""
    max_batch_len: Annotated[int, Field(ge=8, le=100_000_000)] | None = None
    """Most tokens in one micro-batch on one rank; None = max_seq_len (dpo: twice that), at least 4096. Not below that."""
    num_epochs: Annotated[int, Field(ge=1, le=10_000)] = 1
    """Times that the data set is passed through."""
    effective_batch_size: Annotated[int, Field(ge=1, le=1_000_000)] = 32
    """Samples in one optimizer step, over all ranks and micro-batches."""
    save_samples: Count = 0
    """Save a checkpoint whenever this many more samples were seen; 0 = not by samples."""
    learning_rate: Annotated[FiniteFloat, Field(gt=0, le=10)] | None = None
    """Peak learning rate; None = 2e-5 for full fine-tuning, 2e-4 with LoRA, 5e-7 for dpo."""
    warmup_steps: Count = 0
    """Optimizer steps over which the learning rate rises linearly from zero."""
    is_padding_free: bool = True
    """True: samples are packed without padding. False: samples are padded to the longest of their micro-batch."""
    random_seed: Annotated[int, Field(ge=0, le=2**32 - 1)] = 42
    """Seed of shuffling, dropout and new weights."""

    # Method.
    method: Method = SftMethod()
    """What is learned from the rows."""
    lora: LoraArguments | None = None
    """Train an adapter instead of all weights; None = full fine-tuning."""
    qat: QatArguments | None = None
    """Train all weights for being quantised afterwards; None = without. The export is an ordinary model, to be quantised by torchao with the same settings."""
    train_on: Literal["assistant", "last_assistant", "all"] = "assistant"
    """Which turns carry labels: every assistant turn, the last one, or everything that isn't a system turn."""
    chat_template: Annotated[str, Field(min_length=1, max_length=200_000)] | None = None
    """A template for models that have none, or instead of their own: a shipped name (chatml) or Jinja text."""

    # Length and steps.
    max_steps: PositiveInt | None = None
    """Stop after this many optimizer steps; None = as many as num_epochs gives. Data is passed through again until they are done only when num_epochs allows."""
    max_steps_per_epoch: PositiveInt | None = None
    """End each epoch after this many optimizer steps; None = at the end of the data."""
    shuffle: bool = True
    """A new reproducible order each epoch; False = file order."""
    over_length: Literal["drop", "truncate_right"] = "drop"
    """What happens to a sample longer than max_seq_len; either way it is counted."""
    invalid_rows: Literal["fail", "skip"] = "fail"
    """fail: a bad row ends the run before it trains, with its line. skip: bad rows are left out, counted and listed."""
    max_invalid_rows: Count = 1000
    """With skip: more bad rows than this end the run."""

    # Optimiser.
    optimizer: Literal["adamw", "adam", "sgd"] = "adamw"
    """AdamW (decoupled weight decay), Adam, or plain SGD."""
    adamw_betas: tuple[Annotated[FiniteFloat, Field(ge=0, lt=1)], Annotated[FiniteFloat, Field(ge=0, lt=1)]] = (0.9, 0.95)
    """Decay rates of Adam's two moments."""
    adamw_eps: Annotated[FiniteFloat, Field(gt=0, le=1)] = 1e-8
    """Added to Adam's denominator."""
    weight_decay: Annotated[FiniteFloat, Field(ge=0, le=1)] = 0.0
    """Weight decay of matrices; biases, norms and embeddings have none."""
    max_grad_norm: Annotated[FiniteFloat, Field(gt=0, le=1e9)] | None = 1.0
    """Gradients are scaled down to this global norm; None = no clipping."""
    lr_scheduler: Literal["constant", "linear", "cosine", "cosine_with_min_lr", "wsd"] = "cosine"
    """Course of the learning rate after the warm-up; wsd holds it, then falls linearly over the last tenth."""
    min_lr_ratio: Ratio = 0.0
    """Lowest learning rate as a share of the peak, for cosine_with_min_lr and wsd."""
    max_skipped_steps: Annotated[int, Field(ge=0, le=1_000_000)] = 10
    """More steps in a row than this with a non-finite loss or gradient end the run."""

    # Machine.
    dtype: Literal["auto", "bf16", "fp16", "fp32"] = "auto"
    """Precision of the computation; auto = bf16 where the device computes it fast, else fp32."""
    master_weights: bool = True
    """Keep weights and optimizer state in fp32 while computing in dtype; False = everything in dtype."""
    device: Literal["auto", "cpu", "cuda", "mps", "xpu", "hpu"] = "auto"
    """Where to train; auto = the first accelerator that works, else the CPU. ROCm is cuda."""
    fsdp: FsdpArguments = FsdpArguments()
    """How model state is spread over the ranks."""
    activation_checkpointing: bool = False
    """Recompute each block's activations in the backward pass instead of keeping them: less memory, more time."""
    activation_offloading: bool = False
    """Keep each block's activations in host memory between forward and backward; with activation_checkpointing, its inputs. Refused where the device's memory is the host's."""
    attention: Literal["auto", "sdpa", "flash"] = "auto"
    """Kernel of the attention, which keeps documents apart in any case: auto = flash for all documents of a pack at once where the device has it, else sdpa; sdpa = one call for each document; flash = refused where the device or the precision has none."""
    deterministic: bool = False
    """Use only algorithms that give the same bits each time."""

    # Validation.
    validation_data_path: Path_ | None = None
    """File of validation rows."""
    validation_split: Annotated[FiniteFloat, Field(gt=0, lt=1)] | None = None
    """Share of the training rows held out for validation, chosen by random_seed; not together with a file."""
    validation_every_steps: PositiveInt | None = None
    """Validate after every so many steps; None = at the end of each epoch."""
    max_validation_steps: PositiveInt | None = None
    """Most micro-batches per rank in one validation; None = all."""

    # Checkpoints.
    save_every_steps: Count = 0
    """Save a checkpoint every so many steps; 0 = not by steps."""
    save_every_epoch: bool = True
    """Save a checkpoint at the end of each epoch. The end of the run is always saved."""
    keep_last: PositiveInt = 2
    """Newest checkpoints that stay."""
    keep_best: Count = 0
    """Best checkpoints, by best_metric, that stay besides."""
    best_metric: Literal["validation_loss", "validation_accuracy", "loss"] = "validation_loss"
    """What makes a checkpoint the best: losses low, accuracy high."""
    resume: Annotated[str, Field(pattern=r"^(auto|never|step-\d{6,})$")] = "auto"
    """auto: go on from the newest complete checkpoint of ckpt_output_dir, if any. never: start anew. step-000100: from that one."""
    async_save: Literal["auto", "on", "off"] = "auto"
    """Write checkpoints beside training, from a copy of weights and optimizer state in host memory; auto = where there is room for twice the copy. Those at the end and on a stop are written at once."""
    merge_lora: bool = False
    """Also write the final adapter merged into the model, as `merged/` beside `model/`."""

    # Seen.
    loggers: tuple[Logger, ...] = ()
    """Where metrics go besides metrics.jsonl."""
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """Least severe message that the rank logs keep."""
    profile_steps: tuple[PositiveInt, PositiveInt] | None = None
    """First and last step that torch.profiler records; each rank writes profile/rank-<r>.json in the attempt's folder. None = no profile."""

    @model_validator(mode="after")
    def _agree(self) -> Self:
        longest = None if self.max_seq_len is None else self.max_seq_len * self.documents_per_sample
        if longest is not None and self.max_batch_len is not None and self.max_batch_len < longest:
            twice = "" if self.documents_per_sample == 1 else "twice "
            raise Disagreement(
                "{max_batch_len} ({room}) is below {twice}{max_seq_len} ({longest}): "
                "a sample of full length would fit no micro-batch; raise {max_batch_len}",
                room=self.max_batch_len, twice=twice, longest=self.max_seq_len,
            )  # fmt: skip
        self._agree_on_method()
        if self.validation_data_path is not None and self.validation_split is not None:
            raise Disagreement("{validation_data_path} and {validation_split} exclude each other; give one")
        validates = self.validation_data_path is not None or self.validation_split is not None
        for name in ("validation_every_steps", "max_validation_steps"):
            if getattr(self, name) is not None and not validates:
                raise Disagreement(f"{{{name}}} needs {{validation_data_path}} or {{validation_split}}")
        if self.keep_best and self.best_metric.startswith("validation") and not validates:
            raise Disagreement("{keep_best} by {best_metric} {metric} needs {validation_data_path} or {validation_split}", metric=self.best_metric)
        if self.profile_steps is not None and self.profile_steps[0] > self.profile_steps[1]:
            raise Disagreement("{profile_steps} ends ({last}) before it begins ({first})", first=self.profile_steps[0], last=self.profile_steps[1])
        if self.merge_lora and self.lora is None:
            raise Disagreement("{merge_lora} needs {lora}")
        if self.min_lr_ratio and self.lr_scheduler not in ("cosine_with_min_lr", "wsd"):
            raise Disagreement("{min_lr_ratio} has no effect with {lr_scheduler} {kind}; use cosine_with_min_lr or wsd", kind=repr(self.lr_scheduler))
        if self.dtype == "fp16" and self.device in ("cpu", "mps"):
            raise Disagreement("{dtype} fp16 cannot train on {device} {kind}; use bf16 or fp32", kind=self.device)
        return self

    def _agree_on_method(self) -> None:
        kind = self.method.kind
        if kind != "sft" and self.train_on != "assistant":
            raise Disagreement("{train_on} has no effect with {method} {kind}, which says itself what is learned; leave it out", kind=repr(kind))
        if isinstance(self.method, PretrainMethod):
            if self.chat_template is not None:
                raise Disagreement("{chat_template} has no effect with {method} 'pretrain'; leave it out")
            if not self.is_padding_free:
                raise Disagreement("{is_padding_free} false has no use with {method} 'pretrain', whose blocks are full; leave it out")
            if self.over_length != "drop":
                raise Disagreement("{over_length} has no effect with {method} 'pretrain', which cuts documents into blocks; leave it out")
            size = self.method.block_size
            if size is not None and self.max_seq_len is not None and size > self.max_seq_len:
                raise Disagreement(
                    "{method.block_size} ({size}) is beyond {max_seq_len} ({longest}); lower it or raise {max_seq_len}", size=size, longest=self.max_seq_len
                )
        if isinstance(self.method, DpoMethod) and not self.method.precompute_reference and self.lora is None:
            raise Disagreement("{method.precompute_reference} false needs {lora}: without an adapter there is no reference beside the model")
        if self.qat is not None and self.lora is not None:
            raise Disagreement("{qat} trains all weights and {lora} an adapter; give one")

    @property
    def documents_per_sample(self) -> int:
        """Documents of up to max_seq_len tokens that one sample has: two for pairs of answers."""
        return 2 if isinstance(self.method, DpoMethod) else 1

    def resolved(self) -> FullTrainingArguments:
        """The same arguments with every default filled in that needs neither the model nor the machine."""
        changes: dict[str, Any] = {}
        if self.learning_rate is None:
            usual = 2e-5 if self.lora is None else 2e-4
            changes["learning_rate"] = 5e-7 if isinstance(self.method, DpoMethod) else usual
        if self.data_output_dir is None:
            changes["data_output_dir"] = str(Path(self.ckpt_output_dir) / "data")
        return self.model_copy(update=changes)

    def digest(self) -> str:
        """SHA-256 over what a resumed run must share with the run that made the checkpoint.

        Paths, the machine, checkpoint and logging knobs may change between attempts; what is learned may not.
        """
        free = {
            "ckpt_output_dir", "data_output_dir", "data_path", "validation_data_path", "model_path", "resume",
            "device", "fsdp", "activation_checkpointing", "activation_offloading", "attention", "save_samples", "save_every_steps", "save_every_epoch",
            "keep_last", "keep_best", "best_metric", "async_save", "merge_lora", "loggers", "log_level", "validation_every_steps",
            "max_validation_steps", "max_skipped_steps", "profile_steps",
        }  # fmt: skip
        data = self.resolved().model_dump(mode="json", exclude=free)
        return hashlib.sha256(json.dumps(data, sort_keys=True).encode()).hexdigest()


class TorchrunArguments(Arguments):
    """How many ranks run, and where they meet. Names as torchrun and InstructLab have them."""

    nproc_per_node: Annotated[int, Field(ge=1, le=1024)] | Literal["auto", "gpu", "cpu"] = 1
    """Ranks on this node; gpu or auto = one for each accelerator (cpu = one for each core)."""
    nnodes: Annotated[int, Field(ge=1, le=65536)] = 1
    """Nodes that train together."""
    node_rank: Annotated[int, Field(ge=0, le=65535)] = 0
    """This node's number."""
    rdzv_id: Annotated[str, Field(min_length=1, max_length=200, pattern=r"^[\x21-\x7e]+$", coerce_numbers_to_str=True)] = "posttrain"
    """Name of the rendezvous; the same on all nodes, different for each run that shares an endpoint."""
    rdzv_endpoint: Annotated[str, Field(pattern=r"^[A-Za-z0-9._\[\]:-]+:\d{1,5}$", max_length=300)] | None = None
    """host:port where the nodes meet; None on a single node = a private one."""
    master_addr: Annotated[str, Field(pattern=r"^[A-Za-z0-9._:-]+$", max_length=253)] | None = None
    """Address of node 0, instead of rdzv_endpoint."""
    master_port: Annotated[int, Field(ge=1, le=65535)] | None = None
    """Port on node 0, with master_addr."""
    shutdown_timeout_s: Annotated[int, Field(ge=1, le=86400)] = 30
    """Seconds that ranks have to save and exit after SIGTERM before they are killed. Under the service its shim keeps this time, and torchrun itself is given a little more."""

    @model_validator(mode="after")
    def _agree(self) -> Self:
        if (self.master_addr is None) != (self.master_port is None):
            raise Disagreement("{master_addr} and {master_port} go together; give both or neither")
        if self.rdzv_endpoint is not None and self.master_addr is not None:
            raise Disagreement("{rdzv_endpoint} and {master_addr} exclude each other; give one")
        if self.node_rank >= self.nnodes:
            raise Disagreement("{node_rank} ({number}) must be below {nnodes} ({count})", number=self.node_rank, count=self.nnodes)
        if self.nnodes > 1 and self.rdzv_endpoint is None and self.master_addr is None:
            raise Disagreement(
                "{nnodes} is {count}: name where the nodes meet by {rdzv_endpoint} (or {master_addr} and {master_port})", count=self.nnodes
            )
        return self


class AttemptArguments(Arguments):
    """The content of an attempt's arguments.json."""

    contract: int
    """CONTRACT_VERSION of the writer; a trainer of another version refuses to start."""
    train_args: FullTrainingArguments
    """What to train."""
    torch_args: TorchrunArguments
    """How it was started."""
