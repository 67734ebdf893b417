"""Addresses: host and port as one text. Light, because options are checked with it."""

from __future__ import annotations

PORTS = 2**16


def split_address(address: str) -> tuple[str, int]:
    """Host and port of `host:port`, the host of an IPv6 address in brackets. Raises ValueError."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or int(port) >= PORTS:
        raise ValueError(f"{address!r} is no address: write it as host:port")
    return host.strip("[]"), int(port)
