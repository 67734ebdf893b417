"""Origins: which web pages may use this server from a browser (the check against cross-site requests), and read its answers
(CORS).

Programs send neither Origin nor Sec-Fetch-Site and pass. A page passes if it comes from this server, if page and server are both
on this machine, or if the settings allow its origin. A foreign domain that points at this machine (DNS rebinding) is not one of
this server's names, so its pages do not pass. Pages of other origins get no headers (Fetch standard), and their browser withholds
the answer. Where a key is needed and no origins are named, any page is allowed: a foreign one does not know the key, and no
browser adds it.
"""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Collection
from functools import cache
from urllib.parse import urlsplit

from aiohttp import web

from vnext.server.context.errors import OriginRejected
from vnext.server.context.identity import ANTHROPIC_ID_HEADER, REQUEST_ID_HEADER
from vnext.server.settings import ServerSettings

LOOPBACK = ("127.0.0.1", "localhost", "[::1]", "::1", "::ffff:127.0.0.1")
ANY = "*"
MAX_AGE_S = 600
METHODS = "DELETE, GET, HEAD, OPTIONS, PATCH, POST, PUT"


def allows(origin: str, allowed: Collection[str]) -> bool:
    """Whether the settings name this origin, as `https://chat.example` or by `*`."""
    return ANY in allowed or origin in allowed


def check_origin(request: web.Request, allowed: Collection[str]) -> None:
    """Raise OriginRejected where the page for which a browser sends a request is of another site."""
    origin, site = request.headers.get("Origin"), request.headers.get("Sec-Fetch-Site", "")
    named = origin if origin is not None else f"http://{request.host}" if site == "same-origin" else "null"
    if allows(named, allowed) or _is_own(named, request.host):
        return
    raise OriginRejected(
        f"A web page of {'another site' if named == 'null' else named} asks, and this server has no key that would tell its "
        "users from others: start it with --api-key, or with --allowed-origins and that page's address."
    )


def is_from_a_page(request: web.Request) -> bool:
    """Whether a browser sends this for a page: neither a program nor an address that the user typed."""
    headers = request.headers
    return "Origin" in headers or headers.get("Sec-Fetch-Site", "") in ("cross-site", "same-site", "same-origin")


def host_name(host: str) -> str:
    """A Host header's name, without its port."""
    return host if host.endswith("]") else host.rpartition(":")[0] or host


def _is_own(origin: str, host: str) -> bool:
    try:
        page = urlsplit(origin).netloc
    except ValueError:
        return False
    name = host_name(host)
    if name in LOOPBACK:
        return host_name(page) in LOOPBACK
    return page == host and (_is_address(name) or name.lower() in _machine_names())


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name.strip("[]"))
    except ValueError:
        return False
    return True


@cache
def _machine_names() -> frozenset[str]:
    """The names of this machine, found without a resolver, which could take seconds."""
    return frozenset({socket.gethostname().lower()})


def is_preflight(request: web.Request) -> bool:
    """Whether a browser asks before it sends a page's request. It has no key, so none is checked."""
    headers = request.headers
    return request.method == "OPTIONS" and bool(headers.get("Origin")) and "Access-Control-Request-Method" in headers


def preflight_answer(request: web.Request, settings: ServerSettings, has_keys: bool) -> web.Response:
    """The answer to a preflight. Raises OriginRejected."""
    origin = request.headers["Origin"]
    if not allows(origin, _allowed(settings, has_keys)):
        raise OriginRejected(f"A web page of {origin[:200]} asks: start the server with --allowed-origins and that page's address.")
    return web.Response(status=204, headers=_permissions(request, settings))


def _permissions(request: web.Request, settings: ServerSettings) -> dict[str, str]:
    methods = METHODS if ANY in settings.allowed_methods else ", ".join(settings.allowed_methods)
    asked = request.headers.get("Access-Control-Request-Headers", "")
    headers = asked if ANY in settings.allowed_headers else ", ".join(settings.allowed_headers)
    granted = {"Access-Control-Allow-Methods": methods, "Access-Control-Max-Age": str(MAX_AGE_S)}
    return granted | ({"Access-Control-Allow-Headers": headers} if headers else {})


def _allowed(settings: ServerSettings, has_keys: bool) -> tuple[str, ...]:
    return settings.allowed_origins or ((ANY,) if has_keys else ())


def permit(request: web.Request, response: web.StreamResponse, settings: ServerSettings, has_keys: bool) -> None:
    """Let the page that asks read the response, if the settings allow it; `has_keys`: the path needs a key."""
    allowed = _allowed(settings, has_keys)
    if not allowed:
        return
    origin = request.headers.get("Origin")
    anyone = ANY in allowed and not (settings.allow_credentials and settings.allowed_origins)
    if not anyone:
        response.headers.add("Vary", "Origin")  # a cache must not give one page's permission to another
    if origin is None or not allows(origin, allowed):
        return
    response.headers["Access-Control-Allow-Origin"] = ANY if anyone else origin
    response.headers["Access-Control-Expose-Headers"] = f"{REQUEST_ID_HEADER}, {ANTHROPIC_ID_HEADER}"
    if settings.allow_credentials and settings.allowed_origins:
        response.headers["Access-Control-Allow-Credentials"] = "true"
