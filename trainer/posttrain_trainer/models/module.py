"""The module that trains: backbone, gathering of supervised positions, head and loss in one forward.

Head and loss are inside because FSDP gathers the root's parameters only while the root's forward runs.

Shapes: B rows, S tokens, N supervised positions (at least 1), H hidden size, V vocabulary size.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel

from posttrain_trainer.contract.errors import InvalidArguments
from posttrain_trainer.models.attention import LENGTHS

if TYPE_CHECKING:
    from peft import PeftModel

    from posttrain_trainer.data.batch import Batch

T = TypeVar("T")
LogitTransform = Callable[[Tensor], Tensor]
HeadLoss = Callable[[Tensor, Tensor, nn.Module, LogitTransform | None], T]
"""(hidden_NH, labels_N, head, transform of the logits or None) -> a tuple of tensors."""

IGNORE = -100


class TrainModule(nn.Module):
    """Wraps a causal language model of transformers, or a peft model around one, as `model`."""

    autocast: torch.dtype | None = None
    """Precision of the computation where FSDP does not set it; None = that of the parameters."""

    def __init__(self, model: PreTrainedModel | PeftModel) -> None:
        super().__init__()
        self.model = model
        self.transform = logit_transform(self.causal.config)

    @property
    def causal(self) -> Any:
        """The transformers model itself, with adapters inside if there are any."""
        model: Any = self.model
        return model.get_base_model() if hasattr(model, "get_base_model") else model

    def forward(self, batch: Batch, loss: HeadLoss[T]) -> T:
        """What `loss` makes of the hidden states at supervised positions.

        A batch without labels gives `loss` one position labelled -100, so that every parameter gets a (zero)
        gradient and no rank falls out of the collectives.
        """
        device_type = batch.input_ids_BS.device.type
        with torch.autocast(device_type, dtype=self.autocast, enabled=self.autocast is not None):
            hidden_BSH = self.hidden(batch)
            labels_T = batch.labels_BS.flatten()
            index_N = (labels_T != IGNORE).nonzero().squeeze(1)
            if index_N.numel() == 0:
                index_N = labels_T.new_zeros(1)
            hidden_NH = hidden_BSH.flatten(0, 1).index_select(0, index_N)
            return loss(hidden_NH, labels_T[index_N], self.causal.get_output_embeddings(), self.transform)

    def hidden(self, batch: Batch) -> Tensor:
        """Last hidden states [B, S, H]; no mask and no cache, with which documents would see each other."""
        lengths = tuple(batch.lengths) if batch.packed else None
        output = self.causal.base_model(
            input_ids=batch.input_ids_BS, position_ids=batch.position_ids_BS, use_cache=False, **{LENGTHS: lengths}
        )
        hidden_BSH: Tensor = output.last_hidden_state
        return hidden_BSH


def logit_transform(config: PretrainedConfig) -> LogitTransform | None:
    """What the model family does to its head's output; None = nothing. `check_documents` proves it right for a model."""
    config = config.get_text_config()
    if (cap := getattr(config, "final_logit_softcapping", None)) is not None:
        return lambda logits: torch.tanh(logits / cap) * cap
    if (divisor := getattr(config, "logits_scaling", None)) is not None:
        return lambda logits: logits / divisor
    for name in ("logit_scale", "lm_head_multiplier"):
        if (factor := getattr(config, name, None)) is not None:
            return lambda logits: logits * factor
    return None


@torch.no_grad()
def check_documents(module: TrainModule) -> None:
    """Prove on a few tokens that packing keeps documents apart and that our logits are the model's own.

    Costs two forward passes of a few tokens. It catches what no list of model families can: state-space layers that
    carry state on, masks made from positions, unknown scalings of logits.

    Raises:
        InvalidArguments: The second document's logits differ from those of the document alone.
    """
    causal = module.causal
    embedding = causal.get_input_embeddings().weight
    ids_S = torch.arange(11, device=embedding.device) * 7919 % embedding.shape[0]
    first, second = 6, 5
    batch: Any = SimpleNamespace(
        input_ids_BS=ids_S[None],
        labels_BS=torch.where(torch.arange(11, device=ids_S.device) < first, IGNORE, ids_S)[None],
        position_ids_BS=torch.cat([torch.arange(first), torch.arange(second)])[None].to(ids_S.device),
        lengths=(first, second),
        packed=True,
    )
    training = module.training
    module.eval()

    def both(hidden_NH: Tensor, _labels_N: Tensor, head: nn.Module, transform: LogitTransform | None) -> tuple[Tensor, Tensor]:
        logits_NV: Tensor = head(hidden_NH)
        # Also inside the module's forward, the only place where the parameters of a sharded model are whole.
        alone_NV: Tensor = causal(input_ids=ids_S[None, first:], use_cache=False, **{LENGTHS: None}).logits[0]
        return logits_NV if transform is None else transform(logits_NV), alone_NV

    packed, alone = module(batch, both)
    exact = packed.dtype == torch.float32
    packed, alone = packed.float(), alone.float()
    module.train(training)
    difference = float((packed - alone).abs().max())
    allowed = (1e-3 if exact else 5e-2) * max(1.0, float(alone.abs().max()))
    if not difference <= allowed:
        raise InvalidArguments(
            f"{type(causal).__name__} cannot be trained here: in a pack, a document's logits differ by {difference:.3g} from "
            "those of the document alone, so documents would leak into each other or the loss would be of other logits"
        )
