"""Real llama-stack clients of six versions, each in its own environment, against a running service."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

NEWEST = "0.7.0"
"""The environment of this one lends the others what they need."""


@pytest.mark.slow
@pytest.mark.timeout(1200)  # the first time, packages are installed
@pytest.mark.parametrize("version", ["0.2.12", "0.2.23", "0.3.5", "0.4.4", "0.6.1", NEWEST])
def test_every_call_works(server, repository, environments, table, version):
    folder = repository / ".cache" / "clients"
    name = f"llama-stack-client-{version}"
    if version == "0.2.12":
        env = environments.virtual(folder / name, environments.this_python(), f"llama-stack-client=={version}", "fire", "requests")
    else:
        newest = f"llama-stack-client-{NEWEST}"
        env = environments.virtual(folder / newest, environments.python312(), f"llama-stack-client=={NEWEST}")
        if version != NEWEST:
            env = environments.over(env, folder / name, f"llama-stack-client=={version}")
    script = str(Path(__file__).with_name("walk.py"))
    said = env.run(script, server.base_url.removesuffix("/v1"), version, f"m{version}")
    seen = json.loads(said.splitlines()[-1])
    assert set(seen.values()) <= {"works", "works with extra_query or extra_body"}
    table.check(repository, "llama-stack-client", version, seen)
