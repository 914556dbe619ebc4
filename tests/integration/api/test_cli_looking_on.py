"""Looking on from the command line: states, events, curves, JSON everywhere, and a server that goes away meanwhile."""

import contextlib
import dataclasses
import json
import threading

import pytest
from typer.testing import CliRunner

from posttrain_service.app import create_app
from posttrain_service.cli import tensorboard
from posttrain_service.cli.main import app
from posttrain_service.domain.lifecycle import EndReason, JobState
from posttrain_service.wire.jobs import JobRequest
from posttrain_service.work.services import StreamItem

DONE = StreamItem("end", {"status": "succeeded", "reason": "completed"})


def log(text, cursor):
    return StreamItem("log", {"text": text, "source": "rank-0", "attempt": 1}, cursor)


@pytest.fixture
def run(served):
    def run(*words, code=0):
        result = CliRunner().invoke(app, [*words], env={"POSTTRAIN_SERVER": served})
        assert result.exit_code == code, (result.output, result.exception)
        return result

    return run


def move(fake, **changes):
    fake.services.jobs.jobs["j"] = dataclasses.replace(fake.services.jobs.jobs["j"], **changes)


def test_events(run, fake, job):
    lines = run("jobs", "events", "j").stdout.splitlines()
    assert len(lines) == 5
    assert lines[0] == "2023-11-14T22:13:21Z info  note: event 1"
    assert [event["id"] for event in json.loads(run("jobs", "events", "j", "--json").stdout)] == ["1", "2", "3", "4", "5"]
    one = {"id": "9", "created_at": 1.5, "type": "failed", "level": "error", "message": "a\x1b[31m\nb", "data": {}}
    fake.services.streams.items = [StreamItem("event", one, "9"), StreamItem("end", {"status": "failed", "reason": "lost"})]
    followed = run("jobs", "events", "j", "-f", code=1)
    assert followed.stdout == "1970-01-01T00:00:01Z error failed: a\\x1b[31m\\nb\n"  # no control character reaches a terminal
    assert followed.stderr == "job j: failed (lost)\n"
    assert json.loads(run("jobs", "events", "j", "-f", "--json", code=1).stdout)["type"] == "failed"


@pytest.mark.parametrize(("state", "code"), [(JobState.SUCCEEDED, 0), (JobState.FAILED, 1), (JobState.CANCELLED, 1)])
def test_watching_says_each_change_once(run, fake, job, state, code, monkeypatch):
    looks = []
    get = type(fake.services.jobs).get

    def moving(self, job_uuid):
        looks.append(job_uuid)
        if len(looks) == 3:
            move(fake, state=JobState.RUNNING, attempt=1)
            self.views["j"] = {"progress": {"step": 3, "total_steps": 9, "eta_s": 65.0, "percent": 33.0}, "metrics": {"step": 3, "loss": 1.25}}
        if len(looks) == 5:
            move(fake, state=state, reason=EndReason.COMPLETED)
        return get(self, job_uuid)

    monkeypatch.setattr(type(fake.services.jobs), "get", moving)
    watched = run("jobs", "watch", "j", "--every", "0.05", code=code)
    assert watched.stdout.splitlines() == ["queued", "running step 3/9 loss 1.2500 eta 1m05s", f"{state} step 3/9 loss 1.2500"]
    assert watched.stderr == f"job j: {state} (completed)\n"


def test_curves(run, fake, job):
    assert run("jobs", "metrics", "j", "--plot").stdout == "loss: no value yet\n"
    fake.services.jobs.points = [{"v": 1, "attempt": 1, "step": n, "epoch": 0.5, "time": 1.0, "loss": 4.0 / n, "grad_norm": None} for n in range(1, 21)]
    drawn = run("jobs", "metrics", "j", "--plot", "--names", "loss,grad_norm").stdout.splitlines()
    assert drawn[0] == "loss by step"
    assert drawn[1].startswith("  4 |")
    assert drawn[14].startswith("0.2 |")
    assert drawn[15].split() == ["1", "20"]
    assert drawn[-1] == "grad_norm: no value yet"
    assert fake.services.jobs.calls[-1][1]["max_points"] == 2000
    table = run("jobs", "metrics", "j", "--names", "loss").stdout.splitlines()
    assert table[3].split() == ["3", "1.3333"]  # as many digits as mean something; --json has all
    assert json.loads(run("jobs", "metrics", "j", "--json").stdout)[2]["loss"] == 4.0 / 3


def test_json_everywhere(run, fake, job, tmp_path):
    request = tmp_path / "job.yaml"
    request.write_text("model: m\ndataset: file-1\n")
    made = json.loads(run("jobs", "submit", str(request), "--json").stdout)
    assert made["status"] == "queued"
    for verb, status in (("pause", "paused"), ("resume", "queued"), ("cancel", "cancelled"), ("retry", "queued"), ("cancel", "cancelled")):
        assert json.loads(run("jobs", verb, "j", "--json").stdout)["status"] == status
    fake.services.jobs.log = b"a\nb\n"
    assert json.loads(run("jobs", "logs", "j", "--tail", "1", "--json").stdout)["text"] == "b\n"
    run("jobs", "logs", "j", "-f", "--json", code=2)
    assert json.loads(run("jobs", "watch", "j", "--json", code=1).stdout)["status"] == "cancelled"
    assert json.loads(run("jobs", "rm", "j", "--json").stdout) == {"job_uuid": "j", "deleted": True}
    assert [model["id"] for model in json.loads(run("models", "list", "--json").stdout)] == list(fake.services.models.names)
    assert fake.services.models.names[0] in run("models", "list").stdout
    assert "base model" in run("models", "rm", fake.services.models.names[0], code=1).stderr


def test_a_log_goes_on_from_the_same_byte_when_the_server_comes_back(fake, settings, serving, monkeypatch):
    """A server that is stopped and started again while its log is being followed."""
    streams, opened, result = fake.services.streams, threading.Event(), []
    logs = streams.logs

    def opening(job_uuid, **query):
        opened.set()
        return logs(job_uuid, **query)

    monkeypatch.setattr(streams, "logs", opening)
    fake.services.jobs.create(JobRequest(model="m", dataset="file-1", job_uuid="j"))
    streams.items, streams.endless = [log("one\n", "1:4")], True
    with serving(create_app(settings, build=lambda told: fake)) as address:
        words = ["jobs", "logs", "j", "-f", "--retry-for", "30", "--server", address]
        follower = threading.Thread(target=lambda: result.append(CliRunner().invoke(app, words)))
        follower.start()
        assert opened.wait(30)
        streams.close()
    streams.items, streams.endless = [log("two\n", "1:8"), DONE], False
    streams.closed.clear()
    with serving(create_app(settings, build=lambda told: fake), port=int(address.rsplit(":", 1)[1])):
        follower.join(30)
    [followed] = result
    assert (followed.exit_code, followed.stdout) == (0, "one\ntwo\n"), followed.output
    assert "waiting for it to come back" in followed.stderr
    assert streams.asked[-1][1]["after"] == "1:4"


def test_metrics_become_event_files_of_tensorboard(run, fake, job, tmp_path):
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    fake.services.jobs.points = [
        {"v": 1, "attempt": 1, "step": n, "epoch": 0.5, "time": 10.0 + n, "loss": 4.0 / n, "grad_norm": None, "skipped": False} for n in (1, 2)
    ]
    assert run("jobs", "tensorboard", "j", "--write-only", "--logdir", str(tmp_path)).stdout == f"{tmp_path / 'j'}\n"
    events = accumulator.EventAccumulator(str(tmp_path / "j"))
    events.Reload()
    assert set(events.Tags()["scalars"]) == {"epoch", "loss"}
    assert [(one.step, one.value, one.wall_time) for one in events.Scalars("loss")] == [(1, 4.0, 11.0), (2, 2.0, 12.0)]
    assert "--logdir" in run("jobs", "tensorboard", "j", "--write-only", code=1).stderr
    assert "nobodys" in run("jobs", "tensorboard", "nobodys", "--write-only", "--logdir", str(tmp_path), code=1).stderr
    assert not (tmp_path / "nobodys").exists()


def test_tensorboard_is_started_on_the_files_and_gets_what_is_measured(run, fake, job, tmp_path, monkeypatch):
    started = []

    class Shown(contextlib.nullcontext):
        def __init__(self, argv):
            super().__init__(self)
            started.append(argv)

        def wait(self):
            started.append(sorted(path.parent.name for path in tmp_path.rglob("*tfevents*")))

        def terminate(self):
            started.append("ended")

    monkeypatch.setattr(tensorboard.subprocess, "Popen", Shown)
    fake.services.streams.items = [StreamItem("metric", {"step": 1, "time": 1.0, "loss": 1.0}, "1:1"), DONE]
    assert "has ended" in run("jobs", "tensorboard", "j", "--logdir", str(tmp_path), "--port", "0").stderr
    argv, folders, end = started
    assert argv[1:] == ["-m", "tensorboard.main", "--logdir", str(tmp_path), "--host", "127.0.0.1", "--port", "0"]
    assert (folders, end) == (["j"], "ended")
