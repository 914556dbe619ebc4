"""Checkpoints over HTTP: pages, one file in ranges, all of them as a tar; nothing outside ever leaves."""

import asyncio
import contextlib
import gc
import io
import os
import tarfile
import tracemalloc
from pathlib import Path

import pytest
from starlette.requests import Request

from posttrain_service.api.download import file_response, tar_response
from posttrain_service.wire.shapes import Checkpoint, CheckpointList, Error

LIST = "/post_training/jobs/j/checkpoints"
FILE = f"{LIST}/step-000010/files/model/weights.safetensors"


def checkpoint(step, files=()):
    return {
        "id": f"step-{step:06d}", "step": step, "epoch": 1.0, "created_at": 1.7e9, "size_bytes": sum(s for _, s in files),
        "files": [{"v": 1, "path": path, "size_bytes": size, "sha256": "0" * 64} for path, size in files],
        "metrics": {"loss": 1.0}, "kind": "full", "best": False,
    }  # fmt: skip


@pytest.fixture
def content(fake, job, tmp_path):
    (tmp_path / "model").mkdir()
    data = os.urandom(600_000)
    (tmp_path / "model/weights.safetensors").write_bytes(data)
    (tmp_path / "model/ünïcode name.txt").write_bytes(b"x" * 1000)
    files = (("model/weights.safetensors", len(data)), ("model/ünïcode name.txt", 1000))
    fake.services.jobs.found = [checkpoint(2), checkpoint(10, files), checkpoint(100)]
    fake.services.jobs.found[1]["files"] += ({"v": 1, "path": "state/x", "size_bytes": 9, "sha256": ""},)
    return data


def test_pages_in_numeric_order(http, content):
    seen, after = [], None
    while True:
        page = http.get(LIST, params={"limit": 1, **({"after": after} if after else {})}).json()
        CheckpointList.model_validate(page)
        seen += [found["step"] for found in page["data"]]
        after = page["last_id"]
        if not page["has_more"]:
            break
    assert seen == [2, 10, 100]
    # A checkpoint that was pruned between two pages still says where to go on.
    assert http.get(LIST, params={"after": "step-000050"}).json()["data"][0]["step"] == 100
    assert http.get(LIST, params={"after": "x"}).status_code == 422
    shown = http.get(f"{LIST}/step-000010").json()
    Checkpoint.model_validate(shown)
    assert [file["path"] for file in shown["files"]] == ["model/weights.safetensors", "model/ünïcode name.txt"]
    assert http.delete(f"{LIST}/step-000002").status_code == 204
    assert http.get(f"{LIST}/step-000002").status_code == 404


def test_a_whole_file(http, content):
    answer = http.get(FILE)
    assert answer.content == content
    assert answer.headers["content-length"] == str(len(content))
    assert answer.headers["accept-ranges"] == "bytes"
    assert answer.headers["content-disposition"].startswith('attachment; filename="weights.safetensors"')
    assert answer.headers["x-content-type-options"] == "nosniff"
    head = http.head(FILE)
    assert (head.content, head.headers["content-length"]) == (b"", str(len(content)))


@pytest.mark.parametrize(
    ("header", "span"),
    [
        ("bytes=0-0", (0, 1)),
        ("bytes=100-199", (100, 200)),
        ("bytes=599999-", (599_999, 600_000)),
        ("bytes=-10", (599_990, 600_000)),
        ("bytes=-999999999", (0, 600_000)),
        ("bytes=10-999999999", (10, 600_000)),
    ],
)
def test_ranges(http, content, header, span):
    answer = http.get(FILE, headers={"range": header})
    assert answer.status_code == 206
    assert answer.content == content[slice(*span)]
    assert answer.headers["content-range"] == f"bytes {span[0]}-{span[1] - 1}/{len(content)}"
    assert answer.headers["content-length"] == str(span[1] - span[0])


@pytest.mark.parametrize(
    "header",
    ["bytes=5-1", "bytes=-", "bytes=x", "rows=0-5", "bytes=0-1,5-6", "bytes=" + ",".join(f"{n}-" for n in range(50_000)), "bytes=" + "0-" * 20_000],
)
def test_ranges_that_are_not_one_range_give_the_whole_file(http, content, header):
    answer = http.get(FILE, headers={"range": header})
    assert (answer.status_code, answer.content == content) == (200, True)


@pytest.mark.parametrize("header", ["bytes=600000-", "bytes=600001-700000", "bytes=-0"])
def test_ranges_behind_the_end(http, content, header):
    answer = http.get(FILE, headers={"range": header})
    assert (answer.status_code, answer.headers["content-range"]) == (416, f"bytes */{len(content)}")
    Error.model_validate(answer.json())


def test_a_range_of_a_file_that_changed_is_not_mixed(http, content):
    etag = http.get(FILE).headers["etag"]
    assert http.get(FILE, headers={"range": "bytes=0-4", "if-range": etag}).status_code == 206
    assert http.get(FILE, headers={"range": "bytes=0-4", "if-range": '"other"'}).content == content


def test_archive(http, content, tmp_path):
    answer = http.get(f"{LIST}/step-000010/archive")
    assert answer.headers["content-type"] == "application/x-tar"
    assert len(answer.content) == int(answer.headers["content-length"])
    with tarfile.open(fileobj=io.BytesIO(answer.content)) as tar:
        names = tar.getnames()
        assert names == ["j-step-000010/model/weights.safetensors", "j-step-000010/model/ünïcode name.txt"]
        assert tar.extractfile(names[0]).read() == content
        assert {(m.uid, m.mode, m.mtime, m.isreg()) for m in tar.getmembers()} == {(0, 0o644, 1_700_000_000, True)}
    assert http.get(f"{LIST}/step-000010/archive").content == answer.content


@pytest.mark.parametrize("kind", ["link", "folder", "fifo", "gone"])
def test_links_and_other_things_are_never_followed(http, content, tmp_path, kind):
    secret = tmp_path / "secret"
    secret.write_text("secret")
    target = tmp_path / "model/weights.safetensors"
    target.unlink()
    {"link": lambda: target.symlink_to(secret), "folder": target.mkdir, "fifo": lambda: os.mkfifo(target), "gone": lambda: None}[kind]()
    answer = http.get(FILE)
    assert answer.status_code == 404
    assert "secret" not in answer.text
    assert str(tmp_path) not in answer.text
    with pytest.raises(Exception, match=r"weights\.safetensors"):  # too late for a status: the transfer breaks
        _sizes(tar_response([("x", target, 6)], filename="x.tar", mtime=0))


@pytest.mark.parametrize(
    "path", ["../../secret", "..%2f..%2fsecret", "%2e%2e/secret", "model/../../secret", "/etc/passwd", "model/weights.safetensors%00", "state/x"]
)
def test_only_listed_files(http, content, path):
    assert http.get(f"{LIST}/step-000010/files/{path}").status_code == 404


def test_the_archive_takes_constant_memory(tmp_path):
    big = tmp_path / "big"
    with big.open("wb") as file:
        file.truncate(256 * 1024 * 1024)
    response = tar_response([(f"m/{n}", big, 256 * 1024 * 1024) for n in range(2)], filename="x.tar", mtime=0)
    tracemalloc.start()
    size = sum(_sizes(response))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert size == int(response.headers["content-length"])
    assert peak < 4 * 1024 * 1024


def test_an_answer_that_nobody_reads_leaves_no_open_file(content, tmp_path):
    request = Request({"type": "http", "method": "GET", "headers": []})
    path = tmp_path / "model/weights.safetensors"
    with path.open("rb"):
        assert _times_open(path) == 1
    for _ in range(5):
        file_response(request, path, filename="x")
    gc.collect()
    assert _times_open(path) == 0


def _times_open(path):
    """Descriptors of this process on the file; others come and go with whatever ran before."""
    found = 0
    for entry in Path("/dev/fd").iterdir():
        with contextlib.suppress(OSError):  # the listing's own is closed by now
            found += os.path.samestat(os.fstat(int(entry.name)), path.stat())
    return found


def test_a_file_that_shrinks_breaks_the_transfer(tmp_path):
    small = tmp_path / "small"
    small.write_bytes(b"x" * 10)
    with pytest.raises(OSError, match="shorter"):
        _sizes(tar_response([("x", small, 20)], filename="x.tar", mtime=0))


def _sizes(response):
    """Sizes of the response's pieces, none of which is kept."""

    async def collect():
        return [len(piece) async for piece in response.body_iterator]

    return asyncio.run(collect())
