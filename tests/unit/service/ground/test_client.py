"""The two clients do the same, and follow a job over the loss of its server."""

import asyncio
import inspect
import sys

import httpx
import pytest

from posttrain_service.client import ApiError, AsyncClient, Client, ServerGone
from posttrain_service.client import base as parts
from posttrain_service.client.curves import draw
from posttrain_service.errors import InvalidRequest

BASE = "http://127.0.0.1:1"
END = b'event: end\ndata: {"status": "succeeded", "reason": "completed"}\n\n'


def event(number):
    return b'event: metric\nid: 1:%d\ndata: {"step": %d}\n\n' % (number, number)


class Server:
    """Answers with what the test has prepared, one after the other; an exception is a broken connection."""

    def __init__(self, *answers):
        self.answers = list(answers)
        self.cursors = []
        self.keys = set()

    def __call__(self, request):
        self.keys.add(request.headers.get("authorization"))
        if not request.url.path.endswith("/metrics"):
            return httpx.Response(200, json={"job_uuid": "j", "status": "succeeded"})
        self.cursors.append(request.headers.get("last-event-id"))
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer if isinstance(answer, httpx.Response) else httpx.Response(200, content=answer)


@pytest.fixture(params=[Client, AsyncClient], ids=["blocking", "asyncio"])
def follow(request):
    """Collects what a client gives out: (steps, what it was told of losses)."""

    def blocking(server, how, told):
        with Client(BASE, api_key="k", transport=httpx.MockTransport(server)) as client:
            return list(client.follow("j", "metrics", on_gone=told.append, **how))

    async def awaited(server, how, told):
        async with AsyncClient(BASE, api_key="k", transport=httpx.MockTransport(server)) as client:
            return [event async for event in client.follow("j", "metrics", on_gone=told.append, **how)]

    def collect(server, **how):
        told = []
        found = blocking(server, how, told) if request.param is Client else asyncio.run(awaited(server, how, told))
        assert server.keys == {"Bearer k"}
        return [one.data.get("step", one.event) for one in found], told

    return collect


def test_both_clients_have_the_same_methods():
    def methods(cls):
        public = {name: value for name, value in vars(cls).items() if not name.startswith("_")}
        return {name: list(inspect.signature(value).parameters.items()) for name, value in public.items()}

    assert methods(Client) == methods(AsyncClient)
    assert len(methods(Client)) > 20


def test_following_goes_on_right_after_the_last_event(follow, monkeypatch):
    monkeypatch.setattr(parts, "_FIRST_PAUSE_S", 0.001)
    busy = httpx.Response(503, json={"error": {"message": "the server is stopping", "code": "unavailable"}})
    server = Server(event(1) + event(2), httpx.ConnectError("refused"), busy, event(3), b": heartbeat\n\n", END)
    found, told = follow(server)
    assert found == [1, 2, 3, "end"]
    assert server.cursors == [None, "1:2", "1:2", "1:2", "1:3", "1:3"]
    assert len(told) == 2  # once for each loss, not for each try


def test_patience_has_an_end(follow, monkeypatch):
    monkeypatch.setattr(parts, "_FIRST_PAUSE_S", 0.001)
    with pytest.raises(ServerGone, match="before the job had ended"):
        follow(Server(event(1)), patience_s=0)
    clock = iter(range(0, 1000, 4))
    monkeypatch.setattr(parts.time, "monotonic", lambda: float(next(clock)))
    with pytest.raises(ServerGone, match="no server answers"):
        follow(Server(event(1), *[httpx.ConnectError("refused")] * 30), patience_s=30)


def test_a_refusal_is_not_waited_for(follow):
    refusal = httpx.Response(401, json={"error": {"message": "the API key is not valid here", "code": "invalid_api_key"}})
    server = Server(event(1), refusal)
    with pytest.raises(ApiError, match="not valid"):
        follow(server)


def test_waiting_tells_the_progress():
    seen = []
    with Client(BASE, transport=httpx.MockTransport(Server(event(1) + event(2) + END))) as client:
        assert client.wait("j", progress=seen.append)["status"] == "succeeded"
    assert [point["step"] for point in seen] == [1, 2]


class Axes:
    """What `draw` asks of matplotlib's axes."""

    def __init__(self):
        self.lines, self.said = [], {}

    def plot(self, steps, values, label, marker):
        self.lines.append((label, steps, values))

    def set_xlabel(self, text):
        self.said["x"] = text

    def set_title(self, text):
        self.said["title"] = text

    def get_legend_handles_labels(self):
        return [], [label for label, *_ in self.lines]

    def legend(self):
        self.said["legend"] = True


POINTS = [{"step": 1, "loss": 2.0}, {"step": 2, "loss": None, "validation_loss": 1.5}, {"step": 3, "loss": 1.0}]


def test_curves_of_a_job_are_drawn_on_the_axes_that_are_given():
    def points(request):
        assert request.url.params["names"] == "loss,validation_loss"
        return httpx.Response(200, json={"data": POINTS})

    with Client(BASE, transport=httpx.MockTransport(points)) as client:
        drawn = client.plot("j", axes=Axes())

    async def awaited():
        async with AsyncClient(BASE, transport=httpx.MockTransport(points)) as client:
            return await client.plot("j", axes=Axes())

    for axes in (drawn, asyncio.run(awaited())):
        assert axes.lines == [("loss", [1, 3], [2.0, 1.0]), ("validation_loss", [2], [1.5])]
        assert axes.said == {"x": "step", "title": "j", "legend": True}


def test_without_matplotlib_a_plot_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(InvalidRequest, match="pip install matplotlib"):
        draw(POINTS, ["loss"], "j")


def test_with_matplotlib_there_is_a_figure():
    matplotlib = pytest.importorskip("matplotlib")
    matplotlib.use("Agg")
    assert [line.get_label() for line in draw(POINTS, ["loss"], "j").get_lines()] == ["loss"]
