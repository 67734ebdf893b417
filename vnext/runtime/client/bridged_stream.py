"""A stream of outputs for a consumer in another event loop, and thread, than the client's.

Owns what has come and was not taken, merged. The client's thread puts outputs in as they arrive; the consumer's loop is woken once
for all that arrives until it takes them. Submission and closing are callbacks of the client's loop, in the order of the calls, so
a stream that is left at once leaves no request behind.
"""

from __future__ import annotations

import asyncio
import threading
from collections import defaultdict
from collections.abc import Sequence
from contextlib import closing, suppress

from vnext.runtime.client.engines import AnyEngineClient
from vnext.runtime.client.output_stream import OutputStream
from vnext.runtime.protocol.merged_output import MergedOutput, TakenOutput
from vnext.runtime.protocol.messages import RequestOutput, SubmitRequest


class BridgedStream:
    """The outputs of some requests, for the event loop that makes it. `own` is the client's."""

    def __init__(self, own: asyncio.AbstractEventLoop) -> None:
        self._own, self._loop = own, asyncio.get_running_loop()
        self._lock, self._news = threading.Lock(), asyncio.Event()
        self._pending: defaultdict[str, MergedOutput] = defaultdict(MergedOutput)
        self._is_woken = self._has_ended = False
        self._error: Exception | None = None
        self._stream: OutputStream | None = None
        self._feeding: asyncio.Task[None] | None = None

    async def take(self) -> tuple[TakenOutput, ...]:
        """All that has arrived, one output a request; waits for some, empty at the end. Raises EngineDead, Refused."""
        while True:
            await self._news.wait()
            with self._lock:
                taken, self._pending = self._pending, defaultdict(MergedOutput)
                self._is_woken = False
                if not self._has_ended:
                    self._news.clear()
            if taken:
                return tuple(merged.taken(name) for name, merged in taken.items())
            if self._error is not None:
                raise self._error
            if self._has_ended:
                return ()

    def close(self) -> None:
        """Abort what is live. From any thread, idempotent."""
        with suppress(RuntimeError):  # the client is closed, and nothing is live
            self._own.call_soon_threadsafe(self._close)

    # ---- in the client's loop --------------------------------------------------------------------------------------

    def submit(self, client: AnyEngineClient, requests: Sequence[SubmitRequest]) -> None:
        try:
            self._stream = client.submit_all(requests)
        except Exception as error:  # for the consumer, in whose loop it is raised
            return self._end(error)
        self._feeding = self._own.create_task(self._feed(self._stream))

    async def _feed(self, stream: OutputStream) -> None:
        try:
            with closing(stream):
                await stream.feed(self)
        except Exception as error:  # likewise
            self._end(error)
        else:
            self._end(None)

    def _close(self) -> None:
        if self._stream is not None:
            self._stream.close()

    def output(self, output: RequestOutput) -> bool:
        """As a Taker of the client's stream. Raises RuntimeError where the consumer's loop has been closed: the client aborts."""
        with self._lock:
            self._pending[output.name].add(output)
            self._wake()
        return True

    def token(self, name: str, token: int) -> bool:
        """As a Taker."""
        with self._lock:
            self._pending[name].tokens += token.to_bytes(4, "little")
            self._wake()
        return True

    def _end(self, error: Exception | None) -> None:
        with self._lock, suppress(RuntimeError):  # a closed loop has no consumer
            self._error, self._has_ended = error, True
            self._wake()

    def _wake(self) -> None:
        if not self._is_woken:
            self._is_woken = True
            self._loop.call_soon_threadsafe(self._news.set)
