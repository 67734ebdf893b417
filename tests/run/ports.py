"""Ports for servers of tests and measurements that are told a number and do not say which one they have."""

from __future__ import annotations

import socket

_held: list[socket.socket] = []


def held_port(address: str = "127.0.0.1") -> int:
    """A port that is nobody else's as long as this process lives: a socket here is bound to it and does not listen, so whoever
    connects is refused, whoever asks for any port gets another one, and a server that sets SO_REUSEADDR, as all do, may listen there."""
    held = socket.socket()
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    held.bind((address, 0))
    _held.append(held)
    return int(held.getsockname()[1])
