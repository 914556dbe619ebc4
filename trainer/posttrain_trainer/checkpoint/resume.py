"""Which checkpoint a run goes on from: verification against the manifest, and the choice."""

from __future__ import annotations

import stat
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

from pydantic import ValidationError

from posttrain_trainer.checkpoint.keep import newest_first
from posttrain_trainer.checkpoint.save import sha256
from posttrain_trainer.contract.errors import CheckpointInvalid, InvalidArguments
from posttrain_trainer.contract.events import Manifest
from posttrain_trainer.contract.rundir import RunDir, read_json


@dataclass(frozen=True)
class Choice:
    """What `choose` found: the checkpoint to go on from (None = start anew), and what it passed over and why."""

    manifest: Manifest | None
    passed_over: list[str] = field(default_factory=list)


def choose(run_dir: RunDir, resume: str, arguments_digest: str) -> Choice:
    """Choose by the knob `resume`; reads and hashes files, so one rank does it and tells the others.

    Args:
        run_dir: The run.
        resume: auto = the newest checkpoint whose files are what its manifest says; never; or a checkpoint's id.
        arguments_digest: `FullTrainingArguments.digest()` of this run; a resumed run must share it.

    Raises:
        CheckpointInvalid: A checkpoint named by id is missing, altered or made with other arguments.
        InvalidArguments: With auto, the newest usable checkpoint was made with other arguments.
    """
    if resume == "never":
        return Choice(None)
    if resume != "auto":
        return Choice(_named(run_dir, resume, arguments_digest))
    manifests, passed_over = readable(run_dir)
    for manifest in newest_first(manifests):
        if problem := verify(run_dir.checkpoint(manifest.id), manifest):
            passed_over.append(f"{manifest.id}: {problem}")
            continue
        if manifest.arguments_digest != arguments_digest:
            raise InvalidArguments(
                f"{run_dir.path} holds checkpoints of a run with other arguments (newest: {manifest.id}); "
                "name another ckpt_output_dir, or say resume: never to start anew there"
            )
        return Choice(manifest, passed_over)
    return Choice(None, passed_over)


def readable(run_dir: RunDir) -> tuple[list[Manifest], list[str]]:
    """The manifests that can be read, and one sentence for each checkpoint folder whose manifest cannot."""
    manifests, problems = [], []
    for path in sorted(run_dir.checkpoints.iterdir()) if run_dir.checkpoints.is_dir() else []:
        if path.name.startswith("step-"):
            try:
                manifests.append(read_manifest(path))
            except CheckpointInvalid as error:
                problems.append(f"{path.name}: {error.message}")
    return manifests, problems


def read_manifest(folder: Path) -> Manifest:
    """The manifest of one checkpoint folder; says nothing about the other files.

    Raises:
        CheckpointInvalid: There is none, it is not one, or it belongs to another checkpoint.
    """
    if folder.is_symlink():
        raise CheckpointInvalid("it is a symbolic link, which is not followed")
    try:
        data = read_json(folder / "manifest.json")
        if data is None:
            raise CheckpointInvalid("it is incomplete, there is no manifest")
        manifest = Manifest.model_validate(data)
    except (ValueError, ValidationError, OSError) as error:
        raise CheckpointInvalid(f"its manifest cannot be read ({error})") from error
    if manifest.id != folder.name:
        raise CheckpointInvalid(f"its manifest is that of {manifest.id}")
    return manifest


def verify(folder: Path, manifest: Manifest) -> str | None:
    """What is wrong with a checkpoint's files, as a sentence; None when all are there with the size and hash told."""
    listed = {file.path for file in manifest.files}
    if "state/.metadata" not in listed or "state/progress.json" not in listed:
        return "its manifest lists no state to go on from"
    for file in manifest.files:
        if problem := _verify_file(folder, file.path, file.size_bytes, file.sha256):
            return problem
    return None


def _verify_file(folder: Path, name: str, size_bytes: int, digest: str) -> str | None:
    parts = PurePosixPath(name)
    if parts.is_absolute() or ".." in parts.parts:
        return f"its manifest names a file outside of it ({name})"
    path = folder / parts
    if any((folder / parent).is_symlink() for parent in parts.parents if parent.name):
        return f"{name} lies behind a symbolic link"
    try:
        found = path.lstat()
    except OSError:
        return f"{name} is missing"
    if not stat.S_ISREG(found.st_mode):
        return f"{name} is not a regular file"
    if found.st_size != size_bytes:
        return f"{name} has {found.st_size} bytes instead of {size_bytes}"
    return None if sha256(path) == digest else f"{name} was altered (its SHA-256 differs)"


def _named(run_dir: RunDir, name: str, arguments_digest: str) -> Manifest:
    folder = run_dir.checkpoint(name)
    if not folder.is_dir():
        have = ", ".join(run_dir.checkpoint_ids()) or "none"
        raise CheckpointInvalid(f"there is no checkpoint {name} in {run_dir.path}; complete ones: {have}")
    try:
        manifest = read_manifest(folder)
    except CheckpointInvalid as error:
        raise CheckpointInvalid(f"{name} cannot be resumed: {error.message}") from error
    if problem := verify(folder, manifest):
        raise CheckpointInvalid(f"{name} cannot be resumed: {problem}")
    if manifest.arguments_digest != arguments_digest:
        raise CheckpointInvalid(f"{name} was made with other arguments than this run's, so going on from it would mix two runs")
    return manifest
