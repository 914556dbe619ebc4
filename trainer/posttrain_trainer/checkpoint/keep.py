"""Which checkpoints stay and in what order they stand: pure functions of manifests."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from posttrain_trainer.contract.events import Manifest


def newest_first(manifests: Iterable[Manifest]) -> list[Manifest]:
    """Manifests by attempt, then step, newest first.

    The attempt comes first: a run that started anew, or went back to an earlier checkpoint, continues from what it
    wrote itself, not from the higher steps that an earlier attempt left.
    """
    return sorted(manifests, key=lambda manifest: (manifest.attempt, manifest.step), reverse=True)


def to_delete(manifests: Sequence[Manifest], *, keep_last: int, keep_best: int, best_metric: str) -> list[str]:
    """Ids of the checkpoints that may go, oldest first.

    Args:
        manifests: All complete checkpoints.
        keep_last: How many of the newest stay, at least 1.
        keep_best: How many of the best stay besides; a best one that is also among the newest counts as kept.
        best_metric: Name of a metric in the manifests; losses are good when low, everything else when high. A
            checkpoint without it, or with a value that is not finite, is nobody's best.
    """
    assert keep_last >= 1, keep_last
    ordered = newest_first(manifests)
    stay = {manifest.id for manifest in ordered[:keep_last]}
    stay.update(manifest.id for manifest in best(ordered, best_metric)[:keep_best])
    return [manifest.id for manifest in reversed(ordered) if manifest.id not in stay]


def best(manifests: Sequence[Manifest], metric: str) -> list[Manifest]:
    """The manifests that carry `metric`, best first; of equals the newest comes first."""
    sign = 1.0 if metric.endswith("loss") else -1.0
    rated = [manifest for manifest in newest_first(manifests) if math.isfinite(manifest.metrics.get(metric, math.nan))]
    return sorted(rated, key=lambda manifest: sign * manifest.metrics[metric])
