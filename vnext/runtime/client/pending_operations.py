"""Operations that a client has asked for and that are not answered yet."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from itertools import count
from typing import Any

import msgspec

from vnext.runtime.client.output_stream import EngineDead
from vnext.runtime.messages import ClientMessage, Operate, Operated
from vnext.runtime.operations import AnyOperation

FOLLOWED = "the engine core has ended and is started again, with the weights of its last change: ask again"


class NotDone(Exception):
    """Why an engine has not carried out an operation, in one sentence."""


class BadTensors(Exception):
    """Why tensors cannot be sent, in one sentence."""


class PendingOperations:
    """Belongs to one event loop."""

    def __init__(self) -> None:
        self._names = count()
        self._pending: dict[str, asyncio.Future[Any]] = {}

    async def ask(self, send: Callable[[ClientMessage], None], operation: AnyOperation) -> Any:
        """The operation's value. Raises NotDone, EngineDead."""
        name, answer = str(next(self._names)), asyncio.get_running_loop().create_future()
        self._pending[name] = answer
        send(Operate(name=name, operation=operation))
        try:
            return await answer
        finally:
            self._pending.pop(name, None)

    def answered(self, message: Operated) -> None:
        answer = self._pending.get(message.name)
        if answer is None or answer.done():
            return
        if message.error:
            answer.set_exception(NotDone(message.error))
        else:
            answer.set_result(msgspec.json.decode(message.value))

    def fail(self, sentence: str) -> None:
        """The engine core has ended: nobody answers."""
        self._fail(EngineDead(sentence))

    def fail_followed(self) -> None:
        """The engine core has ended and another one follows, which knows of no operation."""
        self._fail(NotDone(FOLLOWED))

    def _fail(self, error: Exception) -> None:
        for answer in self._pending.values():
            if not answer.done():
                answer.set_exception(error)
