"""docs/compatibility.md: what the real packages were seen to do, written and checked by the tests that run them."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

WRITE = "WRITE_COMPATIBILITY"
HEAD = f"""# What existing clients can do

Each line was seen with the real package of that version, unmodified, against a running service, or, for the servers, with
posttrain inside the real server. The tests in `tests/integration/clients` write this file (`{WRITE}=1`) and fail where
it says something else than they see.

| package | version | call | outcome |
|---|---|---|---|
"""


def check(repository: Path, package: str, version: str, seen: Mapping[str, str]) -> None:
    """The file says of this package and version exactly what was seen; with WRITE_COMPATIBILITY=1 it is made so."""
    path = repository / "docs" / "compatibility.md"
    lines = path.read_text().removeprefix(HEAD).splitlines() if path.exists() else []
    mark = f"| {package} | {version} |"
    new = [f"{mark} `{call}` | {outcome.replace('|', '/')} |" for call, outcome in seen.items()]
    if os.environ.get(WRITE):
        others = [line for line in lines if line and not line.startswith(mark)]
        path.write_text(HEAD + "".join(f"{line}\n" for line in sorted([*others, *new], key=_order)))
        return
    assert path.read_text().startswith(HEAD)
    assert sorted(line for line in lines if line.startswith(mark)) == sorted(new)


def _order(line: str) -> tuple[str, list[int], str]:
    package, version, call, _ = (cell.strip() for cell in line.strip("|").split("|"))
    return package, [int(part) for part in version.split(".")], call
