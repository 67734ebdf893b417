"""The engine core's client for programs without an event loop: the library, scripts, a prompt in a terminal.

Owns one background thread whose event loop runs an EngineClient, so that outputs are read and merged while the program
does something else. Knows nothing of texts. Any thread may call it, and `begin` serves other event loops.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable, Coroutine, Generator, Iterable, Sequence
from contextlib import suppress
from types import TracebackType
from typing import Any, TypeVar

from vnext.routing.policies import DEFAULT_POLICY
from vnext.runtime.client.bridged_stream import BridgedStream
from vnext.runtime.client.engines import AnyEngineClient, connect_engines
from vnext.runtime.client.output_stream import EngineDead
from vnext.runtime.protocol.merged_output import TakenOutput
from vnext.runtime.protocol.messages import EngineReady, EngineStats, SubmitRequest
from vnext.runtime.protocol.operations import AnyOperation
from vnext.runtime.protocol.settings import NO_ROLES, Roles
from vnext.state.events import AbortReason

CLOSED = "This program has closed the engine: start another one."
FORKED = "start one in each process that needs one, after the fork."
Result = TypeVar("Result")


class SyncEngineClient:
    """Blocking interface to EngineClient; raises the same errors (EngineDead, Refused)."""

    def __init__(self, loop: asyncio.AbstractEventLoop, thread: threading.Thread) -> None:
        self._loop = loop
        self._thread = thread
        self._client: AnyEngineClient | None = None
        self._lock, self._is_closed, self._pid = threading.Lock(), False, os.getpid()

    @classmethod
    def connect(
        cls, address: str | Sequence[str], timeout_s: float = 60.0, policy: str = DEFAULT_POLICY, roles: Roles = NO_ROLES
    ) -> SyncEngineClient:
        """Wait until the engine core at `address`, or at each of several with their `roles`, is ready. `policy` chooses among
        several. Raises EngineDead after `timeout_s`."""
        addresses = (address,) if isinstance(address, str) else address
        loop = asyncio.new_event_loop()
        thread = threading.Thread(target=loop.run_forever, name="engine client", daemon=True)
        thread.start()
        client = cls(loop, thread)
        try:
            client._client = client._wait(connect_engines(addresses, timeout_s, policy, 0, roles))
        finally:
            if client._client is None:
                client._stop_loop()
        return client

    @property
    def ready(self) -> EngineReady:
        return self._connected.ready

    @property
    def stats(self) -> EngineStats | None:
        return self._connected.stats

    @property
    def death(self) -> str | None:
        """Why the engine is dead, None while it lives."""
        return self._connected.death

    @property
    def trouble(self) -> str | None:
        """Why there are no answers at present, None while all is well; calls that wait go on waiting."""
        return self._connected.trouble

    def require_alive(self) -> None:
        """Raise EngineDead once the engine has ended and none follows, or the client is closed."""
        if (death := self.death) is not None:
            raise EngineDead(death)

    def run(self, requests: Sequence[SubmitRequest], whole: bool = False) -> Generator[TakenOutput, None, None]:
        """Submit all, then yield outputs as they come, until each request has had its last. `whole`: yield as requests end.

        Closing the iterator, or an exception in its consumer, aborts the requests that are still live.
        """
        client = self._connected
        stream = self._wait(_called(client.submit_all, requests))
        try:
            while outputs := self._wait(stream.take(whole)):
                yield from outputs
        finally:
            with suppress(EngineDead):  # a closed client has no live requests and no loop
                self._wait(_called(stream.close))

    def begin(self, requests: Sequence[SubmitRequest]) -> BridgedStream:
        """Submit all; their outputs come to the event loop that runs in this thread. Whoever leaves the stream closes it."""
        stream = BridgedStream(self._loop)
        self._call(stream.submit, self._connected, requests)
        return stream

    def abort(self, names: Iterable[str], reason: AbortReason) -> None:
        """End live requests; `run` and `begin` yield the finish "abort" for each."""
        self._call(self._connected.abort, tuple(names), reason)

    def operate(self, operation: AnyOperation) -> Any:
        """Carry out an operation and wait for its value. Raises NotDone, EngineDead."""
        return self._wait(self._connected.operate(operation))

    def reset_prefix_cache(self) -> None:
        self._call(self._connected.reset_prefix_cache)

    def close(self) -> None:
        """Leave the engine core and end the thread. Idempotent."""
        self._require_own_process()
        with self._lock:
            client, self._client = self._client, None
            self._is_closed = True
            leaving = None if client is None else asyncio.run_coroutine_threadsafe(client.close(), self._loop)
        if leaving is not None:
            leaving.result()
            self._stop_loop()

    def __enter__(self) -> SyncEngineClient:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def _connected(self) -> AnyEngineClient:
        self._require_own_process()
        if self._client is None:
            raise EngineDead(CLOSED)
        return self._client

    def _require_own_process(self) -> None:
        """Raise EngineDead in a fork, which has no thread of the client's: calls would wait for ever."""
        if os.getpid() != self._pid:
            raise EngineDead(f"Process {self._pid} has started this engine, and process {os.getpid()} is a fork of it: {FORKED}")

    def _call(self, function: Callable[..., None], *arguments: Any) -> None:
        """Call it in the loop, behind what was called before. What would come behind the end of the loop would never be called."""
        with self._lock:
            if self._is_closed:
                raise EngineDead(CLOSED)
            self._loop.call_soon_threadsafe(function, *arguments)

    def _wait(self, work: Coroutine[Any, Any, Result]) -> Result:
        try:
            self._require_own_process()
            with self._lock:
                if self._is_closed:
                    raise EngineDead(CLOSED)
                future = asyncio.run_coroutine_threadsafe(work, self._loop)
        except EngineDead:
            work.close()
            raise
        try:
            return future.result()
        finally:
            future.cancel()  # no effect when done; after Ctrl-C it also ends the waiting task

    def _stop_loop(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


async def _called(function: Callable[..., Result], *given: object) -> Result:
    return function(*given)  # in the client's event loop
