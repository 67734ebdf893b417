"""Connection: one ZMQ DEALER socket to an engine core, from its first message to the end of the core's process.

Owns the socket, its monitor and the bytes of a turn. ZMQ connects a socket again by itself, and would hand what it has not sent to
the next engine core: a connection that has broken is therefore closed, and nothing that it holds is sent or read.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import zmq

from vnext.runtime.protocol.messages import ClientMessage, encoder

MESSAGES_A_TURN = 16  # as many tokens of a stream as go out in one write, and a millisecond of the event loop
BYTES_A_TURN = 2**13  # of many streams, or with log-probabilities: two milliseconds
RECONNECT_MS = 10
_READABLE = int(zmq.POLLIN)


class Connection:
    """Every message is one frame, and those of a turn go together. `receive` gets each message that arrives and returns whether to
    go on reading; `lost` is called once, when the other process has ended, after all that it had sent was received."""

    def __init__(
        self, context: zmq.Context[zmq.Socket[bytes]], address: str, receive: Callable[[bytes], bool], lost: Callable[[], None]
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._receive, self._lost = receive, lost
        self._socket = _dealer(context)
        self._monitor = self._socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        self._unsent: list[bytes] = []
        self._reads_on = self._is_closed = False
        self._socket.connect(address)
        self._loop.add_reader(_file(self._socket), self._read)
        self._loop.add_reader(_file(self._monitor), self._look_for_end)
        self._loop.call_soon(self._look_for_end)

    def send(self, message: ClientMessage) -> None:
        """Send at the end of this turn, without waiting: ZMQ keeps the order and sends as soon as it can. The API server bounds
        what may queue."""
        if not self._unsent:
            self._loop.call_soon(self._flush)
        self._unsent.append(encoder.encode(message))

    def close(self, linger_ms: int = 0) -> None:
        """Idempotent. What was sent has `linger_ms` to leave."""
        if self._is_closed:
            return
        if linger_ms:
            self._flush()
        self._is_closed = True
        for socket in (self._socket, self._monitor):
            self._loop.remove_reader(_file(socket))
        self._socket.disable_monitor()
        self._monitor.close(linger=0)
        self._socket.close(linger=linger_ms)

    def _flush(self) -> None:
        """Send what a turn has left, as the frames of one message: each time ZMQ's thread wakes costs as much as a request."""
        messages, self._unsent = self._unsent, []
        if messages and not self._is_closed:
            self._socket.send_multipart(messages)
            self._read()

    def _read(self) -> None:
        """Take in what has arrived, the rest in the next turn: an engine that is ahead must not keep the loop. ZMQ's file reports
        a change once, and a change that sending has seen not at all."""
        receive, socket, left = self._receive, self._socket, BYTES_A_TURN
        for _ in range(MESSAGES_A_TURN):
            if self._is_closed or not int(socket.get(zmq.EVENTS)) & _READABLE or not receive(data := socket.recv()):
                return
            left -= len(data)
            if left <= 0:
                break
        if not self._reads_on:
            self._reads_on = True
            self._loop.call_soon(self._read_on)

    def _read_on(self) -> None:
        self._reads_on = False
        self._read()

    def _look_for_end(self) -> None:
        """Watch the connection: on one machine it breaks only when the other process ends."""
        if self._is_closed or not int(self._monitor.get(zmq.EVENTS)) & _READABLE:
            return
        self._loop.remove_reader(_file(self._monitor))
        while not self._is_closed and int(self._socket.get(zmq.EVENTS)) & _READABLE and self._receive(self._socket.recv()):
            pass
        if not self._is_closed:
            self._lost()


def _file(socket: zmq.Socket[bytes]) -> int:
    return int(socket.fd)


def _dealer(context: zmq.Context[zmq.Socket[bytes]]) -> zmq.Socket[bytes]:
    socket = context.socket(zmq.DEALER)
    # No heartbeats: ZMQ takes a stopped process for a dead one, and drops messages in transit.
    socket.set(zmq.RCVHWM, 0)  # everything is read at once
    socket.set(zmq.SNDHWM, 0)
    socket.set(zmq.RECONNECT_IVL, RECONNECT_MS)
    return socket


def weights_folder(address: str) -> Path:
    """The run directory of the engine core at this address, where files for its ranks lie."""
    return Path(address.removeprefix("ipc://")).parent
