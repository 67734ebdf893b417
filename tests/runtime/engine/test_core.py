"""The engine core's loop over toy ranks: numbering, refusals, aborts, order of effects, seeds, drift."""

from __future__ import annotations

import json
import re
import threading
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import zmq
from msgspec.structs import replace
from toy_ranks import ToyExecutor

from vnext.log.codec import Frame
from vnext.replay.cli.main import main as replay
from vnext.replay.reading.source import open_log
from vnext.runtime.client.client import engine_decoder
from vnext.runtime.engine import owners
from vnext.runtime.engine.adapters import AdapterLoading
from vnext.runtime.engine.clients import Clients
from vnext.runtime.engine.clock import EventClock
from vnext.runtime.engine.engine_core import EngineCore
from vnext.runtime.engine.executor import MpExecutor
from vnext.runtime.engine.handovers import HandOvers
from vnext.runtime.engine.operations import Operations
from vnext.runtime.engine.recovery import Recovery
from vnext.runtime.engine.tiers import TierTransfers
from vnext.runtime.processes.subprocesses import start_child
from vnext.runtime.protocol.messages import (
    AbortRequests,
    ClientMessage,
    EngineMessage,
    EngineReady,
    EngineStats,
    Goodbye,
    Hello,
    Outputs,
    RequestOutput,
    RequestRefused,
    ResetPrefixCache,
    SubmitRequest,
    derived_seed,
    encoder,
)
from vnext.runtime.protocol.settings import EngineSettings
from vnext.runtime.record.recorder import Recorder
from vnext.runtime.transport.ring.broadcast import decode_events
from vnext.runtime.transport.ring.reader import RingReader
from vnext.sched import engine
from vnext.sched.turn import steady_turn
from vnext.server.context.metrics import ServerMetrics
from vnext.state.config import SchedulerConfig
from vnext.state.errors import IllegalEvent, LawBroken
from vnext.state.events import EngineStarted, RequestArrived, StepCommitted, StepPlanned, pack_tokens, unpack_tokens
from vnext.state.params import Sampling

REPLIES_MS = 2000


MARK = b"all was sent"


class _Front:
    """The core's socket, whose messages may be gathered before it reads: loopback delivers at its leisure."""

    def __init__(self, socket: zmq.Socket) -> None:
        self._socket, self._gathered = socket, deque[list[bytes]]()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._socket, name)

    def gather(self, count: int) -> None:
        """Take so many messages for the core's next step."""
        for _ in range(count):
            assert self._socket.poll(REPLIES_MS)
            self._gathered.append(self._socket.recv_multipart())

    def get(self, option: int) -> int:
        return zmq.POLLIN if self._gathered and option == zmq.EVENTS else self._socket.get(option)

    def recv_multipart(self) -> list[bytes]:
        return self._gathered.popleft() if self._gathered else self._socket.recv_multipart()


class Bench:
    """An engine core, its toy ranks and one or more clients, all in this process."""

    def __init__(
        self, context: zmq.Context, log_dir: Path, executor: ToyExecutor, privacy: str = "full", all_laws: bool = True,
        recovery: Recovery | None = None, **config: object,
    ) -> None:  # fmt: skip
        self.executor, self.log_dir = executor, log_dir
        self.config = SchedulerConfig(
            **{
                "block_size": 4, "page_count": 32, "max_num_batched_tokens": 16, "max_num_seqs": 4, "max_model_len": 64,
                "vocab_size": 50, "digest_interval": 1, **config,
            }  # fmt: skip
        )
        started = EngineStarted(
            config=self.config, model="toy", model_digest="", world_size=executor.world_size, environment={}, started_ns=0
        )
        self._context = context
        self._front = _Front(context.socket(zmq.ROUTER))
        port = self._front.bind_to_random_port("tcp://127.0.0.1")
        self._address = f"tcp://127.0.0.1:{port}"
        ready = EngineReady(config=self.config, model="toy", world_size=executor.world_size, log_dir="")
        recorder = Recorder.open(log_dir, started, privacy)
        clients = Clients(self._front, ready, root_seed=7)
        self.core = EngineCore(started, executor, recorder, clients, EngineSettings(check_laws=all_laws), recovery)
        self._sockets = [self._front]

    def client(self) -> zmq.Socket:
        socket = self._context.socket(zmq.DEALER)
        socket.identity = f"client {len(self._sockets)}".encode()
        socket.connect(self._address)
        self._sockets.append(socket)
        return socket

    def say(self, socket: zmq.Socket, *messages: ClientMessage) -> None:
        """Have the core take these messages in one step, and go on."""
        for message in messages:
            socket.send(encoder.encode(message))
        self._front.gather(len(messages))
        self.turn(100)

    def turn(self, count: int = 60) -> None:
        for _ in range(count):
            self.core.step()

    def heard(self, socket: zmq.Socket) -> list[EngineMessage]:
        """All that was sent to this client so far: it ends at a mark."""
        messages = []
        self._front.send_multipart((socket.identity, MARK))
        while socket.poll(REPLIES_MS) and (data := socket.recv()) != MARK:
            messages.append(engine_decoder.decode(data))
        return messages

    def verified(self) -> bool:
        return replay(["verify", "--laws", str(self.log_dir)]) == 0

    def close(self) -> None:
        for socket in self._sockets:
            socket.close(linger=0)


@pytest.fixture
def make_bench(tmp_path: Path) -> Iterator:
    benches = []
    with zmq.Context() as context:

        def make(executor: ToyExecutor | None = None, **config: object) -> Bench:
            benches.append(Bench(context, tmp_path / f"log{len(benches)}", executor or ToyExecutor(), **config))
            return benches[-1]

        yield make
        for bench in benches:
            bench.close()


def wish(name: str, prompt: list[int], max_tokens: int = 5, **more: object) -> SubmitRequest:
    sampling = Sampling(seed=1, max_tokens=max_tokens)
    return SubmitRequest(name=name, prompt=pack_tokens(prompt), sampling=sampling, **more)


def outputs_of(messages: list[EngineMessage], name: str) -> list[RequestOutput]:
    """All of one request, those of the columns made whole by the name that its number stands for."""
    named: dict[int, str] = {}
    found = []
    for message in messages:
        if isinstance(message, Outputs):
            columns = zip(memoryview(message.numbers).cast("q"), unpack_tokens(message.tokens))
            reported = [RequestOutput(name=named[number], tokens=pack_tokens([token])) for number, token in columns]
            named |= {output.number: output.name for output in message.outputs}
            found += [output for output in (*reported, *message.outputs) if output.name == name]
    return found


def tokens_of(messages: list[EngineMessage], name: str) -> list[int]:
    return [token for output in outputs_of(messages, name) for token in unpack_tokens(output.tokens).tolist()]


def expected_tokens(request_id: int, prompt_length: int, count: int) -> list[int]:
    return [1 + (position + request_id) % 7 for position in range(prompt_length, prompt_length + count)]


def test_what_an_engine_does_not_have_costs_no_call(make_bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """And who asks for it is answered at once."""
    for facility in (AdapterLoading, EventClock, HandOvers, TierTransfers, Operations):
        monkeypatch.setattr(facility, "next_event", lambda *_: pytest.fail("it is off"))
    bench = make_bench()
    socket = bench.client()
    bench.say(socket, wish("a", [1, 2, 3, 4, 5], 1, hands_over=True, ticket="T"))
    (output,) = outputs_of(bench.heard(socket), "a")
    assert (output.finish, output.ticket) == ("length", "")


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("world_size", [1, 2])
def test_requests_are_served_in_full_and_the_log_verifies(make_bench, depth: int, world_size: int) -> None:
    bench = make_bench(ToyExecutor(world_size), pipeline_depth=depth)
    socket = bench.client()
    bench.say(socket, *(wish(f"r{index}", [1 + index] * (3 + index), 4 + index) for index in range(7)))
    messages = bench.heard(socket)
    for index in range(7):
        assert tokens_of(messages, f"r{index}") == expected_tokens(index, 3 + index, 4 + index)
        assert [output.finish for output in outputs_of(messages, f"r{index}")][-1] == "length"
    stats = [message for message in messages if isinstance(message, EngineStats)][-1]
    assert (stats.finished, stats.running, stats.waiting, stats.blocks_held) == (7, 0, 0, 0)
    assert stats.digest_checks == stats.steps * world_size
    bench.core.shut_down()
    assert bench.verified()


def test_steady_turns_in_one_pass_are_recorded_and_told_as_any(make_bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """With all laws checked no turn is taken in one pass. Results come one by one and two at once, or beside an
    arrival that has to wait."""
    passes, seen = [], []
    monkeypatch.setattr(engine, "steady_turn", lambda *given: (passes.append(turn := steady_turn(*given)), turn)[1])
    for all_laws in (True, False):
        bench = make_bench(ToyExecutor(held=True), all_laws=all_laws, max_num_seqs=3)
        socket = bench.client()
        for index in range(3):  # together they would come in one turn or in several
            bench.say(socket, wish(f"r{index}", [1 + index] * 3, 24))
        for turn in range(60):
            if turn == 10:
                socket.send(encoder.encode(wish("late", [9, 9], 12)))
                assert bench._front.poll(REPLIES_MS)
            if turn % 9 == 8:
                bench.executor.release()
            else:
                bench.executor._ready, bench.executor.results = bench.executor.results[:1], bench.executor.results[1:]
            bench.core.step()
        messages = bench.heard(socket)
        reported = {name: tokens_of(messages, name) for name in ("r0", "r1", "r2", "late")}
        bench.core.shut_down()
        frames = [item.events for item in open_log(bench.log_dir).items() if isinstance(item, Frame)]
        seen.append(
            (
                reported,
                [
                    [replace(event, arrival_ns=0) if isinstance(event, RequestArrived) else event for event in each]
                    for each in frames
                ],
            )
        )
        assert bool(passes) is not all_laws and bench.verified()
    assert seen[0] == seen[1] and len(seen[0][0]["late"]) == 12 and sum(turn is not None for turn in passes) > 10


def test_hello_is_answered_with_the_configuration(make_bench) -> None:
    bench = make_bench()
    socket = bench.client()
    socket.send(encoder.encode(Hello()))
    for _ in range(50):
        bench.core.step()
        if socket.poll(20):
            break
    assert bench.heard(socket)[0].config == bench.config


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (wish("bad", []), "empty"),
        (wish("bad", [1] * 70), "64"),
        (wish("bad", [1], 0), "max_tokens is 0"),
        (wish("bad", [99]), "99"),
        (wish("bad", [-3]), "-3"),
        (wish("good", [1]), "live already"),
    ],
)
def test_a_client_mistake_is_refused_and_becomes_no_event(make_bench, wrong: SubmitRequest, words: str) -> None:
    bench = make_bench(ToyExecutor(held=True))
    socket = bench.client()
    bench.say(socket, wish("good", [1, 2, 3]), wrong)
    refusals = [message for message in bench.heard(socket) if isinstance(message, RequestRefused)]
    assert len(refusals) == 1 and words in refusals[0].message
    assert bench.core.state.next_id == 1


def test_a_request_over_the_cache_is_refused(make_bench) -> None:
    bench = make_bench(page_count=4)
    socket = bench.client()
    bench.say(socket, wish("large", [1] * 20), wish("fits", [1] * 8))
    messages = bench.heard(socket)
    assert "cache" in next(message for message in messages if isinstance(message, RequestRefused)).message
    assert len(tokens_of(messages, "fits")) == 5


def test_garbage_from_a_client_changes_nothing(make_bench) -> None:
    bench = make_bench()
    socket = bench.client()
    socket.send(b"\xc1garbage")
    bench.say(socket, wish("next", [1, 2]))
    assert len(tokens_of(bench.heard(socket), "next")) == 5


def test_abort_and_goodbye_free_everything(make_bench) -> None:
    bench = make_bench(ToyExecutor(held=True))
    first, second = bench.client(), bench.client()
    bench.say(first, wish("same", [1] * 9), wish("other", [2] * 9))
    bench.say(second, wish("same", [3] * 9))
    assert len(bench.core.state.requests) == 3
    bench.say(first, AbortRequests(names=("same", "never heard of"), reason="client"))
    assert len(bench.core.state.requests) == 2
    bench.say(first, Goodbye())
    bench.say(second, Goodbye())
    assert len(bench.core.state.requests) == 0 and bench.core.state.counters.aborted == 3
    bench.executor.release()
    bench.turn()
    assert bench.core.state.pool.free == 32 and not bench.core.state.in_flight
    assert bench.verified()


def test_a_client_that_dies_without_a_word_is_forgotten(make_bench) -> None:
    bench = make_bench()
    first, second = bench.client(), bench.client()
    bench.executor.held = True
    bench.say(first, wish("long", [1] * 9, 30))
    first.close(linger=0)
    bench.say(second, wish("other", [2] * 3, 30))
    for _ in range(20):
        bench.executor.release()
        bench.turn(2)
        second.poll(20)  # the socket's own thread learns of the loss at its leisure
    assert "long" not in {request.name for _, request in bench.core.state.requests.items()}
    assert bench.core.state.counters.aborted == 1
    assert len(tokens_of(bench.heard(second), "other")) >= 20


def test_nothing_is_told_or_sent_before_it_is_written(make_bench, monkeypatch: pytest.MonkeyPatch) -> None:
    bench = make_bench()
    socket, story = bench.client(), []
    append, send, tell = Recorder.append, bench.executor.send, Clients.tell
    monkeypatch.setattr(Recorder, "append", lambda *given: (story.append("write"), append(*given))[1])
    monkeypatch.setattr(bench.executor, "send", lambda message: (story.append("send"), send(message))[1])
    monkeypatch.setattr(Clients, "tell", lambda *given: (story.append("tell"), tell(*given))[1])
    bench.say(socket, wish("one", [1, 2, 3]))
    assert len(story) >= 15 and story == ["write", "send", "tell"] * (len(story) // 3)


def test_a_drifted_rank_is_named_at_its_step(make_bench, capsys: pytest.CaptureFixture[str]) -> None:
    executor = ToyExecutor(2)
    executor.drift[1] = 3
    bench = make_bench(executor)
    with pytest.raises(LawBroken, match=r"rank 1 has drifted: its state digest differs at step 3"):
        bench.say(bench.client(), wish("one", [1, 2, 3], 9))
    bench.core.record_end()
    assert replay(["verify", str(bench.log_dir)]) == 1
    assert "rank 1" in capsys.readouterr().out
    assert replay(["ranks", "--json", str(bench.log_dir)]) == 1
    right, drifted = json.loads(capsys.readouterr().out)["ranks"]
    assert right["first_different_step"] == -1 and drifted["first_different_step"] == 3
    assert drifted["fields"] == ["sequence"], "the rank has told its words"


def test_a_rank_with_other_tokens_is_named_with_its_request(make_bench, capsys: pytest.CaptureFixture[str]) -> None:
    executor = ToyExecutor(2)
    executor.wrong_tokens[1] = 34
    bench = make_bench(executor)
    first, second = bench.client(), bench.client()
    with pytest.raises(LawBroken, match=r"rank 1 has drifted: its token digest differs at step \d+ \(requests 1\)") as broken:
        bench.say(first, wish("one", [1, 2, 3], 30)), bench.say(second, wish("two", [4, 5], 30))
    bench.core.record_end()
    step = int(str(broken.value).split("step ")[1].split()[0])
    assert replay(["verify", "--json", str(bench.log_dir)]) == 1
    found = json.loads(capsys.readouterr().out)["difference"]
    assert (found["step"], found["field"]) == (step, "tokens of rank 1") and step > 34
    assert f"before step {step}, for request 1; it agreed up to step {step - 1}" in found["message"]
    assert replay(["ranks", "--json", str(bench.log_dir)]) == 1
    right, drifted = json.loads(capsys.readouterr().out)["ranks"]
    assert not right["fields"] and (drifted["fields"], drifted["requests"]) == (["tokens"], [1])


def test_an_event_that_breaks_a_law_is_in_the_log(
    make_bench, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    bench = make_bench()
    socket = bench.client()
    bench.say(socket, wish("one", [1, 2, 3]))
    sequence = bench.core.state.sequence

    def broken(state: object) -> None:
        raise LawBroken("M1", "made up")

    monkeypatch.setattr(bench.core.engine, "_check", broken)
    with pytest.raises(LawBroken):
        bench.say(socket, wish("two", [4, 5, 6]))
    bench.core.record_end()
    assert replay(["info", "--json", str(bench.log_dir)]) == 0
    assert json.loads(capsys.readouterr().out)["events"]["RequestArrived"] == 2
    assert bench.core.state.sequence == sequence + 1


def test_an_event_without_a_shape_does_not_keep_the_engine_from_ending(tmp_path: Path) -> None:
    """The default log has no texts: what it cannot put into shape is left out, and the end goes on."""
    with zmq.Context() as context:
        bench = Bench(context, tmp_path / "log", ToyExecutor(held=True), privacy="shape")
        bench.say(bench.client(), wish("one", [1, 2, 3]))
        with pytest.raises(IllegalEvent):
            bench.core.engine.fold(StepCommitted(step=7, tokens=b""))
        bench.core.record_end()
        assert bench.verified()
        bench.close()


def test_unseeded_requests_get_seeds_that_differ_and_repeat(make_bench) -> None:
    bench = make_bench()
    bench.say(bench.client(), *(wish(f"r{index}", [1], has_seed=index == 2) for index in range(3)))
    events = [event for message in bench.executor.messages for event in decode_events(message)]
    seeds = [event.sampling.seed for event in events if isinstance(event, RequestArrived)]
    assert seeds == [derived_seed(7, 0), derived_seed(7, 1), 1] and len(set(seeds)) == 3


def test_prefix_cache_reset_forgets_contents(make_bench) -> None:
    bench = make_bench()
    socket = bench.client()
    bench.say(socket, wish("one", [1] * 12))
    assert len(bench.core.state.pool.prefix_index) > 0
    bench.say(socket, ResetPrefixCache())
    assert len(bench.core.state.pool.prefix_index) == 0
    bench.say(socket, wish("two", [1] * 12))
    assert outputs_of(bench.heard(socket), "two")[0].cached_tokens == 0


def test_shutdown_aborts_what_lives(make_bench) -> None:
    bench = make_bench(ToyExecutor(held=True))
    socket = bench.client()
    bench.say(socket, wish("one", [1] * 9))
    bench.core.shut_down()
    assert [output.finish for output in outputs_of(bench.heard(socket), "one")] == ["abort"]
    assert bench.verified()


def test_a_full_ring_is_seen_in_the_metrics(make_bench, tmp_path: Path) -> None:
    """A rank that is too far behind: counted by its ring, told with the engine's numbers, shown by the edge."""
    idle = start_child("rank 0", "vnext.runtime.engine.main")  # a light one; as a rank it waits for its settings
    ranks = MpExecutor([idle], tmp_path, lambda *_: pytest.fail("no rank is told anything here"))

    class Stalling(ToyExecutor):
        stalls = property(lambda self: ranks.stalls)

    bench = make_bench(Stalling())
    socket = bench.client()

    def stalls() -> tuple[float, float]:
        bench.say(socket, wish(f"r{bench.core.state.next_id}", [1]))
        stats = [message for message in bench.heard(socket) if isinstance(message, EngineStats)][-1]
        engine = SimpleNamespace(stats=stats, death=None, trouble=None, recoveries=0, recovery_seconds=0.0)
        text = ServerMetrics("toy", 64, [engine]).text().decode()
        found = dict(re.findall(r"^(vnext_ring_stall\w+){.*} (\S+)$", text, re.MULTILINE))
        return float(found["vnext_ring_stalls_total"]), float(found["vnext_ring_stall_seconds_total"])

    try:
        with RingReader.attach(ranks._ring.name, 0) as rank:
            half = bytes(rank._segment.capacity_bytes // 2 - 8)
            ranks.send(half)
            ranks.send(half)
            assert stalls() == (0.0, 0.0)
            threading.Timer(0.02, rank.read).start()
            ranks.send(half)
            count, seconds = stalls()
            assert count == 1.0 and seconds == ranks.stalls[1] > 0.0
            assert rank.read() == rank.read() == half
    finally:
        ranks.stop()


@pytest.mark.parametrize("logprobs", [-1, 1])
def test_a_first_output_says_how_long_its_request_waited_for_its_first_step(
    make_bench, monkeypatch: pytest.MonkeyPatch, logprobs: int
) -> None:
    """By a clock that goes on by one with each planned step."""
    bench = make_bench(max_num_seqs=2, pipeline_depth=1)
    monkeypatch.setattr(owners, "time", SimpleNamespace(monotonic=lambda: float(bench.core.state.planned)))
    socket = bench.client()
    samplings = {name: Sampling(seed=1, max_tokens=count, logprobs=logprobs) for name, count in (("a", 9), ("b", 4), ("c", 4))}
    bench.say(socket, *(SubmitRequest(name=name, prompt=pack_tokens([5, 6]), sampling=each) for name, each in samplings.items()))
    heard = bench.heard(socket)
    waited = {name: [output.queue_seconds for output in outputs_of(heard, name)] for name in "abc"}
    assert waited["a"][0] == waited["b"][0] == 1.0, "they came before the plan that began them"
    assert 3.0 <= waited["c"][0] <= 5.0, "its turn comes when the second has ended"
    assert not any(second for each in waited.values() for second in each[1:])
    assert not any(vars(bench.core._clients._owners)[kept] for kept in ("_came_s", "_waited_s"))


def test_a_preempted_request_has_waited_once(make_bench, monkeypatch: pytest.MonkeyPatch) -> None:
    bench = make_bench(page_count=6, pipeline_depth=1)
    monkeypatch.setattr(owners, "time", SimpleNamespace(monotonic=lambda: float(bench.core.state.planned)))
    socket = bench.client()
    bench.say(socket, wish("a", [1] * 8, 12), wish("b", [2] * 8, 12))
    heard = bench.heard(socket)
    assert bench.core.state.counters.preempted > 0
    assert all([output.queue_seconds for output in outputs_of(heard, name)] == [1.0] + [0.0] * 11 for name in "ab")


class FailingRanks(ToyExecutor):
    """Ranks that cannot follow the constraint of request 1 once it has `length` tokens."""

    length = 0

    def _fold(self, rank: int, event: object) -> None:
        super()._fold(rank, event)
        if isinstance(event, StepPlanned):
            scheduled = self._states[rank].in_flight[-1]
            places = zip(scheduled.ids[scheduled.samples], (scheduled.starts + scheduled.counts)[scheduled.samples])
            failed = ((1, "why"),) if (1, self.length) in [tuple(map(int, each)) for each in places] else ()
            self.results[-1] = replace(self.results[-1], failed=failed)


@pytest.mark.parametrize("depth", [1, 2, 3, 4])
def test_a_constraint_fails_at_its_token_also_after_a_preemption(make_bench, depth: int) -> None:
    """The step that fails may have been planned before its request gave way: it had tokens of steps in flight, which are lost."""
    preempted = 0
    for length in range(8, 20):
        ranks = FailingRanks()
        ranks.length = length
        bench = make_bench(ranks, page_count=6, pipeline_depth=depth)
        socket = bench.client()
        bench.say(socket, wish("a", [1] * 8, 12), wish("b", [2] * 8, 12))
        heard, count = bench.heard(socket), length - 8
        while not all(any(each.finish for each in outputs_of(heard, name)) for name in "ab"):  # the test's own limit ends this
            heard += bench.heard(socket)
        assert tokens_of(heard, "a") == expected_tokens(0, 8, 12)
        assert tokens_of(heard, "b") == expected_tokens(1, 8, count), length
        assert [(each.finish, each.error) for each in outputs_of(heard, "b")][-1] == ("abort", "why")
        preempted += bench.core.state.counters.preempted
    assert preempted > 0


def test_what_is_aborted_while_it_waits_leaves_no_trace(make_bench) -> None:
    bench = make_bench(ToyExecutor(held=True), max_num_seqs=1)
    socket = bench.client()
    bench.say(socket, wish("a", [1], 4), wish("b", [2], 4))
    bench.say(socket, AbortRequests(names=("a", "b"), reason="client"))
    assert not any(vars(bench.core._clients._owners)[kept] for kept in ("_came_s", "_waited_s"))
