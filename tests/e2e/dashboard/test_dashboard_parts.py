"""Parts of the page that compute, asked in the browser itself."""

from __future__ import annotations

import ast
import json
import re
import shlex

import pytest

BODY = {"model": "it's a \"model\"", "name": "tab\tnew\nline $HOME `id` \\ ünï", "dataset": {"rows": [{"a": None, "b": [True, False, 1e-5, -3]}]}, "metadata": {}}


@pytest.fixture
def module(page, world):
    """Calls a function of one of the page's modules."""
    page.goto(world.address)

    def call(file, expression, *arguments):
        script = f"async (args) => {{ const module = await import('/dashboard/{file}'); return {expression}; }}"
        return page.evaluate(script, list(arguments))

    return call


def test_smoothing_is_not_pulled_to_zero(module):
    found = module("charts.js", "module.smooth(args[0], 0.5)", [1, 2, None, 3])
    mean, mass, expected = 0.0, 0.0, []
    for value in (1, 2, None, 3):
        if value is not None:
            mean, mass = 0.5 * mean + 0.5 * value, 0.5 * mass + 0.5
        expected.append(None if value is None else mean / mass)
    assert found == pytest.approx(expected)
    assert found[0] == 1
    assert module("charts.js", "module.smooth([4, 4, 4], 0.99)") == pytest.approx([4, 4, 4])


def test_curves_hold_numbers_only_in_order_of_their_axis(module):
    points = [
        {"step": 1, "epoch": 0.5, "time": "2026-01-01T00:00:00Z", "loss": 3.0}, {"step": 2, "epoch": 1.0, "time": "2026-01-01T00:01:30Z", "loss": None},
        {"step": 3, "epoch": 1.5, "time": "2026-01-01T00:03:00Z", "loss": 2.0},
    ]  # fmt: skip
    assert module("charts.js", "module.columns(args[0], 'loss', 'step')", points) == [[1, 3], [3.0, 2.0]]
    assert module("charts.js", "module.columns(args[0], 'loss', 'minutes')", points) == [[0, 3], [3.0, 2.0]]
    assert module("charts.js", "module.columns(args[0], 'epoch', 'epoch')", points[::-1]) == [[0.5, 1, 1.5], [0.5, 1, 1.5]]
    merged = module("charts.js", "(() => { const run = new module.Run('a', 'a'); args[0].forEach((p) => run.add(p)); return run.ordered(); })()", [{"step": 2, "loss": 1}, {"step": 1, "loss": 2}, {"step": 2, "validation_loss": 3}])
    thinned = module("charts.js", "(() => { const run = new module.Run('a', 'a'); [1, 2, 3, 4, 5].forEach((step) => run.add({ step })); run.replace([{ step: 1 }, { step: 4 }]); return run.ordered().map((p) => p.step); })()")
    assert thinned == [1, 4, 5], "what was measured while the server was asked stays"
    assert merged == [{"step": 1, "loss": 2}, {"step": 2, "loss": 1, "validation_loss": 3}]


@pytest.mark.parametrize("with_key", [False, True])
def test_a_shell_and_python_read_the_request_as_it_is(module, with_key):
    words = shlex.split(module("snippets.js", "module.curl('http://127.0.0.1:1/', args[0], args[1])", BODY, with_key).replace("\\\n", " "))
    assert json.loads(words[-1]) == BODY
    assert ("Authorization: Bearer $POSTTRAIN_API_KEY" in words) is with_key
    code = module("snippets.js", "module.python('http://127.0.0.1:1/', args[0], args[1])", BODY, with_key)
    compile(code, "snippet", "exec")
    assert ast.literal_eval(re.search(r"create_job\((.*)\)\n", code, re.DOTALL)[1].split(")\n    print")[0]) == BODY
    assert ("POSTTRAIN_API_KEY" in code) is with_key


@pytest.mark.parametrize("size", [1, 2, 7, 1000])
def test_a_stream_is_read_however_it_is_cut(module, size):
    text = ': hello\nretry: 5\n\nid: 1:0\nevent: log\ndata: {"text": "ü✓"}\r\n\r\ndata: a\ndata: b\n\n:beat\n\nid: 2\nevent: end\ndata: {}\n\nevent: torn\ndata: never'
    data = list(text.encode())
    pieces = [data[at : at + size] for at in range(0, len(data), size)]
    script = """(async () => {
      const body = new ReadableStream({ start(c) { args[0].forEach((piece) => c.enqueue(new Uint8Array(piece))); c.close(); } });
      const found = [];
      for await (const item of module.events(body)) found.push([item.id, item.event, item.data]);
      return found;
    })()"""
    assert module("api.js", f"await {script}", pieces) == [["1:0", "log", '{"text": "ü✓"}'], [None, None, "a\nb"], ["2", "end", "{}"]]


def test_gauges_are_read_with_and_without_labels(module):
    text = '# HELP x\n# TYPE posttrain_jobs gauge\nposttrain_jobs{state="running"} 2.0\nposttrain_jobs{state="queued"} 0\nposttrain_devices 4.0\nother_thing 1\nposttrain_disk_free_bytes 4.7e+10\n'
    assert module("devices.js", "module.parse(args[0])", text) == {"jobs": {"running": 2, "queued": 0}, "devices": 4, "disk_free_bytes": 4.7e10}
