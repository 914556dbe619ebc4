"""What a run learns from its rows, one model for each method, and the base of all arguments."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import ConfigDict, Field, FiniteFloat, model_validator

from posttrain_trainer.contract.base import Disagreement, Model


class Arguments(Model):
    """Base of all arguments."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", use_attribute_docstrings=True, protected_namespaces=(), validate_default=True
    )


class SftMethod(Arguments):
    """Supervised fine-tuning: learn the answers of conversations."""

    kind: Literal["sft"] = "sft"
    """Supervised fine-tuning."""


class DpoMethod(Arguments):
    """Direct preference optimisation: prefer the chosen of two answers (Rafailov et al. 2023, arXiv:2305.18290)."""

    kind: Literal["dpo"]
    """Direct preference optimisation."""
    beta: Annotated[FiniteFloat, Field(gt=0, le=100)] = 0.1
    """How closely the model is held to its reference; larger = closer. For ipo: the regulariser tau."""
    loss_type: Literal["sigmoid", "hinge", "ipo", "kto_pair"] = "sigmoid"
    """sigmoid: DPO. hinge: SLiC (arXiv:2305.10425). ipo: squared, on log-probabilities per token (arXiv:2310.12036). kto_pair: KTO on pairs (arXiv:2402.01306)."""
    label_smoothing: Annotated[FiniteFloat, Field(ge=0, lt=0.5)] = 0.0
    """Share of pairs whose answers are taken to be swapped by mistake; sigmoid only."""
    reference_free: bool = False
    """Compare with a model to which all answers are equally likely instead of with the model as it was before training."""
    precompute_reference: bool = True
    """Take the reference's log-probabilities once, before training, and keep them on disk. False: in each step, from the model without its adapter (needs lora)."""

    @model_validator(mode="after")
    def _agree(self) -> Self:
        if self.label_smoothing and self.loss_type != "sigmoid":
            raise Disagreement("{label_smoothing} has no effect with {loss_type} {loss}; use sigmoid, or 0", loss=repr(self.loss_type))
        if self.reference_free and not self.precompute_reference:
            raise Disagreement("{reference_free} has no reference to compute; leave {precompute_reference} out")
        return self


class PretrainMethod(Arguments):
    """Continued pretraining: learn every token of plain documents."""

    kind: Literal["pretrain"]
    """Continued pretraining on documents."""
    text_column: Annotated[str, Field(min_length=1, max_length=200)] = "auto"
    """Column that holds the text; auto = text, document or content."""
    block_size: Annotated[int, Field(ge=8, le=10_000_000)] | None = None
    """Tokens of one sample: documents are joined and cut into blocks of this size, and attention stays inside each document. None = max_seq_len."""


Method = Annotated[SftMethod | DpoMethod | PretrainMethod, Field(discriminator="kind")]
"""The union of methods, told apart by `kind`."""


class QatArguments(Arguments):
    """Quantisation-aware training by torchao: linear layers compute with weights rounded as the quantised model's will be."""

    quantizer_name: Literal["8da4w", "int4", "int8"] = "8da4w"
    """8da4w: int4 weights by group, int8 activations by token. int4, int8: weights by group, activations as they are."""
    group_size: Annotated[int, Field(ge=8, le=65536)] = 32
    """Weights that share one scale; must divide the input width of every linear layer."""
