"""openapi.yaml is the application's own description, and it is complete."""

import yaml

from posttrain_service.app import openapi_yaml


def test_openapi_yaml_is_current(repository):
    written = (repository / "openapi.yaml").read_text(encoding="utf-8")
    assert written == openapi_yaml(), "openapi.yaml is out of date: run `posttrain openapi --to openapi.yaml`"


def test_everything_is_described():
    described = yaml.safe_load(openapi_yaml())
    names = []
    for path, methods in described["paths"].items():
        for method, operation in methods.items():
            names.append(operation["operationId"])
            assert operation.get("description"), (path, method)
            answers = operation["responses"]
            assert answers["4XX"]["content"]["application/json"]["schema"] == {"$ref": "#/components/schemas/Error"}
            assert any(code.startswith("2") for code in answers)
            for parameter in operation.get("parameters", []):
                if parameter["in"] == "query":
                    assert parameter.get("description"), (path, parameter["name"])
    assert len(names) == len(set(names))
    for name, schema in described["components"]["schemas"].items():
        for field, content in schema.get("properties", {}).items():
            assert content.get("description") or "$ref" in content, (name, field)
