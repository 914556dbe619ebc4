"""Is the schema current, and making it so: Alembic from inside the process, for the checkout and for the wheel."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from alembic import command
from alembic.config import Config
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import Connection, Engine, text

from posttrain_service.errors import StoreMismatch

_LOCK = 0x706F7374  # "post": PostgreSQL's advisory lock of our migrations


def migrations_dir() -> Path:
    """The folder of the migrations: the checkout's own when we run from one, else what the wheel brought along."""
    package = Path(__file__).parents[1]
    checkout = package.parents[1]
    if package.parent.name == "service" and (checkout / "pyproject.toml").is_file():
        return checkout / "migrations"
    return package / "_migrations"


def head() -> str:
    """The schema revision that this build works with."""
    revision = ScriptDirectory.from_config(_config()).get_current_head()
    assert revision is not None, f"no migrations in {migrations_dir()}"
    return revision


def known_revisions() -> set[str]:
    """Every schema revision that this build has migrations for."""
    return {script.revision for script in ScriptDirectory.from_config(_config()).walk_revisions()}


def current(engine: Engine) -> str | None:
    """The schema revision of the database; None for an empty one."""
    with engine.connect() as connection:
        return MigrationContext.configure(connection).get_current_revision()


def is_current(engine: Engine) -> bool:
    """Whether the database has exactly the schema of this build."""
    return current(engine) == head()


def upgrade(engine: Engine, revision: str = "head") -> bool:
    """Bring the schema up to `revision`; False when there was nothing to do.

    Several processes may call this at once: one migrates, the others wait and find it done. On SQLite the whole
    upgrade is one transaction; a crash leaves the old schema.

    Raises:
        StoreMismatch: The database was made by a newer build, or a migration would break references between rows.
    """
    return _migrate(engine, revision, command.upgrade)


def downgrade(engine: Engine, revision: str) -> bool:
    """Take the schema back to `revision` ("base" = empty); False when there was nothing to do."""
    return _migrate(engine, revision, command.downgrade)


def _migrate(engine: Engine, revision: str, act: Any) -> bool:
    with engine.connect() as connection:
        sqlite = engine.dialect.name == "sqlite"
        if sqlite:
            # Foreign keys off, or rebuilding a parent table deletes its children by cascade. The pragma is ignored
            # inside a transaction, so it goes past the "begin" hook to the raw connection.
            _raw(connection).execute("PRAGMA foreign_keys = OFF")
        try:
            with connection.execution_options(posttrain_write=True).begin():
                if not sqlite:
                    connection.execute(text("SELECT pg_advisory_xact_lock(:lock)"), {"lock": _LOCK})
                return _migrate_locked(connection, revision, act, check=sqlite)
        finally:
            if sqlite:
                _raw(connection).execute("PRAGMA foreign_keys = ON")


def _migrate_locked(connection: Connection, revision: str, act: Any, *, check: bool) -> bool:
    before = MigrationContext.configure(connection).get_current_revision()
    config = _config()
    if before is not None and before not in known_revisions():
        raise StoreMismatch(
            f"the database has schema {before}, which this build does not know: it was made by a newer posttrain; "
            "install that version, or restore a backup"
        )
    config.attributes["connection"] = connection
    act(config, revision)
    if check and (broken := connection.execute(text("PRAGMA foreign_key_check")).first()) is not None:
        raise StoreMismatch(
            f"the migration would leave rows of {broken[0]} without the row they refer to; nothing was changed"
        )
    return MigrationContext.configure(connection).get_current_revision() != before


def _config() -> Config:
    config = Config()
    config.set_main_option("script_location", str(migrations_dir()).replace("%", "%%"))
    return config


def _raw(connection: Connection) -> Any:
    return connection.connection.driver_connection
