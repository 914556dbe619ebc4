"""The page and its assets: without a key, under a policy, from this server alone."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest
from fastapi.testclient import TestClient

from posttrain_service.app import create_app
from posttrain_service.domain.keys import make_key
from posttrain_service.settings import Settings
from posttrain_service.store.engine import make_engine
from posttrain_service.store.store import Store
from posttrain_service.web.pages import STATIC

OWN = sorted(path for path in STATIC.iterdir() if path.suffix in (".js", ".css", ".html"))


@pytest.fixture
def settings(tmp_path):
    return Settings(storage_dir=tmp_path / "storage", disk_reserve_bytes=0)


@pytest.fixture(scope="module")
def http(tmp_path_factory):
    settings = Settings(storage_dir=tmp_path_factory.mktemp("pages"), disk_reserve_bytes=0)
    with TestClient(create_app(settings), base_url="http://127.0.0.1") as client:
        store = Store(make_engine(settings.effective_database_url))
        key, _ = make_key("ann", "admin", 0.0)
        store.keys.insert(key)
        store.close()
        yield client


def test_the_page_needs_no_key_and_what_it_shows_does(http):
    assert http.get("/").status_code == http.head("/").status_code == 200
    assert http.get("/dashboard/app.js").status_code == 200
    assert http.get("/post_training/jobs").status_code == 401
    for path in ("/dashboardx", "/dashboard", "/dashboar/d", "/dashboard/../post_training/jobs"):
        assert http.get(path, follow_redirects=False).status_code in (401, 404), path


@pytest.mark.parametrize("path", ["/", "/dashboard/app.js", "/dashboard/style.css", "/dashboard/vendor/uPlot.min.js", "/dashboard/icon.svg"])
def test_every_answer_carries_the_policy(http, path):
    answer = http.get(path)
    policy = dict(part.split(" ", 1) for part in answer.headers["content-security-policy"].split("; "))
    assert policy["default-src"] == "'none'"
    assert policy["script-src"] == policy["style-src"] == policy["connect-src"] == "'self'"
    assert policy["frame-ancestors"] == "'none'"
    assert "unsafe" not in answer.headers["content-security-policy"]
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert answer.headers["x-frame-options"] == "DENY"


def test_an_asset_is_sent_once_and_then_only_confirmed(http):
    first = http.get("/dashboard/app.js")
    again = http.get("/dashboard/app.js", headers={"if-none-match": first.headers["etag"]})
    assert (again.status_code, again.content) == (304, b"")
    assert "content-security-policy" in again.headers


@pytest.mark.parametrize("path", ["../pages.py", "..%2fpages.py", "%2e%2e/pages.py", "/etc/passwd", "vendor", "", "nothing.js", "app.js%00"])
def test_only_the_folders_files_are_served(http, path):
    answer = http.get(f"/dashboard/{path}")
    assert answer.status_code in (401, 404), path
    assert "StaticFiles" not in answer.text


def test_pages_of_other_hosts_get_nothing(http):
    assert http.get("/", headers={"host": "evil.example"}).json()["error"]["code"] == "foreign_host"
    assert http.get("/dashboard/app.js", headers={"origin": "http://evil.example"}).json()["error"]["code"] == "foreign_origin"


@pytest.mark.parametrize("path", OWN, ids=lambda path: path.name)
def test_nothing_turns_text_into_a_program_or_asks_another_server(path):
    text = path.read_text(encoding="utf-8")
    assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function|srcdoc|DOMParser|setHTML|javascript:", text)
    assert set(re.findall(r"https?://[^'\"\s)]+", text)) <= {"http://www.w3.org/2000/svg"}
    assert not re.search(r"\son\w+=|<style|style=", text) or path.suffix != ".html"


def test_the_page_knows_the_prefix_it_is_shown_under(settings):
    told = settings.model_copy(update={"root_path": "/train/here"})
    with TestClient(create_app(told), base_url="http://127.0.0.1") as http:
        store = Store(make_engine(told.effective_database_url))
        store.keys.insert(make_key("ann", "admin", 0.0)[0])
        store.close()
        assert http.get("/train/here/post_training/jobs").status_code == 401
        for path in ("/", "/train/here/", "/train/here"):
            answer = http.get(path)
            assert '<base href="/train/here/">' in answer.text, path
        assert http.get("/train/here/dashboard/app.js").status_code == 200


def test_a_prefix_cannot_leave_its_attribute(settings):
    told = settings.model_copy(update={"root_path": '/a"><script>'})
    with TestClient(create_app(told), base_url="http://127.0.0.1") as http:
        assert '<base href="/a&quot;&gt;&lt;script&gt;/">' in http.get("/").text


def test_the_dashboard_costs_no_memory_to_speak_of():
    code = (
        "import fastapi, starlette.staticfiles, starlette.responses, psutil, os\n"
        "before = psutil.Process().memory_info().rss\n"
        "from posttrain_service.web import pages\n"
        "pages.install(fastapi.FastAPI())\n"
        "print(psutil.Process().memory_info().rss - before)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert int(done.stdout) < 2_000_000
