"""Uploads on disk: whole or not at all."""

import errno
import hashlib
import io
import os
import stat
import tracemalloc

import pytest

from posttrain_service.errors import DiskFull, InvalidRequest, PayloadTooLarge
from posttrain_service.ids import new_file_id
from posttrain_service.runs import blobs as module
from posttrain_service.runs.blobs import Blobs


@pytest.fixture
def blobs(tmp_path):
    return Blobs(tmp_path / "files", max_bytes=5_000_000, reserve_bytes=0)


class Dribble(io.RawIOBase):
    """Gives bytes in pieces of odd sizes, as sockets do."""

    def __init__(self, data, step=7919, error=None):
        self.data, self.step, self.error = data, step, error

    def read(self, size=-1):
        if not self.data and self.error:
            raise self.error
        piece, self.data = self.data[: self.step], self.data[self.step :]
        return piece


def names(blobs):
    return sorted(path.name for path in blobs._folder.iterdir())


def test_a_file_is_stored_and_hashed(blobs):
    data = os.urandom(3_000_000)
    file_id = new_file_id()
    blob = blobs.save(Dribble(data), file_id)
    assert blob.path == blobs.path(file_id)
    assert blob.path.read_bytes() == data
    assert (blob.size_bytes, blob.sha256) == (len(data), hashlib.sha256(data).hexdigest())
    assert stat.S_IMODE(blob.path.stat().st_mode) == 0o600
    assert names(blobs) == [file_id]
    assert blobs.delete(file_id)
    assert not blobs.delete(file_id)
    assert names(blobs) == []


def test_the_limit_is_exact(blobs):
    assert blobs.save(io.BytesIO(b"x" * 5_000_000), new_file_id()).size_bytes == 5_000_000
    with pytest.raises(PayloadTooLarge, match="more than 5,000,000 bytes") as caught:
        blobs.save(Dribble(b"x" * 5_000_001), new_file_id())
    assert (caught.value.code, caught.value.param) == ("file_too_large", "file")
    assert len(names(blobs)) == 1, "nothing of the refused one is left"


def test_an_empty_file_is_refused(blobs):
    with pytest.raises(InvalidRequest, match="is empty"):
        blobs.save(io.BytesIO(b""), new_file_id())
    assert names(blobs) == []


def test_an_upload_that_breaks_off_leaves_nothing(blobs):
    with pytest.raises(ConnectionResetError):
        blobs.save(Dribble(b"x" * 100_000, error=ConnectionResetError()), new_file_id())
    assert names(blobs) == []


def test_the_reserve_is_kept(tmp_path):
    blobs = Blobs(tmp_path / "files", max_bytes=10, reserve_bytes=2**60)
    with pytest.raises(DiskFull, match="must stay free") as caught:
        blobs.save(io.BytesIO(b"x"), new_file_id())
    assert caught.value.code == "disk_full"
    assert names(blobs) == []


def test_a_disk_that_fills_up_meanwhile_is_said(blobs, monkeypatch):
    write = os.write

    def full(fd, data):
        if len(data) > 100:
            return write(fd, data[:100])  # a short write first, as kernels do
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(module.os, "write", full)
    with pytest.raises(DiskFull):
        blobs.save(io.BytesIO(b"x" * 150), new_file_id())
    assert names(blobs) == []


def test_short_writes_lose_nothing(blobs, monkeypatch):
    write = os.write
    monkeypatch.setattr(module.os, "write", lambda fd, data: write(fd, data[:1000]))
    data = os.urandom(10_500)
    assert blobs.save(io.BytesIO(data), new_file_id()).path.read_bytes() == data


def test_memory_does_not_grow_with_the_file(tmp_path):
    blobs = Blobs(tmp_path / "files", max_bytes=2**30, reserve_bytes=0)

    class Endless:
        left = 40

        def read(self, size):
            self.left -= 1
            return b"x" * size if self.left >= 0 else b""

    tracemalloc.start()
    try:
        assert blobs.save(Endless(), new_file_id()).size_bytes == 40 << 20
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 5 << 20


@pytest.mark.parametrize("name", ["../x", "file-", "file-" + "g" * 32, "/etc/passwd", "file-" + "0" * 32 + "\n", ""])
def test_only_file_ids_become_paths(blobs, name):
    for act in (blobs.path, blobs.delete, lambda n: blobs.save(io.BytesIO(b"x"), n)):
        with pytest.raises(ValueError, match="is no file id"):
            act(name)


def test_a_link_laid_in_the_way_is_not_followed(blobs, tmp_path):
    file_id = new_file_id()
    victim = tmp_path / "victim"
    victim.write_text("safe")
    (blobs._folder / f".{file_id}.part").symlink_to(victim)
    with pytest.raises(FileExistsError):
        blobs.save(io.BytesIO(b"x"), file_id)
    (blobs._folder / f".{file_id}.part").unlink(missing_ok=True)
    blobs.path(file_id).symlink_to(victim)
    blobs.save(io.BytesIO(b"x"), file_id)
    assert victim.read_text() == "safe"
    assert not blobs.path(file_id).is_symlink()


def test_leftovers_of_crashes_are_found_by_age(blobs):
    old, young = new_file_id(), new_file_id()
    for file_id in (old, young):
        blobs.save(io.BytesIO(b"x"), file_id)
    part = blobs._folder / f".{new_file_id()}.part"
    fresh_part = blobs._folder / f".{new_file_id()}.part"
    for path in (part, fresh_part, blobs._folder / "foreign"):
        path.touch()
    for path in (blobs.path(old), part, blobs._folder / "foreign"):
        os.utime(path, (1000, 1000))
    now = blobs.path(young).stat().st_mtime
    assert list(blobs.leftovers(now, 3600)) == [old]
    assert not part.exists()
    assert fresh_part.exists()
    assert (blobs._folder / "foreign").exists()
