"""Files and uploads by parts, by the real `openai` client."""

from __future__ import annotations

import hashlib
import io

import openai
import pytest


def test_files_go_in_and_come_back(server, client, row, jsonl):
    data = jsonl(row())
    made = client.files.create(file=("rows.jsonl", data), purpose="fine-tune", expires_after={"anchor": "created_at", "seconds": 3600})
    assert (made.bytes, made.filename, made.status) == (len(data), "rows.jsonl", "processed")
    assert made.expires_at - made.created_at == 3600
    assert client.files.wait_for_processing(made.id).id == made.id
    assert client.files.content(made.id).content == data
    assert made.id in [file.id for file in client.files.list(limit=1)], "over many pages"
    assert client.files.delete(made.id).deleted
    with pytest.raises(openai.NotFoundError) as caught:
        client.files.retrieve(made.id)
    assert caught.value.code == "file_not_found"


def test_a_file_is_put_together_from_parts(server, client, tmp_path, row, jsonl):
    data = jsonl(*(row(answer="x" * 50) for _ in range(200)))
    path = tmp_path / "rows.jsonl"
    path.write_bytes(data)
    done = client.uploads.upload_file_chunked(
        file=path, mime_type="application/jsonl", purpose="fine-tune", part_size=4000, md5=hashlib.md5(data).hexdigest()
    )
    assert (done.status, done.file.bytes, done.file.filename) == ("completed", len(data), "rows.jsonl")
    assert client.files.content(done.file.id).content == data
    job = client.fine_tuning.jobs.create(model="tiny", training_file=done.file.id)
    assert server.wait(job, "succeeded", "failed").status == "succeeded"


def test_uploads_that_do_not_end_well(server, client):
    def begin(size, **options):
        return client.uploads.create(bytes=size, filename="a.jsonl", mime_type="x", purpose="fine-tune", **options)

    upload = begin(6, expires_after={"anchor": "created_at", "seconds": 7200})
    assert (upload.status, upload.expires_at - upload.created_at) == ("pending", 3600)
    one, two = (client.uploads.parts.create(upload.id, data=io.BytesIO(data)).id for data in (b"abc", b"def"))
    for part_ids, options, code in (
        ([one], {}, "upload_size_mismatch"),
        ([one, one], {}, "invalid_request"),
        ([one, "part_none"], {}, "part_not_found"),
        ([one, two], {"md5": "0" * 32}, "upload_md5_mismatch"),
    ):
        with pytest.raises(openai.UnprocessableEntityError) as caught:
            client.uploads.complete(upload.id, part_ids=part_ids, **options)
        assert caught.value.code == code
    done = client.uploads.complete(upload.id, part_ids=[two, one])
    assert client.files.content(done.file.id).content == b"defabc"
    assert done.file.expires_at - done.file.created_at == 7200
    assert client.uploads.complete(upload.id, part_ids=[two, one]).file.id == done.file.id, "repeating is harmless"
    with pytest.raises(openai.ConflictError):
        client.uploads.cancel(upload.id)

    dropped = begin(3)
    client.uploads.parts.create(dropped.id, data=b"abc")
    assert client.uploads.cancel(dropped.id).status == "cancelled"
    assert client.uploads.cancel(dropped.id).status == "cancelled"
    with pytest.raises(openai.ConflictError) as late:
        client.uploads.parts.create(dropped.id, data=b"abc")
    assert late.value.code == "upload_cancelled"
    with pytest.raises(openai.NotFoundError):
        client.uploads.cancel("upload_none")
    with pytest.raises(openai.APIStatusError) as large:
        begin(10**12)
    assert large.value.status_code == 413
    small = begin(1)
    with pytest.raises(openai.APIStatusError) as flood:
        client.uploads.parts.create(small.id, data=b"abc")
    assert flood.value.status_code == 413
