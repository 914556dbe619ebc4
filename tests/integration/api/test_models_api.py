"""Models in OpenAI's shape."""

import openai
from fastapi.testclient import TestClient

from posttrain_service.app import create_app
from posttrain_service.wire import model_shapes

RESULT = "ft:tiny:posttrain::j-1"


def test_models_are_listed_in_pages(http):
    body = http.get("/v1/models", params={"limit": 2}).json()
    assert model_shapes.ModelList.model_validate(body).has_more
    assert [model["id"] for model in body["data"]] == ["tiny", "org/small"]
    rest = http.get("/v1/models", params={"after": "org/small"}).json()
    assert [(m["id"], m["kind"], m["owned_by"], m["job_uuid"]) for m in rest["data"]] == [(RESULT, "full", "default", "j-1")]
    assert http.get("/v1/models", params={"limit": 0}).status_code == 422
    assert http.get("/v1/models", params={"owner": "x"}).status_code == 422


def test_one_model_by_any_name(http):
    for path in ("org/small", "org%2Fsmall"):
        assert http.get(f"/v1/models/{path}").json()["id"] == "org/small"
    answer = http.get("/v1/models/nope")
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "model_not_found")


def test_the_openai_client_reads_them(fake, settings):
    app = create_app(settings, build=lambda told: fake)
    with TestClient(app, base_url="http://127.0.0.1:8484") as transport:
        client = openai.OpenAI(api_key="none", base_url="http://127.0.0.1:8484/v1", http_client=transport, max_retries=0)
        assert [model.id for model in client.models.list()] == ["tiny", "org/small", RESULT]
        assert client.models.retrieve(RESULT).created == 1_700_000_000
