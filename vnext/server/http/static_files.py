"""The files of a page for browsers, who may ask for them, and the headers that isolate them.

The token in a page's address keeps out other users of this machine, who can reach the port but do not know the address. The
host check keeps out pages of other sites, whose names can be made to resolve here (DNS rebinding). The log tool serves its
page by this.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from importlib.resources.abc import Traversable
from pathlib import PurePath

import msgspec
from aiohttp import web

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


class File(msgspec.Struct, frozen=True):
    """One file of a page. `digest` is of its bytes, and its ETag."""

    content_type: str
    body: bytes
    digest: str


class StaticFiles:
    """The files of one page, read once. A requested name is looked up in `files`, never on the disk."""

    def __init__(self, folder: Traversable) -> None:
        found = [each for each in folder.iterdir() if each.is_file()]
        self.files = {each.name: file_of(TYPES[PurePath(each.name).suffix], each.read_bytes()) for each in found}

    def add_to(self, app: web.Application, prefix: str) -> None:
        """Serve them below a path that begins and ends with "/"; the path itself is START."""
        app.router.add_get(prefix, self.get)
        app.router.add_get(f"{prefix}{{name}}", self.get)

    async def get(self, request: web.Request) -> web.Response:
        """The file that the path names; 304 for a client that has it."""
        found = self.files.get(request.match_info.get("name") or START)
        if found is None:
            raise web.HTTPNotFound(text="the page has no such file")
        return answer_with(request, found)


def answer_with(request: web.Request, found: File) -> web.Response:
    """A file; 304 for a client that has it."""
    etag = f'"{found.digest}"'
    if request.headers.get("If-None-Match") == etag:
        return web.Response(status=304, headers={"ETag": etag})
    return web.Response(body=found.body, content_type=found.content_type, charset="utf-8", headers={"ETag": etag})


def file_of(content_type: str, body: bytes) -> File:
    return File(content_type, body, hashlib.sha256(body).hexdigest())


def refusal(request: web.Request, token: str) -> web.Response | None:
    """The answer to a request that another host's name or another token brought here, None for one that may be answered."""
    host = request.host if request.host.endswith("]") else request.host.rsplit(":", 1)[0]
    if host not in HOSTS:
        return web.Response(text=f"ask for 127.0.0.1, not for {host}", status=403)
    given = request.path.lstrip("/").split("/")[0].encode(errors="replace")
    if not hmac.compare_digest(given, token.encode()):
        return web.Response(text="the page has another address: open the one that was printed at its start", status=403)
    return None


async def isolate(_: web.Request, response: web.StreamResponse) -> None:
    """Set the headers of every answer, including errors."""
    response.headers.update(HEADERS)
