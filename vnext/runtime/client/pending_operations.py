"""Operations that a client has asked for and that are not answered yet.

Where the engine core dies, the one that follows it is asked again, by the same name: it knows which change of the weights its
predecessor has made, and makes none twice.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable
from itertools import count
from typing import Any

import msgspec

from vnext.runtime.client.output_stream import EngineDead
from vnext.runtime.protocol.messages import ClientMessage, Operate, Operated
from vnext.runtime.protocol.operations import AnyOperation

Send = Callable[[ClientMessage], None]


class NotDone(Exception):
    """Why an engine has not carried out an operation, in one sentence."""


class BadTensors(Exception):
    """Why tensors cannot be sent, in one sentence."""


class PendingOperations:
    """Belongs to one event loop."""

    def __init__(self) -> None:
        self._who, self._count = secrets.token_hex(8), count()
        self._pending: dict[str, tuple[Operate, asyncio.Future[Any]]] = {}

    async def ask(self, send: Send, operation: AnyOperation) -> Any:
        """The operation's value. Raises NotDone, EngineDead."""
        name, answer = f"{self._who}-{next(self._count)}", asyncio.get_running_loop().create_future()
        message = Operate(name=name, operation=operation)
        self._pending[name] = message, answer
        send(message)
        try:
            return await answer
        finally:
            self._pending.pop(name, None)

    def ask_again(self, send: Send) -> None:
        """Another engine core has begun, which knows of no question."""
        for message, _ in self._pending.values():
            send(message)

    def answered(self, message: Operated) -> None:
        _, answer = self._pending.get(message.name, (None, None))
        if answer is None or answer.done():
            return
        if message.error:
            answer.set_exception(NotDone(message.error))
        else:
            answer.set_result(msgspec.json.decode(message.value))

    def fail(self, sentence: str) -> None:
        """The engine core has ended: nobody answers."""
        for _, answer in self._pending.values():
            if not answer.done():
                answer.set_exception(EngineDead(sentence))
