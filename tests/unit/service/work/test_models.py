"""From a model's name to what the trainer loads."""

import json

import pytest

from posttrain_service.errors import InvalidRequest
from posttrain_service.work import models


@pytest.fixture
def models_dir(tmp_path):
    folder = tmp_path / "models" / "tiny"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps({"max_position_embeddings": 128}))
    (folder / "model.safetensors").write_bytes(b"x" * 10)
    return tmp_path / "models"


def test_a_name_is_its_folder(models_dir):
    model = models.find("tiny", models_dir)
    assert (model.local, model.location) == (True, str(models_dir / "tiny"))
    assert (model.size_bytes, model.max_positions) == (10, 128)


def test_an_organisation_and_name_is_a_hub_id(models_dir):
    model = models.find("HuggingFaceTB/SmolLM2-135M-Instruct", models_dir)
    assert (model.local, model.location) == (False, "HuggingFaceTB/SmolLM2-135M-Instruct")


def test_a_local_organisation_folder_wins_over_the_hub(models_dir):
    folder = models_dir / "org" / "name"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    assert models.find("org/name", models_dir).local
    assert models.names(models_dir) == ["org/name", "tiny"]


@pytest.mark.parametrize("name", ["tinny", "../models/tiny", "/etc", "tiny/..", ".", "a/b/c", "a\\b", "-x/y", "x/..y"])
def test_anything_else_is_refused_and_says_what_there_is(models_dir, name):
    with pytest.raises(InvalidRequest, match="the models folder has tiny") as caught:
        models.find(name, models_dir)
    assert caught.value.param == "model"


def test_a_folder_that_leads_out_is_refused(models_dir, tmp_path):
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "config.json").write_text("{}")
    (models_dir / "link").symlink_to(outside)
    with pytest.raises(InvalidRequest, match="leads out"):
        models.find("link", models_dir)


def test_a_file_that_leads_out_is_refused(models_dir, tmp_path):
    (tmp_path / "secret").write_text("s")
    (models_dir / "tiny" / "vocab.txt").symlink_to(tmp_path / "secret")
    with pytest.raises(InvalidRequest, match=r"vocab\.txt leads out"):
        models.find("tiny", models_dir)


@pytest.mark.parametrize(("content", "what"), [(None, "has no config.json"), ("{", "is not JSON")])
def test_a_folder_that_is_no_model_is_refused(models_dir, content, what):
    folder = models_dir / "bad"
    folder.mkdir()
    if content is not None:
        (folder / "config.json").write_text(content)
    with pytest.raises(InvalidRequest, match=what):
        models.find("bad", models_dir)
