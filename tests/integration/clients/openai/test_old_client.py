"""The oldest supported `openai` client (1.x), installed beside this environment and kept between runs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

VERSION = "1.109.1"
SCRIPT = '''
import json, sys, time
import openai
assert openai.__version__.startswith("1."), openai.__version__
client = openai.OpenAI(base_url=sys.argv[1], api_key="any")
rows = b'{"messages": [{"role": "user", "content": "train"}, {"role": "assistant", "content": "b"}]}\\n'
file = client.files.create(file=("rows.jsonl", rows), purpose="fine-tune")
bad = client.files.create(file=("rows.jsonl", b"{}\\n"), purpose="fine-tune")
upload = client.uploads.create(bytes=3, filename="a.jsonl", mime_type="x", purpose="fine-tune")
part = client.uploads.parts.create(upload.id, data=b"abc")
joined = client.uploads.complete(upload.id, part_ids=[part.id])
jobs = client.fine_tuning.jobs
def wait(job):
    while job.status not in ("succeeded", "failed", "cancelled"):
        time.sleep(0.02)
        job = jobs.retrieve(job.id)
    return job
made = jobs.create(model="tiny", training_file=file.id, suffix="old", method={"type": "supervised"}, metadata={"client": "old"})
done = wait(made)
failed = wait(jobs.create(model="tiny", training_file=bad.id))
try:
    jobs.create(model="tiny", training_file=file.id, method={"type": "reinforcement"})
except openai.BadRequestError as error:
    code = error.code
print(json.dumps({
    "first": made.status, "last": done.status, "model": done.fine_tuned_model, "csv": client.files.content(done.result_files[0]).text,
    "listed": [job.id for job in jobs.list(limit=1)].count(made.id), "joined": joined.file.bytes, "code": code,
    "events": len({event.id for event in jobs.list_events(made.id, limit=3)}),
    "checkpoints": [c.step_number for c in jobs.checkpoints.list(made.id, limit=1)],
    "error": failed.error.message, "models": done.fine_tuned_model in [model.id for model in client.models.list()],
    "cancelled": wait(jobs.cancel(jobs.create(model="tiny", training_file=file.id).id)).status, "deleted": client.files.delete(bad.id).deleted,
}))
'''


@pytest.fixture(scope="session")
def old_packages(repository: Path) -> str:
    """A folder with the old client and what it needs, to stand before this environment's packages."""
    folder = repository / ".cache" / "clients" / f"openai-{VERSION}"
    ready = folder / "ready"
    if not ready.exists():
        options = ["--quiet", "--disable-pip-version-check", "--no-compile", "--upgrade", "--target", str(folder)]
        argv = [sys.executable, "-m", "pip", "install", *options, f"openai=={VERSION}"]
        made = subprocess.run(argv, capture_output=True, text=True, timeout=240, check=False)
        if made.returncode != 0:
            pytest.skip(f"openai {VERSION} cannot be installed here: {made.stderr.strip()[-300:]}")
        ready.touch()
    return str(folder)


@pytest.mark.slow
def test_the_whole_way_with_the_old_client(old_packages, server):
    argv = [sys.executable, "-c", SCRIPT, server.base_url]
    env = os.environ | {"PYTHONPATH": old_packages}
    ran = subprocess.run(argv, capture_output=True, text=True, timeout=120, check=False, env=env)
    assert ran.returncode == 0, ran.stderr
    seen = json.loads(ran.stdout)
    assert (seen["first"], seen["last"], seen["code"], seen["joined"]) == ("validating_files", "succeeded", "unsupported_method", 3)
    assert seen["model"].startswith("ft:tiny:posttrain:old:")
    assert seen["csv"].startswith("step,train_loss,train_accuracy,valid_loss,valid_mean_token_accuracy\n1,1.0,0.5,,\n")
    assert (seen["listed"], seen["checkpoints"], seen["models"], seen["deleted"]) == (1, [4, 2], True, True)
    assert seen["events"] > 6
    assert "line 1:" in seen["error"]
    assert seen["cancelled"] == "cancelled"
