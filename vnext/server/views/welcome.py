"""Welcome: GET / as plain text, and GET /docs with a summary of the API, for a browser.

The paths come from routes.py. Both need no key and reveal nothing about the model.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable
from functools import cache
from html import escape
from typing import NamedTuple

import msgspec
from aiohttp import web

from vnext.base.version import __version__
from vnext.server.context.server_context import SERVER_CONTEXT
from vnext.server.example import curl_line

JSON, TEXT, HTML, EVENTS, BYTES = "application/json", "text/plain", "text/html", "text/event-stream", "application/octet-stream"


class Route(NamedTuple):
    """One path with its view; a part of the path may have a rule (`{name:rule}`). `what`: its line on the page, "" for a path
    that another line names. `body`: the struct of the request's body; `answers`: the content types of an answer."""

    method: str
    path: str
    view: Callable[[web.Request], Awaitable[web.StreamResponse]]
    what: str = ""
    body: type[msgspec.Struct] | None = None
    answers: tuple[str, ...] = (JSON,)

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
HEADERS = {"Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'", "X-Content-Type-Options": "nosniff"}
HOST_UNKNOWN = "127.0.0.1:8000"
STYLE = "body{font:16px/1.5 sans-serif;max-width:60em;margin:2em auto;padding:0 1em}td{padding:.2em 1em .2em 0;vertical-align:top}"


async def get_welcome(request: web.Request) -> web.Response:
    """GET /."""
    return web.Response(text=f"{_text(tuple(request.app[ROUTES]))}\n\n{_example(request)}\n", headers=HEADERS)


async def get_docs(request: web.Request) -> web.Response:
    """GET /docs."""
    before, after = _page(tuple(request.app[ROUTES]))
    return web.Response(text=before + escape(_example(request)) + after, content_type="text/html", headers=HEADERS)


@cache
def _text(routes: tuple[Route, ...]) -> str:
    """GET / up to its example. Made once, as `_page`: anyone may ask for them, as often as he likes."""
    shown = [each for each in routes if each.what]
    width = max(len(each.plain_path) for each in shown)
    paths = "\n".join(f"{each.method:<4} {each.plain_path:<{width}}  {each.what}" for each in shown)
    return f"vnext {__version__}: an LLM server that speaks OpenAI's API\n\n{paths}"


@cache
def _page(routes: tuple[Route, ...]) -> tuple[str, str]:
    """GET /docs before and after its example."""
    rows = "".join(
        f"<tr><td>{each.method}<td><code>{each.plain_path}</code><td>{escape(each.what)}<td>{', '.join(each.fields)}"
        for each in routes
        if each.what
    )
    before = (
        f"<!doctype html><html lang=en><meta charset=utf-8><title>vnext</title><style>{STYLE}</style><h1>vnext {__version__}</h1>"
        "<p>An LLM server that speaks OpenAI's API: point any of its clients at this address with <code>/v1</code>."
        f"<table><tr><th><th>path<th>what it does<th>fields{rows}</table><p>Try<pre>"
    )
    return before, "</pre><p>A field that is misspelt or asks for what this server has not gets status 400 and one sentence."


def _example(request: web.Request) -> str:
    context = request.app[SERVER_CONTEXT]
    host = request.host if request.host.isascii() else HOST_UNKNOWN  # a name on the wire is ASCII
    return curl_line(f"http://{host}", chat=context.template is not None, has_key=context.settings.needs_key)
