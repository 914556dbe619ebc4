"""What gets installed: a wheel with everything in it, extras that leave a working torch alone, set-up that tells what is missing."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

TOOLS = ("sh", "uname", "cat", "cksum", "tr", "dirname", "head", "ls", "rm", "df", "awk", "grep")


def run(argv: list[str], **options: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(argv, capture_output=True, text=True, timeout=240, **options)  # type: ignore[call-overload,no-any-return]


def test_a_wheel_holds_migrations_sample_data_and_type_marks(repository: Path, tmp_path: Path) -> None:
    built = run([sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(tmp_path), str(repository)])
    assert built.returncode == 0, built.stdout[-2000:] + built.stderr[-2000:]
    [wheel] = tmp_path.glob("posttrain-*.whl")
    names = set(zipfile.ZipFile(wheel).namelist())
    versions = [path.name for path in (repository / "migrations" / "versions").glob("*.py")]
    assert versions
    wanted = {f"posttrain_service/_migrations/versions/{name}" for name in versions} | {
        "posttrain_service/_migrations/env.py",
        "posttrain_service/py.typed",
        "posttrain_trainer/py.typed",
        "posttrain_service/cli/demo_data/observatory.jsonl",
        "posttrain_service/web/static/index.html",
        "posttrain_service/web/static/vendor/uPlot.min.js",
    }
    assert wanted <= names
    tops = {name.split("/")[0] for name in names}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"posttrain_service", "posttrain_trainer"}


def test_an_editable_installation_copies_nothing_that_could_grow_stale(repository: Path, tmp_path: Path) -> None:
    code = "import sys, hatchling.build as build; build.build_editable(sys.argv[1])"
    built = run([sys.executable, "-c", code, str(tmp_path)], cwd=repository)
    assert built.returncode == 0, built.stdout[-2000:] + built.stderr[-2000:]
    [wheel] = tmp_path.glob("posttrain-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        [link] = [name for name in archive.namelist() if ".dist-info/" not in name]
        assert archive.read(link).decode().splitlines() == [str(repository / "service"), str(repository / "trainer")]


def test_the_extras_leave_an_installed_torch_alone(repository: Path, tmp_path: Path) -> None:
    if importlib.util.find_spec("torch") is None:
        pytest.skip("torch is not installed here")
    report = tmp_path / "report.json"
    environment = {k: v for k, v in os.environ.items() if not k.lower().endswith("_proxy")}
    command = [sys.executable, "-m", "pip", "install", "--dry-run", "--no-build-isolation", "--no-input", "-qq"]
    done = run([*command, "--report", str(report), f"{repository}[train]"], env=environment)
    if done.returncode and "No matching distribution" in done.stderr:
        pytest.skip(f"the package registry can't be reached: {done.stderr.strip()[-300:]}")
    assert done.returncode == 0, done.stderr[-3000:]
    would = {canonicalize_name(item["metadata"]["name"]) for item in json.loads(report.read_text())["install"]}
    assert "posttrain" in would
    assert "torch" not in would


@pytest.mark.parametrize("version", ["2.11.0", "2.13.0", "2.13.0+cpu", "2.13.0+rocm7.1", "2.14.1+cu130", "3.0.0"])
def test_the_range_of_torch_is_wide(repository: Path, version: str) -> None:
    extras = tomllib.loads((repository / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    [torch] = [Requirement(text) for text in extras["train"] if Requirement(text).name == "torch"]
    assert torch.specifier.contains(version)


def test_nothing_that_is_installed_with_the_trainer_pins_torch() -> None:
    seen: set[str] = set()
    waiting = [(canonicalize_name("posttrain"), frozenset({"train"}))]
    while waiting:
        name, extras = waiting.pop()
        if name in seen or name == "torch":
            continue
        seen.add(name)
        for text in importlib.metadata.requires(name) or []:
            requirement = Requirement(text)
            if requirement.marker and not any(requirement.marker.evaluate({"extra": extra}) for extra in extras or {""}):
                continue
            if canonicalize_name(requirement.name) == "torch":
                assert not any(s.operator in ("==", "===", "<", "<=", "~=") for s in requirement.specifier), f"{name}: {text}"
            waiting.append((canonicalize_name(requirement.name), frozenset(requirement.extras)))
    assert {"transformers", "accelerate", "peft"} <= seen


def test_constraints_pin_everything_exactly(repository: Path) -> None:
    lines = (repository / "constraints.txt").read_text().splitlines()
    pins = [Requirement(line) for line in lines if line and not line.startswith("#")]
    assert all([s.operator for s in pin.specifier] == ["=="] and pin.url is None for pin in pins)
    [torch] = [pin for pin in pins if pin.name == "torch"]
    assert str(torch.specifier) == "==2.13.0"
    named = {canonicalize_name(pin.name) for pin in pins}
    project = tomllib.loads((repository / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    asked = project["dependencies"] + extras["train"] + extras["dev"] + extras["postgres"]
    assert {canonicalize_name(Requirement(text).name) for text in asked} <= named


@pytest.fixture
def bare_clone(repository: Path, tmp_path: Path) -> Path:
    clone = tmp_path / "a clone"
    (clone / "scripts").mkdir(parents=True)
    for name in ("pyproject.toml", "constraints.txt", "scripts/setup.sh"):
        shutil.copy(repository / name, clone / name)
    tools = clone / "bin"
    tools.mkdir()
    for tool in TOOLS:
        (tools / tool).symlink_to(str(shutil.which(tool)))
    return clone


def set_up(clone: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    return run(["sh", str(clone / "scripts" / "setup.sh")], env={"PATH": str(clone / "bin"), **environment})


def fake_python(clone: Path, name: str, script: str) -> Path:
    path = clone / "bin" / name
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return path


def test_setting_up_without_python_says_so_in_one_line(bare_clone: Path) -> None:
    fake_python(bare_clone, "python3.12", "echo 'a shim that cannot run this version' >&2; exit 127")
    done = set_up(bare_clone)
    assert done.returncode == 1
    [line] = (done.stdout + done.stderr).splitlines()
    assert "no Python 3.11, 3.12 or 3.13 found" in line
    assert "apt-get install python3" in line


def test_setting_up_without_venv_says_so_in_one_line(bare_clone: Path) -> None:
    path = fake_python(bare_clone, "python3", "case $2 in *ensurepip*) exit 1 ;; *) exit 0 ;; esac")
    done = set_up(bare_clone)
    assert done.returncode == 1
    [line] = (done.stdout + done.stderr).splitlines()
    assert str(path) in line
    assert "python3-venv" in line


def test_setting_up_with_an_unusable_interpreter_names_it(bare_clone: Path) -> None:
    done = set_up(bare_clone, PYTHON="/nonexistent/python3")
    assert done.returncode == 1
    [line] = (done.stdout + done.stderr).splitlines()
    assert "PYTHON=/nonexistent/python3" in line


def test_a_finished_set_up_does_nothing(bare_clone: Path) -> None:
    venv = bare_clone / ".venv"
    (venv / "bin").mkdir(parents=True)
    log = bare_clone / "called"
    fake = venv / "bin" / "python"
    fake.write_text(f'#!/bin/sh\necho "$@" >> "{log}"\n')
    fake.chmod(0o755)
    sums = "".join((bare_clone / name).read_text() for name in ("pyproject.toml", "constraints.txt", "scripts/setup.sh"))
    checksum = subprocess.run(["cksum"], input=sums.encode(), capture_output=True, check=True).stdout.decode().strip()
    (venv / ".posttrain-stamp").write_text(f"{bare_clone}\n{checksum}\n")
    done = set_up(bare_clone)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert log.read_text().split() == ["-c"], "only whether the interpreter runs was looked at"
