"""The PostgreSQL server of the tests ends with them, even when they are killed."""

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import postgres_server as own
import psutil
import pytest

TEST = """
import pathlib, time
def test_it(postgres_server):
    pathlib.Path({said!r}).write_text(postgres_server)
    time.sleep(120)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells a process that its parent has ended")
@pytest.mark.skipif(own.GIVEN_SERVER is not None, reason="POSTTRAIN_TEST_DATABASE_URL names a server that isn't the tests' own")
def test_no_server_is_left_by_killed_tests(tmp_path, postgres_server):
    said = tmp_path / "said"
    (tmp_path / "test_it.py").write_text(TEST.format(said=str(said)))
    argv = [sys.executable, "-m", "pytest", "-q", "-p", "postgres_server", "-p", "no:cacheprovider", "-c", os.devnull, tmp_path]
    env = os.environ | {"PYTHONPATH": os.pathsep.join([str(Path(own.__file__).parent), *filter(None, sys.path)])}
    tests = subprocess.Popen(argv, env=env, cwd=tmp_path, stdout=subprocess.DEVNULL)
    try:
        while not (said.exists() and said.read_text()):
            assert tests.poll() is None
            time.sleep(0.05)
        folder = Path(said.read_text().split("host=")[1])
        servers = [p for p in psutil.process_iter(["cmdline"]) if str(folder / "data") in (p.info["cmdline"] or [])]
        assert servers
        everything = [*servers, *(child for server in servers for child in server.children(recursive=True))]
    finally:
        tests.send_signal(signal.SIGKILL)
        tests.wait(10)
    _, alive = psutil.wait_procs(everything, timeout=20)
    assert alive == []
    shutil.rmtree(folder)
