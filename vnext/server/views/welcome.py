"""Welcome: the server about itself: GET / as plain text, to a browser as a page with a chat and the engine's figures; GET /docs for
a browser, and GET /openapi.json as an OpenAPI 3.1 document.

All but the page are derived from the table of routes and the structs of the bodies, so that they cannot lag behind them. They
need no key and reveal nothing about the model.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Iterable
from functools import cache
from html import escape
from importlib.resources import files
from typing import Any, NamedTuple

import msgspec
from aiohttp import web

from vnext.base.version import __version__
from vnext.server.http.field_words import FIELDS, PARAMETERS
from vnext.server.http.static_files import HEADERS as PAGE_HEADERS, File, StaticFiles, answer_with, file_of

JSON, TEXT, HTML, EVENTS, BYTES = "application/json", "text/plain", "text/html", "text/event-stream", "application/octet-stream"
NDJSON = "application/x-ndjson"
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
            "description": "what was wrong",
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string", "description": "one sentence with the remedy"},
                "type": {"type": "string", "description": "the kind of error, as OpenAI names it"},
                "param": {"type": ["string", "null"], "description": "the field that is wrong"},
                "code": {"type": ["string", "null"], "description": "a word for programs"},
            },
        }
    },
}


class Route(NamedTuple):
    """One path with its view; a part of the path may have a rule (`{name:rule}`). `what`: its line on the page, in brackets for a
    path that another line there names. `body`: the struct of the request's body; `answers`: the content types of an answer."""

    method: str
    path: str
    view: Callable[[web.Request], Awaitable[web.StreamResponse]]
    what: str
    body: type[msgspec.Struct] | None = None
    answers: tuple[str, ...] = (JSON,)

    @property
    def is_listed(self) -> bool:
        """Whether it has a line of its own."""
        return not self.what.startswith("(")

    @property
    def plain_path(self) -> str:
        """The path without the rules of its parts."""
        return PARAMETER.sub(r"{\1}", self.path)

    @property
    def fields(self) -> tuple[str, ...]:
        """The names of the body's fields."""
        return self.body.__struct_fields__ if self.body else ()


PARAMETER = re.compile(r"\{(\w+)(?::((?:[^{}]|\{[^{}]*\})*))?\}")
ROUTES: web.AppKey[tuple[Route, ...]] = web.AppKey("routes")
EXAMPLE: web.AppKey[Callable[[str], str]] = web.AppKey("example")
"""The command line to try at an address."""
HEADERS = {"Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'", "X-Content-Type-Options": "nosniff"}
HOST_UNKNOWN = "127.0.0.1:8000"
STYLE = "body{font:16px/1.5 sans-serif;max-width:60em;margin:2em auto;padding:0 1em}td{padding:.2em 1em .2em 0;vertical-align:top}"


PAGE = StaticFiles(files("vnext.server") / "page")
PAGE_PATHS = frozenset(f"/page/{name}" for name in PAGE.files)


async def get_page_file(request: web.Request) -> web.Response:
    """GET /page/NAME, and the page itself."""
    found = await PAGE.get(request)
    found.headers.update(PAGE_HEADERS)
    return found


async def get_welcome(request: web.Request) -> web.Response:
    if "text/html" in request.headers.get("Accept", ""):
        return await get_page_file(request)
    return web.Response(text=f"{_text(request.app[ROUTES])}\n\n{_example(request)}\n", headers=HEADERS)


async def get_live(request: web.Request) -> web.Response:
    """GET /live: 200 as long as this process runs. One that answers here need not be started again, whatever the engine does."""
    return web.json_response({"status": "ok"})


async def get_version(request: web.Request) -> web.Response:
    return web.json_response({"version": __version__})


async def get_docs(request: web.Request) -> web.Response:
    """GET /docs: to a browser the page, which shows the API in its own view; without scripts the paths and their fields."""
    if "text/html" in request.headers.get("Accept", ""):
        return await get_page_file(request)
    before, after = _page(request.app[ROUTES])
    return web.Response(text=before + escape(_example(request)) + after, content_type="text/html", headers=HEADERS)


@cache
def _text(routes: tuple[Route, ...]) -> str:
    """GET / up to its example. Made once, as `_page`: anyone may ask for them, as often as he likes."""
    shown = [each for each in routes if each.is_listed]
    width = max(len(each.plain_path) for each in shown)
    paths = "\n".join(f"{each.method:<4} {each.plain_path:<{width}}  {each.what}" for each in shown)
    return f"vnext {__version__}: an LLM server that speaks OpenAI's API\n\n{paths}"


@cache
def _page(routes: tuple[Route, ...]) -> tuple[str, str]:
    """GET /docs before and after its example."""
    rows = "".join(
        f"<tr><td>{each.method}<td><code>{each.plain_path}</code><td>{escape(each.what)}<td>{', '.join(each.fields)}"
        for each in routes
        if each.is_listed
    )
    before = (
        f"<!doctype html><html lang=en><meta charset=utf-8><title>vnext</title><style>{STYLE}</style><h1>vnext {__version__}</h1>"
        "<p>An LLM server that speaks OpenAI's API: point any of its clients at this address with <code>/v1</code>."
        f"<table><tr><th><th>path<th>what it does<th>fields{rows}</table><p>Try<pre>"
    )
    return before, "</pre><p>A field that is misspelt or asks for what this server has not gets status 400 and one sentence."


def _example(request: web.Request) -> str:
    host = request.host if request.host.isascii() else HOST_UNKNOWN  # a name on the wire is ASCII
    return request.app[EXAMPLE](f"{request.scheme}://{host}")


async def get_openapi(request: web.Request) -> web.Response:
    return answer_with(request, _encoded(request.app[ROUTES]))


VIEWS = (get_welcome, get_page_file, get_docs, get_openapi)
"""Those of this file, which read the two keys of an application."""


@cache
def _encoded(routes: tuple[Route, ...]) -> File:
    """Made once: it takes 45 ms of the event loop, and anyone may ask for it."""
    return file_of(JSON, msgspec.json.encode(document(routes)))


def document(routes: Iterable[Route]) -> dict[str, Any]:
    """The OpenAPI document of a table of routes."""
    routes = tuple(routes)
    bodies = [route.body for route in routes if route.body]
    schemas, components = msgspec.json.schema_components(bodies, ref_template=REF)
    for schema in schemas:  # `fields` decides about the others: some pass, some are refused by name
        components[schema["$ref"].rpartition("/")[2]].pop("additionalProperties", None)
    for name, schema in components.items():
        for field, each in schema.get("properties", {}).items():
            each["description"] = FIELDS.get(f"{name.rpartition('.')[2]}.{field}") or FIELDS[field]
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
        {
            "name": name, "in": "path", "required": True, "description": PARAMETERS[name],
            "schema": {"type": "string", "pattern": f"^(?:{rule or '[^/]+'})$"},
        }
        for name, rule in PARAMETER.findall(route.path)
    ]
    found: dict[str, Any] = {
        "operationId": re.sub(r"\W+", "_", f"{route.method.lower()} {path}").strip("_"),
        "summary": route.what.strip("()"),
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
