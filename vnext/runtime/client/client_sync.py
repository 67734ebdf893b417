"""The engine core's client for programs without an event loop: the library, scripts, a prompt in a terminal.

Owns one background thread whose event loop runs an EngineClient, so that outputs are read and merged while the program
does something else. Knows nothing of texts. One program thread uses it at a time.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine, Iterable, Iterator, Sequence
from types import TracebackType
from typing import Any, TypeVar

from vnext.router.policies import DEFAULT_POLICY
from vnext.runtime.client.engines import AnyEngineClient, connect_engines
from vnext.runtime.client.output_stream import OutputStream
from vnext.runtime.messages import EngineReady, EngineStats, RequestOutput, SubmitRequest
from vnext.runtime.operations import AnyOperation
from vnext.state.events import AbortReason

Result = TypeVar("Result")


class SyncEngineClient:
    """Blocking interface to EngineClient; raises the same errors (EngineDead, Refused)."""

    def __init__(self, loop: asyncio.AbstractEventLoop, thread: threading.Thread) -> None:
        self._loop = loop
        self._thread = thread
        self._client: AnyEngineClient | None = None

    @classmethod
    def connect(
        cls, address: str | Sequence[str], timeout_s: float = 60.0, policy: str = DEFAULT_POLICY, prefill_engines: int = 0
    ) -> SyncEngineClient:
        """Wait until the engine core at `address`, or at each of several, is ready. `policy` chooses among several, of which the
        first `prefill_engines` compute prompts for the others. Raises EngineDead after `timeout_s`."""
        addresses = (address,) if isinstance(address, str) else address
        loop = asyncio.new_event_loop()
        thread = threading.Thread(target=loop.run_forever, name="engine client", daemon=True)
        thread.start()
        client = cls(loop, thread)
        try:
            client._client = client._wait(connect_engines(addresses, timeout_s, policy, prefill_engines=prefill_engines))
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

    def run(self, requests: Sequence[SubmitRequest], whole: bool = False) -> Iterator[RequestOutput]:
        """Submit all, then yield outputs as they come, until each request has had its last. `whole`: yield as requests end.

        Closing the iterator, or an exception in its consumer, aborts the requests that are still live.
        """
        client = self._connected
        stream = self._wait(_submit(client, requests))
        try:
            while outputs := self._wait(stream.take(whole)):
                yield from outputs
        finally:
            if self._client is client:  # a closed client has no live requests and no loop
                self._wait(stream.aclose())

    def abort(self, names: Iterable[str], reason: AbortReason) -> None:
        """End live requests; `run` yields the finish "abort" for each."""
        self._loop.call_soon_threadsafe(self._connected.abort, tuple(names), reason)

    def operate(self, operation: AnyOperation) -> Any:
        """Carry out an operation and wait for its value. Raises NotDone, EngineDead."""
        return self._wait(self._connected.operate(operation))

    def reset_prefix_cache(self) -> None:
        self._loop.call_soon_threadsafe(self._connected.reset_prefix_cache)

    def close(self) -> None:
        """Leave the engine core and end the thread. Idempotent."""
        if self._client is not None:
            self._wait(self._client.close())
            self._client = None
            self._stop_loop()

    def __enter__(self) -> SyncEngineClient:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def _connected(self) -> AnyEngineClient:
        if self._client is None:
            raise ValueError("this client is closed: connect a new one")
        return self._client

    def _wait(self, work: Coroutine[Any, Any, Result]) -> Result:
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        finally:
            future.cancel()  # no effect when done; after Ctrl-C it also ends the waiting task

    def _stop_loop(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


async def _submit(client: AnyEngineClient, requests: Sequence[SubmitRequest]) -> OutputStream:
    return client.submit_all(requests)  # in its own event loop
