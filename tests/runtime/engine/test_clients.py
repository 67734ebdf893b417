"""The engine core's side of its clients: one that does not read, and one that sends what no client of ours sends."""

from __future__ import annotations

import logging
import os
import random
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import zmq

from vnext.runtime.client.client import engine_decoder
from vnext.runtime.engine import process as core_process
from vnext.runtime.engine.clients import Clients, constraint_refusal
from vnext.runtime.engine.owners import News
from vnext.runtime.processes.run_dir import PROGRESS, SUSPECT, CoreNotes
from vnext.runtime.protocol.messages import (
    AbortRequests,
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
    SubmitRequest,
    TokenLogprobs,
    encoder,
)
from vnext.state.config import SchedulerConfig
from vnext.state.events import (
    AnyEvent,
    EngineStarted,
    RequestAborted,
    RequestArrived,
    RequestResumed,
    pack_tokens,
    unpack_tokens,
)
from vnext.state.outputs import Going
from vnext.state.params import Constraint, Sampling
from vnext.state.reduce import reduce, start

CONFIG = SchedulerConfig(
    block_size=4, page_count=200, max_num_batched_tokens=16, max_num_seqs=4, max_model_len=600, vocab_size=50
)
STARTED = EngineStarted(config=CONFIG, model="toy", model_digest="", world_size=1, environment={}, started_ns=0)
READY = EngineReady(config=CONFIG, model="toy", world_size=1, log_dir="")
STEPS, AHEAD = 500, 4


class Bench:
    """A core's clients without a core, over a transport that holds no more than it is told to."""

    def __init__(self, context: zmq.Context, **others: Any) -> None:
        self._context = context
        self._front = self._socket(zmq.ROUTER)
        self._front.bind("inproc://front")
        self.clients = Clients(self._front, READY, root_seed=7, **others)
        self.state = start(STARTED)

    def _socket(self, kind: int) -> zmq.Socket:
        socket = self._context.socket(kind)
        socket.set(zmq.LINGER, 0)
        socket.set(zmq.SNDHWM, AHEAD)
        socket.set(zmq.RCVHWM, AHEAD)
        return socket

    def client(self, kind: int = zmq.DEALER) -> zmq.Socket:
        socket = self._socket(kind)
        socket.connect("inproc://front")
        return socket

    def arrived(self) -> list[AnyEvent]:
        """What has come; the state goes on."""
        events = list(self.clients.arrived(self.state))
        for event in events:
            self.state = reduce(self.state, event)
        return events

    def heard(self, socket: zmq.Socket) -> list[EngineMessage]:
        """All that a client gets that reads from now on."""
        messages = []
        while socket.poll(20):
            messages.append(engine_decoder.decode(socket.recv()))
            self.arrived()
        return messages


@pytest.fixture
def bench() -> Iterator[Bench]:
    context = zmq.Context()
    yield Bench(context)
    context.destroy(linger=0)


def wish(name: str, priority: int = 0) -> bytes:
    sampling = Sampling(seed=1, max_tokens=STEPS)
    return encoder.encode(SubmitRequest(name=name, prompt=pack_tokens([1, 2]), sampling=sampling, priority=priority))


def stats(steps: int) -> EngineStats:
    numbers = {name: 0 for name in EngineStats.__struct_fields__ if name not in ("stalled", "adapters", "tier", "pins", "states", "experts", "recovering", "residence", "lost")}
    return EngineStats(**numbers | {"steps": steps})


def told_of(messages: list[EngineMessage]) -> dict[str, list[RequestOutput]]:
    """What each request was told, in order; a column's entry as an output of one token."""
    reported: dict[str, list[RequestOutput]] = defaultdict(list)
    names: dict[int, str] = {}
    for message in (each for each in messages if isinstance(each, Outputs)):
        tokens = unpack_tokens(message.tokens).tolist()
        for number, token in zip(memoryview(message.numbers).cast("q"), tokens):
            reported[names[number]].append(RequestOutput(name=names[number], tokens=pack_tokens([token])))
        for output in message.outputs:
            names[output.number] = output.name
            reported[output.name].append(output)
    return reported


def drained(socket: zmq.Socket) -> list[EngineMessage]:
    """What is there."""
    messages = []
    while socket.poll(0):
        messages.append(engine_decoder.decode(socket.recv()))
    return messages


@pytest.mark.parametrize("with_logprobs", [False, True])
def test_a_client_that_does_not_read_loses_nothing_and_holds_nobody_up(bench: Bench, with_logprobs: bool) -> None:
    """Two requests of each client, and a third that begins when one client reads no more."""
    frozen, reader = bench.client(), bench.client()
    for name in "abc":
        frozen.send(wish(name))
        reader.send(wish(name))
    names = {int(event.id): event.name for event in bench.arrived()}
    assert sorted(names.values()) == list("aabbcc")
    got: list[EngineMessage] = []
    for step in range(STEPS):
        ids = [id_ for id_, name in names.items() if name != "c" or step > STEPS // 2]
        bench.clients.tell([news_of(ids, names, step, with_logprobs)])
        bench.clients.tell_stats(stats(step))
        got += drained(reader)
    assert bench.clients.is_behind
    bench.clients.tell_all(EngineDied(message="the end"))
    late = bench.heard(frozen)
    assert not bench.clients.is_behind and len(late) <= 2 * AHEAD + 4
    got += bench.heard(reader)
    for messages in (late, got):
        for name, mine in told_of(messages).items():
            steps = list(range(STEPS))[STEPS // 2 + 1 if name == "c" else 0 :]
            assert sum((unpack_tokens(one.tokens).tolist() for one in mine), []) == steps
            assert [-entry.logprob for one in mine for entry in one.logprobs] == (steps if with_logprobs else [])
            assert mine[-1].finish == ("" if name == "b" else "length") and not any(one.finish for one in mine[:-1])
        assert messages[-1] == EngineDied(message="the end")
        assert [message.steps for message in messages if isinstance(message, EngineStats)][-1] == STEPS - 1


def news_of(ids: list[int], names: dict[int, str], step: int, with_logprobs: bool) -> News:
    """A step in which each request gets the step's number as its token; the last one ends all but b."""
    ends = step == STEPS - 1
    logprobs = (TokenLogprobs(logprob=-step, rank=0, top=()),) if with_logprobs else ()
    singles = [
        RequestOutput(
            name=names[id_], tokens=pack_tokens([step]), finish="length" if ends and names[id_] != "b" else "",
            logprobs=logprobs, number=id_,
        )
        for id_ in ids if with_logprobs or (ends and names[id_] != "b")
    ]  # fmt: skip
    alone = {output.number for output in singles}
    rest = np.array([id_ for id_ in ids if id_ not in alone], dtype=np.int64)
    return Going(rest, np.full(len(rest), step, dtype=np.int32), np.zeros(len(rest), dtype=np.int64)), singles


def test_a_client_that_leaves_while_it_is_behind_is_forgotten(bench: Bench) -> None:
    socket = bench.client()
    socket.send(wish("a"))
    bench.arrived()
    for step in range(STEPS):
        bench.clients.tell([news_of([0], {0: "b"}, step, False)])
    assert bench.clients.is_behind
    socket.close(linger=0)
    events: list[AnyEvent] = []
    while not events:
        events = bench.arrived()
    assert [type(event).__name__ for event in events] == ["RequestAborted"] and not bench.clients.is_behind


def test_a_ping_is_answered(bench: Bench) -> None:
    socket = bench.client()
    socket.send(encoder.encode(Ping()))
    assert bench.arrived() == [] and bench.heard(socket) == [Pong()]


def garbage(seed: int) -> list[bytes]:
    """A message of one to four parts that no client of ours sends, or hardly."""
    draw = random.Random(seed)
    whole = wish("x")
    kinds = (
        lambda: b"",
        lambda: draw.randbytes(draw.randrange(200)),
        lambda: whole[: draw.randrange(len(whole))],
        lambda: b"\x91" * draw.choice((3, 5000)),
        lambda: msgspec.msgpack.encode([draw.choice((0, 1, 2, 3, 4, 5, 9, -1, 2**70 % 2**63)), "a", None, {}]),
    )
    return [draw.choice(kinds)() for _ in range(draw.choice((1, 1, 2, 3, 4)))]


def test_what_no_client_sends_is_dropped_with_a_word(bench: Bench, caplog: pytest.LogCaptureFixture) -> None:
    """Parts that a REQ socket puts in front, and bytes of all kinds: the requests between and behind them arrive."""
    socket = bench.client()
    socket.set(zmq.SNDHWM, 0)
    caplog.set_level(logging.WARNING)
    for seed in range(400):
        socket.send_multipart(garbage(seed))
        bench.arrived()
    before = len(caplog.messages)
    socket.send_multipart([b"", wish("first"), b"\xc1", wish("second")])
    socket.send(wish("third"))
    events = bench.arrived()
    assert [event.name for event in events if isinstance(event, RequestArrived)] == ["first", "second", "third"]
    assert len(caplog.messages[before:]) == 2
    assert before > 300 and all("could not be read and was dropped: " in message for message in caplog.messages)


def test_last_words_reach_those_who_say_hello_beside_those_who_talk_nonsense(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(core_process, "FAREWELL_MS", 50)
    reader, writer = os.pipe()
    with zmq.Context() as context, context.socket(zmq.ROUTER) as front, context.socket(zmq.DEALER) as socket:
        front.bind("inproc://front")
        socket.connect("inproc://front")
        socket.send_multipart([b"a", b"b"])
        socket.send(b"\xc1")
        socket.send(encoder.encode(Hello()))
        core_process.report_death(front, reader, EngineDied(message="no model"))
        assert engine_decoder.decode(socket.recv(zmq.NOBLOCK)) == EngineDied(message="no model")
    os.close(reader)
    os.close(writer)


@pytest.mark.parametrize(
    "changes, constraint, words",
    [
        ({"ignore_eos": True}, Constraint(grammar="g"), "ignore_eos does not go with a grammar"),
        ({"min_tokens": 1}, Constraint(grammar="g"), "min_tokens does not go with a grammar"),
        ({}, Constraint(reasoning_end=(3, 10**6)), "token id 1000000 of reasoning_end is outside"),
        ({"ignore_eos": True}, Constraint(reasoning_end=(3,)), None),
    ],
)
def test_a_constraint_that_no_answer_can_keep_is_refused(changes: dict, constraint: Constraint, words: str | None) -> None:
    config = msgspec.structs.replace(CONFIG, eos_token_ids=(1,), vocab_size=100)
    why_not = constraint_refusal(config, Sampling(seed=0, max_tokens=4, **changes), constraint)
    assert why_not is None if words is None else words in (why_not or "")


@pytest.mark.parametrize(("policy", "seen"), [("fair", [0, 3]), ("priority", [-4, 3]), ("fcfs", [-4, 3])])
def test_no_priority_gets_a_client_before_its_turn(bench: Bench, policy: str, seen: list[int]) -> None:
    """Under `fair` one below 0 counts as 0, and one may still let others go first."""
    bench.state = start(msgspec.structs.replace(STARTED, config=msgspec.structs.replace(CONFIG, policy=policy)))
    socket = bench.client()
    for priority in (-4, 3):
        socket.send(wish(str(priority), priority))
    found: list[AnyEvent] = []
    while len(found) < len(seen):
        found += bench.arrived()
    assert [event.priority for event in found if isinstance(event, RequestArrived)] == seen


def test_a_grammar_needs_a_model_with_an_end_token() -> None:
    config = msgspec.structs.replace(CONFIG, eos_token_ids=(), vocab_size=100)
    assert "has no end token" in (constraint_refusal(config, Sampling(seed=0, max_tokens=4), Constraint(grammar="g")) or "")


# ---- an engine core that follows another -------------------------------------------------------------------------


@pytest.fixture
def successor(tmp_path: Path) -> Iterator[Bench]:
    context = zmq.Context()
    yield Bench(context, notes=CoreNotes(tmp_path), follows=True)
    context.destroy(linger=0)


def resumed(name: str, deaths: int = 1, generated: Sequence[int] = ()) -> bytes:
    wished = SubmitRequest(name=name, prompt=pack_tokens([1, 2]), sampling=Sampling(seed=1, max_tokens=STEPS))
    return encoder.encode(msgspec.structs.replace(wished, deaths=deaths, generated=pack_tokens(list(generated))))


def greeted(bench: Bench) -> zmq.Socket:
    socket = bench.client()
    socket.send(encoder.encode(Hello()))
    return socket


def test_a_resumption_is_an_event_of_its_own_and_what_was_meant_for_another_engine_core_is_dropped(successor: Bench) -> None:
    stale, socket = successor.client(), greeted(successor)
    stale.send(wish("stale"))
    socket.send(resumed("a", generated=[7, 8]))
    socket.send(resumed("b"))
    socket.send(wish("c"))
    first, second, third = successor.arrived()
    assert isinstance(first, RequestResumed) and unpack_tokens(first.generated).tolist() == [7, 8]
    assert isinstance(second, RequestResumed) and (second.name, second.generated) == ("b", b"")
    assert type(third) is RequestArrived and third.name == "c"


@pytest.mark.parametrize(("generated", "words"), [([50], "outside the model's vocabulary"), ([3] * STEPS, "it has ended")])
def test_a_resumption_that_cannot_be_is_refused(successor: Bench, generated: list[int], words: str) -> None:
    socket = greeted(successor)
    socket.send(resumed("a", generated=generated))
    assert successor.arrived() == []
    assert words in successor.heard(socket)[-1].message


def test_suspects_are_tried_one_at_a_time_and_named_before_they_begin(successor: Bench, tmp_path: Path) -> None:
    clients, socket, notes = successor.clients, greeted(successor), CoreNotes(tmp_path)
    for name in "abcd":
        socket.send(resumed(name, deaths=1 if name == "a" else 2))
    assert [event.name for event in successor.arrived()] == ["a", "b"] and notes.text(SUSPECT) is None
    assert not clients.is_behind
    clients.begun((0,), {})
    assert notes.text(SUSPECT) is None
    clients.begun((1,), {})
    assert notes.text(SUSPECT) == "b"
    clients.tell([news_of([0], {0: "a"}, 0, False)])
    assert successor.arrived() == [] and notes.text(SUSPECT) == "b" and notes.text(PROGRESS) == ""
    clients.tell([news_of([0, 1], {0: "a", 1: "b"}, 1, False)])
    assert notes.text(SUSPECT) is None and clients.is_behind, "the next one may be tried"
    socket.send(encoder.encode(AbortRequests(names=("c",), reason="client")))
    assert [event.name for event in successor.arrived()] == ["d"]
    socket.send(encoder.encode(AbortRequests(names=("d",), reason="client")))
    [event] = successor.arrived()
    clients.tell([(None, [RequestOutput(name="d", tokens=b"", finish="abort", number=2)])])
    assert isinstance(event, RequestAborted) and not clients.is_behind


def test_a_client_that_leaves_takes_its_suspects_along(successor: Bench) -> None:
    socket = greeted(successor)
    for name in "ab":
        socket.send(resumed(name, deaths=2))
    assert [event.name for event in successor.arrived()] == ["a"]
    socket.send(encoder.encode(Goodbye()))
    successor.arrived()
    successor.clients.tell([(None, [RequestOutput(name="a", tokens=b"", finish="abort", number=0)])])
    assert not successor.clients.is_behind and successor.arrived() == []
