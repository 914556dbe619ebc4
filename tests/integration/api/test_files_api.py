"""/v1/files with the real `openai` client and with multipart bodies of all kinds."""

import io
import threading
from urllib.parse import quote

import httpx
import openai
import pytest

from posttrain_service.api.multipart import Upload
from posttrain_service.errors import InvalidRequest
from posttrain_service.wire.file_shapes import File, FileDeleted, FileList
from posttrain_service.wire.shapes import Error

ROWS = b'{"messages": []}\n' * 100
BOUNDARY = "b0undary"


def part(name, content, filename=None):
    named = f'; filename="{filename}"' if filename is not None else ""
    return f'--{BOUNDARY}\r\nContent-Disposition: form-data; name="{name}"{named}\r\n\r\n'.encode() + content + b"\r\n"


def form(*parts, end=True):
    return b"".join(parts) + (f"--{BOUNDARY}--\r\n".encode() if end else b"")


def send(http, body, **headers):
    return http.post("/v1/files", content=body, headers={"content-type": f"multipart/form-data; boundary={BOUNDARY}", **headers})


PURPOSE = part("purpose", b"fine-tune")


@pytest.fixture
def client(served):
    with openai.OpenAI(api_key="none", base_url=f"{served}/v1", max_retries=0) as client:
        yield client


def test_the_openai_client(client, fake):
    made = client.files.create(file=("rows.jsonl", ROWS), purpose="fine-tune", expires_after={"anchor": "created_at", "seconds": 3600})
    assert (made.bytes, made.filename, made.purpose, made.status) == (len(ROWS), "rows.jsonl", "fine-tune", "processed")
    assert made.expires_at == made.created_at + 3600
    others = [client.files.create(file=io.BytesIO(ROWS), purpose="fine-tune").id for _ in range(4)]
    assert client.files.retrieve(made.id) == made
    assert client.files.wait_for_processing(made.id).id == made.id
    # The client asks for page after page until it is told that there are no more.
    assert [file.id for file in client.files.list(limit=2)] == [*reversed(others), made.id]
    assert [file.id for file in client.files.list(limit=2, order="asc", purpose="fine-tune")] == [made.id, *others]
    assert client.files.content(made.id).read() == ROWS
    gone = client.files.delete(made.id)
    assert (gone.id, gone.deleted, gone.object) == (made.id, True, "file")
    with pytest.raises(openai.NotFoundError) as caught:
        client.files.retrieve(made.id)
    assert (caught.value.code, caught.value.type) == ("file_not_found", "not_found_error")
    assert made.id in str(caught.value)
    assert caught.value.request_id.startswith("req-")
    with pytest.raises(openai.UnprocessableEntityError) as caught:
        client.files.create(file=("x", b"x"), purpose="batch")
    assert caught.value.param == "purpose"


def test_shapes(http):
    made = send(http, form(PURPOSE, part("file", ROWS, "a.jsonl")))
    File.model_validate(made.json())
    FileList.model_validate(http.get("/v1/files").json())
    FileDeleted.model_validate(http.delete(f"/v1/files/{made.json()['id']}").json())


def test_content_has_ranges(http):
    uuid = send(http, form(PURPOSE, part("file", ROWS, "a.jsonl"))).json()["id"]
    answer = http.get(f"/v1/files/{uuid}/content", headers={"range": "bytes=2-5"})
    assert (answer.status_code, answer.content) == (206, ROWS[2:6])


def test_the_file_may_come_before_the_purpose(http, fake):
    made = send(http, form(part("file", ROWS, "a.jsonl"), PURPOSE))
    assert (made.status_code, made.json()["bytes"]) == (200, len(ROWS))
    for late in (part("purpose", b"batch"), part("purpose", b""), PURPOSE + part("expires_after[anchor]", b"created_at")):
        assert send(http, form(part("file", ROWS, "a.jsonl"), late)).status_code == 422
    assert len(fake.services.files.files) == 1


@pytest.mark.parametrize("sent", ["../../etc/passwd", "/etc/passwd", "C:\\temp\\passwd", "passwd"])
def test_names_are_shown_without_folders(http, sent):
    assert send(http, form(PURPOSE, part("file", ROWS, sent.replace("\\", "\\\\")))).json()["filename"] == "passwd"


@pytest.mark.parametrize(
    ("sent", "kept", "plain"),
    [
        ("a\\\"b.jsonl", 'a"b.jsonl', "a_b.jsonl"),
        ("a; x=1; filename*=UTF-8''evil.jsonl", "a; x=1; filename*=UTF-8''evil.jsonl", "a; x=1; filename*=UTF-8''evil.jsonl"),
        ("a%0D%0ASet-Cookie: x.jsonl", "a%0D%0ASet-Cookie: x.jsonl", "a%0D%0ASet-Cookie: x.jsonl"),
        ("a\x01\x7f\x1bb.jsonl", "ab.jsonl", "ab.jsonl"),
        ("a\u202e\u2028\x85b.jsonl", "ab.jsonl", "ab.jsonl"),
        ("ü漢.jsonl", "ü漢.jsonl", "__.jsonl"),
        ("", "upload", "upload"),
        ("x" * 255, "x" * 255, "x" * 255),
    ],
)
def test_odd_names_are_shown_and_sent_back_safely(http, fake, sent, kept, plain):
    made = send(http, form(PURPOSE, part("file", ROWS, sent)))
    assert (made.status_code, made.json()["filename"]) == (200, kept)
    got = http.get(f"/v1/files/{made.json()['id']}/content")
    assert got.content == ROWS
    assert "set-cookie" not in got.headers
    assert got.headers["content-disposition"] == f"attachment; filename=\"{plain}\"; filename*=UTF-8''{quote(kept, safe='')}"


@pytest.mark.parametrize("sent", ["x" * 300, "\x01", "..", "a/", "\u202e"])
def test_names_of_which_nothing_is_left_are_refused(http, fake, sent):
    answer = send(http, form(PURPOSE, part("file", ROWS, sent)))
    assert (answer.status_code, answer.json()["error"]["code"]) == (422, "invalid_filename")
    assert not fake.services.files.files


@pytest.mark.parametrize("sent", ["a\r\nX-Injected: 1", "a\nb", "a\rb", "a\0b"])
def test_a_line_end_in_a_name_ends_in_no_header(http, sent):
    answer = send(http, form(PURPOSE, part("file", ROWS, sent)))
    assert answer.status_code in (200, 422)
    if answer.status_code == 200:
        name = answer.json()["filename"]
        assert name.isprintable()
        got = http.get(f"/v1/files/{answer.json()['id']}/content")
        assert "x-injected" not in got.headers
        assert got.headers["content-disposition"].isprintable()


@pytest.mark.parametrize(
    ("body", "param"),
    [
        (form(PURPOSE), "file"),
        (form(part("file", ROWS, "a")), "purpose"),
        (form(PURPOSE, PURPOSE, part("file", ROWS, "a")), "purpose"),
        (form(PURPOSE, part("file", ROWS, "a"), part("file", ROWS, "b")), "file"),
        (form(PURPOSE, part("colour", b"red"), part("file", ROWS, "a")), "colour"),
        (form(PURPOSE, part("file", ROWS, "a"), part("colour", b"red")), "colour"),
        (form(PURPOSE, part("expires_after[anchor]", b"now"), part("file", ROWS, "a")), "expires_after.anchor"),
        (form(PURPOSE, part("expires_after[anchor]", b"created_at"), part("file", ROWS, "a")), "expires_after.seconds"),
        (form(PURPOSE, part("expires_after[anchor]", b"created_at"), part("expires_after[seconds]", b"1e9"), part("file", ROWS, "a")), "expires_after.seconds"),
        (form(PURPOSE, part("expires_after[anchor]", b"created_at"), part("expires_after[seconds]", b"5"), part("file", ROWS, "a")), "expires_after.seconds"),
        (form(part("purpose", b"x" * 20_000), part("file", ROWS, "a")), "purpose"),
        (form(PURPOSE, part("file", ROWS, "a"), end=False), None),
        (form(PURPOSE, part("file", ROWS, "a"), end=False)[:-500], None),
        (b"", None),
        (b"no multipart at all", None),
        (b"--" + BOUNDARY.encode() + b"\r\nX: " + b"y" * 20_000 + b"\r\n\r\n", None),
    ],
)  # fmt: skip
def test_bad_forms_store_nothing(http, fake, body, param):
    answer = send(http, body)
    assert answer.status_code == 422, answer.text
    Error.model_validate(answer.json())
    assert param in (None, answer.json()["error"]["param"])
    assert not fake.services.files.files
    assert not list(fake.services.files.folder.glob("partial"))


def test_other_content_types(http):
    for kind in ("application/json", "multipart/form-data", "text/plain"):
        answer = http.post("/v1/files", content=b"{}", headers={"content-type": kind})
        assert answer.status_code == 422


def test_too_large_by_its_own_word_and_in_fact(http, fake, settings):
    most = settings.max_upload_bytes
    body = form(PURPOSE, part("file", b"x" * (most + 1), "a"))
    assert send(http, form(PURPOSE, part("file", b"x" * most, "a"))).status_code == 200
    answer = send(http, body)
    assert (answer.status_code, answer.json()["error"]["code"]) == (413, "payload_too_large")
    answer = send(http, (body[n : n + 1000] for n in range(0, len(body), 1000)))  # chunked: no Content-Length
    assert answer.status_code == 413
    answer = send(http, b"", **{"content-length": str(10**12)})
    assert answer.status_code == 413
    assert len(fake.services.files.files) == 1


def test_bytes_are_stored_while_they_arrive(served, fake):
    """The store reads the first bytes before the last ones were sent, so nothing is collected first."""
    release = threading.Event()

    def body():
        yield PURPOSE + part("file", b"x" * 100_000, "a")[:-2]
        release.set() if fake.services.files.first_read.wait(20) else None
        yield b"y" * 100_000 + b"\r\n" + form()

    headers = {"content-type": f"multipart/form-data; boundary={BOUNDARY}"}
    answer = httpx.post(f"{served}/v1/files", content=body(), headers=headers)
    assert release.is_set()
    assert (answer.status_code, answer.json()["bytes"]) == (200, 200_000)
    assert fake.services.files.largest_read <= 65536


def test_a_client_that_goes_away_leaves_nothing(served, fake):
    def body():
        yield PURPOSE + part("file", b"x" * 100_000, "a")[:-2]
        assert fake.services.files.first_read.wait(20)
        raise ConnectionAbortedError

    with pytest.raises(ConnectionAbortedError):
        httpx.post(f"{served}/v1/files", content=body(), headers={"content-type": f"multipart/form-data; boundary={BOUNDARY}"})
    assert httpx.get(f"{served}/v1/files").json()["data"] == []


@pytest.mark.parametrize("size", [1, 2, 3, 7, 64, 1000])
def test_pieces_of_any_size_give_the_same_file(size):
    content = b"--b0undar\r\n--b0undaryX\r\n\r\n" + bytes(range(256)) * 20
    body = form(PURPOSE, part("file", content, "a"), part("late", b"1"))
    pieces = iter([body[n : n + size] for n in range(0, len(body), size)])
    upload = Upload(f'multipart/form-data; boundary="{BOUNDARY}"', lambda: next(pieces, b""))
    upload.find_file()
    assert (upload.fields, upload.filename) == ({"purpose": "fine-tune"}, "a")
    found = b""
    while data := upload.read(100):
        assert len(data) <= 100
        found += data
    assert found == content
    assert upload.fields == {"purpose": "fine-tune", "late": "1"}
    assert upload.read(5) == b""


def test_reading_all_at_once():
    pieces = iter([form(PURPOSE, part("file", ROWS, "a"))])
    upload = Upload(f"multipart/form-data; boundary={BOUNDARY}", lambda: next(pieces, b""))
    upload.find_file()
    assert upload.read() == ROWS


def test_a_body_that_breaks_off_is_an_error():
    pieces = iter([form(PURPOSE, part("file", ROWS, "a"), end=False)])
    upload = Upload(f"multipart/form-data; boundary={BOUNDARY}", lambda: next(pieces, b""))
    upload.find_file()
    with pytest.raises(InvalidRequest, match="broke off"):
        upload.read()


def test_a_boundary_that_nobody_may_use_is_refused(http):
    long = "b" * 5000
    answer = http.post("/v1/files", content=b"--x--", headers={"content-type": f"multipart/form-data; boundary={long}"})
    assert answer.status_code == 422
    assert Error.model_validate(answer.json()).error.code == "invalid_multipart"


def test_a_file_that_the_client_has_is_not_sent_again(http):
    made = send(http, form(PURPOSE, part("file", ROWS, "rows.jsonl"))).json()
    path = f"/v1/files/{made['id']}/content"
    etag = http.get(path).headers["etag"]
    for known in (etag, f'"other", W/{etag}', "*"):
        answer = http.get(path, headers={"if-none-match": known})
        assert (answer.status_code, answer.content, answer.headers["etag"]) == (304, b"", etag)
    assert http.get(path, headers={"if-none-match": '"other"'}).content == ROWS
