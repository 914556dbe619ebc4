"""Rows before any job."""

import json

import pytest

from posttrain_service.errors import InvalidRequest, PayloadTooLarge
from posttrain_service.work import rows
from posttrain_trainer.contract.methods import DpoMethod, PretrainMethod, SftMethod

GOOD = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}


def source(tmp_path, lines, filename="rows.jsonl"):
    path = tmp_path / "file-1"
    path.write_text("".join(line if isinstance(line, str) else json.dumps(line) + "\n" for line in lines))
    return rows.Source(path=path, filename=filename, file_id="file-1", sha256="0" * 64)


@pytest.mark.parametrize(
    ("filename", "suffix"),
    [("a.csv", ".csv"), ("a.b.jsonl.gz", ".jsonl.gz"), ("A.TSV", ".tsv"), ("x", ".jsonl"), ("x.exe", ".jsonl"), ("a.exe.gz", ".gz")],
)
def test_the_ending_tells_the_format(filename, suffix):
    assert rows.Source(filename=filename).suffix == suffix


def test_every_bad_line_is_named_and_counted(tmp_path):
    report = rows.Checker(10**6).report(source(tmp_path, [GOOD, "{\n", GOOD, {"messages": []}]), SftMethod())
    shown = rows.report_json(report)
    assert (shown["valid"], shown["rows"], shown["num_errors"]) == (False, 4, 2)
    assert [error["line"] for error in shown["errors"]] == [2, 4]
    with pytest.raises(InvalidRequest, match=r"2 of 4 rows cannot be used; line 2: .*set training\.invalid_rows") as caught:
        rows.refuse_bad_rows(report, "dataset", skip=False, max_invalid_rows=0)
    assert [error["line"] for error in caught.value.errors] == [2, 4]


def test_skipped_rows_are_a_warning_until_they_are_too_many(tmp_path):
    report = rows.Checker(10**6).report(source(tmp_path, [GOOD, "{\n"]), SftMethod())
    (warning,) = rows.refuse_bad_rows(report, "dataset", skip=True, max_invalid_rows=1)
    assert "1 of 2 rows are bad and left out" in warning
    with pytest.raises(InvalidRequest, match=r"raise training\.max_invalid_rows"):
        rows.refuse_bad_rows(report, "dataset", skip=True, max_invalid_rows=0)


@pytest.mark.parametrize("lines", [[], ["\n"], ["{\n"]])
def test_a_set_without_any_good_row_is_refused_even_with_skip(tmp_path, lines):
    report = rows.Checker(10**6).report(source(tmp_path, lines), SftMethod())
    with pytest.raises(InvalidRequest, match="mend the rows"):
        rows.refuse_bad_rows(report, "dataset", skip=True, max_invalid_rows=1000)


def test_a_key_without_meaning_is_a_warning():
    report = rows.Checker(10**6).report(rows.inline([GOOD | {"source": "web"}], 10), SftMethod())
    (warning,) = rows.refuse_bad_rows(report, "dataset", skip=False, max_invalid_rows=0)
    assert warning == "dataset: 1 rows hold the key 'source', which means nothing in their format and is left out (line 1)"


def test_what_is_odd_about_rows_is_told_with_its_lines(tmp_path):
    odd = {"messages": [*GOOD["messages"], {"role": "tool", "content": "3"}, GOOD["messages"][1]]}
    report = rows.Checker(10**6).report(source(tmp_path, [GOOD, odd, GOOD, *[odd] * 6]), SftMethod())
    (warning,) = rows.refuse_bad_rows(report, "dataset", skip=False, max_invalid_rows=0)
    assert warning == "dataset: 7 rows hold a tool result that no tool call precedes (lines 2, 4, 5, 6, 7, ...)"
    (shown,) = rows.report_json(report)["warnings"]
    assert shown == {"message": "rows hold a tool result that no tool call precedes", "rows": 7, "lines": [2, 4, 5, 6, 7, 8, 9]}


def test_what_a_row_teaches_is_judged_anew_for_another_train_on(tmp_path):
    checker = rows.Checker(10**6)
    asked = source(tmp_path, [GOOD, {"messages": GOOD["messages"][:1]}])
    found = [checker.report(asked, SftMethod(), train_on).num_errors for train_on in ("assistant", "all", "assistant", "last_assistant")]
    assert found == [1, 0, 1, 1]


def test_rows_of_another_kind_are_refused():
    report = rows.Checker(10**6).report(rows.inline([{"text": "abc"}], 10), SftMethod())
    assert not report.valid


def test_a_method_says_what_rows_must_mean(tmp_path):
    pair, text = {"prompt": "q", "chosen": "a", "rejected": "b"}, {"body": "abc"}
    checker = rows.Checker(10**6)
    assert checker.report(rows.inline([pair], 10), DpoMethod(kind="dpo")).valid
    assert not checker.report(rows.inline([GOOD], 10), DpoMethod(kind="dpo")).valid
    documents = source(tmp_path, [text])
    assert checker.report(documents, PretrainMethod(kind="pretrain", text_column="body")).valid
    assert not checker.report(documents, PretrainMethod(kind="pretrain")).valid  # not the verdict on another column


def test_a_file_is_read_once(tmp_path):
    checker = rows.Checker(10**6)
    first = source(tmp_path, [GOOD])
    report = checker.report(first, SftMethod())
    first.path.unlink()
    assert checker.report(first, SftMethod()) is report


def test_too_many_inline_rows_are_refused_with_the_remedy():
    with pytest.raises(PayloadTooLarge, match="upload them as a file"):
        rows.inline([GOOD, GOOD], 1)


def test_placed_rows_outlive_the_upload(tmp_path):
    upload = source(tmp_path, [GOOD], "a.csv")
    folder = tmp_path / "data"
    folder.mkdir()
    name = rows.place(upload, folder, "train")
    upload.path.unlink()
    assert name == "train.csv"
    assert json.loads((folder / name).read_text()) == GOOD


def test_placed_inline_rows_are_lines(tmp_path):
    name = rows.place(rows.inline([GOOD, {"a": "ü"}], 10), tmp_path, "validation")
    assert [json.loads(line) for line in (tmp_path / name).read_text("utf-8").splitlines()] == [GOOD, {"a": "ü"}]


def test_keys_that_mean_nothing_are_listed_in_the_report():
    report = rows.Checker(10**6).report(rows.inline([GOOD | {"source": "web"}, GOOD], 10), SftMethod())
    assert rows.report_json(report)["ignored"] == {"source": 1}


def test_rows_of_several_shapes_are_allowed_and_told(tmp_path):
    lines = [GOOD, GOOD, {"prompt": "a", "completion": "b"}]
    report = rows.Checker(10**6).report(source(tmp_path, lines), SftMethod())
    assert report.valid
    sentence = "rows have several shapes (2 messages, 1 prompt_completion); each is trained on as what it is"
    assert rows.refuse_bad_rows(report, "dataset", skip=False, max_invalid_rows=0) == [f"dataset: {sentence}"]
    assert rows.report_json(report)["warnings"] == [{"message": sentence, "rows": 3, "lines": [1]}]
    one = rows.Checker(10**6).report(source(tmp_path, [GOOD]), SftMethod())
    assert rows.report_json(one)["warnings"] == []
