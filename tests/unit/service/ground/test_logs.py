"""Log lines: one each, with their context, whatever the message holds."""

import json
import logging

import pytest

from posttrain_service.logs import (
    JsonFormatter,
    TextFormatter,
    add_context,
    context_value,
    fields,
    log_context,
    set_up_logging,
)


def record(message, *args, error=None):
    made = logging.LogRecord("posttrain_service.work.x", logging.WARNING, "f", 1, message, args, None)
    made.created = 1714564800.123
    made.exc_info = (type(error), error, None) if error else None
    return made


def test_text_lines():
    line = TextFormatter().format(record("job %s is %s", "a", "b"))
    assert line == "2024-05-01T12:00:00.123Z WARNING work.x: job a is b"


@pytest.mark.parametrize("evil", ["a\nFAKE line", "\x1b[31mred", "a\rb", "\u202eabc", "\x00"])
def test_no_message_can_forge_a_line_or_colour_a_terminal(evil):
    line = TextFormatter().format(record("%s", evil))
    assert line.isprintable()
    line = JsonFormatter().format(record("%s", evil))
    assert "\n" not in line
    assert json.loads(line)["message"] == evil


def test_context_is_on_each_line_and_ends():
    with log_context(job="j1"):
        with log_context(request="r1"):
            assert TextFormatter().format(record("m")).endswith("m [job=j1] [request=r1]")
            data = json.loads(JsonFormatter().format(record("m")))
            assert (data["job"], data["request"], data["level"]) == ("j1", "r1", "warning")
        assert TextFormatter().format(record("m")).endswith("m [job=j1]")
    assert TextFormatter().format(record("m")).endswith(": m")


def test_context_never_replaces_the_facts():
    with log_context(message="x", level="y"):
        data = json.loads(JsonFormatter().format(record("m")))
    assert (data["message"], data["level"], data["time"]) == ("m", "warning", "2024-05-01T12:00:00.123Z")


def test_a_line_s_own_values_stand_beside_the_message_and_what_is_no_json_is_left_out():
    one = record("m")
    one.__dict__.update(fields(status=200, seconds=0.5, nothing=None, odd=float("nan"), made=object(), level="x", job="j2"))
    with log_context(job="j1"):
        data = json.loads(JsonFormatter().format(one))
    assert data == {"job": "j2", "status": 200, "seconds": 0.5, "time": data["time"], "level": "warning", "logger": data["logger"], "message": "m"}
    assert TextFormatter().format(one).endswith(": m")


def test_context_that_is_added_lasts_as_long_as_what_is_around_it():
    with log_context(request="r1"):
        add_context(job="j1")
        assert (context_value("request"), context_value("job")) == ("r1", "j1")
    assert context_value("job") is None


def test_tracebacks_are_kept():
    assert "ValueError: boom" in TextFormatter().format(record("m", error=ValueError("boom")))
    assert "ValueError: boom" in json.loads(JsonFormatter().format(record("m", error=ValueError("boom"))))["traceback"]


def test_set_up_twice_speaks_once(capsys):
    loggers = [logging.getLogger(n) for n in ("posttrain_service", "uvicorn", "uvicorn.error", "uvicorn.access", "alembic", "opentelemetry")]
    before = [(logger, logger.handlers[:], logger.propagate, logger.level) for logger in loggers]
    try:
        set_up_logging("text", "info")
        set_up_logging("json", "info")
        logging.getLogger("posttrain_service.work").info("hello")
        logging.getLogger("posttrain_service.work").debug("unheard")
        logging.getLogger("uvicorn.error").info("started")
        logging.getLogger("alembic.runtime").info("unheard")
        logging.getLogger("opentelemetry.exporter").warning("no collector")
    finally:
        for logger, handlers, propagate, level in before:
            logger.handlers[:], logger.propagate, logger.level = handlers, propagate, level
    lines = [json.loads(line)["message"] for line in capsys.readouterr().err.splitlines()]
    assert lines == ["hello", "started", "no collector"]
