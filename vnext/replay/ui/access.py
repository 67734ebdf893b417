"""Access to the page's server: who may ask, and which files the page has.

Owns the token in the page's address, the check of the host name, the headers that isolate the page, and the table of
its files. The token keeps out other users of this machine, who can reach the port but do not know the address. The host
check keeps out pages of other sites, whose names can be made to resolve here (DNS rebinding).
"""

from __future__ import annotations

import hmac
import secrets
from collections.abc import Callable
from importlib import resources
from pathlib import PurePath

from aiohttp import web

from vnext.replay.reading.source import UnusableLog
from vnext.replay.ui.questions import Indexing

TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript"}
START = "index.html"
HOSTS = ("127.0.0.1", "localhost", "[::1]")
POLICY = "default-src 'self'; img-src 'self' data:; style-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
HEADERS = {
    "Content-Security-Policy": POLICY,
    "Cache-Control": "no-store",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
}
TOKEN_BYTES = 16


def new_token() -> str:
    """The first part of one server's paths, new at each start."""
    return secrets.token_urlsafe(TOKEN_BYTES)


def page_files() -> dict[str, tuple[str, bytes]]:
    """All files of the page: type and content by name. A requested name is looked up here, never on the disk."""
    found = (resources.files("vnext.replay.ui") / "page").iterdir()
    return {each.name: (TYPES[PurePath(each.name).suffix], each.read_bytes()) for each in found if each.is_file()}


def guard(token: str) -> Callable:
    """The middleware: admits loopback hosts with the token only, answers errors with one sentence, and reports the
    index's progress for questions that must wait."""

    @web.middleware
    async def guarded(request: web.Request, handler: Callable) -> web.StreamResponse:
        if (refused := _refusal(request, token)) is not None:
            return refused
        try:
            return await handler(request)
        except UnusableLog as error:
            return web.json_response({"error": str(error)}, status=400)
        except Indexing as waiting:
            return web.json_response({"indexing": [waiting.done, waiting.total]}, status=202)

    return guarded


async def keep_to_itself(_: web.Request, response: web.StreamResponse) -> None:
    """Set the headers of every answer, including errors."""
    response.headers.update(HEADERS)


def _refusal(request: web.Request, token: str) -> web.Response | None:
    host = request.host if request.host.endswith("]") else request.host.rsplit(":", 1)[0]
    if host not in HOSTS:
        return web.Response(text=f"ask for 127.0.0.1, not for {host}", status=403)
    given = request.path.lstrip("/").split("/")[0].encode(errors="replace")
    if not hmac.compare_digest(given, token.encode()):
        return web.Response(text="the page has another address: open the one that vnext-replay ui has printed", status=403)
    return None
