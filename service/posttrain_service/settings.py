"""Every setting of the service: one flat, frozen tree, read from `POSTTRAIN_*` variables and from `posttrain serve`'s flags.

The sentence under each field is its documentation. Client-side variables (`POSTTRAIN_SERVER`, `POSTTRAIN_API_KEY`, `POSTTRAIN_API_KEY_FILE`) are
the command line's own and not here.
"""

from __future__ import annotations

import base64
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Literal, Self

import platformdirs
from pydantic import Field, FiniteFloat, SecretStr, field_validator, model_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

ENV_PREFIX = "POSTTRAIN_"
_NOT_OURS = frozenset({"SERVER", "API_KEY", "API_KEY_FILE", "JOB_UUID", "ATTEMPT", "LAUNCHER_LOCK"})  # the client's, and the markers of a job's processes

Seconds = Annotated[FiniteFloat, Field(gt=0, le=10 * 365 * 86400)]
Bytes = Annotated[int, Field(ge=0, le=2**60)]


class Settings(BaseSettings):
    """What the service is told from outside."""

    model_config = SettingsConfigDict(
        env_prefix=ENV_PREFIX, frozen=True, extra="forbid", use_attribute_docstrings=True, validate_default=True,
        env_ignore_empty=True,
    )  # fmt: skip

    # Where things are.
    storage_dir: Path = Field(default_factory=lambda: Path(platformdirs.user_data_dir("posttrain")))
    """Folder that holds everything: database, uploads, models, runs. On a local disk (locks and SQLite need one)."""
    models_dir: Path | None = None
    """Folder of local base models; None = `models` below storage_dir."""
    database_url: str | None = None
    """SQLAlchemy URL, e.g. postgresql+psycopg://user@host/db; None = SQLite in storage_dir."""
    trainer_python: Path = Path(sys.executable)
    """Interpreter that runs the trainer; the server's own environment then needs no torch."""

    # The server.
    host: str = "127.0.0.1"
    """Address to listen on."""
    port: Annotated[int, Field(ge=0, le=65535)] = 8484
    """Port to listen on; 0 = any free one."""
    root_path: Annotated[str, Field(pattern=r"^(/[^/?#\s]+)*$")] = ""
    """Path prefix under which a proxy shows the service, e.g. /train."""
    log_format: Literal["text", "json"] = "text"
    """Form of the server's own log lines."""
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """Least severe of the server's own log lines."""
    traces: Literal["off", "otlp"] = "off"
    """Whether requests and jobs become traces: otlp sends them to the collector that OTEL_EXPORTER_OTLP_ENDPOINT names (extra `otel`)."""

    # Queue and supervision.
    cpu_slots: Annotated[int, Field(ge=1, le=1024)] = 1
    """Ranks that may train at the same time on a host without accelerators; the cores are divided among them."""
    queue_ttl_s: Seconds = 7 * 86400.0
    """A job that waited longer in the queue fails with reason queue_timeout."""
    preemption: bool = False
    """A queued job that finds no free devices has running jobs of lower priority paused; they go on after it by themselves."""
    launch_timeout_s: Seconds = 60.0
    """A launch that isn't confirmed by then has failed."""
    stop_grace_s: Seconds = 30.0
    """Time a run has to end after it was asked to stop; 10 seconds later whatever is left is killed."""
    paused_ttl_s: Seconds = 30 * 86400.0
    """A job that stayed paused longer is cancelled."""
    heartbeat_import_s: Seconds = 600.0
    """Longest silence while the trainer imports its libraries."""
    heartbeat_load_s: Seconds = 3600.0
    """Longest silence while the model is fetched and loaded."""
    heartbeat_data_s: Seconds = 3600.0
    """Longest silence while the data set is read and tokenised."""
    heartbeat_compile_s: Seconds = 3600.0
    """Longest silence while the model is compiled."""
    heartbeat_train_s: Seconds = 1800.0
    """Longest silence between two optimizer steps."""
    heartbeat_validate_s: Seconds = 3600.0
    """Longest silence in a validation."""
    heartbeat_save_s: Seconds = 3600.0
    """Longest silence while a checkpoint is saved."""
    supervise_interval_s: Seconds = 1.0
    """Time between two looks at the live jobs and the queue."""
    sweep_interval_s: Seconds = 300.0
    """Time between two rounds of removing what has outlived its retention."""
    lease_ttl_s: Seconds = 15.0
    """How long the one acting scheduler may be silent before another server process takes over."""

    # Who is told.
    webhook_secret: SecretStr | None = None
    """Key that signs webhooks: base64 of at least 16 random bytes, e.g. by `openssl rand -base64 32`; None = unsigned."""
    webhook_allow_private: bool = False
    """Whether webhooks may go to private, loopback and link-local addresses."""
    webhook_timeout_s: Annotated[FiniteFloat, Field(gt=0, le=20)] = 15.0
    """Longest time that one delivery of a webhook may take; one that fails is tried again later, nine times within two days."""

    # What stays, and how much.
    retention_ttl_s: Seconds = 30 * 86400.0
    """Artifacts and rows of ended jobs stay this long, unless the job says otherwise."""
    idempotency_ttl_s: Seconds = 86400.0
    """How long an Idempotency-Key is remembered."""
    disk_reserve_bytes: Bytes = 1_000_000_000
    """Free space in storage_dir that uploads and new runs must leave untouched."""
    storage_quota_bytes: Bytes | None = None
    """Most bytes that uploads and runs may have together; new uploads and jobs are refused beyond it. None = no limit."""
    owner_quota_bytes: Bytes | None = None
    """The same for each owner's uploads and runs; None = no limit."""
    max_upload_bytes: Annotated[int, Field(ge=1, le=2**60)] = 8_000_000_000
    """Largest upload."""
    max_rows_inline: Annotated[int, Field(ge=1, le=1_000_000)] = 10_000
    """Most rows in the body of a job request."""
    log_quota_bytes: Annotated[int, Field(ge=65536, le=2**60)] = 100_000_000
    """Most bytes that each log file of a run may have; older output is dropped with a marker."""
    database_busy_timeout_s: Seconds = 30.0
    """How long a writer waits for another one on SQLite before the request is answered with "busy"."""

    @field_validator("storage_dir", "models_dir", "trainer_python")
    @classmethod
    def _absolute(cls, path: Path | None) -> Path | None:
        # Not resolve(): an interpreter inside a virtual environment is a link, and following it leaves the environment.
        return None if path is None else Path(os.path.abspath(path.expanduser()))  # noqa: PTH100

    @model_validator(mode="after")
    def _agree(self) -> Self:
        url = self.database_url
        if url is not None and not url.startswith(("sqlite:", "postgresql+psycopg:")):
            scheme = url.split(":", 1)[0]  # never the whole URL: it may hold a password
            raise ValueError(f"database_url begins with {scheme!r}; use sqlite:///PATH or postgresql+psycopg://...")
        return self

    @field_validator("webhook_secret")
    @classmethod
    def _is_key(cls, secret: SecretStr | None) -> SecretStr | None:
        if secret is not None:
            _key(secret.get_secret_value())
        return secret

    @property
    def webhook_key(self) -> bytes | None:
        """The key that signs webhooks; None = they are sent unsigned."""
        return None if self.webhook_secret is None else _key(self.webhook_secret.get_secret_value())

    @property
    def files_dir(self) -> Path:
        """Folder of uploaded files."""
        return self.storage_dir / "files"

    @property
    def jobs_dir(self) -> Path:
        """Folder of the runs, one folder for each run id."""
        return self.storage_dir / "jobs"

    @property
    def base_models_dir(self) -> Path:
        """Folder of local base models."""
        return self.models_dir or self.storage_dir / "models"

    @property
    def effective_database_url(self) -> str:
        """The SQLAlchemy URL that is used."""
        return self.database_url or f"sqlite:///{self.storage_dir / 'posttrain.db'}"

    @property
    def is_loopback(self) -> bool:
        """Whether only this host can reach the service."""
        return self.host in ("localhost", "::1") or self.host.startswith("127.")

    def heartbeat_s(self, phase: str) -> float:
        """Longest silence in a trainer's phase; an unknown phase (a newer trainer's) gets the longest of all."""
        limits = self.heartbeat_limits()
        return limits.get(phase, max(limits.values()))

    def heartbeat_limits(self) -> dict[str, float]:
        """Longest silence for each phase of the trainer, in seconds."""
        return {
            name.removeprefix("heartbeat_").removesuffix("_s"): float(getattr(self, name))
            for name in type(self).model_fields
            if name.startswith("heartbeat_")
        }


def _key(secret: str) -> bytes:
    how = "make one with: openssl rand -base64 32"
    try:
        key = base64.b64decode(secret.removeprefix("whsec_"), validate=True)
    except ValueError as error:
        raise ValueError(f"webhook_secret is not base64; {how}") from error
    if len(key) < 16:
        raise ValueError(f"webhook_secret has {len(key)} bytes and needs at least 16; {how}")
    return key


def unknown_variables(environ: Mapping[str, str]) -> list[str]:
    """Names of `POSTTRAIN_*` variables that no part of posttrain reads: most likely misspelt, so say so at start."""
    known = {name.upper() for name in Settings.model_fields} | _NOT_OURS
    return sorted(
        name
        for name in environ
        if name.upper().startswith(ENV_PREFIX) and name.upper().removeprefix(ENV_PREFIX) not in known
    )
