"""`posttrain keys ...`: API keys, on the machine that has the database."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import typer

from posttrain_service.cli.common import fail, say, sentences, show_json, show_table
from posttrain_service.cli.db import StorageOption, UrlOption, opened
from posttrain_service.clock import SystemClock
from posttrain_service.domain.keys import ApiKey, key_id, make_key
from posttrain_service.errors import StoreMismatch
from posttrain_service.store.store import Store
from posttrain_service.store.upgrade import is_current, upgrade

app = typer.Typer(help="API keys: who may use the server, and whose things they see.", no_args_is_help=True)

JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON.")]


@app.command()
def create(
    owner: Annotated[str, typer.Option(help="Whose key it is: jobs and files made with it belong to this name.")],
    scope: Annotated[
        str, typer.Option(help="read: look; submit: also make and change; admin: also see and change everybody's.")
    ] = "submit",
    label: Annotated[str | None, typer.Option(help="What it is for.")] = None,
    to: Annotated[
        Path | None, typer.Option("--to", help="Write it to this new file, for its owner's eyes only, instead of printing it.")
    ] = None,
    as_json: JsonOption = False,
    storage_dir: StorageOption = None,
    database_url: UrlOption = None,
) -> None:
    """Make a key and print it, this once. From the first key on, the server answers nobody without one."""
    with sentences(), _store(storage_dir, database_url) as store:
        key, text = make_key(owner, scope, SystemClock().now(), label=label)
        if to is not None:
            _write_private(to, text)
        store.keys.insert(key)
        if as_json:
            show_json(_shown(key) | ({} if to is not None else {"key": text}))
        elif to is None:
            print(text)
        say(f"{key.prefix} is {owner}'s, scope {key.scope}; the key itself is kept nowhere here, so keep it now")


@app.command("list")
def list_(as_json: JsonOption = False, storage_dir: StorageOption = None, database_url: UrlOption = None) -> None:
    """List keys by their prefix, revoked ones too."""
    with sentences(), _store(storage_dir, database_url) as store:
        found = [_shown(key) for key in store.keys.all()]
    if as_json:
        show_json(found)
        return
    columns = ("prefix", "owner", "scope", "label", "created_at", "revoked_at")
    show_table([name.upper() for name in columns], ([key[name] for name in columns] for key in found))


@app.command()
def revoke(
    key: Annotated[str, typer.Argument(metavar="PREFIX", help="pt_ and 16 hex digits, as `posttrain keys list` shows it.")],
    storage_dir: StorageOption = None,
    database_url: UrlOption = None,
) -> None:
    """Refuse a key from now on, at once and on every server of this database. Repeating is harmless."""
    with sentences(), _store(storage_dir, database_url) as store:
        found = store.keys.revoke(key_id(key))
        if found is None:
            fail(f"there is no key pt_{key_id(key)}; `posttrain keys list` shows those there are")
        else:
            print(f"{found.prefix} of {found.owner} is revoked")
            if all(one.revoked_at is not None for one in store.keys.all()):
                say("that was the last good key: the server answers nobody until another one is made")


@contextmanager
def _store(storage_dir: Path | None, database_url: str | None) -> Iterator[Store]:
    """The store, its schema made current where a server would do so by itself."""
    with opened(storage_dir, database_url) as (_, engine, store):
        if engine.dialect.name == "sqlite":
            upgrade(engine)
        elif not is_current(engine):
            raise StoreMismatch("the database has another schema than this build; run `posttrain db upgrade` first")
        yield store


def _write_private(path: Path, text: str) -> None:
    with os.fdopen(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o600), "w", encoding="ascii") as file:
        file.write(f"{text}\n")


def _shown(key: ApiKey) -> dict[str, Any]:
    """A key for people: all but what it is known by."""
    return {
        "prefix": key.prefix,
        "owner": key.owner,
        "scope": key.scope,
        "label": key.label,
        "created_at": _time(key.created_at),
        "revoked_at": _time(key.revoked_at),
    }


def _time(seconds: float | None) -> str | None:
    return None if seconds is None else datetime.fromtimestamp(seconds, UTC).isoformat(timespec="seconds").replace("+00:00", "Z")
