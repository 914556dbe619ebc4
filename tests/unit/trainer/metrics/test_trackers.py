"""Which sinks are opened; what they write with the real packages, where those are installed."""

import builtins
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from posttrain_trainer.contract.errors import InvalidArguments
from posttrain_trainer.contract.events import MetricsPoint
from posttrain_trainer.contract.rundir import RunDir
from posttrain_trainer.contract.spec import FullTrainingArguments
from posttrain_trainer.metrics.choose import open_sinks
from posttrain_trainer.metrics.mlflow import _page
from posttrain_trainer.metrics.sink import numbers, open_sink


def args(**knobs) -> FullTrainingArguments:
    return FullTrainingArguments(model_path="m", data_path="d", ckpt_output_dir="o", **knobs)


@pytest.fixture
def attempt(tmp_path):
    attempt = RunDir(tmp_path).attempt(1)
    attempt.path.mkdir(parents=True)
    return attempt


def test_metrics_have_names_that_trackers_group():
    point = MetricsPoint(attempt=2, step=3, epoch=0.5, time=1.0, loss=2.0, validation_loss=1.0, skipped=True)
    assert numbers(point) == {"train/epoch": 0.5, "train/loss": 2.0, "validation/loss": 1.0}


@pytest.mark.parametrize("package", ["wandb", "mlflow", "tensorboard"])
def test_a_sink_without_its_package_is_refused_by_name(package, attempt, monkeypatch):
    real = builtins.__import__

    def without(name, *rest, **more):
        if name.split(".")[0] == package or name == f"torch.utils.{package}":
            raise ImportError(name)
        return real(name, *rest, **more)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(InvalidArguments, match=rf"{package}, which is not installed here; install posttrain\[tracking\]"):
        open_sinks(args(loggers=[{"kind": package}]), attempt, pytest.fail)


def test_a_sink_that_cannot_be_opened_is_left_out():
    told = []

    def make():
        raise ConnectionError("the server is down")

    assert open_sink("mlflow", make, told.append) is None
    assert len(told) == 1
    assert "mlflow logger could not be opened (ConnectionError: the server is down)" in told[0]


def test_a_logger_named_twice_writes_once(attempt):
    sinks = open_sinks(args(loggers=[{"kind": "tensorboard"}, {"kind": "jsonl"}, {"kind": "tensorboard"}]), attempt, pytest.fail)
    assert [sink.name for sink in sinks] == ["jsonl", "tensorboard"]
    for sink in sinks:
        sink.close()


@pytest.mark.parametrize("knobs", [{"api_key": "s"}, {"tracking_uri": "http://u:p@h"}, {"host": "h"}, {"name": "a/../b"}])
def test_no_request_names_keys_or_servers(knobs):
    for kind in ("wandb", "mlflow"):
        with pytest.raises(ValueError, match=next(iter(knobs))):
            args(loggers=[{"kind": kind, **knobs}])


@pytest.mark.parametrize(
    ("store", "page"),
    [
        ("https://us:pw@ml.example:5000/base/?x=1", "https://ml.example:5000/base/#/experiments/3/runs/r"),
        ("http://ml.example", "http://ml.example/#/experiments/3/runs/r"),
        ("sqlite:////run/mlflow.db", None),
        ("databricks", None),
    ],
)
def test_mlflows_page_of_a_run_shows_no_password(store, page):
    assert _page(store, "3", "r") == page


def python_with(package: str, repository: Path) -> str:
    """An interpreter that has the package: this one, or the one that `make tracking` makes."""
    for python in (sys.executable, str(repository / ".cache" / "tracking" / "bin" / "python")):
        code = f"import importlib.util as u, sys; sys.exit(u.find_spec({package!r}) is None)"
        if Path(python).exists() and subprocess.run([python, "-c", code], check=False).returncode == 0:
            return python
    pytest.skip(f"{package} is not installed: it is large, and asked for by `make tracking`")


WRITE = """
import json, sys
from pathlib import Path
from posttrain_trainer.contract.events import MetricsPoint
from posttrain_trainer.contract.loggers import MlflowLogger, WandbLogger
from posttrain_trainer.metrics.mlflow import MlflowSink
from posttrain_trainer.metrics.wandb import WandbSink

kind, folder = sys.argv[1], Path(sys.argv[2])
if kind == "wandb":
    sink = WandbSink(WandbLogger(kind="wandb", project="ours"), folder, {"learning_rate": 1e-3})
else:
    sink = MlflowSink(MlflowLogger(kind="mlflow", experiment="ours"), folder, {"learning_rate": 1e-3})
for step in (1, 2, 3):
    sink.write(MetricsPoint(attempt=1, step=step, epoch=step / 3, time=100.0 + step, loss=3.0 / step))
sink.write(MetricsPoint(attempt=1, step=3, epoch=1.0, time=104.0, validation_loss=1.5))
sink.close(sys.argv[3])
"""


def run(python: str, code: str, *argv: str, repository: Path, folder: Path) -> str:
    env = {k: v for k, v in os.environ.items() if not k.startswith(("WANDB_", "MLFLOW_"))}
    env |= {"PYTHONPATH": str(repository / "trainer"), "HOME": str(folder / "home"), "MLFLOW_TRACKING_URI": ""}
    done = subprocess.run([python, "-c", code, *argv], env=env, capture_output=True, text=True, timeout=240, cwd=folder, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


@pytest.mark.slow
def test_wandb_offline_holds_every_point(repository, tmp_path):
    python = python_with("wandb", repository)
    run(python, WRITE, "wandb", str(tmp_path / "run"), "stopped", repository=repository, folder=tmp_path)
    [record] = (tmp_path / "run").rglob("run-*.wandb")
    read = """
import json, struct, sys
from wandb.proto import wandb_internal_pb2
data = open(sys.argv[1], "rb").read()
assert data[:4] == b":W&B" and len(data) < 32768, "a header of 7 bytes, then one block of LevelDB's log format"
at, steps = 7, []
while at + 7 <= len(data):
    _, length, kind = struct.unpack("<IHB", data[at : at + 7])
    assert kind == 1, "a whole record"
    record = wandb_internal_pb2.Record()
    record.ParseFromString(data[at + 7 : at + 7 + length])
    at += 7 + length
    if record.WhichOneof("record_type") == "history":
        steps.append({(item.key or "/".join(item.nested_key)): json.loads(item.value_json) for item in record.history.item})
    if record.WhichOneof("record_type") == "exit":
        code = record.exit.exit_code
print(json.dumps([steps, code]))
"""
    steps, code = json.loads(run(python, read, str(record), repository=repository, folder=tmp_path))
    assert [(s["step"], s.get("train/loss")) for s in steps] == [(1, 3.0), (2, 1.5), (3, 1.0), (3, None)]
    assert steps[-1]["validation/loss"] == 1.5
    assert code == 255  # what W&B shows as killed


@pytest.mark.slow
def test_mlflow_with_sqlite_holds_every_point(repository, tmp_path):
    python = python_with("mlflow", repository)
    folder = tmp_path / "run"
    folder.mkdir()
    run(python, WRITE, "mlflow", str(folder), "failed", repository=repository, folder=tmp_path)
    read = """
import json, sys
from mlflow.tracking import MlflowClient
client = MlflowClient(tracking_uri="sqlite:///" + sys.argv[1])
[run] = client.search_runs([client.get_experiment_by_name("ours").experiment_id])
history = [(m.step, m.value) for m in client.get_metric_history(run.info.run_id, "train/loss")]
print(json.dumps([run.info.status, history, run.data.metrics["validation/loss"], run.data.params["learning_rate"]]))
"""
    found = json.loads(run(python, read, str(folder / "mlflow.db"), repository=repository, folder=tmp_path))
    assert found == ["FAILED", [[1, 3.0], [2, 1.5], [3, 1.0]], 1.5, "0.001"]
