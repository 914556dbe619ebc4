"""Lines that arrive by pieces."""

from __future__ import annotations

import random

import pytest

from posttrain_service.runs.lines import Lines


@pytest.mark.parametrize("seed", range(20))
def test_lines_and_their_ends_do_not_depend_on_the_pieces(seed):
    pick = random.Random(seed)
    lines = [b"x" * pick.choice([0, 1, 5, 9, 10, 11, 50]) for _ in range(60)]
    data = b"".join(line + b"\n" for line in lines) + b"torn"
    expected, at = [], 0
    for line in lines:
        at += len(line) + 1
        if len(line) <= 10:
            expected.append((line, at))
    found, reader, start = [], Lines(10), 0
    while start < len(data):
        piece = data[start : start + pick.randint(1, 30)]
        found += reader.feed(piece, start)
        assert reader.kept_bytes <= 10
        start += len(piece)
    assert found == expected
    assert reader.kept_bytes == 4


def test_what_was_cut_off_does_not_begin_the_next_file():
    reader = Lines(10)
    assert list(reader.feed(b"1" * 50, 0)) == []
    reader.restart()
    assert list(reader.feed(b"ab\n", 0)) == [(b"ab", 3)]
