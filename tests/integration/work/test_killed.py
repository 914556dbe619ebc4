"""kill -9 of the server process in the midst of submissions and launches: what only a real process can show."""

from __future__ import annotations

import json
import random
import subprocess
import sys
import time

from posttrain_service.ids import is_run_id

SERVER = """
import json, sys
from posttrain_service.compose import build
from posttrain_service.settings import Settings
from posttrain_service.wire.jobs import JobRequest

runtime = build(Settings(**json.loads(sys.argv[1])), slots=["cpu:0", "cpu:1"])
runtime.start()
request = JobRequest.model_validate_json(sys.argv[2])
while True:
    print(runtime.services.jobs.create(request)[0].job.job_uuid, flush=True)
"""


def test_each_accepted_job_runs_exactly_once_however_often_the_server_is_killed(server):
    server.runtime.stop()
    settings = json.dumps(server.settings.model_dump(mode="json", exclude_unset=True))
    body = {"model": "tiny", "dataset": {"rows": [{"messages": [{"role": "user", "content": "succeed"}, {"role": "assistant", "content": "b"}]}]}}
    rng = random.Random(5)
    accepted: list[str] = []
    for _ in range(3):
        process = subprocess.Popen([sys.executable, "-c", SERVER, settings, json.dumps(body)], stdout=subprocess.PIPE, text=True)
        with process, process.stdout as answers:
            accepted += [answers.readline().strip() for _ in range(rng.randint(1, 3))]
            time.sleep(rng.uniform(0, 0.1))  # anywhere in a submission or a launch
            process.kill()
            # Answers that were written before the kill are promises too; a torn one is none.
            accepted += [line.strip() for line in answers if line.endswith("\n")]
    assert all(is_run_id(job_uuid) for job_uuid in accepted)
    server.start()
    for job_uuid in accepted:
        server.wait_for(job_uuid, "succeeded", "failed")
        assert (server.job(job_uuid).state, server.starts(job_uuid)) == ("succeeded", [1])
    jobs = server.jobs.page(limit=100).data
    for view in jobs:  # those whose answer was lost ran once as well
        server.wait_for(view.job.job_uuid, "succeeded")
        assert server.starts(view.job.job_uuid) == [1]
    assert server.runtime.store.slots.taken() == []
