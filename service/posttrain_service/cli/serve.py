"""`posttrain serve`: the service under uvicorn. Its flags are the settings, one for one."""

from __future__ import annotations

import inspect
import signal
import socket
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, Protocol, cast

import typer
import uvicorn
from pydantic import ValidationError

from posttrain_service import compose
from posttrain_service.app import Running, check_reach, create_app
from posttrain_service.cli.common import say, sentences
from posttrain_service.errors import InvalidSettings
from posttrain_service.logs import set_up_logging
from posttrain_service.settings import Settings
from posttrain_service.work.services import Services

_GRACE_S = 5
"""Time that open requests have to end; streams are told at once. With the loops' end it stays below ten seconds."""


def read_settings(given: dict[str, str]) -> Settings:
    """Settings from flags, then `POSTTRAIN_*` variables, then defaults.

    Raises:
        InvalidSettings: A value is out of bounds, or they contradict each other.
    """
    try:
        return Settings(**cast(dict[str, Any], given))  # text, as from the environment
    except ValidationError as error:
        faults = [f"{'.'.join(map(str, item['loc'])) or 'settings'}: {item['msg']}" for item in error.errors()]
        raise InvalidSettings("; ".join(faults)) from error


def run(settings: Settings, *, stop_jobs: bool = False) -> None:
    """Serve until SIGTERM or SIGINT.

    Args:
        settings: What the service is told.
        stop_jobs: Cancel running jobs before the server ends; otherwise they go on without it.
    """
    check_reach(settings)
    set_up_logging(settings.log_format, settings.log_level)
    sock = _listen(settings.host, settings.port)  # first, so that a second server on the port leaves the store alone
    runtime = compose.build(settings)
    running = _Ending(runtime, stop_jobs)
    app = create_app(settings, build=lambda _: running)
    config = uvicorn.Config(
        app,
        host=settings.host,
        port=settings.port,
        log_config=None,
        timeout_graceful_shutdown=_GRACE_S,
        server_header=False,
    )
    server = _Server(config, running, stop_jobs, f"http://{_bracketed(settings.host)}:{sock.getsockname()[1]}")
    # uvicorn raises the signal again when it is done: it then finds this handler, and the command ends with code 0.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, server.handle_exit)
    server.run(sockets=[sock])


@dataclass(frozen=True)
class _Ending:
    """A runtime that ends as the command line says."""

    runtime: compose.Runtime
    stop_jobs: bool

    @property
    def services(self) -> Services:
        """The use cases."""
        return self.runtime.services

    def start(self) -> None:
        """Start the loops."""
        self.runtime.start()

    def stop(self) -> None:
        """Stop the loops, and the jobs where that was asked for."""
        self.runtime.stop(stop_jobs=self.stop_jobs)


class _Server(uvicorn.Server):
    """uvicorn that says where it listens, and that ends the streams before it waits for open requests."""

    def __init__(self, config: uvicorn.Config, running: Running, stop_jobs: bool, address: str) -> None:
        super().__init__(config)
        self._running, self._stop_jobs, self._address = running, stop_jobs, address

    async def startup(self, sockets: Any = None) -> None:
        """Start, then say so."""
        await super().startup(sockets=sockets)
        if self.started:
            after = "running jobs are cancelled then" if self._stop_jobs else "running jobs go on"
            say(f"posttrain serves at {self._address}; Ctrl-C ends the server, {after}")

    async def shutdown(self, sockets: Any = None) -> None:
        """End the streams, then everything else."""
        self._running.services.streams.close()
        await super().shutdown(sockets=sockets)


def _listen(host: str, port: int) -> socket.socket:
    """A listening socket; connections wait in it until the service is ready.

    Raises:
        InvalidSettings: The address isn't this machine's, or the port is taken.
    """
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        sock = socket.create_server(found[4][:2], family=found[0], backlog=2048)
        # Connections take this over. asyncio sets it only on sockets that name their protocol, which this one doesn't; and
        # without it the second half of each answer waits for the client's delayed acknowledgement: 40 ms on a kept connection.
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return sock
    except OSError as error:
        raise InvalidSettings(f"cannot listen on {host}, port {port}: {error.strerror}; choose another one by --port") from error


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host


class _Serve(Protocol):
    def __call__(self, *, stop_jobs: bool, **given: str | None) -> None: ...


def _with_flags(function: _Serve) -> Callable[..., None]:
    """Give the function one flag for each setting, so that a new setting has one at once."""
    parameters = [
        inspect.Parameter(
            "stop_jobs",
            inspect.Parameter.KEYWORD_ONLY,
            default=False,
            annotation=Annotated[bool, typer.Option("--stop-jobs", help="Cancel running jobs when the server ends; without it they go on.")],
        )
    ]
    for name, info in Settings.model_fields.items():
        simple = isinstance(info.default, str | int | float) and info.default != ""  # no path of the building machine
        default = f" Default: {info.default}." if simple else ""
        flag = f"--{name.replace('_', '-')}"
        option = typer.Option(flag, help=f"{info.description}{default}", show_default=False, metavar="VALUE")
        kind = inspect.Parameter.KEYWORD_ONLY
        parameters.append(inspect.Parameter(name, kind, default=None, annotation=Annotated[str | None, option]))
    function.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    function.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return function


@_with_flags
def serve(*, stop_jobs: bool, **given: str | None) -> None:
    """Run the service. Each flag is a setting, which may also stand in the environment as POSTTRAIN_NAME."""
    with sentences():
        run(read_settings({name: value for name, value in given.items() if value is not None}), stop_jobs=stop_jobs)
