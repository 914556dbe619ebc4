"""Tracked files name no path of one machine and no package registry's host."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

# Put together here, so that this file does not hold them itself.
HOSTS = [".".join(parts) for parts in (
    ("pypi", "org"), ("files", "pythonhosted", "org"), ("download", "pytorch", "org"), ("registry", "npmjs", "org"),
    ("deb", "debian", "org"), ("pypi", "nvidia", "com"),
)]  # fmt: skip
FOLDERS = ["/" + name + "/" for name in ("work", "root", "opt/wheels", "opt/pypi")]
FORBIDDEN = re.compile("|".join([*map(re.escape, HOSTS), *(rf"(?<![\w.~}}-]){re.escape(folder)}" for folder in FOLDERS)]))


def tracked(repository: Path) -> list[Path]:
    git = shutil.which("git")
    if git is None or not (repository / ".git").exists():
        pytest.skip("not a git checkout, so nothing tells which files are tracked")
    listed = subprocess.run([git, "-C", str(repository), "ls-files", "-z"], capture_output=True, text=True, timeout=60)
    if listed.returncode:
        pytest.skip(f"git cannot list the files: {listed.stderr.strip()}")
    return [repository / name for name in listed.stdout.split("\0") if name]


def test_the_pattern_finds_them() -> None:
    for bad in [f"see {FOLDERS[0]}main", f'open("{FOLDERS[1]}x")', f"--index-url https://{HOSTS[0]}/simple", f"-f {FOLDERS[2]}x"]:
        assert FORBIDDEN.search(bad), bad
    for good in ["{base}/work/x", "posttrain_service/work/loops.py", "a/root/b", "~/work/x"]:
        assert not FORBIDDEN.search(good), good


def test_no_tracked_file_names_this_machine_or_a_registry(repository: Path) -> None:
    found = []
    for path in tracked(repository):
        if not path.is_file() or path.is_symlink():
            continue
        for number, line in enumerate(path.read_text(encoding="utf-8", errors="replace").splitlines(), 1):
            if match := FORBIDDEN.search(line):
                found.append(f"{path.relative_to(repository)}:{number}: {match.group(0)}")
    assert not found, "\n".join(found)


def test_no_tracked_file_is_large(repository: Path) -> None:
    large = {str(path): path.stat().st_size for path in tracked(repository) if path.is_file() and path.stat().st_size > 500_000}
    assert not large
