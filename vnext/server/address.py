"""Address: the socket that the server listens on, and the error for an address that it cannot use. Imports nothing slow."""

from __future__ import annotations

import errno
import ipaddress
import socket


class AddressUnusable(Exception):
    """The server cannot listen there: one sentence with the port and the remedy."""


def bind(host: str, port: int) -> socket.socket:
    """A socket bound to the port; port 0 takes a free one. It does not listen yet, so the system refuses early clients."""
    try:
        found = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (socket.gaierror, UnicodeError) as error:
        raise AddressUnusable(f"the host {host!r} is unknown: choose another with --host") from error
    family, kind, protocol, _, address = min(found, key=lambda entry: entry[0] != socket.AF_INET)
    listener = socket.socket(family, kind, protocol)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind(address)
    except OSError as error:
        listener.close()
        raise unusable(error, host, port) from error
    return listener


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches a server that listens there. A name but localhost may be any address."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host.lower() == "localhost"


def unusable(error: OSError, host: str, port: int) -> AddressUnusable:
    """The error for an address that the system refused."""
    if error.errno == errno.EADDRINUSE:
        return AddressUnusable(f"port {port} of {host} is in use: end its program or choose another with --port")
    if error.errno == errno.EACCES:
        return AddressUnusable(f"port {port} needs more rights than this user has: choose one above 1023 with --port")
    if error.errno == errno.EADDRNOTAVAIL:
        return AddressUnusable(f"{host} is no address of this machine: choose another with --host")
    return AddressUnusable(f"the server cannot listen on {host} port {port}: {error.strerror}")
