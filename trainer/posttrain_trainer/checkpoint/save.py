"""The folder protocol of checkpoints: written under a temporary name, hashed, manifest last, renamed.

A checkpoint exists when its manifest does. Everything else below `checkpoints/` is the rest of something interrupted
and is swept when a run starts. What goes into a checkpoint is the business of `state` and `export`.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from posttrain_trainer.contract.events import Manifest, ManifestFile
from posttrain_trainer.contract.folders import TRASH, remove_tree
from posttrain_trainer.contract.rundir import RunDir, checkpoint_id, sync_folder, write_json
from posttrain_trainer.dist import World

Trigger = Literal["steps", "samples", "epoch", "end", "stop"]

_TEMPORARY = ".tmp-"


@dataclass(frozen=True)
class Facts:
    """What the manifest says about a checkpoint besides its files; fields as in `Manifest`."""

    step: int
    epoch: float
    samples_seen: int
    tokens_seen: int
    attempt: int
    kind: Literal["full", "adapter"]
    trigger: Trigger
    metrics: dict[str, float]
    arguments_digest: str


def write_checkpoint(run_dir: RunDir, world: World, facts: Facts, fill: Callable[[Path], None]) -> Manifest:
    """Write one checkpoint; all ranks call it together, and return when it is complete and durable.

    Where it fails on one rank, it fails on all with that rank's error.

    Args:
        run_dir: The run.
        world: All ranks.
        facts: What to say about it.
        fill: Called on every rank with the folder, in which `model` and `state` exist and are empty.

    Returns:
        The manifest.

    Raises:
        OSError: Nothing is left of this checkpoint then, and earlier ones are intact.
    """
    name = checkpoint_id(facts.step)
    temporary = run_dir.checkpoints / f"{_TEMPORARY}{name}-{facts.attempt}"

    def begin() -> None:
        if world.rank == 0:
            shutil.rmtree(temporary, ignore_errors=True)
            for part in ("model", "state"):
                (temporary / part).mkdir(parents=True)

    try:
        world.together(begin)
        world.together(lambda: fill(temporary))
        data = world.together(lambda: _complete(run_dir, temporary, name, facts) if world.rank == 0 else None)
        return Manifest.model_validate(world.broadcast(data))
    except BaseException:
        if world.rank == 0:
            # Also gives the space back, which may be what was missing.
            shutil.rmtree(temporary, ignore_errors=True)
        raise


def sweep(run_dir: RunDir) -> list[str]:
    """Remove what interrupted writes and deletions left; returns the names. Only one process may do it."""
    left = [path for path in _children(run_dir.checkpoints) if path.name.startswith((_TEMPORARY, TRASH))]
    for path in left:
        remove_tree(path)  # the service may be removing it as well
    return sorted(path.name for path in left)


def delete_checkpoint(run_dir: RunDir, name: str) -> None:
    """Remove a checkpoint; it vanishes as a whole first, so no reader ever finds half of one."""
    trash = run_dir.checkpoints / f"{TRASH}{name}"
    shutil.rmtree(trash, ignore_errors=True)
    run_dir.checkpoint(name).rename(trash)
    remove_tree(trash)


def sha256(path: Path) -> str:
    """SHA-256 of a file, in hex."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _complete(run_dir: RunDir, temporary: Path, name: str, facts: Facts) -> dict[str, object]:
    """Hash and sync the files, write the manifest, give the folder its name; returns the manifest as JSON."""
    paths = sorted(path for path in temporary.rglob("*") if path.is_file())
    with ThreadPoolExecutor(max_workers=4) as pool:  # hashing and fsync both release the interpreter lock
        files = list(pool.map(lambda path: _seal(path, temporary), paths))
    for folder in {path.parent for path in paths}:
        sync_folder(folder)
    manifest = Manifest(
        id=name,
        step=facts.step,
        epoch=facts.epoch,
        samples_seen=facts.samples_seen,
        tokens_seen=facts.tokens_seen,
        attempt=facts.attempt,
        created_at=time.time(),
        kind=facts.kind,
        trigger=facts.trigger,
        metrics=facts.metrics,
        arguments_digest=facts.arguments_digest,
        files=files,
    )
    data = manifest.model_dump(mode="json")
    write_json(temporary / "manifest.json", data)
    final = run_dir.checkpoint(name)
    if final.exists() or final.is_symlink():
        # An altered checkpoint that resuming passed over, or one of a run that was started anew.
        delete_checkpoint(run_dir, name)
    temporary.rename(final)
    sync_folder(run_dir.checkpoints)
    return data


def _seal(path: Path, root: Path) -> ManifestFile:
    with path.open("rb") as file:
        os.fsync(file.fileno())
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        size = os.fstat(file.fileno()).st_size
    return ManifestFile(path=path.relative_to(root).as_posix(), size_bytes=size, sha256=digest)


def _children(folder: Path) -> list[Path]:
    return sorted(folder.iterdir()) if folder.is_dir() else []
