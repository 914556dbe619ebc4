"""Which rank says what."""

from __future__ import annotations

import logging
import re
import warnings

import pytest

from posttrain_trainer import logs


@pytest.fixture(autouse=True)
def _restore_logging():
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    logging.captureWarnings(False)
    root.handlers[:] = handlers
    root.setLevel(level)


@pytest.mark.parametrize(
    ("level", "rank", "said"),
    [
        ("info", 0, ["info", "warning"]),
        ("info", 1, ["warning"]),
        ("debug", 1, ["debug", "info", "warning"]),
        ("error", 0, []),
        ("warning", 3, ["warning"]),
    ],
)
def test_rank_0_speaks_and_others_warn(level, rank, said, capsys):
    logs.set_up(level, rank=rank)
    for name in ("debug", "info", "warning"):
        getattr(logging.getLogger("posttrain_trainer.x"), name)("%s line", name)
    lines = capsys.readouterr().err.splitlines()
    assert [line.rsplit(": ", 1)[1].split()[0] for line in lines] == said
    assert all(re.match(rf"\d{{4}}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{{3}}Z rank{rank} ", line) for line in lines)


def test_libraries_do_not_chat_and_python_warnings_are_kept(capsys):
    logs.set_up("info")
    logging.getLogger("transformers.x").info("chat")
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        logging.captureWarnings(True)
        warnings.warn("mind this", UserWarning, stacklevel=1)
        logging.captureWarnings(False)
    err = capsys.readouterr().err
    assert "chat" not in err
    assert "mind this" in err
