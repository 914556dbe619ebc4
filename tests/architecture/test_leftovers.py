"""The end of `make test` finds processes that a test run left behind, tells of them and ends them."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest


@pytest.fixture
def leftovers(repository: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    spec = importlib.util.spec_from_file_location("leftovers", repository / "scripts" / "leftovers.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "GRACE_S", 0.0)
    return module


@pytest.fixture
def sleeper(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[subprocess.Popen[bytes]]:
    environment = {k: v for k, v in os.environ.items() if k != "TESTRUN_TAG"} | request.param
    code = "import sys, time; sys.stdout.write('up'); sys.stdout.flush(); time.sleep(600)"
    process = subprocess.Popen([sys.executable, "-S", "-c", code], env=environment, cwd=tmp_path, stdout=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stdout.read(2) == b"up"
    yield process
    process.kill()
    process.wait()
    process.stdout.close()


@pytest.mark.parametrize("sleeper", [{"TESTRUN_TAG": "run-of-this-test"}], indirect=True)
def test_the_tag_is_found(leftovers: ModuleType, sleeper: subprocess.Popen[bytes], capsys: pytest.CaptureFixture[str]) -> None:
    assert leftovers.main("another-run", "/nowhere") == 0
    assert sleeper.poll() is None
    assert leftovers.main("run-of-this-test", "/nowhere") == 1
    assert str(sleeper.pid) in capsys.readouterr().err
    assert sleeper.wait(timeout=30) < 0


@pytest.mark.parametrize("sleeper", [{"POSTTRAIN_JOB_UUID": "1"}], indirect=True)
def test_a_job_in_the_runs_folder_is_found(leftovers: ModuleType, sleeper: subprocess.Popen[bytes], tmp_path: Path) -> None:
    assert leftovers.main("another-run", "/nowhere") == 0
    assert leftovers.main("another-run", str(tmp_path)) == 1
