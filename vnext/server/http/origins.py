"""Origins: which web pages may use this server from a browser.

Owns the one check against cross-site requests. Programs send neither Origin nor Sec-Fetch-Site and pass. A page passes if it
comes from this server, if page and server are both on this machine, or if the settings allow its origin. A foreign domain
that points at this machine (DNS rebinding) is not one of this server's names, so its pages do not pass.
"""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Collection
from functools import cache
from urllib.parse import urlsplit

from aiohttp import web

from vnext.server.context.errors import OriginRejected

LOOPBACK = ("127.0.0.1", "localhost", "[::1]", "::1", "::ffff:127.0.0.1")
ANY = "*"


def allows(origin: str, allowed: Collection[str]) -> bool:
    """Whether the settings name this origin, as `https://chat.example` or by `*`."""
    return ANY in allowed or origin in allowed


def check_origin(request: web.Request, allowed: Collection[str]) -> None:
    """Raise OriginRejected for a request that a browser sends for a page of another site."""
    origin = request.headers.get("Origin")
    site = request.headers.get("Sec-Fetch-Site", "")
    if origin is None and site not in ("cross-site", "same-site", "same-origin"):
        return  # not a browser, or an address that the user typed
    named = origin if origin is not None else f"http://{request.host}" if site == "same-origin" else "null"
    if allows(named, allowed) or _is_own(named, request.host):
        return
    raise OriginRejected(
        f"A web page of {'another site' if named == 'null' else named} asks, and this server has no key that would tell its "
        "users from others: start it with --api-key, or with --allowed-origins and that page's address."
    )


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
