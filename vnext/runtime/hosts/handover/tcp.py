"""Blocks over TCP: a rank's server, and the source that reads from it.

Both ends prove the secret and key every frame (runtime/hosts/wire.py). The source sends one frame, the identity of its pages and
the names; the server answers with a sentence, "" if it has such pages, and then with one frame for each name, empty for a block
that it has not. Owns connections and threads; knows nothing of pages.
"""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress

import msgspec

from vnext.base.spelling import reason
from vnext.runtime.hosts.handover.source import OTHER_PAGES, HandoverFailed, split_address
from vnext.runtime.hosts.wire import Wire, WireBroken, WireRefused, connected

CONNECT_S, ANSWER_S = 3.0, 5.0
"""How long a connection and a frame may take."""
CONNECTIONS_MAX = 64
RETRY_S = 0.25
log = logging.getLogger(__name__)


class Asked(msgspec.Struct, frozen=True, array_like=True, tag="blocks"):
    """What a source sends."""

    identity: bytes
    names: tuple[bytes, ...]


_encode = msgspec.msgpack.Encoder().encode
_asked = msgspec.msgpack.Decoder(Asked)


class BlockServer:
    """Serves the blocks of one rank until `close`. `reads` give a block's file by name, b"" for none, of pages of each identity;
    any thread calls them."""

    def __init__(self, address: tuple[str, int], secret: bytes, reads: Mapping[bytes, Callable[[bytes], bytes]]) -> None:
        """Raises OSError where nobody can listen."""
        family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
        self._listener = socket.create_server(address, family=family)
        self._secret, self._reads = secret, reads
        host, port = self._listener.getsockname()[:2]
        self.address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        self._has_warned = self._is_closed = False
        self._room = threading.BoundedSemaphore(CONNECTIONS_MAX)
        threading.Thread(target=self._accept, name="handover-accept", daemon=True).start()

    def close(self) -> None:
        """Accept nobody any more."""
        self._is_closed = True
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:  # closed; or the comer has left, or no descriptor is free: others come later
                if self._is_closed:
                    return
                time.sleep(RETRY_S)
                continue
            if self._room.acquire(blocking=False):
                threading.Thread(target=self._serve, args=(connection,), name="handover-serve", daemon=True).start()
            else:
                connection.close()

    def _serve(self, connection: socket.socket) -> None:
        try:
            self._answer(connection)
        finally:
            self._room.release()

    def _answer(self, connection: socket.socket) -> None:
        try:
            wire = connected(connection, self._secret, "master", CONNECT_S)
        except (WireBroken, WireRefused) as error:
            if not self._has_warned:
                self._has_warned = True
                log.warning("An engine that asks for blocks gets none: %s", error)
            return
        try:
            asked = _asked.decode(_next_frame(wire, deque()))
            read = self._reads.get(asked.identity)
            wire.send(OTHER_PAGES.encode() if read is None else b"")
            if read is not None:
                for name in asked.names:
                    wire.send(read(name))
        except (WireBroken, ValueError, RecursionError):
            pass  # the other side has what it wants, or has ended
        finally:
            wire.close()


class TcpSource:
    """See BlockSource. `failed` is called where the server cannot be reached."""

    def __init__(self, address: str, secret: bytes, identity: bytes, failed: Callable[[], None] = lambda: None) -> None:
        self._failed = failed
        self._address, self._secret, self._identity = address, secret, identity
        self._wire: Wire | None = None
        self._frames: deque[bytes] = deque()

    def ask(self, names: Sequence[bytes]) -> None:
        try:
            connection = socket.create_connection(split_address(self._address), CONNECT_S)
            self._wire = connected(connection, self._secret, "host", CONNECT_S)
            self._wire.send(_encode(Asked(self._identity, tuple(names))))
            why_not = _next_frame(self._wire, self._frames).decode("utf-8", "replace")
        except (OSError, ValueError, WireBroken, WireRefused) as error:
            self._failed()
            raise HandoverFailed(f"no blocks come from {self._address}: {reason(error)}") from error
        if why_not:
            raise HandoverFailed(f"no blocks come from {self._address}: {why_not}")

    def next(self) -> bytes:
        """The next of those that were asked for, b"" for one that is not there. Raises HandoverFailed."""
        assert self._wire is not None, "asked before"
        try:
            return _next_frame(self._wire, self._frames)
        except WireBroken as error:
            raise HandoverFailed(f"the files from {self._address} end half-way: {error}") from error

    def fetch(self, name: bytes, buffer: bytearray | memoryview) -> bool:
        if len(data := self.next()) != len(buffer):
            return False
        buffer[:] = data
        return True

    def close(self) -> None:
        if self._wire is not None:
            self._wire.close()


def _next_frame(wire: Wire, frames: deque[bytes]) -> bytes:
    """The next of the frames that have come, waiting for it. Raises WireBroken."""
    while not frames:
        if not wire.wait(ANSWER_S):
            raise WireBroken(f"there was no answer for {ANSWER_S:.0f} s")
        frames.extend(wire.receive())
    return frames.popleft()
