"""An engine core's outside, for tests of its clients: real messages over real ZMQ, one token a step, no model."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Coroutine
from typing import Any

import msgspec
import pytest
import zmq

from vnext.runtime.client.client import EngineClient
from vnext.runtime.engine.clients import client_decoder
from vnext.runtime.protocol.messages import (
    AbortRequests,
    ClientMessage,
    EngineDied,
    EngineReady,
    EngineStats,
    Goodbye,
    Hello,
    Message,
    Outputs,
    Ping,
    Pong,
    RequestOutput,
    RequestRefused,
    SubmitRequest,
    TokenLogprobs,
    encoder,
)
from vnext.state.config import SchedulerConfig
from vnext.state.events import pack_tokens

WAIT_S = 60.0
"""The longest that anything may take on a busy machine: ranks that are killed begin again in ten seconds there."""
RETAINED = (16, 8)
"""Tokens that stay and tokens that gave way, of every request that asks for pins."""

CONFIG = SchedulerConfig(
    block_size=16,
    page_count=64,
    max_num_batched_tokens=64,
    max_num_seqs=8,
    max_model_len=512,
    vocab_size=512,
    eos_token_ids=(1,),
)


class FakeEngine:
    """Answers each request with the tokens that `answer` gives for it, one a step while `running` is set or `hold` lets
    it.

    `refuse` gives a sentence for requests to be refused. Everything a client sent stands in `received`. While `frozen` is set it
    neither reads nor writes, as a process that is stopped. `address`: that of an engine before it, which this one follows; `ready`:
    members of its EngineReady.
    """

    def __init__(
        self,
        answer: Callable[[SubmitRequest], list[int]],
        refuse: Callable[[SubmitRequest], str | None] = lambda request: None,
        config: SchedulerConfig = CONFIG,
        silent: bool = False,
        address: str = "",
        **ready: object,
    ) -> None:
        self.received: list[ClientMessage] = []
        self.running = threading.Event()
        self.running.set()
        self.frozen = threading.Event()
        self._answer, self._refuse, self._config, self._silent = answer, refuse, config, silent
        self._steps = 0
        self._news = threading.Condition()
        self._ended = threading.Event()
        self._live: dict[str, tuple[bytes, SubmitRequest, list[int]]] = {}
        self._numbers: dict[str, int] = {}
        self._last_words: list[Message] = []
        self._peers: set[bytes] = set()
        self._ready = EngineReady(**{"config": config, "model": "folder/toy", "world_size": 1, "log_dir": ""} | ready)
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.set(zmq.SNDHWM, 0)  # else ZMQ drops what a client on a busy machine is late to read
        self.address = address or f"tcp://127.0.0.1:{self._socket.bind_to_random_port('tcp://127.0.0.1')}"
        if address:
            self._socket.bind(address)
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def hold(self, steps: int = 1) -> None:
        """Take so many steps once there is a request, and no more until `running` is set."""
        self.running.clear()
        self._steps = steps

    def of_kind(self, kind: type[Message]) -> list:
        return [message for message in self.received if isinstance(message, kind)]

    def wait_for(self, condition: Callable[[], bool]) -> None:
        """Until it holds, looked at whenever a message has come."""
        with self._news:
            assert self._news.wait_for(condition, WAIT_S), f"never came true; received: {self.received}"

    def wait_aborts(self, reason: str) -> list[str]:
        """Names aborted for this reason, once there are any."""
        self.wait_for(lambda: any(message.reason == reason for message in self.of_kind(AbortRequests)))
        return [name for message in self.of_kind(AbortRequests) if message.reason == reason for name in message.names]

    def die(self, sentence: str) -> None:
        """Say EngineDied and go on existing."""
        self.say(EngineDied(message=sentence))

    def say(self, word: Message) -> None:
        """To all clients."""
        self._last_words.append(word)

    def close(self) -> None:
        """End at once, as a killed process does: the connection breaks without a word."""
        self._ended.set()
        self._thread.join()

    def __enter__(self) -> FakeEngine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _run(self) -> None:
        while not self._ended.is_set():
            if self.frozen.is_set():
                self._ended.wait(0.005)
                continue
            busy = self._live and self.running.is_set()
            if self._socket.poll(1 if busy else 10):
                peer, *frames = self._socket.recv_multipart()
                for frame in frames:
                    self._receive(peer, frame)
            if self.running.is_set() or (self._steps and self._live):
                self._step()
                self._steps = max(0, self._steps - 1)
            while self._last_words:
                word = self._last_words.pop()
                for peer in self._peers:
                    self._send(peer, word)
        self._socket.close(linger=0)
        self._context.term()

    def _receive(self, peer: bytes, data: bytes) -> None:
        message = client_decoder.decode(data)
        match message:
            case Hello():
                self._peers.add(peer)
                if not self._silent:
                    self._send(peer, self._ready)
            case _ if peer not in self._peers:
                return
            case SubmitRequest():
                if (sentence := self._refuse(message)) is not None:
                    self._send(peer, RequestRefused(name=message.name, message=sentence))
                else:
                    self._live[message.name] = (peer, message, self._answer(message)[len(message.generated) // 4 :])
            case AbortRequests(names=names):
                for name in names:
                    self._live.pop(name, None)
            case Ping() if not self._silent:
                self._send(peer, Pong())
            case Goodbye():
                self._peers.discard(peer)
        with self._news:
            self.received.append(message)
            self._news.notify_all()

    def _step(self) -> None:
        for name, (peer, request, tokens) in list(self._live.items()):
            output = self._output(name, request, tokens)
            if output.finish:
                del self._live[name]
            self._send(peer, self._letter(output))
            if output.finish:
                self._send(peer, self._stats())

    def _letter(self, output: RequestOutput) -> Outputs:
        """As an engine core writes it: a plain token is an entry of the columns once its request has a number."""
        is_first = output.name not in self._numbers
        number = self._numbers.setdefault(output.name, len(self._numbers))
        if is_first or output.finish or output.logprobs:
            return Outputs(outputs=(msgspec.structs.replace(output, number=number),))
        return Outputs(numbers=number.to_bytes(8, "little"), tokens=output.tokens)

    def _output(self, name: str, request: SubmitRequest, tokens: list[int]) -> RequestOutput:
        token = tokens.pop(0)
        sampling = request.sampling
        ends = (() if sampling.ignore_eos else self._config.eos_token_ids) + sampling.stop_token_ids
        at_limit = not tokens or len(tokens) <= len(self._answer(request)) - sampling.max_tokens
        finish = "stop" if token in ends else "length" if at_limit else ""
        return RequestOutput(
            name=name,
            tokens=pack_tokens([token]),
            finish=finish,
            retained=RETAINED if finish and sampling.retention else None,
            stop_token=token if token in ends else -1,
            cached_tokens=min(3, len(request.prompt) // 4 - 1),
            logprobs=(self._logprobs(token, sampling.logprobs),) if sampling.logprobs >= 0 else (),
        )

    def _logprobs(self, token: int, count: int) -> TokenLogprobs:
        others = [other for other in range(100, 100 + count) if other != token]
        top = [(token, -0.5)] + [(other, -2.0 - place) for place, other in enumerate(others)]
        return TokenLogprobs(logprob=-0.5, rank=0, top=tuple(top[:count]))

    def _stats(self) -> EngineStats:
        others = ("stalled", "recovering", "adapters", "tier", "pins", "states", "experts", "residence", "lost", "step_seconds_sum", "plan_seconds_sum")
        numbers = {field: 7 for field in EngineStats.__struct_fields__ if field not in others} | {"recoveries": 0}
        return EngineStats(**numbers, step_seconds_sum=1.5, plan_seconds_sum=0.25)

    def _send(self, peer: bytes, message: Message) -> None:
        self._socket.send_multipart([peer, encoder.encode(message)])


@pytest.fixture
def nobody_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """What statistics say of fake engines."""
    plain = FakeEngine._stats
    monkeypatch.setattr(FakeEngine, "_stats", lambda self: msgspec.structs.replace(plain(self), waiting=0))


def wait_until(condition: Callable[[], bool]) -> None:
    """For what no message tells of: look again until it holds."""
    end_s = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < end_s, "never came true"
        time.sleep(0.005)


def with_client(engine: FakeEngine, use: Callable[[EngineClient], Coroutine[Any, Any, None]]) -> None:
    """Connect, use, close."""

    async def run() -> None:
        client = await EngineClient.connect(engine.address, 60.0)
        try:
            await use(client)
        finally:
            await client.close()

    asyncio.run(run())
