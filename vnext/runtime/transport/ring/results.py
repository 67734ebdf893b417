"""Results: carries ranks' messages to the engine core, over one Unix socket each, read in the turn in which they arrive.

Owns the framing (four bytes of length, little-endian, then the message) and both ends. There is no thread between: a result
wakes the engine core's process once. The receiver takes what has arrived without waiting; a message may come in pieces.
"""

from __future__ import annotations

import logging
import socket
import struct
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from vnext.runtime.processes.readable import readable

PIECE_BYTES = 1 << 16
MESSAGE_BYTES_MAX = 1 << 30
head = struct.Struct("<I")
log = logging.getLogger(__name__)


class ResultsSender:
    """One rank's end. A context; one thread uses it."""

    def __init__(self, address: str) -> None:
        """Connect. Raises OSError if there is no listener."""
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.connect(address)

    def send(self, message: bytes) -> None:
        """Send; blocks while the receiver is far behind. If the receiver has ended the message is lost; the ring reports that."""
        try:
            self._socket.sendall(head.pack(len(message)) + message)
        except ConnectionError:
            pass

    def close(self) -> None:
        """Close; messages sent before still arrive."""
        self._socket.close()

    def __enter__(self) -> ResultsSender:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class ResultsReceiver:
    """The engine core's end for `count` ranks. Mutable. `ended`: the sockets of ranks that have ended, still open: the caller takes
    each out, stops watching it and closes it."""

    def __init__(self, address: str, count: int) -> None:
        """Listen. Raises OSError if the address is not available."""
        self._address = address
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(address)
        self._listener.listen(count)
        self._listener.setblocking(False)
        self._count = count
        self._pieces: dict[socket.socket, bytearray] = {}
        self.ended: list[socket.socket] = []

    @property
    def sockets(self) -> tuple[socket.socket, ...]:
        """The sockets of connected ranks; readable when something has arrived."""
        return tuple(self._pieces)

    def wait(self, timeout_s: float) -> bool:
        """Accept ranks that connect, while some are missing. Returns whether something may have arrived."""
        ready = readable((self._listener, *self._pieces), timeout_s)
        with suppress(BlockingIOError):
            while self._listener.fileno() in ready and len(self._pieces) < self._count:
                connection, _ = self._listener.accept()
                connection.setblocking(False)
                self._pieces[connection] = bytearray()
        return bool(ready)

    def messages(self) -> Iterator[bytes]:
        """All complete messages. The socket of a rank that has ended leaves `sockets`: it would stay readable for ever."""
        for connection, pieces in self._pieces.items():
            while data := _read(connection):
                if not pieces and len(data) >= head.size and len(data) - head.size == head.unpack_from(data)[0]:
                    yield data[head.size :]  # the usual case
                else:
                    pieces += data
                    yield from self._whole(pieces)
                if len(data) < PIECE_BYTES:
                    break
            if data == b"":
                self.ended.append(connection)
        if self.ended:
            self._pieces = {each: pieces for each, pieces in self._pieces.items() if each not in self.ended}

    def _whole(self, pieces: bytearray) -> Iterator[bytes]:
        """Remove and return the complete messages."""
        while len(pieces) >= head.size:
            end = head.size + head.unpack_from(pieces)[0]
            if end > MESSAGE_BYTES_MAX:
                log.warning("a rank's message of %d bytes was dropped, and all that came with it", end - head.size)
                pieces.clear()
            if len(pieces) < end:
                return
            message = bytes(pieces[head.size : end])
            del pieces[:end]
            yield message

    def close(self) -> None:
        for each in (self._listener, *self._pieces, *self.ended):
            each.close()
        Path(self._address).unlink(missing_ok=True)


def _read(connection: socket.socket) -> bytes | None:
    """The bytes that have arrived, at most PIECE_BYTES; None if there are none, b"" if the rank has ended."""
    try:
        return connection.recv(PIECE_BYTES)
    except BlockingIOError:
        return None
