"""Output streams: what has arrived for one or several requests, merged until their consumer takes it.

Owns the two errors that a stream can end with. Knows no sockets: the client puts outputs in and is told when the stream
closes. What waits for a slow consumer is one entry a live request, however many tokens came.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable
from types import TracebackType

from vnext.runtime.messages import RequestOutput, TokenLogprobs
from vnext.state.events import AbortReason


class EngineDead(Exception):
    """The engine core has died, its connection is lost or it never answered."""


class EngineNotStarted(EngineDead):
    """The engine core says why it cannot start. It tells whoever started it as well."""


class Refused(Exception):
    """The engine core refused a request: one sentence with the value and the remedy."""

    def __init__(self, name: str, message: str) -> None:
        super().__init__(message)
        self.name = name
        self.message = message


class _Pending:
    """What has arrived for one request and was not taken yet."""

    __slots__ = ("cached_tokens", "finish", "logprobs", "stop_token", "tokens")

    def __init__(self) -> None:
        self.tokens = bytearray()
        self.logprobs: list[TokenLogprobs] = []
        self.finish, self.stop_token, self.cached_tokens = "", -1, 0

    def add(self, output: RequestOutput) -> None:
        self.tokens += output.tokens
        self.logprobs += output.logprobs
        self.finish, self.stop_token = output.finish, output.stop_token
        self.cached_tokens = max(self.cached_tokens, output.cached_tokens)

    def merged(self, name: str) -> RequestOutput:
        return RequestOutput(
            name=name,
            tokens=bytes(self.tokens),
            finish=self.finish,
            stop_token=self.stop_token,
            cached_tokens=self.cached_tokens,
            logprobs=tuple(self.logprobs),
        )


class OutputStream:
    """Outputs of one or several requests as they come; ends after each has had its last one.

    Closing it, leaving its `async with` or cancelling a task that waits in it aborts what is still live, as "client".
    """

    def __init__(self, names: Iterable[str], on_close: Callable[[Iterable[str], AbortReason], None]) -> None:
        self._on_close = on_close
        self._live = set(names)
        self._pending: dict[str, _Pending] = {}
        self._error: EngineDead | Refused | None = None
        self._news = asyncio.Event()
        self._has_ended = self._waits_for_end = False

    @property
    def live(self) -> frozenset[str]:
        """Names of requests whose last output has not arrived yet."""
        return frozenset(self._live)

    def __aiter__(self) -> AsyncIterator[RequestOutput]:
        return self

    async def __anext__(self) -> RequestOutput:
        """The oldest request's output. Raises Refused or EngineDead."""
        await self._wait()
        if not self._pending:
            raise StopAsyncIteration
        name = next(iter(self._pending))
        return self._pending.pop(name).merged(name)

    async def take(self, ended: bool = False) -> tuple[RequestOutput, ...]:
        """All that has arrived, one output a request; waits for some, empty at the end. Raises as iteration does.

        `ended`: waits until a request has had its last one. Whoever wants whole answers is not woken at each token then.
        """
        self._waits_for_end = ended
        await self._wait()
        taken, self._pending, self._has_ended = self._pending, {}, False
        return tuple(pending.merged(name) for name, pending in taken.items())

    async def _wait(self) -> None:
        while self._live and not self._has_news() and self._error is None:
            self._news.clear()
            try:
                await self._news.wait()
            except asyncio.CancelledError:
                self.close()
                raise
        if self._error is not None:
            self.close()
            raise self._error

    def _has_news(self) -> bool:
        return self._has_ended if self._waits_for_end else bool(self._pending)

    def close(self, reason: AbortReason = "client") -> None:
        """Abort what is still live and forget what has arrived. Idempotent."""
        self._on_close(self._live, reason)
        self._live.clear()
        self._pending.clear()
        self._news.set()

    async def aclose(self) -> None:
        """`close` under the name that `contextlib.aclosing` calls."""
        self.close()

    async def __aenter__(self) -> OutputStream:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def put(self, output: RequestOutput) -> None:
        """For the client: an output of one of the live requests has come."""
        pending = self._pending.get(output.name)
        if pending is None:
            pending = self._pending[output.name] = _Pending()
        pending.add(output)
        if output.finish:
            self._live.discard(output.name)
            self._has_ended = True
        if output.finish or not self._waits_for_end:
            self._news.set()

    def fail(self, error: EngineDead | Refused) -> None:
        """For the client: the stream ends with this error; of two the first counts."""
        if isinstance(error, Refused):
            self._live.discard(error.name)
        else:
            self._live.clear()
        self._error = self._error or error
        self._news.set()
