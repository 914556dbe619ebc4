"""`posttrain models add`: a folder or a GGUF file becomes a model that jobs can name."""

import json
import sys

import pytest
from typer.testing import CliRunner

from posttrain_service.cli.main import app
from posttrain_service.work import models

CONVERTER = """#!{python}
import json, pathlib, sys
order = json.load(sys.stdin)
folder = pathlib.Path(order["target"])
folder.mkdir()
(folder / "config.json").write_text("{{}}")
(folder / "model.safetensors").write_bytes(pathlib.Path(order["source"]).read_bytes())
print(json.dumps({{"path": order["target"], "parameters": 1}}))
"""


@pytest.fixture
def run(tmp_path):
    def run(*words, code=0, env=None):
        result = CliRunner().invoke(app, ["models", "add", *map(str, words), "--storage-dir", str(tmp_path / "storage")], env=env)
        assert result.exit_code == code, (result.output, result.exception)
        return result

    return run


@pytest.fixture
def folder(tmp_path):
    folder = tmp_path / "my-model"
    folder.mkdir()
    (folder / "config.json").write_text('{"max_position_embeddings": 8}')
    blob = tmp_path / "blob"
    blob.write_bytes(b"weights")
    (folder / "model.safetensors").symlink_to(blob)  # as the hub's cache has it
    (folder / "code.py").write_text("no")
    (folder / "old.bin").write_bytes(b"no")
    return folder


def test_a_folder_is_copied_without_code_and_pickles(run, folder, tmp_path):
    assert run(folder).stdout == "my-model\n"
    kept = tmp_path / "storage/models/my-model"
    assert sorted(path.name for path in kept.iterdir()) == ["config.json", "model.safetensors"]
    assert not (kept / "model.safetensors").is_symlink()
    assert models.find("my-model", tmp_path / "storage/models").size_bytes == 7
    assert "already" in run(folder, code=1).stderr
    told = json.loads(run(folder, "--name", "org/other", "--json").stdout)
    assert (told["id"], told["size_bytes"]) == ("org/other", 7)


@pytest.mark.parametrize("name", ["../x", "a/b/c", ".hidden", "", "a/", "a\\b"])
def test_names_that_lead_elsewhere(run, folder, name, tmp_path):
    said = run(folder, "--name", name, code=0 if name == "" else 1)  # an empty one is none
    assert name == "" or "is no name for a model" in said.stderr
    assert not (tmp_path / "x").exists()


def test_what_has_no_safetensors_is_refused_and_leaves_nothing(run, folder, tmp_path):
    (folder / "model.safetensors").unlink()
    assert "no safetensors" in run(folder, code=1).stderr
    assert list((tmp_path / "storage/models").iterdir()) == []


def test_a_gguf_file_is_converted_by_the_trainers_interpreter(run, tmp_path):
    python = tmp_path / "python"
    python.write_text(CONVERTER.format(python=sys.executable))
    python.chmod(0o755)
    file = tmp_path / "small.gguf"
    file.write_bytes(b"abc")
    assert run(file, env={"POSTTRAIN_TRAINER_PYTHON": str(python)}).stdout == "small\n"
    assert (tmp_path / "storage/models/small/model.safetensors").read_bytes() == b"abc"
