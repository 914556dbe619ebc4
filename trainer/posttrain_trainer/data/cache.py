"""Tokenised samples on disk: written once, mapped into memory by every rank.

A folder holds `ids.bin` (int32) and `trained.bin` (uint8), all samples one after another; `lengths.bin` and
`supervised.bin` (int32, one number a sample); `report.json`, written last. It gets its name when it is complete.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from posttrain_trainer.contract.errors import InvalidData
from posttrain_trainer.contract.locks import LockHeld, hold
from posttrain_trainer.contract.rundir import read_json, sync_folder, write_json
from posttrain_trainer.data.batch import IGNORE, Sample
from posttrain_trainer.data.tokenise import Chunk, shifted_labels

_TEMPORARY = ".preparing-"


class Dataset:
    """Tokenised samples by number.

    Attributes:
        lengths: Tokens of each sample, int32 [N].
        supervised: Labels of each sample, int32 [N].
        report: What was read and what became of it: rows, samples, tokens, supervised_tokens, max_len, format,
            invalid, errors, dropped, dropped_lines, truncated, ignored, warnings.
        padded_lengths: Room of each sample where it is padded to its longest document: the same as `lengths`.
        key: Name of the folder that holds it, which stands for its content.
    """

    def __init__(
        self, ids: npt.NDArray[np.int32], trained: npt.NDArray[np.uint8], lengths: npt.NDArray[np.int32],
        supervised: npt.NDArray[np.int32], report: dict[str, Any], members: npt.NDArray[np.int64] | None = None, key: str = "",
    ) -> None:  # fmt: skip
        self.key = key
        self._ids, self._trained = ids, trained
        self._all_lengths, self._all_supervised = lengths, supervised
        self._ends = np.cumsum(lengths, dtype=np.int64)
        self._members = np.arange(len(lengths)) if members is None else members
        self.lengths = lengths[self._members]
        self.padded_lengths = self.lengths
        self.supervised = supervised[self._members]
        self.report = report | {
            "samples": len(self),
            "tokens": int(self.lengths.sum(dtype=np.int64)),
            "supervised_tokens": int(self.supervised.sum(dtype=np.int64)),
            "max_len": int(self.lengths.max(initial=0)),
        }

    def __len__(self) -> int:
        return len(self._members)

    def sample(self, number: int) -> Sample:
        """Ids and shifted labels (the token that each position has to predict, or -100) of a sample, int32 [L] each."""
        place = self._members[number]
        end = int(self._ends[place])
        start = end - int(self._all_lengths[place])
        ids = np.array(self._ids[start:end])
        return ids, shifted_labels(ids, np.array(self._trained[start:end], dtype=np.bool_), IGNORE)

    def split(self, share: float, seed: int) -> tuple[Dataset, Dataset]:
        """Hold a share of the samples out, at least one, chosen by `seed`; both parts keep the file's order.

        Raises:
            InvalidData: There are too few samples for two parts.
        """
        held = held_out(len(self), share, seed)
        return self._part(~held), self._part(held)

    def _part(self, chosen: npt.NDArray[np.bool_]) -> Dataset:
        return Dataset(self._ids, self._trained, self._all_lengths, self._all_supervised, self.report, self._members[chosen], self.key)


def held_out(count: int, share: float, seed: int) -> npt.NDArray[np.bool_]:
    """Which of `count` samples are held out, at least one, chosen by `seed`; bool [count].

    Raises:
        InvalidData: There are too few samples for two parts.
    """
    chosen = max(1, round(count * share))
    if chosen >= count:
        raise InvalidData(f"{count} samples cannot be split with a validation share of {share}; give more data or a smaller share")
    held = np.zeros(count, dtype=np.bool_)
    held[order(count, seed, epoch=0, purpose=1)[:chosen]] = True
    return held


def order(count: int, seed: int, epoch: int, purpose: int = 0) -> npt.NDArray[np.int64]:
    """A permutation of `count` numbers that depends on nothing but the arguments: the same with every version of NumPy.

    Numbers are sorted by their hash (the finaliser of SplitMix64, Steele et al. 2014, doi:10.1145/2660193.2660195).
    """
    start = np.array([seed, epoch, purpose], dtype=np.uint64)
    state = np.uint64(0)
    for part in start:
        state = _mix(np.array([state ^ part], dtype=np.uint64))[0]
    return np.argsort(_mix(np.arange(count, dtype=np.uint64) + state), kind="stable")


def _mix(values: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    mixed = values + np.uint64(0x9E3779B97F4A7C15)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return mixed ^ (mixed >> np.uint64(31))


def open_cache(folder: Path) -> Dataset | None:
    """The data set in a folder; None when there is none, or when its files are not of the recorded sizes."""
    record = read_json(folder / "report.json") if folder.is_dir() else None
    if record is None:
        return None
    arrays = []
    for name, kind in (("ids", np.int32), ("trained", np.uint8), ("lengths", np.int32), ("supervised", np.int32)):
        path = folder / f"{name}.bin"
        if not path.is_file() or path.stat().st_size != record["sizes"][name]:
            return None
        arrays.append(np.memmap(path, dtype=kind, mode="r"))
    ids, trained, lengths, supervised = arrays
    return Dataset(ids, trained, np.array(lengths), np.array(supervised), record["report"], key=folder.name)


def write_cache(folder: Path, chunks: Iterable[Chunk], finish: Callable[[], dict[str, Any]]) -> Dataset:
    """Write samples as they come, then give the folder its name; what a killed writer left behind is removed.

    Args:
        folder: Where the data set shall be; an unusable one there is replaced.
        chunks: The samples.
        finish: Called after the last chunk: the report, or an error that makes everything void.

    Raises:
        OSError: The disk is full or not writable.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    _sweep(folder.parent)
    with tempfile.TemporaryDirectory(prefix=_TEMPORARY, dir=folder.parent, ignore_cleanup_errors=True) as name:
        work = Path(name)
        with hold(work / ".lock"):
            _write(work, chunks, finish)
            _publish(work, folder)
    dataset = open_cache(folder)
    assert dataset is not None
    return dataset


def _write(work: Path, chunks: Iterable[Chunk], finish: Callable[[], dict[str, Any]]) -> None:
    data = work / "data"
    data.mkdir()
    lengths: list[int] = []
    supervised: list[int] = []
    with (data / "ids.bin").open("wb") as ids_file, (data / "trained.bin").open("wb") as trained_file:
        for chunk in chunks:
            for ids, trained in zip(chunk.ids, chunk.trained, strict=True):
                ids.tofile(ids_file)
                trained.astype(np.uint8).tofile(trained_file)
                lengths.append(len(ids))
                supervised.append(int(trained[1:].sum()))
        report = finish()
        for file in (ids_file, trained_file):
            file.flush()
            os.fsync(file.fileno())
    np.asarray(lengths, dtype=np.int32).tofile(data / "lengths.bin")
    np.asarray(supervised, dtype=np.int32).tofile(data / "supervised.bin")
    sizes = {path.stem: path.stat().st_size for path in data.glob("*.bin")}
    write_json(data / "report.json", {"sizes": sizes, "report": report})


def _publish(work: Path, folder: Path) -> None:
    if folder.exists():
        if open_cache(folder) is not None:
            return  # another process was quicker, and its content is the same
        shutil.rmtree(folder)
    (work / "data").rename(folder)
    sync_folder(folder.parent)


def _sweep(parent: Path) -> None:
    for path in parent.glob(f"{_TEMPORARY}*"):
        if not (path / ".lock").is_file():
            continue  # its writer has only just begun
        try:
            with hold(path / ".lock", wait_s=0.0):
                shutil.rmtree(path, ignore_errors=True)
        except (LockHeld, OSError):
            continue  # somebody is writing there, or has just gone
