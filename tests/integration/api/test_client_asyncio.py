"""The asyncio client against a server: its own requests, not only the same names as the other one's."""

import asyncio
import tarfile

import pytest

from posttrain_service.client import ApiError, AsyncClient, ServerGone
from posttrain_service.work.services import StreamItem

ROWS = b'{"prompt": "a", "completion": "b"}\n'


def test_a_whole_way(served, fake, tmp_path):
    (tmp_path / "rows.jsonl").write_bytes(ROWS)
    (tmp_path / "w").write_bytes(b"x" * 1000)
    found = {"id": "step-000001", "step": 1, "epoch": 1.0, "created_at": 1.0, "size_bytes": 1000, "kind": "full", "best": False,
             "metrics": {}, "files": [{"path": "w", "size_bytes": 1000, "sha256": "0"}]}  # fmt: skip
    end = StreamItem("end", {"status": "succeeded", "reason": "completed"})

    async def way():
        async with AsyncClient(served) as client:
            assert await client.is_ready()
            sent = []
            file = await client.upload(tmp_path / "rows.jsonl", progress=sent.append)
            assert (file["bytes"], sent[-1]) == (len(ROWS), len(ROWS))
            for name in ("a", "b", "c"):
                await client.create_job({"model": "m", "dataset": file["id"], "job_uuid": name})
            assert [job["job_uuid"] async for job in client.jobs(limit=1)] == ["c", "b", "a"]
            assert [event["id"] async for event in client.events("a")] == ["1", "2", "3", "4", "5"]
            assert (await client.cancel("a"))["status"] == "cancelled"
            await client.delete_job("a")
            with pytest.raises(ApiError) as gone:
                await client.job("a")
            assert (gone.value.status, gone.value.code) == (404, "job_not_found")
            fake.services.streams.items = [StreamItem("metric", {"step": 1, "loss": 2.0}, "1:9"), end]
            points = []
            assert (await client.wait("b", progress=points.append))["job_uuid"] == "b"
            assert [point["loss"] for point in points] == [2.0]
            fake.services.jobs.found = [found]
            target = await client.download_checkpoint("b", "step-000001", tmp_path / "out.tar")
            with tarfile.open(target) as tar:
                assert tar.getnames() == ["b-step-000001/w"]
            assert [model["id"] async for model in client.models()] == list(fake.services.models.names)
            await client.delete_file(file["id"])
            with pytest.raises(ApiError):
                await client.delete_file(file["id"])

    asyncio.run(way())


def test_no_server():
    async def ask():
        async with AsyncClient("http://127.0.0.1:9") as client:
            assert not await client.is_ready()
            with pytest.raises(ServerGone, match="no server answers"):
                await client.job("x")

    asyncio.run(ask())
