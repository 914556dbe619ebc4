"""Alembic's environment: on the connection that `posttrain_service.store.upgrade` hands over, or from the command line.

The service's own `upgrade` is the usual way (`posttrain db upgrade`); `alembic revision --autogenerate` and the like
work in a checkout and use the database of the settings.
"""

from alembic import context

from posttrain_service.settings import Settings
from posttrain_service.store.engine import make_engine
from posttrain_service.store.tables import metadata


def migrate(connection) -> None:
    context.configure(
        connection=connection,
        target_metadata=metadata,
        render_as_batch=connection.dialect.name == "sqlite",  # SQLite alters a table by making a new one
        transactional_ddl=True,  # true of SQLite as well, since we begin transactions ourselves
        compare_type=True,
    )
    with context.begin_transaction():
        context.run_migrations()


def from_command_line() -> None:
    engine = make_engine(Settings().effective_database_url)
    with engine.connect() as connection:
        if engine.dialect.name == "sqlite":
            # Before the transaction begins, or a rebuilt parent table deletes its children by cascade.
            connection.connection.driver_connection.execute("PRAGMA foreign_keys = OFF")
        with connection.execution_options(posttrain_write=True).begin():
            migrate(connection)
    engine.dispose()


if context.is_offline_mode():
    raise SystemExit("SQL scripts (--sql) are not made here: run `posttrain db upgrade` against the database")
given = context.config.attributes.get("connection")
if given is None:
    from_command_line()
else:
    migrate(given)
