"""Commands that need no server."""

import json

import pytest
import yaml
from typer.testing import CliRunner

from posttrain_service.cli.common import say
from posttrain_service.cli.main import app
from posttrain_service.cli.serve import read_settings
from posttrain_service.errors import InvalidSettings
from posttrain_service.settings import Settings


def run(*words, code=0, **env):
    result = CliRunner().invoke(app, [*words], env=env)
    assert result.exit_code == code, (result.output, result.exception)
    return result


def test_every_setting_is_a_flag_of_serve():
    text = run("serve", "--help", COLUMNS="400", TERMINAL_WIDTH="400").stdout
    for name in Settings.model_fields:
        assert f"--{name.replace('_', '-')}" in text
    assert "--stop-jobs" in text


def test_flags_are_read_like_variables(monkeypatch, tmp_path):
    monkeypatch.setenv("POSTTRAIN_PORT", "1")
    monkeypatch.setenv("POSTTRAIN_CPU_SLOTS", "7")
    told = read_settings({"port": "9000", "storage_dir": str(tmp_path)})
    assert (told.port, told.cpu_slots, told.storage_dir) == (9000, 7, tmp_path)
    for given in ({"port": "x"}, {"port": "99999"}, {"log_format": "xml"}):
        with pytest.raises(InvalidSettings, match=next(iter(given))):
            read_settings(given)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--host", "0.0.0.0"), "there are no API keys"),
        (("--port", "-1"), "port"),
        (("--database-url", "mysql://u:secret@h/d"), "database_url"),
        (("--host", "192.0.2.1"), "there are no API keys"),
    ],
)
def test_serve_refuses_with_a_sentence(tmp_path, flags, words):
    result = run("serve", "--storage-dir", str(tmp_path / "s"), *flags, code=1)
    assert words in result.stderr
    assert result.stderr.startswith("error: ")
    assert "secret" not in result.stderr
    assert not (tmp_path / "s").exists()


def test_openapi(tmp_path):
    text = run("openapi").stdout
    assert "/post_training/jobs" in yaml.safe_load(text)["paths"]
    run("openapi", "--to", str(tmp_path / "o.yaml"))
    assert (tmp_path / "o.yaml").read_text() == text


def test_version():
    assert set(json.loads(run("version").stdout)) == {"version", "contract", "python"}


def test_data_validate(tmp_path):
    good = tmp_path / "good.jsonl"
    good.write_text('{"prompt": "a", "completion": "b"}\n')
    assert "1 rows, format prompt_completion, 0 errors" in run("data", "validate", str(good)).stdout
    bad = tmp_path / "bad.jsonl"
    bad.write_text('{"prompt": "a", "completion": "b"}\n{"prompt": 1}\n')
    assert f"{bad}:2: " in run("data", "validate", str(bad), code=1).stdout
    report = json.loads(run("data", "validate", str(bad), "--json", code=1).stdout)
    assert (report["valid"], report["rows"], report["errors"][0]["line"]) == (False, 2, 2)


def test_what_is_said_cannot_drive_the_terminal(capsys):
    say("a\x1b[2Jb\nc\u202e")
    assert capsys.readouterr().err == "a\\x1b[2Jb\\nc\\u202e\n"
