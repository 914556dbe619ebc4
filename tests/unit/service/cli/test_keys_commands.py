"""`posttrain keys`, and where the command line has its own key from."""

import json
import stat

import pytest
from typer.testing import CliRunner

from posttrain_service.cli import apikey
from posttrain_service.cli.main import app
from posttrain_service.domain.keys import read_token
from posttrain_service.errors import InvalidRequest


@pytest.fixture
def run(tmp_path):
    def run(*words, code=0):
        result = CliRunner().invoke(app, ["keys", *words, "--storage-dir", str(tmp_path / "storage")])
        assert result.exit_code == code, (result.output, result.exception)
        return result

    return run


def test_create_list_revoke(run, tmp_path):
    made = run("create", "--owner", "ann", "--label", "laptop")
    text = made.stdout.strip()
    assert read_token(text) is not None
    prefix, secret = text[:19], text[20:]
    assert secret not in made.stderr
    file = tmp_path / "key"
    assert run("create", "--owner", "root", "--scope", "admin", "--to", str(file)).stdout == ""
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert apikey.read_key(file) == file.read_text().strip()
    run("create", "--owner", "root", "--to", str(file), code=1)  # nothing is replaced, and no key is made

    listed = run("list", "--json").stdout
    assert [(key["owner"], key["scope"], key["label"], key["revoked_at"]) for key in json.loads(listed)] == [
        ("ann", "submit", "laptop", None), ("root", "admin", None, None),
    ]  # fmt: skip
    assert secret not in listed + run("list").stdout
    assert prefix in run("list").stdout

    assert run("revoke", prefix).stdout == f"{prefix} of ann is revoked\n"
    first = json.loads(run("list", "--json").stdout)[0]["revoked_at"]
    assert run("revoke", text).exit_code == 0
    assert json.loads(run("list", "--json").stdout)[0]["revoked_at"] == first is not None
    admin = json.loads(run("list", "--json").stdout)[1]["prefix"]
    assert "answers nobody" in run("revoke", admin).stderr


def test_faults_are_told_in_a_sentence(run):
    assert "there is no key pt_0000000000000000" in run("revoke", "pt_0000000000000000", code=1).stderr
    assert "by its prefix" in run("revoke", "x", code=1).stderr
    assert "scope 'root' is none of read, submit, admin" in run("create", "--owner", "a", "--scope", "root", code=1).stderr
    assert "owner ''" in run("create", "--owner", "", code=1).stderr
    assert run("list", "--json").stdout.strip() == "[]"


def test_where_the_key_is_from(tmp_path, monkeypatch):
    monkeypatch.setattr(apikey, "default_key_file", lambda: tmp_path / "default")
    assert apikey.read_key(None, {}) is None
    (tmp_path / "default").write_text("pt_default\n")
    with pytest.raises(InvalidRequest, match="chmod 600") as caught:
        apikey.read_key(None, {})
    assert "pt_default" not in caught.value.message
    (tmp_path / "default").chmod(0o600)
    assert apikey.read_key(None, {}) == "pt_default"
    assert apikey.read_key(None, {"POSTTRAIN_API_KEY": "pt_env"}) == "pt_env"
    named = tmp_path / "named"
    named.touch(0o600)
    with pytest.raises(InvalidRequest, match="no API key"):
        apikey.read_key(named, {})
    named.write_text("two words")
    with pytest.raises(InvalidRequest, match="no API key") as caught:
        apikey.read_key(named, {})
    assert "two words" not in caught.value.message
    named.write_text("pt_named")
    assert apikey.read_key(named, {"POSTTRAIN_API_KEY": "pt_env"}) == "pt_named"


def test_no_command_takes_a_key_as_an_argument():
    """A flag's value stands in the list of processes, for every user of the machine."""

    def options(command):
        for name, inner in getattr(command, "commands", {}).items():
            yield from ((f"{name} {path}", option) for path, option in options(inner))
        yield from ((command.name, option) for parameter in command.params for option in parameter.opts)

    import typer

    found = list(options(typer.main.get_command(app)))
    assert any(option == "--api-key-file" for _, option in found)
    assert [one for one in found if one[1] in ("--api-key", "--key", "--token")] == []
