"""Output streams: outputs of one or several requests, merged until their consumer takes them; LiveRequest: what a client must know
of a request to have another engine core go on with it.

Owns the errors with which a stream can end or fail to begin. Knows no sockets: the client puts outputs in and is notified when
the stream closes. A slow consumer leaves one waiting entry per live request, however many tokens arrive.
"""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import AsyncIterator, Callable, Iterable
from typing import NoReturn, Protocol

from msgspec.structs import replace

from vnext.runtime.protocol.merged_output import MergedOutput, TakenOutput
from vnext.runtime.protocol.messages import RequestOutput, SubmitRequest, derived_seed
from vnext.state.events import AbortReason


class EngineDead(Exception):
    """The engine core has died, its connection is lost or it never answered."""


class EngineStalled(Exception):
    """The engine core is silent, or a step of its ranks does not end; it may go on."""


class EngineNotStarted(EngineDead):
    """The engine core reports why it cannot start. It reports the same to the process that started it."""


class Refused(Exception):
    """The engine core refused a request: one sentence with the value and the remedy."""

    def __init__(self, name: str, message: str) -> None:
        super().__init__(message)
        self.name = name
        self.message = message


class Taker(Protocol):
    """Takes outputs as they arrive, in the same turn of the event loop; each call returns whether it can take more at once."""

    def output(self, output: RequestOutput) -> bool:
        """Any output."""

    def token(self, name: str, token: int) -> bool:
        """A request goes on with this token; nothing else has changed."""


class OutputStream:
    """Outputs of one or several requests as they come; ends after each request has had its last one.

    Closing it (`contextlib.closing`) or cancelling a task that waits in it aborts live requests, with reason "client".
    """

    def __init__(self, names: Iterable[str], on_close: Callable[[Iterable[str], AbortReason], None]) -> None:
        self._on_close = on_close
        self._live = set(names)
        self._pending: dict[str, MergedOutput] = {}
        self._error: Exception | None = None
        self._news: asyncio.Future[None] | None = None  # while a task waits
        self._has_ended = self._waits_for_end = False
        self._taker: Taker | None = None

    @property
    def live(self) -> frozenset[str]:
        """Names of requests whose last output has not arrived yet."""
        return frozenset(self._live)

    def __aiter__(self) -> AsyncIterator[RequestOutput]:
        return self

    async def __anext__(self) -> RequestOutput:
        """The output of the request that has waited longest. Raises Refused or EngineDead."""
        await self._wait()
        if not self._pending:
            raise StopAsyncIteration
        name = next(iter(self._pending))
        return self._pending.pop(name).merged(name)

    async def take(self, ended: bool = False) -> tuple[TakenOutput, ...]:
        """All that has arrived, one output a request; waits for some, empty at the end. Raises as iteration does.

        `ended`: waits until a request has had its last output, so that a consumer of whole answers does not wake at each token.
        """
        self._waits_for_end = ended
        await self._wait()
        taken, self._pending, self._has_ended = self._pending, {}, False
        return tuple(pending.taken(name) for name, pending in taken.items())

    async def feed(self, taker: Taker) -> bool:
        """Give outputs to `taker` as they arrive, without waking a task for them, until it cannot take more. Then returns True,
        and later outputs are merged. Returns False when each request has had its last one. Raises as iteration does, and what
        `taker` raises."""
        self._taker = taker
        while self._pending and self._taker is not None:
            name = next(iter(self._pending))
            self._give(self._pending.pop(name).merged(name))
        while self._taker is not None and self._live and self._error is None:
            await self._woken()
        self._taker = None
        if self._error is not None:
            self._raise(self._error)
        return bool(self._live or self._pending)

    def _give(self, output: RequestOutput) -> None:
        try:
            is_ready = self._taker is not None and self._taker.output(output)
        except Exception as error:  # for the task that feeds the taker: the client, whose turn this is, has other streams
            self._error, is_ready = self._error or error, False
        if not is_ready:
            self._taker = None
            self._wake()

    def _wake(self) -> None:
        if self._news is not None and not self._news.done():
            self._news.set_result(None)

    async def _woken(self) -> None:
        """Wait for `_wake`."""
        self._news = asyncio.get_running_loop().create_future()
        try:
            await self._news
        except asyncio.CancelledError:
            self.close()
            raise

    async def _wait(self) -> None:
        while self._live and not self._has_news() and self._error is None:
            await self._woken()
        if self._error is not None:
            self._raise(self._error)

    def _raise(self, error: Exception) -> NoReturn:
        self.close()
        raise error

    def _has_news(self) -> bool:
        return self._has_ended if self._waits_for_end else bool(self._pending)

    def close(self, reason: AbortReason = "client") -> None:
        """Abort live requests and discard what has arrived. Idempotent."""
        if self._live:
            self._on_close(self._live, reason)
        self._live.clear()
        self._pending.clear()
        self._taker = None
        self._wake()

    def put(self, output: RequestOutput) -> None:
        """For the client: an output of one of the live requests has come."""
        if output.finish:
            self._live.discard(output.name)
            self._has_ended = True
        if self._taker is not None:
            self._give(output)
            if not self._live:
                self._wake()
            return
        pending = self._pending.get(output.name)
        if pending is None:
            pending = self._pending[output.name] = MergedOutput()
        pending.add(output)
        if output.finish or not self._waits_for_end:
            self._wake()

    def put_token(self, name: str, token: int) -> None:
        """For the client: a live request goes on with this token; nothing else has changed."""
        if self._taker is not None:
            try:
                is_ready = self._taker.token(name, token)
            except Exception as error:  # see _give
                self._error, is_ready = self._error or error, False
            if not is_ready:
                self._taker = None
                self._wake()
            return
        pending = self._pending.get(name)
        if pending is None:
            pending = self._pending[name] = MergedOutput()
        pending.tokens += token.to_bytes(4, "little")
        if not self._waits_for_end:
            self._wake()

    def fail(self, error: EngineDead | Refused) -> None:
        """For the client: the stream ends with this error; the first error counts."""
        if isinstance(error, Refused):
            self._live.discard(error.name)
        else:
            self._live.clear()
        self._error = self._error or error
        self._wake()


class LiveRequest:
    """A request whose last output has not arrived. `tokens` (int32) are those that have; `number` is its number in the engine core
    that has it, -1 before its first output. `is_encoded`: no other engine is asked for its inputs. `prefilled`: the output of the
    engine that has computed its prompt for that one, None without one."""

    __slots__ = ("_is_repeated", "_known", "_was_heard", "is_encoded", "number", "prefilled", "request", "stream", "tokens")

    def __init__(self, request: SubmitRequest, stream: OutputStream) -> None:
        self.request, self.stream = request, stream
        self.tokens = array("i")
        self.number = -1
        self.prefilled: RequestOutput | None = None
        self._known = 0  # tokens when it was submitted
        self._was_heard = self._is_repeated = self.is_encoded = False

    def lose(self, root_seed: int) -> None:
        """The engine core that had it has ended. A request that has had an output keeps the key that `root_seed` gave it."""
        has_new = len(self.tokens) > self._known
        changes = {"deaths": 1 if has_new else self.request.deaths + 1, "generated": self.tokens.tobytes()}
        if self.number >= 0 and not self.request.has_seed:
            seed = derived_seed(root_seed, self.number)
            changes |= {"sampling": replace(self.request.sampling, seed=seed), "has_seed": True}
        self.request = replace(self.request, **changes)
        self._known, self.number, self._is_repeated = len(self.tokens), -1, self._was_heard

    def take(self, output: RequestOutput) -> RequestOutput:
        """Take in an output; returns what is new of it. What a request's first outputs report comes again from another engine
        core: the wait, the tokens found in the cache and, if there are tokens behind it, the prompt's results. Experts, which come
        with every token, may repeat."""
        self.tokens.frombytes(output.tokens)
        if self.prefilled is not None and not self._was_heard:
            waited_s = output.queue_seconds + self.prefilled.queue_seconds
            output = replace(output, cached_tokens=self.prefilled.cached_tokens, queue_seconds=waited_s)
        self._was_heard = True
        if not self._is_repeated:
            return output
        prompt = tuple(part for part in output.prompt if part.experts or not self._known)
        return replace(output, queue_seconds=0.0, cached_tokens=0, prompt=prompt, missed=None)
