from __future__ import annotations

import asyncio
import fcntl
import os
import random
from pathlib import Path

import pytest

from posttrain_service.runs import tail
from posttrain_service.runs.tail import Chunk, collapse, follow, read
from posttrain_trainer.contract import logcap

TEXT = "a line\nünïcödé ░▒▓ 漢字 🚀🚀\nprogress\r10%\r20%\nend"


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return tmp_path / "rank-0.log"


@pytest.fixture
def num_read(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Sizes of all reads."""
    sizes: list[int] = []
    pread = os.pread

    def counted(fd: int, length: int, offset: int) -> bytes:
        data = pread(fd, length, offset)
        sizes.append(len(data))
        return data

    monkeypatch.setattr(os, "pread", counted)
    return sizes


def pages(log: Path, limit: int, offset: int = 0, *, final: bool = True) -> list[Chunk]:
    found: list[Chunk] = []
    while (chunk := read(log, offset, limit, final=final)).data:
        assert chunk.start >= offset
        assert chunk.end > offset
        found.append(chunk)
        offset = chunk.end
    return found


@pytest.mark.parametrize("limit", [1, 2, 3, 4, 5, 7, 16, 1000])
def test_pages_of_any_size_make_up_the_file_and_tear_nothing(log: Path, limit: int) -> None:
    log.write_text(TEXT)
    found = pages(log, limit)
    assert b"".join(chunk.data for chunk in found) == log.read_bytes()
    assert "".join(chunk.text for chunk in found) == TEXT
    assert all(len(chunk.data) <= max(limit, 4) for chunk in found)
    assert {chunk.size for chunk in found} == {len(TEXT.encode())}


def test_a_range_that_begins_inside_a_character_begins_after_it(log: Path) -> None:
    log.write_bytes("a░b".encode())
    assert [read(log, offset, 10).text for offset in range(6)] == ["a░b", "░b", "b", "b", "b", ""]
    assert [read(log, offset, 10).start for offset in range(7)] == [0, 1, 4, 4, 4, 5, 5]


@pytest.mark.parametrize("data", [b"\x80", b"a\x80\x80\x80\x80\x80b", b"\xe2a", b"\xff\xfe", b"\xc0\xaf", b"\xed\xa0\x80", b"\xf8\x88\x80\x80\x80"])
def test_bytes_that_are_no_utf8_are_given_one_way_or_another(log: Path, data: bytes) -> None:
    log.write_bytes(data)
    for limit in (1, 2, 3, 100):
        assert b"".join(chunk.data for chunk in pages(log, limit)) == data
    assert "\ufffd" in read(log, 0, 100, final=True).text


def test_random_bytes_never_lose_or_double_a_byte(log: Path) -> None:
    rng = random.Random(1)
    alphabet = [b"a", b"\n", b"\x80", b"\xe2", b"\x96", b"\xf0", b"\xff", "ü".encode(), "░".encode(), "🚀".encode()]
    for _ in range(300):
        data = b"".join(rng.choices(alphabet, k=rng.randint(0, 12)))
        log.write_bytes(data)
        for limit in (1, 3, 5):
            assert b"".join(chunk.data for chunk in pages(log, limit)) == data
            # Decoding pieces gives what decoding the whole gives, for what is valid.
            assert "".join(c.text for c in pages(log, limit)).replace("\ufffd", "") == data.decode(errors="ignore")


def test_an_unfinished_character_is_held_back_until_it_is_whole_or_final(log: Path) -> None:
    log.write_bytes(b"x\xe2")
    assert (read(log, 0, 10).data, read(log, 1, 10).data, read(log, 1, 10).start) == (b"x", b"", 1)
    assert read(log, 1, 10, final=True).data == b"\xe2"
    log.write_bytes(b"x\xe2\x96")
    assert (read(log, 2, 10).data, read(log, 2, 10).start) == (b"", 2)
    assert read(log, 2, 10, final=True).data == b"\x96"
    log.write_bytes(b"x\xe2\x96\x91")
    assert read(log, 1, 10).text == "░"
    assert (read(log, 2, 10).data, read(log, 2, 10).start) == (b"", 4)


def test_a_missing_log_is_an_empty_one_and_so_is_a_link(log: Path, tmp_path: Path) -> None:
    assert read(log, 5, 10) == Chunk(b"", 0, 0)
    assert tail.tail(log, 10) == Chunk(b"", 0, 0)
    assert tail.read_end(log, 10).data == b""
    (tmp_path / "secret").write_text("secret")
    log.symlink_to(tmp_path / "secret")
    assert read(log, 0, 10) == Chunk(b"", 0, 0)


@pytest.mark.parametrize(
    ("data", "lines", "expected"),
    [
        (b"1\n2\n3\n", 2, b"2\n3\n"),
        (b"1\n2\n3", 2, b"2\n3"),
        (b"1\n2\n3\n", 99, b"1\n2\n3\n"),
        (b"1\n2\n3\n", 0, b""),
        (b"\n\n\n", 2, b"\n\n"),
        (b"one", 1, b"one"),
        (b"", 1, b""),
        (b"1\r\n2\r\n", 1, b"2\r\n"),
    ],
)
def test_the_last_lines(log: Path, data: bytes, lines: int, expected: bytes) -> None:
    log.write_bytes(data)
    chunk = tail.tail(log, lines)
    assert (chunk.data, chunk.end) == (expected, len(data))


def test_the_last_lines_over_block_borders_are_those_of_the_whole_file(log: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tail, "BLOCK_BYTES", 7)
    rng = random.Random(2)
    for _ in range(100):
        data = b"".join(rng.choices([b"abc", b"\n", "░".encode()], k=rng.randint(0, 40)))
        log.write_bytes(data)
        for lines in (1, 2, 5):
            expected = b"".join(data.splitlines(keepends=True)[-lines:])
            assert tail.tail(log, lines, final=True).data == expected


def test_the_end_of_two_gigabytes_is_read_alone(log: Path, num_read: list[int]) -> None:
    with log.open("wb") as file:
        file.truncate(2 * 1024**3)
        file.seek(0, os.SEEK_END)
        file.write(b"\nsecond to last\nlast\n")
    assert tail.tail(log, 2).data == b"second to last\nlast\n"
    assert sum(num_read) <= tail.BLOCK_BYTES + logcap.HEAD_BYTES + 100
    num_read.clear()
    # One endless line: cut, at a bounded cost.
    assert len(tail.tail(log, 99).data) == tail.MAX_TAIL_BYTES
    assert sum(num_read) <= 2 * tail.MAX_TAIL_BYTES + logcap.HEAD_BYTES + 10
    num_read.clear()
    assert len(read(log, 1024**3, 1000).data) == 1000
    assert sum(num_read) <= 1010 + logcap.HEAD_BYTES


def test_a_progress_bar_is_one_line_with_its_last_state(log: Path, num_read: list[int]) -> None:
    updates = b"".join(b"\r%5d/10000 [" % i + "█".encode() * 20 for i in range(10_000))
    log.write_bytes(b"before\n" + updates)
    chunk = tail.tail(log, 2)
    assert chunk.data == log.read_bytes()
    assert collapse(chunk.text) == "before\n 9999/10000 [" + "█" * 20
    cut = tail.tail(log, 2, max_bytes=1000)
    assert collapse(cut.text) == " 9999/10000 [" + "█" * 20
    assert "\ufffd" not in cut.text


@pytest.mark.parametrize(
    ("text", "expected"),
    [("a\r\nb\r\n", "a\nb\n"), ("10%\r20%\r", "20%"), ("\r\r\n", "\n"), ("plain", "plain"), ("x\ry\nz", "y\nz"), ("", "")],
)
def test_collapse(text: str, expected: str) -> None:
    assert collapse(text) == expected


class Writer:
    """Plays what happens to a log between the looks of a follower; the log is complete when the play is over."""

    def __init__(self, *acts: object) -> None:
        self.acts = list(acts)
        self.pauses = 0

    async def ended(self) -> bool:
        return not self.acts

    async def pause(self, _seconds: float) -> None:
        self.pauses += 1
        act = self.acts.pop(0)
        if callable(act):
            act()


async def followed(log: Path, writer: Writer, offset: int = 0, **options: float) -> list[Chunk]:
    return [chunk async for chunk in follow(log, offset, ended=writer.ended, pause=writer.pause, **options)]


def append(log: Path, data: bytes) -> object:
    def act() -> None:
        with log.open("ab") as file:
            file.write(data)

    return act


def test_a_follower_sees_everything_whole_from_before_the_file_is_there(log: Path) -> None:
    writer = Writer(None, append(log, b"one\n\xe2"), None, append(log, b"\x96\x91\n"), append(log, b"\x80\n"), append(log, b"\xe2"))
    found = asyncio.run(followed(log, writer))
    assert [chunk.text for chunk in found] == ["one\n", "░\n", "\ufffd\n", "\ufffd"]
    assert [chunk.start for chunk in found] == [0, 4, 8, 10]


def test_what_was_written_right_before_the_end_is_seen(log: Path) -> None:
    found = asyncio.run(followed(log, Writer(append(log, b"last words"))))
    assert [chunk.data for chunk in found] == [b"last words"]


def test_a_follower_goes_on_from_an_offset(log: Path) -> None:
    log.write_bytes(b"old\nnew\n")
    assert [c.data for c in asyncio.run(followed(log, Writer(), offset=4))] == [b"new\n"]
    start = tail.tail(log, 1)
    found = asyncio.run(followed(log, Writer(append(log, b"newer\n")), offset=start.end))
    assert (start.data, [c.data for c in found]) == (b"new\n", [b"newer\n"])


def test_a_truncated_or_replaced_log_is_read_from_its_new_beginning(log: Path) -> None:
    log.write_bytes(b"much that was written before")
    other = log.with_name("other")

    def replace() -> None:
        other.write_bytes(b"replaced by a longer file")
        other.replace(log)

    writer = Writer(lambda: log.write_bytes(b"[cut]\n"), replace, lambda: log.write_bytes(b""))
    found = asyncio.run(followed(log, writer))
    assert [(c.data, c.start, c.restarted) for c in found] == [
        (b"much that was written before", 0, False),
        (b"[cut]\n", 0, True),
        (b"replaced by a longer file", 0, True),
        (b"", 0, True),
    ]


def test_silence_is_broken_by_empty_pieces(log: Path) -> None:
    log.write_bytes(b"x")
    writer = Writer(*[None] * 25, append(log, b"y"))
    found = asyncio.run(followed(log, writer, idle_s=10.0, poll_s=1.0))
    assert [(c.data, c.start) for c in found] == [(b"x", 0), (b"", 1), (b"", 1), (b"y", 1)]


def test_a_large_file_comes_in_pieces_and_without_pauses(log: Path) -> None:
    log.write_bytes(b"0123456789\n" * 30_000)
    writer = Writer()
    found = asyncio.run(followed(log, writer))
    assert b"".join(c.data for c in found) == log.read_bytes()
    assert max(len(c.data) for c in found) <= tail.BLOCK_BYTES
    assert writer.pauses == 0


def test_positions_stay_right_when_older_output_is_dropped(log: Path) -> None:
    lines = [f"line {number:06d} ✓\n".encode() for number in range(20_000)]
    log.write_bytes(b"".join(lines[:10_000]))
    whole = b"".join(lines)
    late = len(b"".join(lines[:9_990]))
    assert logcap.cap(log, 100_000) > 0
    assert log.stat().st_size < 30_000
    append(log, b"".join(lines[10_000:10_100]))()
    here = len(b"".join(lines[:10_100]))
    assert tail.tail(log, 3).data == b"".join(lines[10_097:10_100])
    assert (tail.tail(log, 1).end, tail.read_end(log, 40).size) == (here, here)
    assert read(log, late, 10**6).data == whole[late:here]  # a client that comes back with its position goes on there
    first = read(log, 0, 10**6)
    marker, _, rest = first.data.partition(b"\n")
    assert b"older output was dropped here" in marker
    assert rest == whole[here - len(rest) : here]
    assert rest.startswith(b"line ")
    append(log, b"".join(lines[10_100:]))()
    assert logcap.cap(log, 100_000) > 0  # a second time: positions add up
    assert read(log, len(whole) - 100, 200).data == whole[-100:]
    assert logcap.cap(log, 100_000) == 0


def test_a_follower_loses_and_repeats_nothing_when_older_output_is_dropped_behind_it(log: Path) -> None:
    texts = [b"%06d " % number * 1000 + b"\n" for number in range(60)]

    def write(text: bytes) -> object:
        def act() -> None:
            append(log, text)()
            logcap.cap(log, 65536)

        return act

    log.write_bytes(b"")
    found = asyncio.run(followed(log, Writer(*[write(text) for text in texts], None)))
    assert b"".join(chunk.data for chunk in found) == b"".join(texts)
    assert not any(chunk.restarted for chunk in found)
    assert log.stat().st_size <= 65536


def test_a_log_with_one_endless_line_is_cut_as_well_and_a_missing_one_is_none(log: Path) -> None:
    assert logcap.cap(log, 65536) == 0
    log.write_bytes(b"x" * 400_000)
    assert logcap.cap(log, 65536) == 400_000 - 65536 // 4
    log.with_name("a-link").symlink_to(log)
    append(log, b"y" * 400_000)()
    with pytest.raises(OSError):
        logcap.cap(log.with_name("a-link"), 65536)
    logcap.cap_all(log.parent, 65536)  # the link is left alone and keeps nobody from the rest
    assert log.stat().st_size <= 65536


def test_a_reader_and_the_one_who_drops_wait_for_each_other(log: Path) -> None:
    log.write_bytes(b"z\n" * 100_000)
    with log.open("rb") as reader:
        fcntl.flock(reader, fcntl.LOCK_SH)
        assert logcap.cap(log, 65536) == 0  # the next look does it
    assert logcap.cap(log, 65536) > 0
