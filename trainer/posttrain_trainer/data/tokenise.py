"""Rows -> tokenised samples, a chunk at a time, in this process or in several.

Processes pay from some thousand rows on: rendering a template is Python. They are spawned, not forked (torch and the
tokenizer have threads), take nothing from outside, and end when their parent does, however it ends.
"""

from __future__ import annotations

import multiprocessing
import os
import threading
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import dataclass, field
from itertools import islice
from typing import Literal

import numpy as np
import numpy.typing as npt
from transformers import PreTrainedTokenizerBase

from posttrain_trainer.contract.conversation import TrainOn
from posttrain_trainer.contract.messages import RowFault
from posttrain_trainer.contract.methods import Method
from posttrain_trainer.contract.rowreport import ParsedRow
from posttrain_trainer.data.encode import Rendered, RowEncoder, row_encoder
from posttrain_trainer.data.mask import Ids, Trained


@dataclass
class Chunk:
    """Some rows, tokenised."""

    ids: list[Ids] = field(default_factory=list)
    trained: list[Trained] = field(default_factory=list)
    rows: list[ParsedRow] = field(default_factory=list)
    """Every row of the chunk without its content: line, error (also the template's), shape, ignored keys."""
    dropped: list[tuple[str, int]] = field(default_factory=list)
    """Reason and line of each good row that gives no sample."""
    truncated: int = 0
    """Samples that were cut at the length limit."""


@dataclass(frozen=True)
class Tokeniser:
    """Tokenises chunks of rows; goes to other processes as a whole.

    Args:
        tokenizer: Fast, with a chat template.
        train_on: Which turns are learned.
        max_seq_len: Longest sample in tokens; one of exactly that length stays whole.
        over_length: What happens to a longer one.
        method: Says what rows mean.
    """

    tokenizer: PreTrainedTokenizerBase
    train_on: TrainOn
    max_seq_len: int
    over_length: Literal["drop", "truncate_right"]
    method: Method

    def chunks(self, source: Iterable[list[ParsedRow]], processes: int) -> Iterator[Chunk]:
        """Tokenise in order; with more than one process, some chunks ahead of what was asked for.

        Raises:
            InvalidArguments: The tokenizer has no usable chat template, and the method needs one.
        """
        encoder = row_encoder(self.method, self.tokenizer, self.train_on)
        if processes < 2:
            yield from (self.run(encoder, rows) for rows in source)
            return
        context = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(processes, mp_context=context, initializer=_start_worker, initargs=(self,)) as pool:
            waiting: deque[Future[Chunk]] = deque()
            for rows in source:
                waiting.append(pool.submit(_work, rows))
                if len(waiting) > 2 * processes:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()

    def run(self, encoder: RowEncoder, rows: list[ParsedRow]) -> Chunk:
        """One chunk."""
        chunk = Chunk()
        rendered: list[list[Rendered]] = []
        lines = []
        for row in rows:
            error = row.error
            if row.row is not None:
                try:
                    rendered.append(encoder.render(row.row))
                    lines.append(row.line)
                except RowFault as fault:
                    error = str(fault)
            chunk.rows.append(row._replace(row=None, error=error))
        documents = iter(encoder.tokenize([text for texts in rendered for text in texts]))
        for line, texts in zip(lines, rendered, strict=True):
            self._keep(chunk, line, list(islice(documents, len(texts))))
        return chunk

    def _keep(self, chunk: Chunk, line: int, documents: list[tuple[Ids, Trained]]) -> None:
        """Add a row's documents, all or none of them."""
        if self.method.kind != "pretrain" and any(len(ids) > self.max_seq_len for ids, _ in documents):
            if self.over_length == "drop":
                chunk.dropped.append(("over_length", line))
                return
            documents = [(ids[: self.max_seq_len], trained[: self.max_seq_len]) for ids, trained in documents]
            alike = len(documents) > 1 and np.array_equal(documents[0][0], documents[1][0])
            if alike or not all(trained[1:].any() for _, trained in documents):
                chunk.dropped.append(("answer_cut_off", line))
                return
            chunk.truncated += 1
        if not all(trained[1:].any() for _, trained in documents):  # nothing comes before the first token, so it can't be predicted
            chunk.dropped.append(("nothing_to_learn", line))
            return
        for ids, trained in documents:
            chunk.ids.append(ids)
            chunk.trained.append(trained)


def cut(chunks: Iterable[Chunk], size: int) -> Iterator[Chunk]:
    """Join documents and cut them into blocks of `size` tokens; what comes out are the pieces of documents in them.

    A piece's first token is not learned: what it follows from is in another block or document.
    """
    filled = 0
    for chunk in chunks:
        documents, chunk.ids, chunk.trained = chunk.ids, [], []
        for document in documents:
            rest = document
            while len(rest):
                piece, rest = rest[: size - filled], rest[size - filled :]
                chunk.ids.append(piece)
                chunk.trained.append(np.arange(len(piece)) > 0)
                filled = (filled + len(piece)) % size
        yield chunk


def shifted_labels(ids: Ids, trained: npt.NDArray[np.bool_], ignore: int) -> npt.NDArray[np.int32]:
    """For each position the token that follows it, where that one is learned; else `ignore`."""
    labels = np.full(len(ids), ignore, dtype=np.int32)
    labels[:-1] = np.where(trained[1:], ids[1:], ignore)
    return labels


_worker: tuple[Tokeniser, RowEncoder] | None = None


def _start_worker(tokeniser: Tokeniser) -> None:
    global _worker
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    threading.Thread(target=_end_with_parent, daemon=True).start()
    _worker = tokeniser, row_encoder(tokeniser.method, tokeniser.tokenizer, tokeniser.train_on)


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _work(rows: list[ParsedRow]) -> Chunk:
    assert _worker is not None
    tokeniser, encoder = _worker
    return tokeniser.run(encoder, rows)
