"""GET /openapi.json, and the small routes: the document is complete and valid, and names what the server really answers."""

from __future__ import annotations

from typing import get_type_hints

import httpx
import jsonschema
import pytest
from edge_server import EdgeServer

from vnext.runtime.protocol.sampling_params import UncheckedParams
from vnext.server.context.errors import FAILURES, failure_of
from vnext.server.context.openai_types import ChatBody, SamplingFields
from vnext.server.http.field_words import FIELDS, PARAMETERS
from vnext.server.routes import ROUTES
from vnext.server.views import welcome
from vnext.server.views.welcome import ERRORS, document


def test_every_route_and_field_is_in_the_document(server: EdgeServer) -> None:
    status, found, headers = server.get("/openapi.json")
    assert (status, headers.get_content_type()) == (200, "application/json")
    operations = {(method.upper(), path) for path, methods in found["paths"].items() for method in methods}
    assert len(operations) == len(ROUTES)
    assert ("GET", "/v1/models/{model}") in operations and ("GET", "/log/{segment}") in operations
    names = [operation["operationId"] for methods in found["paths"].values() for operation in methods.values()]
    assert len(names) == len(set(names))
    each = [operation for methods in found["paths"].values() for operation in methods.values()]
    assert all(operation["summary"] and all(one["description"] for one in operation.get("parameters", ())) for operation in each)
    fields = {(name.rpartition(".")[2], field): one for name, schema in found["components"]["schemas"].items()
              for field, one in schema.get("properties", {}).items()}  # fmt: skip
    assert all(one["description"] for one in fields.values())
    assert {*FIELDS} <= {field for _, field in fields} | {".".join(key) for key in fields}, "words of no field"
    assert {*PARAMETERS} == {one["name"] for operation in each for one in operation.get("parameters", ())}
    schema = found["components"]["schemas"]["ChatBody"]
    assert {*schema["properties"]} == {*ChatBody.__struct_fields__} and schema["required"] == ["messages"]


def test_bodies_have_every_sampling_parameter_with_its_type() -> None:
    parameters = get_type_hints(UncheckedParams)
    assert get_type_hints(SamplingFields) == {name: kind | None for name, kind in parameters.items() if name != "logprobs"}


def test_every_reference_leads_somewhere() -> None:
    found = document(ROUTES)

    def walk(value: object) -> None:
        for key, inner in value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ():
            if key == "$ref":
                place: object = found
                for name in inner.removeprefix("#/").split("/"):
                    place = place[name]
            walk(inner)

    walk(found)


def test_a_body_that_is_answered_fits_its_schema_and_a_wrong_one_does_not(server: EdgeServer) -> None:
    found = document(ROUTES)
    schema = {"$ref": "#/components/schemas/CompletionBody", "components": found["components"]}
    good = {"prompt": ["a", "b"], "n": 2, "logit_bias": {"5": 1.0}, "stop": ["x"], "stream_options": None, "max_tokens": 1}
    jsonschema.validate(good, schema)
    assert server.post("/v1/completions", good)[0] == 200
    for wrong in ({"prompt": 5}, {"prompt": "a", "n": "x"}, {}, {"prompt": "a", "stop": 5}):
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(wrong, schema)
        answer = server.post("/v1/completions", wrong)
        assert answer[0] == 400
        jsonschema.validate(answer[1], {"$ref": "#/components/schemas/Error", "components": found["components"]})


def test_every_status_of_an_error_is_documented() -> None:
    statuses = {failure_of(kind.__new__(kind)).status for kind in FAILURES if kind.__init__ is Exception.__init__}
    assert {str(status) for status in statuses} <= {*ERRORS} and len(statuses) > 5


def test_the_small_routes(server: EdgeServer) -> None:
    assert server.get("/load")[1] == {"server_load": 0}
    with server.context.limiter.enter(3):
        assert server.get("/load")[1] == {"server_load": 3}
    info = server.get("/server_info")[1]
    assert info["models"] == ["toy", "other-name"] and info["scheduler"]["max_model_len"] == 512
    assert info["version"] == server.get("/version")[1]["version"]
    [model, _] = server.get("/v1/models")[1]["data"]
    assert (model["id"], model["max_model_len"], model["parent"]) == ("toy", info["max_model_len"], None)


def test_what_the_server_is_made_of_needs_the_key() -> None:
    with EdgeServer(api_keys=("secret",)) as guarded:
        assert guarded.get("/server_info")[0] == 401
        assert guarded.get("/server_info", Authorization="Bearer secret")[0] == 200
        assert guarded.get("/openapi.json")[0] == guarded.get("/load")[0] == 200


def test_the_document_is_made_once(server: EdgeServer, monkeypatch: pytest.MonkeyPatch) -> None:
    first = httpx.get(f"{server.openai().base_url}../openapi.json").content
    monkeypatch.setattr(welcome, "document", lambda routes: pytest.fail("it is made again"))
    assert httpx.get(f"{server.openai().base_url}../openapi.json").content == first and first.startswith(b"{")


def test_a_client_that_has_the_document_gets_no_bytes(server: EdgeServer) -> None:
    url = f"{server.url}/openapi.json"
    first = httpx.get(url)
    again = httpx.get(url, headers={"If-None-Match": first.headers["ETag"]})
    assert (first.status_code, again.status_code, again.content) == (200, 304, b"")
