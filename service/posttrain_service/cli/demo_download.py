"""Bring a job's newest checkpoint to this machine: one tar, every file checked against its hash."""

from __future__ import annotations

import hashlib
import shutil
import tarfile
from pathlib import Path
from typing import Any

from posttrain_service.cli.demo_screen import DemoError
from posttrain_service.client import Client


def fetch(client: Client, job_uuid: str, folder: Path) -> Path:
    """Download the newest checkpoint below `folder` unless it lies there; returns its `model` folder.

    Raises:
        DemoError: There is none, or it did not arrive as its manifest says.
    """
    checkpoints = client.checkpoints(job_uuid)
    if not checkpoints:
        raise DemoError(f"job {job_uuid} succeeded but has no checkpoint; see its log")
    newest = max(checkpoints, key=lambda checkpoint: int(checkpoint["step"]))
    files = [file for file in newest["files"] if file["path"].startswith("model/")]
    target = folder.resolve() / f"{job_uuid}-{newest['id']}"  # as the archive itself calls it
    if not _complete(target, files):
        shutil.rmtree(target, ignore_errors=True)
        target.mkdir(parents=True)
        archive = client.download_checkpoint(job_uuid, str(newest["id"]), target.with_suffix(".tar"))
        _unpack(archive, target)
        archive.unlink()
        if not _complete(target, files):
            raise DemoError(f"checkpoint {newest['id']} arrived damaged; say the same again to fetch it anew")
    return target / "model"


def _unpack(archive: Path, target: Path) -> None:
    """Only plain files, and only into `target`: an archive is somebody else's word."""
    with tarfile.open(archive) as tar:
        for member in tar:
            path = (target.parent / member.name).resolve()
            source = tar.extractfile(member) if member.isfile() and path.is_relative_to(target) else None
            if source is None:
                raise DemoError(f"the checkpoint's archive holds {member.name!r}, which is not a file inside it")
            path.parent.mkdir(parents=True, exist_ok=True)
            with source, path.open("wb") as out:
                shutil.copyfileobj(source, out)


def _complete(target: Path, files: list[dict[str, Any]]) -> bool:
    return all(_sha256(target / file["path"]) == file["sha256"] for file in files)


def _sha256(path: Path) -> str | None:
    if not path.is_file():
        return None
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
