"""What a person can get wrong on the command line: one sentence, exit code 1, never a traceback."""

import pytest
from typer.testing import CliRunner

from posttrain_service.cli.main import app


def fails(*args, server="http://127.0.0.1:1"):
    result = CliRunner().invoke(app, [*map(str, args), "--server", server])
    assert isinstance(result.exception, SystemExit), result.exception
    assert result.exit_code == 1
    return result.stderr


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("model: m\ndataset: f\nmetadata: {day: 2024-01-05}\n", "metadata.day is a date (2024-01-05)"),
        ("model: m\ndataset: f\nmetadata: {day: 2024-13-45}\n", "neither YAML nor JSON"),
        ("model: m\ndataset: f\nmetadata: {1: a}\n", "the name 1 in metadata is no text"),
        ("model: m\ndataset: f\ntraining: {adamw_betas: [.nan, 1]}\n", "training.adamw_betas.0 is nan"),
        ("model: m\ndataset: !!binary aGk=\n", "dataset is a bytes"),
        ("model: m\ndataset: !!set {a}\n", "dataset is a set"),
        ("[" * 5000, "neither YAML nor JSON"),
    ],
)
def test_yaml_that_is_no_json(tmp_path, text, said):
    file = tmp_path / "job.yaml"
    file.write_text(text)
    errors = fails("jobs", "submit", file, "--dry-run")
    assert said in errors
    assert errors.count("\n") <= 3  # a YAML parser names the place on lines of its own


def test_a_profile_whose_number_of_nodes_is_a_word(tmp_path, served):
    (tmp_path / "rows.jsonl").write_text('{"messages": []}\n')
    file = tmp_path / "profile.yaml"
    file.write_text(f"model_path: m\ndata_path: {tmp_path / 'rows.jsonl'}\nnnodes: two\n")
    assert "torchrun.nnodes" in fails("jobs", "submit", file, "--dry-run", server=served)


@pytest.mark.parametrize("address", ["notaurl", "http://", "ftp://x", "http://[::1", "http://h:99999", "http://h:x", ""])
def test_an_address_that_is_none_is_named(address):
    assert f"error: {address!r} is no address of a server" in fails("jobs", "list", server=address)


@pytest.mark.parametrize("job", ["../x", "..", ".", "a/b", "", "a?b", "a%2Fb"])
def test_an_id_that_leads_elsewhere_is_no_job(job, served):
    assert f"{job!r}" in (said := fails("jobs", "show", job, server=served))
    assert "no job" in said
