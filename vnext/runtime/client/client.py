"""Client: the engine core as an API process or the library sees it, over one ZMQ DEALER socket.

Owns the socket and the set of live requests. Knows nothing of HTTP, texts or processes. The event loop reports what arrives, and
each message is sorted into output streams at once, without a task; a task pings a silent core. When the engine dies, every live
stream ends with EngineDead and the client never recovers. An engine that is only silent ends nothing (silence.py). `client_sync`
serves programs without an event loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from typing import assert_never

import msgspec
import zmq

from vnext.runtime.client.output_stream import EngineDead, EngineNotStarted, OutputStream, Refused
from vnext.runtime.client.silence import INTERVAL_S, Silence
from vnext.runtime.messages import (
    AbortRequests,
    ClientMessage,
    EngineDied,
    EngineMessage,
    EngineReady,
    EngineStats,
    Goodbye,
    Hello,
    Outputs,
    Ping,
    Pong,
    RequestOutput,
    RequestRefused,
    ResetPrefixCache,
    SubmitRequest,
    encoder,
    engine_decoder,
)
from vnext.state.events import AbortReason
from vnext.state.params import Sampling

GOODBYE_LINGER_MS = 500
MESSAGES_A_TURN = 16  # as many tokens of a stream as go out in one write, and a millisecond of the event loop
_READABLE = int(zmq.POLLIN)


class EngineClient:
    """One connection to an engine core; every message is one frame, and those of a turn go together. It belongs to the event loop
    that connected it."""

    def __init__(self, address: str) -> None:
        self._address = address
        self._loop = asyncio.get_running_loop()
        self._context = zmq.Context()
        self._socket = _dealer(self._context)
        self._unsent: list[bytes] = []
        self._reads_on = False
        self._monitor = self._socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        self._streams: dict[str, OutputStream] = {}
        self._numbers: dict[str, int] = {}  # of requests that the engine core names by number
        self._numbered: dict[int, tuple[OutputStream, str]] = {}
        self._asking: asyncio.Task[None] | None = None
        self._started: asyncio.Future[None] = self._loop.create_future()
        self._ready: EngineReady | None = None
        self._stats: EngineStats | None = None
        self._death: str | None = None
        self._silence = Silence()

    @classmethod
    async def connect(cls, address: str, timeout_s: float | None = 60.0) -> EngineClient:
        """Say hello to the engine core at `address` and wait until it is ready. Raises EngineDead after `timeout_s` (None:
        never), EngineNotStarted when the core reports that it cannot start."""
        client = cls(address)
        try:
            client._socket.connect(address)
            client._loop.add_reader(client._socket.fd, client._read)
            client._send(Hello())
            await asyncio.wait_for(client._started, timeout_s)
        except TimeoutError as error:
            sentence = f"The engine core at {address} did not answer within {timeout_s:g} s: is it running?"
            raise EngineDead(sentence) from error
        finally:
            if client._ready is None:
                await client._close_sockets(linger_ms=0)
        client._loop.add_reader(client._monitor.fd, client._look_for_end)
        client._look_for_end()
        client._asking = asyncio.create_task(client._ask_when_silent())
        return client

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
        """Why there are no answers at present: the engine is dead, its core is silent, or a step of its ranks does not end.
        None while all is well."""
        stalled = self._stats.stalled if self._stats is not None else ""
        return self._death or self._silence.sentence or stalled or None

    @property
    def live_count(self) -> int:
        return len(self._streams)

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
        if len(names) != len(requests) or not names.isdisjoint(self._streams):
            raise ValueError("a request's name must be unique among the live requests")
        stream = OutputStream(names, self._drop)
        for request in requests:
            self._streams[request.name] = stream
            self._send(request)
        return stream

    def abort(self, names: Iterable[str], reason: AbortReason) -> None:
        """End live requests; their streams get the finish "abort" at once. Names that have ended are ignored."""
        live = {name: self._streams[name] for name in names if name in self._streams}
        self._drop(live, reason)
        for name, stream in live.items():
            stream.put(RequestOutput(name=name, tokens=b"", finish="abort"))

    def abort_all(self, reason: AbortReason) -> None:
        """`abort` for every live request."""
        self.abort(tuple(self._streams), reason)

    def reset_prefix_cache(self) -> None:
        self._send(ResetPrefixCache())

    async def close(self) -> None:
        """Say goodbye and leave; live streams end with EngineDead."""
        if self._death is None:
            self._send(Goodbye())
        self._die("The connection to the engine core was closed by this process.")
        if self._asking is not None:
            self._asking.cancel()
        await self._close_sockets(GOODBYE_LINGER_MS)

    def _send(self, message: ClientMessage) -> None:
        """Send at the end of this turn, without waiting: ZMQ keeps the order and sends as soon as it can. The API server bounds
        what may queue."""
        if not self._unsent:
            self._loop.call_soon(self._flush)
        self._unsent.append(encoder.encode(message))

    def _flush(self) -> None:
        """Send what a turn has left, as the frames of one message: each time ZMQ's thread wakes costs as much as a request."""
        messages, self._unsent = self._unsent, []
        if messages:
            self._socket.send_multipart(messages)
            self._read()

    def _read(self) -> None:
        """Take in what has arrived, the rest in the next turn: an engine that is ahead must not keep the loop. ZMQ's file reports
        a change once, and a change that sending has seen not at all."""
        for _ in range(MESSAGES_A_TURN):
            if not self._socket.get(zmq.EVENTS) & _READABLE or self._death is not None:
                return
            self._silence.heard()
            try:
                self._receive(engine_decoder.decode(self._socket.recv()))
            except msgspec.MsgspecError as error:
                self._die(f"The engine core sent a message that this version cannot read: {error}.")
        if not self._reads_on:
            self._reads_on = True
            self._loop.call_soon(self._read_on)

    def _read_on(self) -> None:
        self._reads_on = False
        if not self._socket.closed:
            self._read()

    def _drop(self, names: Iterable[str], reason: AbortReason) -> None:
        gone = tuple(sorted(name for name in names if self._forget(name) is not None))
        if gone and self._death is None:
            self._send(AbortRequests(names=gone, reason=reason))

    def _receive(self, message: EngineMessage) -> None:
        match message:
            case Outputs():
                self._deliver_columns(message.numbers, message.tokens)
                for output in message.outputs:
                    self._deliver(output)
            case EngineStats():
                self._stats = message
            case RequestRefused(name=name, message=sentence):
                if (stream := self._forget(name)) is not None:
                    stream.fail(Refused(name, sentence))
            case EngineDied(message=sentence):
                if not self._started.done():
                    self._started.set_exception(EngineNotStarted(sentence))
                self._die(sentence)
            case EngineReady():
                self._ready = message
                if not self._started.done():
                    self._started.set_result(None)
            case Pong():
                pass  # the message itself shows that the core runs
            case _:
                assert_never(message)

    def _deliver(self, output: RequestOutput) -> None:
        stream = self._streams.get(output.name)
        if stream is None:
            return  # aborted here while this output was in transit
        if output.finish:
            self._forget(output.name)
        elif output.number >= 0:
            self._numbers[output.name] = output.number
            self._numbered[output.number] = stream, output.name
        stream.put(output)

    def _deliver_columns(self, numbers: bytes, tokens: bytes) -> None:
        """One token each for requests that go on; requests aborted here are unknown by now and are skipped."""
        find = self._numbered.get
        for number, token in zip(memoryview(numbers).cast("q"), memoryview(tokens).cast("i")):
            if (found := find(number)) is not None:
                found[0].put_token(found[1], token)

    def _forget(self, name: str) -> OutputStream | None:
        """Remove a request from the live ones and return its stream, None if it was not live."""
        if (number := self._numbers.pop(name, None)) is not None:
            del self._numbered[number]
        return self._streams.pop(name, None)

    async def _ask_when_silent(self) -> None:
        while self._death is None:
            await asyncio.sleep(INTERVAL_S)
            if self._silence.look():
                self._send(Ping())

    def _look_for_end(self) -> None:
        """Watch the connection: on one machine it breaks only when the other process ends."""
        if self._monitor.get(zmq.EVENTS) & _READABLE:
            self._loop.remove_reader(self._monitor.fd)
            self._die(f"The connection to the engine core at {self._address} is lost: the engine core has ended.")

    def _die(self, sentence: str) -> None:
        self._death = self._death or sentence
        if not self._started.done():
            self._started.set_exception(EngineDead(sentence))
        streams, self._streams, self._numbers, self._numbered = self._streams, {}, {}, {}
        for stream in dict.fromkeys(streams.values()):
            stream.fail(EngineDead(self._death))

    async def _close_sockets(self, linger_ms: int) -> None:
        self._flush()
        for socket in (self._socket, self._monitor):
            self._loop.remove_reader(socket.fd)
        self._socket.disable_monitor()
        self._monitor.close(linger=0)
        self._socket.close(linger=linger_ms)
        try:  # waits until the last messages are sent or the linger time is over
            await asyncio.to_thread(self._context.term)
        except RuntimeError:  # the interpreter is shutting down and starts no more threads
            self._context.term()


def _dealer(context: zmq.Context) -> zmq.Socket:
    socket = context.socket(zmq.DEALER)
    # No heartbeats: ZMQ takes a stopped process for a dead one, and drops messages in transit.
    socket.set(zmq.RCVHWM, 0)  # everything is read at once
    socket.set(zmq.SNDHWM, 0)
    return socket
