"""Bytes of data files: encodings, line ends, archives, damage, sizes; and lines that name the right row."""

from __future__ import annotations

import gzip
import json
import tracemalloc
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard

from posttrain_trainer.contract.conversation import Conversation
from posttrain_trainer.contract.rowfile import read_rows
from posttrain_trainer.contract.rows import iter_rows, validate_file

ROWS = [{"prompt": f"q{i} é", "completion": f"a{i} 漢\u2028字"} for i in range(4)]
LINES = [json.dumps(row, ensure_ascii=False).encode() for row in ROWS]


def write(tmp_path, data: bytes, name: str = "rows.jsonl") -> Path:
    path = tmp_path / name
    path.write_bytes(data)
    return path


def values(path, **options):
    rows = list(read_rows(path, **options))
    assert [row.error for row in rows] == [None] * len(rows)
    return [row.value for row in rows]


@pytest.mark.parametrize(
    "data",
    [
        b"\n".join(LINES) + b"\n",
        b"\n".join(LINES),
        b"\r\n".join(LINES) + b"\r\n",
        b"\xef\xbb\xbf" + b"\n".join(LINES),
        b"\n\n".join(LINES) + b"\n \n",
        json.dumps(ROWS).encode(),
        json.dumps(ROWS, indent=2, ensure_ascii=False).encode(),
        b"\xef\xbb\xbf\n " + json.dumps(ROWS).encode() + b"\n",
    ],
    ids=["lf", "no last newline", "crlf", "bom", "blank lines", "array", "indented array", "array with bom"],
)
@pytest.mark.parametrize("pack", [bytes, gzip.compress, zstandard.compress], ids=["plain", "gz", "zst"])
def test_text_variants(tmp_path, data, pack):
    assert values(write(tmp_path, pack(data))) == ROWS
    assert values(write(tmp_path, pack(data), "file-0123")) == ROWS


def test_archives_of_several_members(tmp_path):
    for pack in (gzip.compress, zstandard.compress):
        assert values(write(tmp_path, pack(LINES[0] + b"\n") + pack(LINES[1]))) == ROWS[:2]


def test_lines_count_blank_ones(tmp_path):
    path = write(tmp_path, b"\n" + LINES[0] + b"\n\n{bad\n" + LINES[1])
    assert [(row.line, row.error is None) for row in read_rows(path)] == [(2, True), (4, False), (5, True)]


def test_array_elements_know_their_line(tmp_path):
    path = write(tmp_path, json.dumps(ROWS, indent=1).encode())
    assert [row.line for row in read_rows(path)] == [2, 6, 10, 14]


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-16-be", "utf-32"])
def test_utf16_is_refused_by_name(tmp_path, encoding):
    (row,) = read_rows(write(tmp_path, b"\n".join(LINES).decode().encode(encoding)))
    assert row.fatal
    assert "UTF-" in row.error
    assert "save it as UTF-8" in row.error


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (b'{"a": "\xff"}', "byte 8 of the line is not UTF-8"),
        (b'{"a": 1', "not JSON: Expecting ',' delimiter at column 8"),
        (b'{"a": NaN}', "NaN is not a JSON value"),
        (b'{"a": "\\ud83d"}', "without its other half"),
        (b'{"a": ' + b"[" * 200_000, "nested too deeply"),
        (b'{"a": ' + b"9" * 5000 + b"}", "not JSON"),
        (b'{"a": "' + b"x" * 70_000 + b'"}', "longer than 65,536 bytes"),
    ],
)
def test_a_bad_line_does_not_end_the_file(tmp_path, line, said):
    limit = 65_536 if b"x" in line else 1_000_000
    good, bad, after = read_rows(write(tmp_path, b"\n".join([LINES[0], line, LINES[1]])), max_row_bytes=limit)
    assert (good.value, after.value) == (ROWS[0], ROWS[1])
    assert (good.line, bad.line, after.line) == (1, 2, 3)
    assert said in bad.error
    assert not bad.fatal


def test_a_pair_of_surrogate_escapes_is_fine(tmp_path):
    assert values(write(tmp_path, b'{"a": "\\ud83d\\ude00"}')) == [{"a": "\U0001f600"}]


def test_a_line_of_exactly_the_limit_is_read(tmp_path):
    for end in (b"\n", b"\r\n", b""):
        path = write(tmp_path, LINES[0] + end)
        assert values(path, max_row_bytes=len(LINES[0])) == ROWS[:1]
        assert "longer" in next(read_rows(path, max_row_bytes=len(LINES[0]) - 1)).error


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b'[{"a": 1}', "cut off"),
        (b'[{"a": 1} {"a": 2}]', "expected ','"),
        (b'[{"a": 1}]x', "follows the end"),
        (b'[{"a": 1}, {"a": ]', "not JSON"),
        (b'[{"a": 1}, {"a": "\xff"}]', "not UTF-8"),
        (b'[{"a": "' + b"x" * 300_000 + b'"}]', "longer than 100,000"),
    ],
)
def test_a_damaged_array_ends_with_its_line(tmp_path, data, said):
    rows = list(read_rows(write(tmp_path, data), max_row_bytes=100_000))
    assert rows[-1].fatal
    assert said in rows[-1].error


def test_long_arrays_are_read_in_pieces(tmp_path):
    many = [{"n": i, "text": "é" * (i % 97) * 50} for i in range(3000)]
    assert values(write(tmp_path, json.dumps(many, ensure_ascii=False).encode())) == many
    assert values(write(tmp_path, json.dumps([*range(40_000)]).encode())) == [*range(40_000)]


@pytest.mark.parametrize("pack", [gzip.compress, zstandard.compress], ids=["gz", "zst"])
def test_a_cut_archive_is_an_error_not_an_end(tmp_path, pack):
    packed = pack(b"".join(json.dumps({"n": i, "x": i**7}).encode() + b"\n" for i in range(20_000)))
    rows = list(read_rows(write(tmp_path, packed[: len(packed) // 2])))
    assert rows[-1].fatal
    assert "cut off" in rows[-1].error
    assert not rows[0].fatal
    if pack is zstandard.compress:  # without a checksum, Zstandard cannot tell
        packed = zstandard.ZstdCompressor(write_checksum=True).compress(b"".join(LINES * 100))
    damaged = list(read_rows(write(tmp_path, packed[:200] + b"\xff" * 50 + packed[250:])))
    assert damaged[-1].fatal


@pytest.mark.parametrize("pack", [gzip.compress, zstandard.compress], ids=["gz", "zst"])
def test_a_bomb_stops_at_the_limit(tmp_path, pack):
    path = write(tmp_path, pack(b" " * 50_000_000))
    tracemalloc.start()
    rows = list(read_rows(path, max_bytes=10_000_000, max_row_bytes=1_000_000))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert "more than 10,000,000 bytes" in rows[-1].error
    assert peak < 80_000_000


def test_memory_depends_on_neither_length_of_file_nor_of_line(tmp_path):
    row = json.dumps(ROWS[0]).encode() + b"\n"
    path = write(tmp_path, row * 8_000 + b'{"prompt": "' + b"x" * 20_000_000 + b'"}\n' + row)
    tracemalloc.start()
    report = validate_file(path, max_row_bytes=100_000)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert (report.rows, report.num_errors) == (8_002, 1)
    assert report.errors[0].line == 8_001
    assert peak < 2_000_000


def test_csv(tmp_path):
    text = 'prompt,completion,id\r\n"Say ""hi""\nplease",Hi,1\r\nshort\r\nBye,,3\r\nq,a,4\r\n'
    path = write(tmp_path, text.encode("utf-8-sig"), "rows.csv")
    rows = list(iter_rows(path))
    assert [(row.line, row.error is None) for row in rows] == [(2, True), (4, False), (5, False), (6, True)]
    assert isinstance(rows[0].row, Conversation)
    assert [message.content for message in rows[0].row.messages] == ['Say "hi"\nplease', "Hi"]
    assert rows[0].ignored == ("id",)
    assert "1 cells, but the header has 3" in rows[1].error


def test_csv_is_told_by_name_or_header(tmp_path):
    text = b"question,answer\nHi,Yo\n"
    assert validate_file(write(tmp_path, text, "file-1"), name="Upload.CSV").format == "question_answer"
    assert validate_file(write(tmp_path, text, "file-1")).format == "question_answer"
    assert validate_file(write(tmp_path, gzip.compress(text), "x.csv.gz")).format == "question_answer"
    assert validate_file(write(tmp_path, text.replace(b",", b"\t"), "x.tsv")).format == "question_answer"


def test_csv_messages_column_holds_json(tmp_path):
    turns = json.dumps([{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yo"}]).replace('"', '""')
    assert validate_file(write(tmp_path, f'messages\n"{turns}"\n'.encode(), "x.csv")).formats == {"messages": 1}


@pytest.mark.parametrize(("text", "said"), [(b"a,a\n1,2\n", "each column once"), (b'prompt,completion\n"open,1\n', "not CSV"), (b"a,\xff\n", "not UTF-8")])
def test_damaged_csv(tmp_path, text, said):
    report = validate_file(write(tmp_path, text, "x.csv"))
    assert report.fatal
    assert said in report.errors[-1].message


def test_parquet_gives_no_foreign_null_keys(tmp_path):
    turns = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yo"}]
    rows = [{"messages": turns, "tools": [{"name": "at", "time": "2025-08-01"}]}, {"messages": turns, "tools": [{"name": "on", "day": 3}]}]
    path = tmp_path / "file-2"
    pq.write_table(pa.Table.from_pylist(rows), path)
    parsed = [row.row for row in iter_rows(path)]
    assert [row.tools for row in parsed] == [({"name": "at", "time": "2025-08-01"},), ({"name": "on", "day": 3},)]


def test_damaged_parquet(tmp_path):
    report = validate_file(write(tmp_path, b"PAR1 nothing", "x.parquet"))
    assert report.fatal
    assert "not Parquet" in report.errors[0].message


def test_an_empty_file_holds_no_rows(tmp_path):
    for data in (b"", b"\n\n", b"[]", b"\xef\xbb\xbf"):
        report = validate_file(write(tmp_path, data))
        assert [error.message for error in report.errors] == ["the file holds no rows"]
        assert not report.valid


def test_one_object_over_many_lines_is_named(tmp_path):
    report = validate_file(write(tmp_path, json.dumps(ROWS[0], indent=2).encode(), "x.json"))
    assert (report.rows, report.num_errors, report.fatal) == (0, 1, True)
    assert "one JSON object over several lines" in report.errors[0].message


def test_other_text_names_its_first_line(tmp_path):
    report = validate_file(write(tmp_path, b"hello\nworld\n", "notes.txt"))
    assert (report.num_errors, report.errors[0].line) == (2, 1)
    assert "not JSON" in report.errors[0].message


@pytest.mark.parametrize(
    ("name", "rows", "shape"),
    [
        ("alpaca.messages", 999, "messages"),
        ("gsm8k_test.messages", 1319, "messages"),
        ("glaive_tools.messages", 300, "messages"),
        ("dpo.preference", 299, "preference"),
        ("c4.documents", 300, "document"),
    ],
)
def test_real_files(real_data, name, rows, shape):
    report = validate_file(real_data / f"{name}.jsonl")
    assert (report.valid, report.rows, report.formats) == (True, rows, {shape: rows})


def test_a_key_that_stands_twice_makes_a_bad_row(tmp_path):
    good = json.dumps(ROWS[0])
    twice = good[:-1] + ', "prompt": []}'
    inside = '{"messages": [{"role": "user", "role": "assistant", "content": "x"}]}'
    lines = f"{good}\n{twice}\n{inside}\n{good}\n".encode()
    array = f"[{good},\n{twice},\n{inside},\n{good}]".encode()
    for name, text in (("x.jsonl", lines), ("x.json", array), ("x.jsonl.gz", gzip.compress(lines))):
        report = validate_file(write(tmp_path, text, name))
        assert (report.rows, report.num_errors, report.fatal) == (4, 2, False)
        assert [error.line for error in report.errors] == [2, 3]
        assert "the key 'prompt' stands twice" in report.errors[0].message
        assert "the key 'role' stands twice" in report.errors[1].message


def test_a_key_that_stands_twice_is_found_across_the_pieces_of_a_file(tmp_path):
    long = json.dumps({"messages": [{"role": "user", "content": "x " * 100_000}, {"role": "assistant", "content": "y"}]})
    report = validate_file(write(tmp_path, f'[{long[:-1]}, "id": 1, "id": 2}},\n{long}]'.encode(), "x.json"))
    assert (report.rows, [error.line for error in report.errors]) == (2, [1])
