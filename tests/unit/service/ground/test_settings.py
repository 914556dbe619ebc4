"""Settings: where they come from, what is refused, and that none is misspelt in silence."""

import sys
from pathlib import Path

import pytest
from pydantic import ValidationError

from posttrain_service.settings import Settings, unknown_variables


def test_defaults_are_safe(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    settings = Settings()
    assert settings.host == "127.0.0.1"
    assert settings.is_loopback
    assert settings.port == 8484
    assert settings.cpu_slots == 1
    assert settings.trainer_python == Path(sys.executable)
    assert settings.effective_database_url == f"sqlite:///{settings.storage_dir / 'posttrain.db'}"
    assert settings.files_dir.parent == settings.jobs_dir.parent == settings.base_models_dir.parent == settings.storage_dir
    assert not settings.storage_dir.is_relative_to("/tmp") or str(tmp_path).startswith("/tmp")


def test_the_environment_is_read(monkeypatch, tmp_path):
    monkeypatch.setenv("POSTTRAIN_STORAGE_DIR", str(tmp_path / "s"))
    monkeypatch.setenv("POSTTRAIN_MODELS_DIR", "~/m")
    monkeypatch.setenv("POSTTRAIN_CPU_SLOTS", "3")
    monkeypatch.setenv("POSTTRAIN_HEARTBEAT_TRAIN_S", "7.5")
    monkeypatch.setenv("POSTTRAIN_DATABASE_URL", "")  # as an unset variable in a compose file arrives
    monkeypatch.setenv("POSTTRAIN_HOST", "0.0.0.0")
    settings = Settings()
    assert settings.storage_dir == tmp_path / "s"
    assert settings.base_models_dir == Path.home() / "m"
    assert settings.cpu_slots == 3
    assert settings.heartbeat_s("train") == 7.5
    assert settings.heartbeat_s("a newer trainer's phase") == max(settings.heartbeat_limits().values())
    assert settings.database_url is None
    assert not settings.is_loopback


def test_arguments_win_over_the_environment(monkeypatch, tmp_path):
    monkeypatch.setenv("POSTTRAIN_PORT", "1")
    assert Settings(storage_dir=tmp_path, port=2).port == 2


def test_a_link_to_an_interpreter_is_not_followed(tmp_path):
    """Followed, it would lead out of the virtual environment."""
    link = tmp_path / "python"
    link.symlink_to(sys.executable)
    assert Settings(storage_dir=tmp_path, trainer_python=link).trainer_python == link


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("port", 70000), ("cpu_slots", 0), ("queue_ttl_s", 0), ("queue_ttl_s", float("inf")), ("stop_grace_s", -1),
        ("max_upload_bytes", 0), ("log_format", "xml"), ("root_path", "train"), ("root_path", "/train/"),
        ("disk_reserve_bytes", -1), ("database_url", "mysql://u:secret@h/d"), ("no_such_setting", 1),
    ],
)  # fmt: skip
def test_wrong_values_are_refused_by_name(tmp_path, name, value):
    with pytest.raises(ValidationError) as caught:
        Settings(storage_dir=tmp_path, **{name: value})
    [error] = caught.value.errors()
    assert name in (*error["loc"], *error["msg"].split())
    assert "secret" not in error["msg"]


def test_settings_never_change(tmp_path):
    settings = Settings(storage_dir=tmp_path)
    with pytest.raises(ValidationError):
        settings.port = 1


def test_every_setting_has_its_sentence():
    for name, field in Settings.model_fields.items():
        assert field.description, name


def test_misspelt_variables_are_named():
    environ = {
        "POSTTRAIN_CPU_SLOT": "2", "POSTTRAIN_PORT": "1", "posttrain_host": "h", "POSTTRAIN_API_KEY": "k",
        "POSTTRAIN_SERVER": "s", "POSTTRAIN_JOB_UUID": "u", "POSTTRAIN_ATTEMPT": "1", "PATH": "/",
    }  # fmt: skip
    assert unknown_variables(environ) == ["POSTTRAIN_CPU_SLOT"]
