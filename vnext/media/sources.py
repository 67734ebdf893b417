"""Sources: from an image's or a video's address to its bytes: data URLs, files below a folder, the web if allowed.

Owns what may be read. Addresses of the web: nothing private, each redirect is looked at anew, and the connection goes to the very
address that was looked at, so that no second answer of a name server can lead elsewhere.
"""

from __future__ import annotations

import base64
import binascii
import http.client
import ipaddress
import socket
import ssl
import threading
import time
from contextlib import suppress
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import NamedTuple
from urllib.parse import SplitResult, unquote, urljoin, urlsplit

from vnext.media.pictures import BYTES_MAX, MediaError

TIMEOUT_S = 10.0
REDIRECTS_MAX = 3
REDIRECTS = (301, 302, 303, 307, 308)
PORTS = {"http": 80, "https": 443}


class MediaRules(NamedTuple):
    """What may be read: files below `folder` ("" for none), and addresses of the web at these `domains` ("*" for any)."""

    folder: str = ""
    domains: tuple[str, ...] = ()
    timeout_s: float = TIMEOUT_S


def bytes_at(address: str, rules: MediaRules, name: str) -> bytes:
    """The bytes at an address, BYTES_MAX at most. Blocks while it reads. Raises MediaError."""
    kind = address[:8].partition(":")[0].lower()
    if kind == "data":
        return _inside(address, name)
    if kind == "file":
        return _file(address, rules, name)
    if kind not in PORTS:
        raise MediaError(f"{name} has no address that begins with data:, file: or https:")
    if not rules.domains:
        raise MediaError(f"{name} is an address of the web, which this server does not read: send it as a data URL")
    try:
        return _fetched(address, rules, name)
    except (OSError, ValueError, http.client.HTTPException) as error:
        if isinstance(error, MediaError):
            raise
        raise MediaError(f"{name} could not be fetched: {type(error).__name__}") from error


def _inside(address: str, name: str) -> bytes:
    head, comma, body = address.partition(",")
    if not comma or not head.lower().endswith(";base64"):
        raise MediaError(f"{name} is no data URL of the form data:image/png;base64,...")
    if len(body) > BYTES_MAX * 4 // 3 + 4:
        raise MediaError(f"{name} has {len(body) * 3 // 4} bytes: it may have {BYTES_MAX}")
    try:
        return base64.b64decode("".join(body.split()), validate=True)  # some tools break lines
    except (binascii.Error, ValueError) as error:
        raise MediaError(f"{name} is no base64: {error}") from error


def _file(address: str, rules: MediaRules, name: str) -> bytes:
    """Links are followed before the look, so that none leads out of the folder."""
    if not rules.folder:
        raise MediaError(f"{name} is a file here, which is not read: send it as a data URL")
    refused = MediaError(f"{name} is no file below the folder that may be read")
    try:
        parts = urlsplit(address)
        if parts.netloc.lower() not in ("", "localhost"):
            raise refused
        path = Path(unquote(parts.path)).resolve(strict=True)
        if not path.is_file() or not path.is_relative_to(Path(rules.folder).resolve()):
            raise refused
        with path.open("rb") as file:
            return _bounded(file.read(BYTES_MAX + 1), name)
    except (OSError, ValueError, RuntimeError) as error:  # RuntimeError: a loop of links, before Python 3.13
        if isinstance(error, MediaError):
            raise
        raise refused from error


def _bounded(data: bytes, name: str) -> bytes:
    if len(data) > BYTES_MAX:
        raise MediaError(f"{name} has more than {BYTES_MAX} bytes, which it may have")
    return data


def _fetched(address: str, rules: MediaRules, name: str) -> bytes:
    end = time.monotonic() + rules.timeout_s
    for _ in range(REDIRECTS_MAX + 1):
        parts = urlsplit(address)
        if parts.scheme not in PORTS or not parts.hostname or parts.username is not None:
            raise MediaError(f"{name} leads to what is no address of the web")
        if "*" not in rules.domains and parts.hostname not in map(str.lower, rules.domains):
            raise MediaError(f"{name} leads to {parts.hostname}, and this server reads {', '.join(rules.domains)}")
        connection, taken = _connected(parts, end, name)
        timer = threading.Timer(_left(end), _end, (taken,))  # whatever it waits for
        timer.start()
        try:
            target = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
            connection.request("GET", target, headers={"User-Agent": "vnext", "Accept": "image/*, video/*, audio/*"})
            answer = connection.getresponse()
            if answer.status in REDIRECTS:
                address = urljoin(address, answer.headers.get("Location", ""))
                continue
            if answer.status != 200:
                raise MediaError(f"{name} could not be fetched: its server answers {answer.status}")
            found = _bounded(answer.read(BYTES_MAX + 1), name)
            _left(end)
            if answer.length:  # http.client says so only where no size is named
                raise http.client.IncompleteRead(found, answer.length)
            return found
        finally:
            timer.cancel()
            connection.close()
    raise MediaError(f"{name} is redirected more than {REDIRECTS_MAX} times")


def _connected(parts: SplitResult, end: float, name: str) -> tuple[http.client.HTTPConnection, socket.socket]:
    """A connection to an address that is public, and its socket."""
    host, port = parts.hostname or "", parts.port or PORTS[parts.scheme]
    found = _addresses(host, port, end)
    if not found or not all(map(is_public, found)):
        raise MediaError(f"{name} leads to a private address")
    connection = http.client.HTTPConnection(host, port, timeout=_left(end))
    taken = socket.create_connection((found[0], port), _left(end))
    if parts.scheme == "https":
        taken = ssl.create_default_context().wrap_socket(taken, server_hostname=host)
    connection.sock = taken
    return connection, taken


def _addresses(host: str, port: int, end: float) -> list[str]:
    """What name servers say, in a thread that nobody waits for beyond the end: the system's own patience may be minutes."""
    answers = SimpleQueue[list[str] | Exception]()

    def ask() -> None:
        try:
            answers.put([str(info[4][0]) for info in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)])
        except Exception as error:  # whatever it is, it is raised where it is waited for
            answers.put(error)

    threading.Thread(target=ask, name="name server", daemon=True).start()
    try:
        found = answers.get(timeout=_left(end))
    except Empty as error:
        raise TimeoutError from error
    if isinstance(found, Exception):
        raise found
    return found


def _end(taken: socket.socket) -> None:
    with suppress(OSError):
        taken.shutdown(socket.SHUT_RDWR)


def _left(end: float) -> float:
    left = end - time.monotonic()
    if left <= 0:
        raise TimeoutError
    return left


def is_public(address: str) -> bool:
    """Whether an IP address is one of the whole web, also where it stands for another one (IPv4 in IPv6, 6to4, Teredo, NAT64)."""
    found = ipaddress.ip_address(address.partition("%")[0])
    if isinstance(found, ipaddress.IPv6Address):
        held = found.ipv4_mapped or found.sixtofour or (found.teredo and found.teredo[1])
        if held is None and found in ipaddress.ip_network("64:ff9b::/96"):
            held = ipaddress.IPv4Address(int(found) & 0xFFFFFFFF)
        if held is not None:
            return is_public(str(held))
    return found.is_global and not found.is_multicast
