"""Names, purposes and expiry of uploads."""

import pytest

from posttrain_service.domain.files import check_filename, check_purpose, expiry
from posttrain_service.errors import InvalidRequest


@pytest.mark.parametrize(
    ("sent", "kept"),
    [
        ("a.jsonl", "a.jsonl"),
        ("../../etc/passwd", "passwd"),
        ("C:\\data\\rows.jsonl", "rows.jsonl"),
        ("a\x00\n\u202eb.jsonl", "ab.jsonl"),
        (" ü.jsonl ", "ü.jsonl"),
        ('a"; filename="b.jsonl', 'a"; filename="b.jsonl'),
        ("a\r\nX-Injected: 1\r\n\r\nb", "aX-Injected: 1b"),
        ("a\x85\x9b\u2028\u2029\u200e\ufeff\u00ad.csv", "a.csv"),
        ("\u0645\u06cc\u200c\u062e\u0648\u0627\u0647\u0645.csv", "\u0645\u06cc\u200c\u062e\u0648\u0627\u0647\u0645.csv"),
        ("a\ud800b", "ab"),
        ("x" * 255, "x" * 255),
    ],
)
def test_names_keep_their_last_part(sent, kept):
    assert check_filename(sent) == kept


@pytest.mark.parametrize("sent", ["", "/", "..", "a/..", "\x00", "x" * 256, "a" * 5000, "\r\n", "\ud800", "\u202e"])
def test_names_that_say_nothing(sent):
    with pytest.raises(InvalidRequest, match="is not allowed"):
        check_filename(sent)


def test_purposes():
    assert check_purpose("fine-tune") == "fine-tune"
    for other in ("assistants", "fine-tune-results", ""):
        with pytest.raises(InvalidRequest, match="use 'fine-tune'"):
            check_purpose(other)


def test_expiry():
    assert expiry(10.0, None) is None
    assert expiry(10.0, 3600) == 3610.0
    for seconds in (0, 3599, 30 * 86400 + 1):
        with pytest.raises(InvalidRequest, match="outside 3600 to 2592000"):
            expiry(10.0, seconds)
