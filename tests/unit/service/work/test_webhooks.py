"""The end of a job is told: signed, at least once, over restarts, and to nobody who must not be reached."""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
import shutil
import socket
import ssl
import subprocess
import threading
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from posttrain_service.domain.webhooks import TRY_AFTER_S
from posttrain_service.errors import InvalidRequest
from posttrain_service.work.webhooks import Webhooks

KEY = b"k" * 32
SECRET = "whsec_" + base64.b64encode(KEY).decode()
DONE = {"status": "completed", "steps": 1}


class Receiver:
    """Takes POSTs on a port of this host, and answers as it is told."""

    def __init__(self, certificate=None):
        self.got: list[tuple[str, dict[str, str], bytes]] = []
        self.answers: list[int] = []
        self.hold: threading.Event | None = None
        receiver = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self):
                body = self.rfile.read(int(self.headers["content-length"]))
                receiver.got.append((self.path, {k.lower(): v for k, v in self.headers.items()}, body))
                if receiver.hold is not None:
                    receiver.hold.wait(20)
                self.send_response(receiver.answers.pop(0) if receiver.answers else 200)
                self.send_header("location", "/elsewhere")
                self.send_header("content-length", "0")
                self.end_headers()

            def log_message(self, *words):
                """Be quiet."""

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        if certificate is not None:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(*certificate)
            self.server.socket = context.wrap_socket(self.server.socket, server_side=True)
        self.port = self.server.server_port
        self.thread = threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.01})
        self.thread.start()

    def url(self, host="127.0.0.1", path="/hook?token=abc", scheme="http"):
        return f"{scheme}://{host}:{self.port}{path}"

    def close(self):
        if self.hold is not None:
            self.hold.set()
        self.server.shutdown()
        self.server.server_close()
        self.thread.join()


@pytest.fixture
def receiver():
    made = Receiver()
    yield made
    made.close()


@pytest.fixture
def hooked(make_bench):
    return make_bench(webhook_secret=SECRET, webhook_allow_private=True)


def deliver(bench):
    """One round of the loop."""
    [loop] = [loop for loop in bench.runtime.loops if loop.name == "webhooks"]
    loop.round()
    assert loop.last_error is None


def finished(bench, url, **more):
    job = bench.run(webhook_url=url, **more)
    bench.ends(job, result=DONE)
    bench.rounds()
    assert bench.job(job).state == "succeeded"
    return job


def outbox(bench):
    return bench.runtime.store.webhooks.due(100)


def told(bench, job):
    """The events about deliveries."""
    return [event for event in bench.jobs.events(job.job_uuid).data if event.type == "webhook"]


def test_an_end_is_told_once_and_signed(hooked, receiver):
    job = finished(hooked, receiver.url(), name="a ✓", metadata={"team": "x"})
    assert receiver.got == [], "the loop that ends jobs tells nobody"
    deliver(hooked)
    deliver(hooked)
    [(path, headers, body)] = receiver.got
    assert path == "/hook?token=abc"
    assert headers["host"] == f"127.0.0.1:{receiver.port}"
    signed = f"{headers['webhook-id']}.{headers['webhook-timestamp']}.".encode() + body
    expected = base64.b64encode(hmac.new(KEY, signed, hashlib.sha256).digest()).decode()
    assert headers["webhook-signature"] == f"v1,{expected}"
    assert headers["webhook-timestamp"] == str(int(hooked.clock.now()))
    message = json.loads(body)
    assert message["type"] == "job.succeeded"
    told_of = message["data"]
    assert (told_of["job_uuid"], told_of["status"], told_of["reason"], told_of["name"], told_of["metadata"]) == (
        job.job_uuid, "succeeded", "completed", "a ✓", {"team": "x"},
    )  # fmt: skip
    [event] = told(hooked, job)
    assert event.data == {"webhook_id": headers["webhook-id"], "host": "127.0.0.1", "tries": 1}
    assert "abc" not in json.dumps([event.message, event.data])


@pytest.mark.parametrize("end", ["failed", "cancelled", "cancelled while queued"])
def test_every_end_is_told(hooked, receiver, end):
    if end == "cancelled while queued":
        job = hooked.submit(webhook_url=receiver.url())
        hooked.jobs.cancel(job.job_uuid)
    else:
        job = hooked.run(webhook_url=receiver.url())
        if end == "cancelled":
            hooked.jobs.cancel(job.job_uuid)
        error = None if end == "cancelled" else {"code": "out_of_memory", "message": "no memory", "rank": 1}
        hooked.sees(job, liveness="dead", exit={"reason": "stopped" if error is None else "exited", "exit_code": 1}, error=error)
        hooked.rounds()
    deliver(hooked)
    message = json.loads(receiver.got[0][2])
    assert message["type"] == f"job.{end.split()[0]}"
    if end == "failed":
        assert message["data"]["error"] == {"code": "out_of_memory", "message": "no memory", "rank": 1}


def test_what_is_no_end_is_not_told(hooked, receiver):
    job = hooked.run(webhook_url=receiver.url(), retry={"max_attempts": 2})
    hooked.sees(job, liveness="dead", exit=None)  # lost, and retried
    hooked.rounds(2)
    hooked.jobs.pause(job.job_uuid)
    hooked.ends(hooked.job(job), 1, result={"status": "stopped", "want": "pause"})
    hooked.rounds()
    assert hooked.job(job).state == "paused"
    assert outbox(hooked) == []
    hooked.jobs.cancel(job.job_uuid)
    assert len(outbox(hooked)) == 1


def test_without_a_url_nothing_is_stored(hooked):
    job = hooked.run()
    hooked.ends(job, result=DONE)
    hooked.rounds()
    assert outbox(hooked) == []


def test_a_failed_delivery_is_tried_again_under_the_same_id(hooked, receiver):
    receiver.answers = [500, 302]
    job = finished(hooked, receiver.url())
    deliver(hooked)
    deliver(hooked)
    assert len(receiver.got) == 1, "not before its time"
    hooked.clock.advance(TRY_AFTER_S[0])
    deliver(hooked)
    hooked.clock.advance(TRY_AFTER_S[1])
    deliver(hooked)
    assert [path for path, _, _ in receiver.got] == ["/hook?token=abc"] * 3, "a redirect is not followed"
    assert len({headers["webhook-id"] for _, headers, _ in receiver.got}) == 1
    assert len({headers["webhook-signature"] for _, headers, _ in receiver.got}) == 3
    assert [event.data["tries"] for event in told(hooked, job)] == [3]
    assert outbox(hooked) == []


def test_a_receiver_that_never_answers_well_is_given_up(hooked, receiver):
    receiver.answers = [503] * 20
    job = finished(hooked, receiver.url())
    for pause in (0.0, *TRY_AFTER_S, 86400.0):
        hooked.clock.advance(pause)
        deliver(hooked)
    assert len(receiver.got) == len(TRY_AFTER_S) + 1
    [event] = told(hooked, job)
    assert event.level == "warn"
    assert "answered 503" in event.message


def test_a_receiver_that_is_gone_is_believed(hooked, receiver):
    receiver.answers = [410]
    job = finished(hooked, receiver.url())
    deliver(hooked)
    assert outbox(hooked) == []
    assert told(hooked, job)[0].level == "warn"


def test_a_restart_and_a_deletion_lose_nothing(make_bench, receiver):
    receiver.answers = [500]
    first = make_bench(webhook_secret=SECRET, webhook_allow_private=True)
    job = finished(first, receiver.url())
    deliver(first)
    first.jobs.delete(job.job_uuid)
    first.runtime.stop()
    second = make_bench(webhook_secret=SECRET, webhook_allow_private=True)
    second.clock.advance(TRY_AFTER_S[0])
    deliver(second)
    assert len({headers["webhook-id"] for _, headers, _ in receiver.got}) == 1
    assert len(receiver.got) == 2
    assert outbox(second) == []


def test_a_receiver_that_hangs_holds_up_neither_jobs_nor_other_receivers(make_bench, receiver):
    bench = make_bench(webhook_secret=SECRET, webhook_allow_private=True, webhook_timeout_s=1)
    receiver.hold = threading.Event()
    quick = Receiver()
    try:
        finished(bench, receiver.url())
        finished(bench, quick.url())
        deliver(bench)
        assert (len(receiver.got), len(quick.got)) == (1, 1)
        bench.clock.advance(TRY_AFTER_S[0])
        assert [message.tries for message in outbox(bench)] == [1]
    finally:
        quick.close()


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "x.localhost", "10.0.0.8", "169.254.169.254", "[::1]", "[::ffff:127.0.0.1]"])
def test_a_url_that_names_a_private_address_is_refused_before_anything_is_stored(make_bench, host):
    bench = make_bench(webhook_secret=SECRET)
    with pytest.raises(InvalidRequest, match="POSTTRAIN_WEBHOOK_ALLOW_PRIVATE") as caught:
        bench.submit(webhook_url=f"http://{host}:8000/x")
    assert caught.value.param == "webhook_url"
    assert bench.jobs.page().data == []


@pytest.fixture
def names(monkeypatch):
    """Names that lead to addresses, one for each look-up; and the look-ups that were made."""
    table, asked = {}, []
    original = socket.getaddrinfo

    def look_up(host, port, *more, **options):
        if host not in table:
            return original(host, port, *more, **options)
        asked.append(host)
        address = table[host].pop(0) if len(table[host]) > 1 else table[host][0]
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, port))]

    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    return table, asked


@pytest.mark.parametrize("host", ["inside.example", "2130706433.example"])
def test_a_name_that_leads_to_a_private_address_is_not_connected_to(make_bench, receiver, names, host):
    bench = make_bench(webhook_secret=SECRET)
    names[0][host] = ["127.0.0.1"]
    finished(bench, receiver.url(host))
    deliver(bench)
    assert receiver.got == []
    bench.clock.advance(TRY_AFTER_S[0])
    assert outbox(bench)[0].tries == 1


def test_a_name_is_looked_up_once_and_that_address_is_connected_to(hooked, receiver, names):
    names[0]["moving.example"] = ["127.0.0.1", "192.0.2.1"]  # a second look-up would lead elsewhere
    finished(hooked, receiver.url("moving.example"))
    deliver(hooked)
    assert names[1] == ["moving.example"]
    assert receiver.got[0][1]["host"] == f"moving.example:{receiver.port}"


def test_certificates_are_checked_against_the_name_and_not_the_address(hooked, names, tmp_path):
    if shutil.which("openssl") is None:
        pytest.skip("a certificate needs the command openssl")
    certificate = (tmp_path / "cert.pem", tmp_path / "key.pem")
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2",
         "-subj", "/CN=right.example", "-addext", "subjectAltName=DNS:right.example", "-keyout", certificate[1], "-out", certificate[0]],
        check=True, capture_output=True, timeout=60,
    )  # fmt: skip
    receiver = Receiver(certificate)
    try:
        names[0].update({"right.example": ["127.0.0.1"], "wrong.example": ["127.0.0.1"]})
        runtime = hooked.runtime
        webhooks = Webhooks(runtime.settings, runtime.store, hooked.clock, runtime.leader)
        trusting = replace(webhooks, trusted=ssl.create_default_context(cafile=str(certificate[0])))
        finished(hooked, receiver.url("wrong.example", scheme="https"))
        trusting.round()
        assert receiver.got == []
        finished(hooked, receiver.url("right.example", scheme="https"))
        webhooks.round()
        assert receiver.got == [], "nobody vouches for it"
        hooked.clock.advance(TRY_AFTER_S[0])
        trusting.round()
        assert len(receiver.got) == 1
    finally:
        receiver.close()


def test_without_a_secret_the_job_is_warned_and_nothing_is_signed(make_bench, receiver):
    bench = make_bench(webhook_allow_private=True)
    job = finished(bench, receiver.url())
    assert any("not signed" in warning for warning in bench.job(job).warnings)
    deliver(bench)
    assert "webhook-signature" not in receiver.got[0][1]


def test_only_the_leader_delivers(make_bench, receiver):
    first = make_bench(webhook_allow_private=True)
    finished(first, receiver.url())
    second = make_bench(webhook_allow_private=True)
    deliver(second)
    assert receiver.got == []
    deliver(first)
    assert len(receiver.got) == 1


@pytest.mark.parametrize("secret", ["not base64!", "c2hvcnQ="])
def test_a_secret_that_keeps_nobody_out_is_refused(make_bench, secret):
    with pytest.raises(ValueError, match="openssl rand"):
        make_bench(webhook_secret=secret)
