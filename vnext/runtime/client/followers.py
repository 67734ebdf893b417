"""Followers: who in this process reads the engine's event stream (vnext/log/stream.py), of which a client asks for one.

Owns when it is asked for: with the first follower, anew for each further one, which begins with a snapshot that all of them
get, and again where the engine core ended it, or has ended itself.
"""

from __future__ import annotations

from collections.abc import Callable

from vnext.runtime.protocol.messages import Events, Subscribe

Take = Callable[[bytes], None]
"""Takes the next whole records of the stream, or b"" where it has ended and another one follows. Called in the event loop."""


class Followers:
    """Of one client. Mutable."""

    def __init__(self, send: Callable[[Subscribe], None]) -> None:
        self._send = send
        self._takes: list[Take] = []

    def add(self, take: Take) -> None:
        """Give the stream to `take` from a snapshot on."""
        self._takes.append(take)
        self._send(Subscribe())

    def remove(self, take: Take) -> None:
        """Idempotent."""
        if take in self._takes:
            self._takes.remove(take)
            if not self._takes:
                self._send(Subscribe(is_on=False))

    def ask(self) -> None:
        """Ask for the stream again, from a snapshot on: of another engine core, or because a follower has lost it."""
        if self._takes:
            self._send(Subscribe())

    def heard(self, message: Events) -> None:
        """The engine core's next part of the stream."""
        for take in tuple(self._takes):
            take(message.data)
        if not message.data:
            self.ask()

    def lose(self) -> None:
        """The engine core has ended."""
        for take in tuple(self._takes):
            take(b"")
