"""The reference is what the code says, and names every setting, command and training argument."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import typer
import yaml

from posttrain_service.cli.main import app
from posttrain_service.settings import ENV_PREFIX, Settings
from posttrain_trainer.contract.spec import FullTrainingArguments, TorchrunArguments


@pytest.fixture(scope="module")
def reference(repository: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location("reference", repository / "scripts" / "reference.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def read(repository: Path, name: str) -> str:
    return (repository / "docs" / "reference" / name).read_text(encoding="utf-8")


def test_the_reference_is_current(reference: ModuleType, repository: Path) -> None:
    for name, text in reference.pages().items():
        assert read(repository, name) == text, f"docs/reference/{name} is stale; say: make docs"


def test_every_setting_is_described(repository: Path) -> None:
    page = read(repository, "settings.md")
    assert [name for name in Settings.model_fields if f"| `{ENV_PREFIX}{name.upper()}` |" not in page] == []


def test_every_training_argument_is_described(repository: Path) -> None:
    page = read(repository, "training-arguments.md")
    fields = [*FullTrainingArguments.model_fields, *TorchrunArguments.model_fields]
    assert [name for name in fields if f"| `{name}` |" not in page] == []


def test_every_command_is_described(reference: ModuleType, repository: Path) -> None:
    page = read(repository, "command-line.md")
    paths = [path for path, _ in reference.commands(typer.main.get_command(app), "posttrain")]
    assert {"posttrain serve", "posttrain demo"} <= set(paths)
    assert [path for path in paths if f"## `{path}`" not in page] == []


def test_no_row_of_the_reference_lacks_its_sentence(repository: Path) -> None:
    for name in ("settings.md", "training-arguments.md", "job-request.md"):
        bare = [line for line in read(repository, name).splitlines() if re.search(r"\|\s*\|\s*$", line)]
        assert bare == [], f"{name}: a field without a sentence"


def test_links_between_documents_lead_somewhere(repository: Path) -> None:
    pages = [repository / "README.md", repository / "CHANGELOG.md", *(repository / "docs").rglob("*.md")]
    assert len(pages) > 5
    dead = [
        f"{page.relative_to(repository)} -> {target}"
        for page in pages
        for target in re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", page.read_text(encoding="utf-8"))
        if "://" not in target and not (page.parent / target).exists()
    ]
    assert dead == []


def test_the_site_is_built_without_a_warning(repository: Path, tmp_path: Path) -> None:
    argv = [sys.executable, "-m", "sphinx", "-W", "--keep-going", "-q", "-c", "docs", "-d", str(tmp_path / "doctrees"), ".", str(tmp_path / "site")]
    built = subprocess.run(argv, cwd=repository, capture_output=True, text=True, timeout=300, check=False)
    assert (built.returncode, built.stderr) == (0, "")
    assert (tmp_path / "site" / "docs" / "index.html").is_file()


def test_every_route_is_described(repository: Path) -> None:
    page = read(repository, "http-api.md")
    spec = yaml.safe_load((repository / "openapi.yaml").read_text(encoding="utf-8"))
    routes = [f"### `{method.upper()} {path}`" for path, operations in spec["paths"].items() for method in operations]
    assert len(routes) > 30
    assert [route for route in routes if route not in page] == []


def test_every_page_is_in_the_contents(repository: Path) -> None:
    index = (repository / "docs" / "index.md").read_text(encoding="utf-8")
    pages = [str(page.relative_to(repository / "docs").with_suffix("")) for page in (repository / "docs").rglob("*.md")]
    assert [page for page in pages if page != "index" and f"\n{page}\n" not in index] == []
