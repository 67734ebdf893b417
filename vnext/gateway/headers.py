"""Headers: which of them pass through the router, in both directions. Pure.

Hop-by-hop headers end here (RFC 9110, 7.6.1), as do those that only this hop can know, cookies, and what a browser says of its
page, which the router has judged. A client's key passes only where the router has none of its own.
"""

from __future__ import annotations

from collections.abc import Mapping

Pairs = list[tuple[str, str]]

HOP_BY_HOP = frozenset(
    "connection keep-alive proxy-authenticate proxy-authorization proxy-connection te trailer transfer-encoding upgrade".split()
)
_OF_REQUESTS = frozenset(
    "host content-length content-encoding accept-encoding expect cookie origin referer forwarded x-forwarded-for "
    "sec-fetch-site sec-fetch-mode sec-fetch-dest sec-fetch-user access-control-request-method "
    "access-control-request-headers x-vnext-handover".split()
)
"""Tickets too: this router gives them out, and a client's would make ranks connect where it says."""
_KEYS = frozenset({"authorization", "x-api-key"})
_OF_ANSWERS = frozenset(
    "content-length date set-cookie access-control-allow-origin access-control-allow-credentials access-control-expose-headers "
    "access-control-allow-methods access-control-allow-headers access-control-max-age".split()
)


def to_server(headers: Mapping[str, str], client: str, own: Mapping[str, str], key: str, has_keys: bool) -> Pairs:
    """The headers of a request on its way to a server. `client`: its address. `own`: the router's. `key`: the server's, "" for
    none. `has_keys`: the router asked for the client's."""
    dropped = _OF_REQUESTS | (_KEYS if key or has_keys else frozenset())
    passed = [pair for pair in _passing(headers, dropped) if pair[0].lower() not in map(str.lower, own)]
    passed.append(("X-Forwarded-For", ", ".join(filter(None, (headers.get("X-Forwarded-For", ""), client)))))
    passed.append(("Accept-Encoding", "identity"))  # an answer is read here where its stream may have to go on
    if key:
        passed.append(("Authorization", f"Bearer {key}"))
    return [*passed, *own.items()]


def to_client(headers: Mapping[str, str]) -> Pairs:
    """The headers of an answer on its way to its client."""
    return _passing(headers, _OF_ANSWERS)


def _passing(headers: Mapping[str, str], dropped: frozenset[str]) -> Pairs:
    named = (value.split(",") for name, value in headers.items() if name.lower() == "connection")
    ended = HOP_BY_HOP | dropped | {name.strip().lower() for names in named for name in names}
    return [(name, value) for name, value in headers.items() if name.lower() not in ended]
