"""The command line against a server."""

import dataclasses
import json
import tarfile

import pytest
from typer.testing import CliRunner

from posttrain_service.cli.main import app
from posttrain_service.wire.jobs import JobRequest
from posttrain_service.work.services import StreamItem

END = StreamItem("end", {"status": "failed", "reason": "lost"})
ROWS = '{"prompt": "a", "completion": "b"}\n'


@pytest.fixture
def run(served):
    def run(*words, code=0):
        result = CliRunner().invoke(app, [*words], env={"POSTTRAIN_SERVER": served})
        assert result.exit_code == code, (result.output, result.exception)
        return result

    return run


@pytest.fixture
def request_file(tmp_path):
    path = tmp_path / "job.yaml"
    path.write_text("model: m\ndataset: file-1\njob_uuid: j\ntraining: {learning_rate: 2e-6}\n")
    return path


def test_submit_show_list_and_verbs(run, fake, request_file):
    made = run("jobs", "submit", str(request_file), "--set", "training.num_epochs=3", "--set", "name=my job")
    assert made.stdout == "j\n"
    assert (fake.services.jobs.jobs["j"].name, run("jobs", "submit", str(request_file), code=1).stderr) == (
        "my job", "error: taken by another request\n",
    )  # fmt: skip
    shown = run("jobs", "show", "j").stdout
    assert "queued" in shown
    assert json.loads(run("jobs", "show", "j", "--json").stdout)["job_uuid"] == "j"
    assert "my job" in run("jobs", "list", "--status", "queued").stdout
    long = {"model": "m" * 200, "dataset": "f", "job_uuid": "u" * 128}
    fake.services.jobs.create(JobRequest(**long))
    assert "u" * 128 in run("jobs", "list").stdout
    assert json.loads(run("jobs", "list", "--json", "--status", "failed").stdout) == []
    for verb, status in (("pause", "paused"), ("resume", "queued"), ("cancel", "cancelled"), ("retry", "queued"), ("cancel", "cancelled")):
        assert run("jobs", verb, "j").stdout == f"{status}\n"
    run("jobs", "delete", "j")
    gone = run("jobs", "show", "j", code=1)
    assert gone.stderr == "error: there is no job 'j'\n"


def test_dry_run(run, fake, request_file):
    assert json.loads(run("jobs", "submit", str(request_file), "--dry-run").stdout)["steps"] == 3
    assert not fake.services.jobs.jobs


def test_submitting_data_and_faults(run, fake, request_file, tmp_path):
    data = tmp_path / "rows.jsonl"
    data.write_text(ROWS)
    run("jobs", "submit", str(request_file), "--data", str(data))
    [file] = fake.services.files.files.values()
    assert (file.filename, file.size_bytes) == ("rows.jsonl", len(ROWS))
    wrong = run("jobs", "submit", str(request_file), "--set", "training.num_epochs=0", "--set", "modle=1", code=1)
    assert "  training.num_epochs: " in wrong.stderr
    assert "  modle: no such field" in wrong.stderr


def test_following_says_how_it_ended(run, fake, job):
    fake.services.streams.items = [StreamItem("log", {"text": "50%\rüber\n", "source": "rank-0", "attempt": 1}, "1:9"), END]
    followed = run("jobs", "logs", "j", "--follow", code=1)
    assert followed.stdout_bytes == "50%\rüber\n".encode()
    assert followed.stderr == "job j: failed (lost)\n"
    fake.services.streams.items = [StreamItem("end", {"status": "succeeded", "reason": "completed"})]
    run("jobs", "logs", "j", "-f")
    fake.services.streams.items = []
    assert "the server ended the stream" in run("jobs", "logs", "j", "-f", "--retry-for", "0", code=3).stderr


def test_following_from_the_last_lines(run, fake, job):
    fake.services.jobs.log = b"a\nb\n"
    done = StreamItem("end", {"status": "succeeded", "reason": "completed"})
    fake.services.streams.items = [StreamItem("log", {"text": "c\n", "source": "rank-0", "attempt": 1}, "1:6"), done]
    assert run("jobs", "logs", "j", "-f", "--tail", "1").stdout == "c\n"  # no attempt has begun: nothing to skip
    fake.services.jobs.jobs["j"] = dataclasses.replace(fake.services.jobs.jobs["j"], attempt=1)
    assert run("jobs", "logs", "j", "-f", "--tail", "1").stdout == "b\nc\n"
    assert fake.services.streams.asked[-1] == ("logs", {"after": "1:4", "attempt": None, "source": "rank-0"})


def test_logs_and_metrics(run, fake, job):
    fake.services.jobs.log = b"a\nb\n"
    assert run("jobs", "logs", "j", "--tail", "1").stdout == "b\n"
    fake.services.jobs.points = [{"v": 1, "attempt": 1, "step": 1, "epoch": 0.5, "time": 1.0, "loss": 2.5}]
    assert "2.5" in run("jobs", "metrics", "j").stdout
    assert json.loads(run("jobs", "metrics", "j", "--json", "--names", "loss").stdout) == [{"step": 1, "loss": 2.5}]


def test_download(run, fake, job, tmp_path):
    assert "no complete checkpoint" in run("jobs", "download", "j", code=1).stderr
    (tmp_path / "w").write_bytes(b"x" * 1000)
    fake.services.jobs.found = [
        {"id": "step-000001", "step": 1, "epoch": 1.0, "created_at": 1.0, "size_bytes": 1000, "kind": "full", "best": False,
         "metrics": {}, "files": [{"path": "w", "size_bytes": 1000, "sha256": "0"}]}
    ]  # fmt: skip
    target = tmp_path / "out.tar"
    assert run("jobs", "download", "j", "--to", str(target)).stdout == f"{target}\n"
    with tarfile.open(target) as tar:
        assert tar.getnames() == ["j-step-000001/w"]
    assert not list(tmp_path.glob(".out*"))
    # A transfer that breaks leaves no file that looks complete.
    (tmp_path / "w").write_bytes(b"x")
    run("jobs", "download", "j", "--to", str(tmp_path / "second.tar"), code=3)
    assert not (tmp_path / "second.tar").exists()


def test_version_and_validation_by_the_server(run, fake, tmp_path):
    assert json.loads(run("version", "--remote").stdout)["server"]["contract"] == 1
    data = tmp_path / "rows.jsonl"
    data.write_text(ROWS)
    report = run("data", "validate", str(data), "--model", "m", code=1)
    assert f"{data}:1: bad" in report.stdout
    assert fake.services.files.files == {}  # what was uploaded for the look is gone


def test_no_server():
    result = CliRunner().invoke(app, ["jobs", "list", "--server", "http://127.0.0.1:9"])
    assert (result.exit_code, result.stderr.startswith("error: no server answers at http://127.0.0.1:9")) == (3, True)
