"""A data file becomes a data set: tokenised once, kept on disk under the hash of all that its content depends on."""

from __future__ import annotations

import errno
import hashlib
import json
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import transformers
from transformers import PreTrainedTokenizerBase

from posttrain_trainer.contract.errors import DiskFull, InvalidArguments, InvalidData
from posttrain_trainer.contract.methods import Method, PretrainMethod
from posttrain_trainer.contract.rowreport import RowReport
from posttrain_trainer.contract.spec import FullTrainingArguments
from posttrain_trainer.data.cache import Dataset, open_cache, write_cache
from posttrain_trainer.data.groups import Groups, blocks, pairs
from posttrain_trainer.data.source import fingerprint, row_chunks
from posttrain_trainer.data.tokenise import Chunk, Tokeniser, cut

__all__ = ["Dataset", "Prepared", "prepare_dataset"]

Prepared = Dataset | Groups
"""Samples of one document, or of several."""

_FORMAT = 1  # of the cache and of the masks; a change of either makes old caches unfindable
_MAX_ERRORS = 100
_MAX_LINES = 20
_PARALLEL_BYTES = 8 * 2**20  # starting processes takes some seconds, in which one alone does about that much


def prepare_dataset(
    path: str | Path, *, tokenizer: PreTrainedTokenizerBase, args: FullTrainingArguments, max_seq_len: int, cache_dir: Path,
    progress: Callable[[int], None] = lambda rows: None,
) -> Prepared:  # fmt: skip
    """Tokenise a file of the rows that the method needs, or find the result of having done so.

    Args:
        path: JSONL, JSON, CSV or Parquet, plain, .gz or .zst.
        tokenizer: Fast, with a chat template unless the method is pretrain.
        args: Takes method, train_on, over_length, invalid_rows and max_invalid_rows from it.
        max_seq_len: Longest sample in tokens.
        cache_dir: Made if missing. One process should prepare before others look.
        progress: Called every few hundred rows with the number done; what it raises ends the preparation and leaves
            nothing behind.

    Raises:
        InvalidData: The file cannot be read, has bad rows (`details["errors"]`), or nothing in it can be learned.
        InvalidArguments: The tokenizer has no usable chat template, or block_size is beyond max_seq_len.
        DiskFull: There was no room for the cache.
    """
    source = Path(path)
    size = _block_size(args.method, max_seq_len)
    folder = cache_dir / f"tokens-{_key(source, tokenizer, args, max_seq_len)}"
    found = open_cache(folder)
    if found is not None:
        return _grouped(found, args.method, size)
    tokeniser = Tokeniser(tokenizer, args.train_on, max_seq_len, args.over_length, args.method)
    tally = _Tally(source, args, progress)
    chunks = tally.watch(tokeniser.chunks(row_chunks(source, args.method, args.train_on), _processes(source)))
    try:
        documents = write_cache(folder, chunks if size is None else cut(chunks, size), tally.finish)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise DiskFull(f"no room for the tokenised data in {cache_dir}; free some space") from error
        raise
    return _grouped(documents, args.method, size)


def _block_size(method: Method, max_seq_len: int) -> int | None:
    """Tokens of a block; None where samples are no blocks."""
    if not isinstance(method, PretrainMethod):
        return None
    if method.block_size is not None and method.block_size > max_seq_len:
        raise InvalidArguments(f"method.block_size {method.block_size} is beyond max_seq_len ({max_seq_len}); lower it or raise max_seq_len")
    return method.block_size or max_seq_len


def _grouped(documents: Dataset, method: Method, size: int | None) -> Prepared:
    if size is not None:
        return blocks(documents, size)
    return pairs(documents) if method.kind == "dpo" else documents


def _key(path: Path, tokenizer: PreTrainedTokenizerBase, args: FullTrainingArguments, max_seq_len: int) -> str:
    backend = json.loads(tokenizer.backend_tokenizer.to_str())
    for changing in ("truncation", "padding"):  # set by each call, no part of what a text's ids are
        backend.pop(changing, None)
    parts = [
        _FORMAT, transformers.__version__, fingerprint(path), backend, tokenizer.chat_template, tokenizer.special_tokens_map,
        args.train_on, args.over_length, args.invalid_rows, args.max_invalid_rows, max_seq_len, args.method.kind,
        args.method.text_column if isinstance(args.method, PretrainMethod) else None, _block_size(args.method, max_seq_len),
    ]  # fmt: skip
    return hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()[:32]


def _processes(path: Path) -> int:
    if path.stat().st_size < _PARALLEL_BYTES:
        return 1
    return min(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1, 16)


@dataclass
class _Tally:
    """What became of each row, and whether that is good enough to train."""

    path: Path
    args: FullTrainingArguments
    progress: Callable[[int], None]
    rows: RowReport = field(default_factory=RowReport)
    dropped: Counter[str] = field(default_factory=Counter)
    lines: dict[str, list[int]] = field(default_factory=dict)
    truncated: int = 0
    samples: int = 0
    fault: str | None = None

    def watch(self, chunks: Iterable[Chunk]) -> Iterator[Chunk]:
        """Count, and stop early when it is clear that the run cannot go on."""
        for chunk in chunks:
            for row in chunk.rows:
                self.rows.add(row, _MAX_ERRORS)
                if row.fatal:
                    self.fault = f"line {row.line}: {row.error}"
            for reason, line in chunk.dropped:
                self.dropped[reason] += 1
                if len(known := self.lines.setdefault(reason, [])) < _MAX_LINES:
                    known.append(line)
            self.truncated += chunk.truncated
            self.samples += len(chunk.ids)
            if self.rows.num_errors >= max(_MAX_ERRORS, self._tolerated() + 1):
                break
            yield chunk
            self.progress(self.rows.rows)

    def finish(self) -> dict[str, Any]:
        """The report.

        Raises:
            InvalidData: As for `prepare_dataset`.
        """
        rows = self.rows.close(_MAX_ERRORS)
        errors = [{"line": error.line, "message": error.message} for error in rows.errors]
        if rows.num_errors and (rows.fatal or rows.num_errors > self._tolerated()):
            raise self._bad_rows(errors)
        if not self.samples:
            raise InvalidData(
                f"{self.path.name} leaves nothing to learn: {rows.rows} rows, {self._losses()}", details={"errors": errors, **self._drops()}
            )
        return {
            "rows": rows.rows, "format": rows.format, "invalid": rows.num_errors, "errors": errors, **self._drops(),
            "truncated": self.truncated, "ignored": rows.ignored, "warnings": self._warnings(),
        }  # fmt: skip

    def _tolerated(self) -> int:
        return self.args.max_invalid_rows if self.args.invalid_rows == "skip" else 0

    def _bad_rows(self, errors: list[dict[str, Any]]) -> InvalidData:
        count = self.rows.num_errors
        first = f"line {errors[0]['line']}: {errors[0]['message']}"
        if self.rows.fatal:
            last = self.fault or first
            return InvalidData(f"{self.path.name} cannot be read to its end; {last}", details={"errors": errors, "num_errors": count})
        if self.args.invalid_rows == "skip":
            remedy = f"more than max_invalid_rows ({self.args.max_invalid_rows}) allows"
        else:
            remedy = "correct them, or leave them out by invalid_rows: skip"
        return InvalidData(
            f"{self.path.name} has {count} bad row{'s' * (count != 1)} in the {self.rows.rows} that were read ({first}); {remedy}",
            details={"errors": errors, "num_errors": count},
        )

    def _drops(self) -> dict[str, Any]:
        return {"dropped": dict(self.dropped), "dropped_lines": self.lines}

    def _losses(self) -> str:
        parts = [f"{self.rows.num_errors} invalid"] if self.rows.num_errors else []
        parts += [f"{count} dropped as {reason} (line {self.lines[reason][0]}, ...)" for reason, count in self.dropped.items()]
        remedies = {"over_length": "raise max_seq_len", "answer_cut_off": "raise max_seq_len", "nothing_to_learn": "check roles and train_on"}
        hints = dict.fromkeys(remedies[reason] for reason in self.dropped)
        return ", ".join(parts) + (f"; {', '.join(hints)}" if hints else "")

    def _warnings(self) -> list[str]:
        said = [f"{count} of {self.rows.rows} rows dropped: {reason} (lines {self.lines[reason]})" for reason, count in self.dropped.items()]
        if self.rows.num_errors:
            said.append(f"{self.rows.num_errors} of {self.rows.rows} rows left out as invalid")
        if self.truncated:
            said.append(f"{self.truncated} samples cut at the length limit")
        said += [f"{remark.rows} of {self.rows.rows} rows hold {text} (lines {remark.lines})" for text, remark in self.rows.remarks.items()]
        return said
