"""The stand-in trainers of the launch tests, here under harder conditions."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

_spec = importlib.util.spec_from_file_location(
    "launch_stand_ins", Path(__file__).parents[1] / "unit" / "service" / "launch" / "conftest.py"
)
assert _spec is not None
assert _spec.loader is not None
_module = importlib.util.module_from_spec(_spec)
sys.modules[_spec.name] = _module  # a dataclass looks its module up
_spec.loader.exec_module(_module)

backend = _module.backend
run = _module.run
