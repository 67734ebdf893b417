"""Client: the engine core as an API process or the library sees it.

Owns the set of live requests. Knows nothing of HTTP, texts or processes. The event loop reports what arrives, and each message is
sorted into output streams at once, without a task; a task pings a silent core. When the engine core dies and another one follows
it, the client connects to that one and has it go on with every live request: streams only wait. Otherwise every live stream ends
with EngineDead. An engine that is only silent ends nothing (silence.py). Where there are several engines, another one may take a
request over (replicas.py). `client_sync` serves programs without an event loop.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, assert_never

import msgspec
import zmq

from vnext.runtime.client.connection import Connection
from vnext.runtime.client.followers import Followers
from vnext.runtime.client.output_stream import EngineDead, EngineNotStarted, LiveRequest, OutputStream, Refused
from vnext.runtime.client.pending_operations import PendingOperations
from vnext.runtime.client.silence import Silence
from vnext.runtime.protocol.engine_messages import engine_decoder
from vnext.runtime.protocol.messages import (
    AbortRequests,
    ClientMessage,
    EngineDied,
    EngineReady,
    EngineStats,
    Events,
    Goodbye,
    Hello,
    Operated,
    Outputs,
    Ping,
    Pong,
    RequestOutput,
    RequestRefused,
    ResetPrefixCache,
    SubmitRequest,
)
from vnext.runtime.protocol.operations import AnyOperation
from vnext.state.events import AbortReason
from vnext.state.params import Sampling

GOODBYE_LINGER_MS = 500
BLAMED = "The engine core ended several times in a row with this request, at last as it began this one alone: it is not tried again"
Numbered = tuple[Callable[[int], None], Callable[[str, int], None], str]
"""Of a request that the engine core names by number: where its tokens are kept, where they go, and its name."""


class Losses(msgspec.Struct):
    """The engine cores that have ended. `present`: the sentence about the one that no other has followed yet, "" for none, which
    ended at `since_s`; `recoveries` in `seconds` were there before, without those of the present core's ranks."""

    present: str = ""
    since_s: float = 0.0
    recoveries: int = 0
    seconds: float = 0.0


class EngineClient:
    """One client of an engine, whichever engine core runs it. It belongs to the event loop that connected it.

    `recoveries` counts the engine cores and ranks that have followed others, `recovery_seconds` is the sum of the times between.
    `followers` read the engine's events.
    `changed` is called whenever the engine core has ended or another one is ready, before streams fail; `forgotten` with the name
    of each request that is not live here any more.
    """

    def __init__(
        self, address: str, changed: Callable[[], None] = lambda: None, forgotten: Callable[[str], None] = lambda name: None
    ) -> None:
        self.address, self._changed, self._forgotten = address, changed, forgotten
        self._context = zmq.Context()
        self._live: dict[str, LiveRequest] = {}
        self._numbered: dict[int, Numbered] = {}
        self._started: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._ready: EngineReady | None = None
        self._stats: EngineStats | None = None
        self._death: str | None = None
        self._losses = Losses()
        self._silence = Silence()
        self._operations = PendingOperations()
        self.followers = Followers(self._send)
        self._connection = self._connected()

    @classmethod
    async def connect(cls, address: str, timeout_s: float | None = 60.0) -> EngineClient:
        """Say hello to the engine core at `address` and wait until it is ready. Raises EngineDead after `timeout_s` (None:
        never), EngineNotStarted when the core reports that it cannot start."""
        client = cls(address)
        await client.begin(timeout_s)
        return client

    async def begin(self, timeout_s: float | None) -> None:
        """The rest of `connect`."""
        try:
            await asyncio.wait_for(self._started, timeout_s)
        except TimeoutError as error:
            sentence = f"The engine core at {self.address} did not answer within {timeout_s:g} s: is it running?"
            raise EngineDead(sentence) from error
        finally:
            if self._ready is None:
                self._death = self._death or f"The engine core at {self.address} has not become ready."
                await self._disconnect(linger_ms=0)
        self._silence.begin(lambda: self._send(Ping()), lambda: self._losses.present)

    @property
    def engines(self) -> tuple[EngineClient, ...]:
        """The clients of single engines: this one."""
        return (self,)

    @property
    def ready(self) -> EngineReady:
        """The engine core's facts about itself."""
        assert self._ready is not None, "connect() makes clients"
        return self._ready

    @property
    def stats(self) -> EngineStats | None:
        """The latest statistics, None before the first have arrived."""
        return self._stats

    @property
    def death(self) -> str | None:
        """Why the engine is dead, None while it lives."""
        return self._death

    @property
    def trouble(self) -> str | None:
        """Why there are no answers at present: the engine is dead or recovers, its core is silent, or a step of its ranks does not
        end. None while all is well."""
        recovering, stalled = ("", "") if (stats := self._stats) is None else (stats.recovering, stats.stalled)
        silent = not self._silence.has_heard and self._silence.sentence
        return self._death or self._losses.present or recovering or silent or stalled or None

    @property
    def recovering(self) -> str:
        """What has ended and is started again, in a sentence; "" while nothing is. Requests wait."""
        return self._losses.present or (self._stats.recovering if self._stats is not None else "")

    @property
    def recoveries(self) -> int:
        return self._losses.recoveries + (self._stats.recoveries if self._stats is not None else 0)

    @property
    def recovery_seconds(self) -> float:
        return self._losses.seconds + (self._stats.recovery_seconds if self._stats is not None else 0.0)

    @property
    def was_ready(self) -> bool:
        """Whether an engine core has been ready, so that there is `ready`."""
        return self._ready is not None

    @property
    def is_up(self) -> bool:
        """Whether the engine core can be sent requests."""
        return self._ready is not None and self._death is None and not self._losses.present

    @property
    def live_count(self) -> int:
        return len(self._live)

    @property
    def live(self) -> Iterable[LiveRequest]:
        return self._live.values()

    def has_any(self, names: Iterable[str]) -> bool:
        """Whether any of these requests is live here."""
        return not self._live.keys().isdisjoint(names)

    def submit(
        self,
        *,
        name: str,
        prompt: bytes,
        sampling: Sampling,
        priority: int = 0,
        cache_salt: str = "",
        has_seed: bool = True,
    ) -> OutputStream:
        """Send one request; `prompt` is int32 bytes. Raises EngineDead; iterating raises Refused too."""
        request = SubmitRequest(
            name=name,
            prompt=prompt,
            sampling=sampling,
            priority=priority,
            cache_salt=cache_salt,
            has_seed=has_seed,
        )
        return self.submit_all((request,))

    def submit_all(self, requests: Sequence[SubmitRequest]) -> OutputStream:
        """Send several requests whose outputs come in one stream. If one is refused, the stream ends and the others are
        aborted.

        A name belongs to one request for the client's whole life: late outputs of an old one must not reach a new one.
        """
        if self._death is not None:
            raise EngineDead(self._death)
        names = {request.name for request in requests}
        if len(names) != len(requests) or not self._live.keys().isdisjoint(names):
            raise ValueError("a request's name must be unique among the live requests")
        stream = OutputStream(names, self.drop)
        for request in requests:
            self.take(LiveRequest(request, stream))
        return stream

    def take(self, live: LiveRequest) -> None:
        """Have this engine compute a request, or go on with it where another engine has lost it."""
        self._live[live.request.name] = live
        self._send(live.request)

    def release(self, deaths_max: int) -> list[LiveRequest]:
        """Forget the live requests that at most `deaths_max` engine cores in a row have lost; returns them, for another engine."""
        free = [live for live in self._live.values() if live.request.deaths <= deaths_max]
        for live in free:
            self._forget(live.request.name)
        return free

    def abort(self, names: Iterable[str], reason: AbortReason) -> None:
        """End live requests; their streams get the finish "abort" at once. Names that have ended are ignored."""
        live = {name: self._live[name] for name in names if name in self._live}
        self.drop(live, reason)
        for name, each in live.items():
            each.stream.put(RequestOutput(name=name, tokens=b"", finish="abort"))

    def abort_all(self, reason: AbortReason) -> None:
        self.abort(tuple(self._live), reason)

    def reset_prefix_cache(self) -> None:
        self._send(ResetPrefixCache())

    async def operate(self, operation: AnyOperation) -> Any:
        """Carry out an operation; its value. Raises NotDone, with nothing changed, and EngineDead."""
        if self._death is not None:
            raise EngineDead(self._death)
        return await self._operations.ask(self._send, operation)

    async def close(self) -> None:
        """Say goodbye and leave; live streams end with EngineDead."""
        self._send(Goodbye())
        self._die("The connection to the engine core was closed by this process.")
        await self._disconnect(GOODBYE_LINGER_MS)

    def _connected(self) -> Connection:
        """A new connection; its first message goes to whichever engine core answers at the address."""
        connection = Connection(self._context, self.address, self._read, self._lose)
        connection.send(Hello())
        return connection

    def _send(self, message: ClientMessage) -> None:
        """Send to the engine core. One that is not there yet learns of what is live when it comes."""
        if self._death is None and not self._losses.present:
            self._connection.send(message)

    def _read(self, data: bytes) -> bool:
        """Take in a message; returns whether to go on reading."""
        self._silence.has_heard = True
        try:
            message = engine_decoder.decode(data)
        except (ValueError, RecursionError) as error:
            self._die(f"The engine core sent a message that this version cannot read: {error}.")
            return False
        match message:
            case Outputs():
                self._deliver(message)
            case EngineStats():
                self._stats = message
            case RequestRefused(name=name, message=sentence):
                if (live := self._forget(name)) is not None:
                    live.stream.fail(Refused(name, sentence))
            case EngineDied(message=sentence, is_followed=is_followed):
                self._end(sentence, is_followed)
            case EngineReady():
                self._begin(message)
            case Operated():
                self._operations.answered(message)
            case Events():
                self.followers.heard(message)
            case Pong():
                pass  # the message itself shows that the core runs
            case _:
                assert_never(message)
        return self._death is None

    def drop(self, names: Iterable[str], reason: AbortReason) -> None:
        """End live requests whose streams want nothing more of them. Names that have ended are ignored."""
        gone = tuple(sorted(name for name in names if self._forget(name) is not None))
        if gone:
            self._send(AbortRequests(names=gone, reason=reason))

    def _deliver(self, message: Outputs) -> None:
        """Those that go on with one token each, and the others. Requests aborted here meanwhile are unknown and are skipped."""
        find = self._numbered.get
        for number, token in zip(memoryview(message.numbers).cast("q"), memoryview(message.tokens).cast("i")):
            if (found := find(number)) is not None:
                keep, put_token, name = found
                keep(token)
                put_token(name, token)
        for output in message.outputs:
            if (live := self._live.get(output.name)) is None:
                continue
            if output.finish:
                self._forget(output.name)
            elif output.number >= 0:
                live.number = output.number
                self._numbered[output.number] = live.tokens.append, live.stream.put_token, output.name
            live.stream.put(live.take(output))

    def _forget(self, name: str) -> LiveRequest | None:
        """Remove a request from the live ones and return it, None if it was not live."""
        if (live := self._live.pop(name, None)) is not None:
            self._numbered.pop(live.number, None)
            self._forgotten(name)
        return live

    # ---- the engine core's beginning and end -----------------------------------------------------------------------

    def _begin(self, ready: EngineReady) -> None:
        """An engine core is ready. One that follows another gets every live request."""
        before, self._ready = self._ready, ready
        if not self._started.done():
            self._started.set_result(None)
        if not self._losses.present:
            return
        if before is not None and before.model_digest != ready.model_digest and not ready.replaces:
            return self._die("The model's files have changed since the engine core that has ended was started.")
        self._losses.present = ""
        self.followers.ask()
        self._losses.recoveries += 1
        self._losses.seconds += time.monotonic() - self._losses.since_s
        if (blamed := self._live.get(ready.blamed)) is not None:
            blamed.stream.put(RequestOutput(name=ready.blamed, tokens=b"", finish="abort", error=BLAMED))
            self._forget(ready.blamed)
        for live in self._live.values():
            self._send(live.request)
        self._operations.ask_again(self._send)
        self._changed()

    def _lose(self) -> None:
        """The connection has broken: the engine core's process has ended."""
        sentence = f"The connection to the engine core at {self.address} is lost: the engine core has ended"
        self._end(f"{sentence}.", is_followed=self._ready is None or self._ready.max_restarts > 0)

    def _end(self, sentence: str, is_followed: bool) -> None:
        """The engine core has ended, or will at once. If another one follows it, wait for that one at the same address."""
        if not is_followed:
            if not self._started.done():
                self._started.set_exception(EngineNotStarted(sentence))
            return self._die(sentence)
        self._connection.close()
        if self._ready is not None and not self._losses.present:
            present = f"{sentence.rstrip('.')}, and is started again: requests wait."
            self._losses = Losses(present, time.monotonic(), self.recoveries, self.recovery_seconds)
            self._stats = None
            self.followers.lose()
            self._lose_all(self._ready)
        self._connection = self._connected()
        self._changed()

    def _lose_all(self, ready: EngineReady) -> None:
        self._numbered = {}
        for live in self._live.values():
            live.lose(ready.root_seed)

    def _die(self, sentence: str) -> None:
        self._death = self._death or sentence
        self._silence.end()
        if self._ready is not None and not self._losses.present:
            self._lose_all(self._ready)
        self._operations.fail(self._death)
        self.followers.lose()
        if not self._started.done():
            self._started.set_exception(EngineDead(sentence))
        self._changed()
        live, self._live, self._numbered = self._live, {}, {}
        for stream in dict.fromkeys(each.stream for each in live.values()):
            stream.fail(EngineDead(self._death))

    async def _disconnect(self, linger_ms: int) -> None:
        self._connection.close(0 if self._losses.present else linger_ms)
        try:  # waits until the last messages are sent or the linger time is over
            await asyncio.to_thread(self._context.term)
        except RuntimeError:  # the interpreter is shutting down and starts no more threads
            self._context.term()
