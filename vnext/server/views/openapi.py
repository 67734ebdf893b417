"""GET /openapi.json: this server's API as an OpenAPI 3.1 document.

Derived from the table of routes and the structs of the bodies, so that it cannot lag behind them. Needs no key and reveals
nothing about the model.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import cache
from typing import Any

import msgspec
from aiohttp import web

from vnext.base.version import __version__
from vnext.server.views.welcome import PARAMETER, ROUTES, Route

REF = "#/components/schemas/{name}"
ERRORS = {
    "400": "a field is wrong; the sentence names it and the remedy",
    "401": "the API key is missing or wrong",
    "403": "a web page of another site may not do this, or the server does not show it",
    "404": "there is nothing of this name",
    "405": "this path does not take this method",
    "408": "the body came too slowly",
    "409": "the stream to go on with is of another system",
    "410": "this part of the log is gone",
    "413": "the body is too large",
    "415": "the body's type or encoding is not supported",
    "429": "too much at once: try again later",
    "500": "a fault of the server",
    "503": "the engine does not answer, or the server is about to end",
    "504": "the answer was not complete within the server's --request-timeout",
    "507": "the folder of files and batches cannot be written",
}
"""Status -> when it comes."""
ERROR_SCHEMA = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
        }
    },
}


async def get_openapi(request: web.Request) -> web.Response:
    """The view."""
    return web.json_response(body=_encoded(tuple(request.app[ROUTES])))


@cache
def _encoded(routes: tuple[Route, ...]) -> bytes:
    """Made once: it takes 45 ms of the event loop, and anyone may ask for it."""
    return msgspec.json.encode(document(routes))


def document(routes: Iterable[Route]) -> dict[str, Any]:
    """The OpenAPI document of a table of routes."""
    routes = tuple(routes)
    bodies = [route.body for route in routes if route.body]
    schemas, components = msgspec.json.schema_components(bodies, ref_template=REF)
    for schema in schemas:  # `fields` decides about the others: some pass, some are refused by name
        components[schema["$ref"].rpartition("/")[2]].pop("additionalProperties", None)
    paths: dict[str, dict[str, Any]] = {}
    for route in routes:
        path = route.plain_path
        paths.setdefault(path, {})[route.method.lower()] = _operation(route, path)
    return {
        "openapi": "3.1.0",
        "info": {"title": "vnext", "version": __version__, "description": "An LLM server that speaks OpenAI's API."},
        "security": [{}, {"key": []}],
        "paths": paths,
        "components": {
            "schemas": components | {"Error": ERROR_SCHEMA},
            "responses": {status: _response(text, {"$ref": REF.format(name="Error")}) for status, text in ERRORS.items()},
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
    }


def _operation(route: Route, path: str) -> dict[str, Any]:
    errors = {status: {"$ref": f"#/components/responses/{status}"} for status in ERRORS}
    answer = {"description": "the answer", "content": {kind: {} for kind in route.answers}}
    parameters = [
        {"name": name, "in": "path", "required": True, "schema": {"type": "string", "pattern": f"^(?:{rule or '[^/]+'})$"}}
        for name, rule in PARAMETER.findall(route.path)
    ]
    found: dict[str, Any] = {
        "operationId": re.sub(r"\W+", "_", f"{route.method.lower()} {path}").strip("_"),
        "summary": route.what,
        "responses": {"200": answer} | errors,
    }
    if parameters:
        found["parameters"] = parameters
    if route.body:
        schema = {"$ref": REF.format(name=route.body.__name__)}
        found["requestBody"] = {"required": True, "content": {"application/json": {"schema": schema}}}
    return found


def _response(text: str, schema: dict[str, Any]) -> dict[str, Any]:
    return {"description": text, "content": {"application/json": {"schema": schema}}}
