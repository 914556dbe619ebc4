"""Beginning and ending sooner changes nothing that anybody sees."""

from __future__ import annotations

import gc
import importlib
import importlib.util
import subprocess
import sys

import pytest

from posttrain_trainer.startup import quick_imports

HANDLERS = """
import atexit, logging, sys
from posttrain_trainer.startup import leave
atexit.register(print, "registered")
sys.stdout.write("unended")
leave(3)
"""


def test_a_process_leaves_with_its_code_its_handlers_and_its_output() -> None:
    ended = subprocess.run([sys.executable, "-c", HANDLERS], capture_output=True, text=True, timeout=60, check=False)
    assert (ended.returncode, ended.stdout, ended.stderr) == (3, "unendedregistered\n", "")


def test_what_is_left_out_is_not_installed_for_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "this", raising=False)
    with quick_imports(without=("this", "json")):
        assert not gc.isenabled()
        assert importlib.util.find_spec("this") is None
        with pytest.raises(ModuleNotFoundError):
            importlib.import_module("this")
    assert gc.isenabled()
    assert importlib.util.find_spec("json") is not None, "it had been imported before"
    monkeypatch.delitem(sys.modules, "this")


def test_the_collector_works_again_after_a_failed_import() -> None:
    with pytest.raises(ModuleNotFoundError), quick_imports():
        importlib.import_module("posttrain_trainer.nothing")
    assert gc.isenabled()


def test_a_rank_without_quantisation_does_without_torchao() -> None:
    code = "import sys; from posttrain_trainer.startup import quick_imports\nwith quick_imports(without=('torchao',)):\n    import posttrain_trainer.build\nprint(sys.modules['torchao'])"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "None\n", "")


def test_torchrun_says_what_ended_it() -> None:
    argv = [sys.executable, "-m", "posttrain_trainer", "torchrun", "--nproc-per-node=0", "-m", "nothing"]
    ended = subprocess.run(argv, capture_output=True, text=True, timeout=120, check=False)
    assert ended.returncode == 1
    assert "Traceback" in ended.stderr
