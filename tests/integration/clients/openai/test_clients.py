"""Every call of the newest `openai` client and of the oldest supported one, each a package of its own."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

# With what each needs beyond the packages of this environment.
CLIENTS = {"1.109.1": ("distro", "jiter", "sniffio", "tqdm"), "3.57.0": ()}


@pytest.mark.slow
@pytest.mark.timeout(1200)  # the first time, packages are installed
@pytest.mark.parametrize("version", CLIENTS)
def test_every_call_works(server, repository, environments, table, version):
    base = environments.Environment(environments.this_python())
    folder = repository / ".cache" / "clients" / f"openai-{version}"
    env = environments.over(base, folder, f"openai=={version}", *CLIENTS[version])
    said = env.run(str(Path(__file__).with_name("walk.py")), server.base_url, version)
    table.check(repository, "openai", version, json.loads(said.splitlines()[-1]))
