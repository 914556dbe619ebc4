"""What is said of a model that only the hub could have: asked once, for a bounded time, against a server on this machine."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from huggingface_hub import constants

from posttrain_trainer.contract.errors import ModelNotFound
from posttrain_trainer.models import hub
from posttrain_trainer.models.source import ModelSource, find_model, loading


class Hub(ThreadingHTTPServer):
    """Answers by the model's name; `silent/one` gets no answer while the test lasts."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Answer)
        self.over = threading.Event()
        self.asked: list[str] = []


class Answer(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        server: Hub = self.server
        server.asked.append(self.path)
        name = self.path.partition("?")[0].removeprefix("/api/models/")
        if name == "silent/one":
            server.over.wait(30)
            return
        status, headers = {
            "there/one": (200, {}),
            "gone/one": (401, {"X-Error-Code": "RepoNotFound"}),
            "gated/one": (403, {"X-Error-Code": "GatedRepo"}),
            "broken/one": (502, {}),
        }[name]
        body = json.dumps({"id": name, "sha": "0" * 40}).encode()
        self.send_response(status)
        for key, value in {**headers, "Content-Type": "application/json", "Content-Length": str(len(body))}.items():
            self.send_header(key, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_args: object) -> None:
        pass


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    with Hub() as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{server.server_address[1]}")
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        hub.is_only_cached.cache_clear()
        yield server
        server.over.set()
        server.shutdown()
        hub.is_only_cached.cache_clear()


def test_a_model_of_the_hub_is_asked_for_once(server):
    for _ in range(3):
        source = find_model("there/one")
    assert (source.name, source.local, source.options()["local_files_only"]) == ("there/one", False, False)
    assert len(server.asked) == 1


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("gone/one", r"there is no model gone/one on the hub http://127\.0\.0\.1.* and no folder gone/one here"),
        ("gated/one", "is gated"),
        ("broken/one", "did not give it: it answered 502"),
        ("silent/one", "did not give it: .*timed? ?out"),
    ],
)
def test_what_the_hub_does_not_give_is_one_sentence_and_no_long_wait(server, monkeypatch, name, sentence):
    monkeypatch.setattr(hub, "_TIMEOUT_S", 0.3)
    started = time.perf_counter()
    with pytest.raises(ModelNotFound, match=sentence) as caught:
        find_model(name)
    assert time.perf_counter() - started < 5
    assert "\n" not in caught.value.message
    assert len(server.asked) == 1


def test_what_is_cached_is_used_where_the_hub_does_not_answer(server, monkeypatch):
    monkeypatch.setattr(hub, "try_to_load_from_cache", lambda *_: "/cache/config.json")
    source = find_model("broken/one")
    assert (source.local, source.cached, source.options()["local_files_only"]) == (False, True, True)


def test_nobody_is_asked_offline_nor_about_a_name_that_no_model_of_the_hub_has(server, monkeypatch):
    with pytest.raises(ModelNotFound, match=r"there is no folder /.*/nope, and an id on the Hugging Face hub is owner/name"):
        find_model("nope")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(ModelNotFound, match=r"nor in the cache .*HF_HUB_OFFLINE"):
        find_model("there/one")
    assert server.asked == []


def test_words_of_the_loader_are_put_into_one_line():
    with pytest.raises(ModelNotFound, match=r"We couldn't connect\. Check your connection") as caught, loading(ModelSource("a/b", local=False)):
        raise OSError("We couldn't connect.\n  Check your connection")
    assert "\n" not in caught.value.message
