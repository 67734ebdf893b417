"""An engine core whose toy ranks are lost, at every moment and in every way: its clients get the same tokens, once each."""

from __future__ import annotations

import json
from collections.abc import Callable
from types import SimpleNamespace

import pytest
from test_core import Bench, expected_tokens, make_bench, outputs_of, tokens_of, wish  # noqa: F401  a fixture
from toy_ranks import ToyExecutor

from vnext.log.codec import Frame
from vnext.replay.cli.main import main as replay
from vnext.replay.reading.source import open_log
from vnext.runtime.engine import recovery as recoveries
from vnext.runtime.engine.executor import RankStartFailed
from vnext.runtime.engine.progress import RanksStalled
from vnext.runtime.engine.recovery import NoMoreRanks, Recovery
from vnext.runtime.processes.subprocesses import ChildDied
from vnext.runtime.protocol.messages import (
    AbortRequests,
    EngineMessage,
    EngineStats,
    ModelFacts,
    RankFailed,
    RankReady,
    encoder,
)
from vnext.runtime.transport.ring.broadcast import decode_events
from vnext.runtime.transport.ring.common import RingAbandoned
from vnext.state.errors import LawBroken
from vnext.state.events import EngineRecovered, RequestId, StepPlanned

LENGTHS = {"a": 20, "b": 14, "c": 9}


def killed() -> ChildDied:
    return ChildDied("rank 0", -9, ["a last word"])


class Ranks(ToyExecutor):
    """Toy ranks that are lost as soon as `dies`, which gets the number of plans so far, returns an error."""

    def __init__(self, dies: Callable[[int], Exception | None] = lambda plans: None, world_size: int = 1) -> None:
        super().__init__(world_size)
        self.dies, self.plans, self.death = dies, 0, None

    def send(self, message: bytes) -> None:
        super().send(message)
        self.plans += any(isinstance(event, StepPlanned) for event in decode_events(message))
        self.death = self.death or self.dies(self.plans)

    def check(self, ready: object = None) -> None:
        if self.death is not None:
            raise self.death


def recovery_of(ranks: list[ToyExecutor], again: Callable[[], ToyExecutor] = Ranks, restarts_max: int = 10) -> Recovery:
    """Replaces ranks by those that `again` makes, which are kept in the list."""
    return Recovery(lambda generation: ranks.append(again()) or ranks[-1], restarts_max)


def ask(bench: Bench, turns: int = 120) -> list[EngineMessage]:
    """Three requests, the third of which comes later."""
    socket = bench.client()
    bench.say(socket, wish("a", [1, 2, 3], LENGTHS["a"]), wish("b", [4] * 9, LENGTHS["b"]))
    socket.send(encoder.encode(wish("c", [5, 6], LENGTHS["c"])))
    bench._front.poll(2000)
    bench.turn(turns)
    return bench.heard(socket)


def require_whole(heard: list[EngineMessage]) -> None:
    for number, (name, prompt) in enumerate((("a", 3), ("b", 9), ("c", 2))):
        assert tokens_of(heard, name) == expected_tokens(number, prompt, LENGTHS[name])
        finishes = [output.finish for output in outputs_of(heard, name)]
        assert finishes[-1] == "length" and not any(finishes[:-1])


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("privacy", ["full", "shape"])
def test_ranks_that_die_after_any_plan_change_no_token(make_bench, depth: int, privacy: str) -> None:  # noqa: F811
    for plan in range(1, 24, 1 if privacy == "full" else 5):
        made: list[ToyExecutor] = []
        ranks = Ranks(lambda plans, last=plan: killed() if plans == last else None, world_size=2)
        bench = make_bench(ranks, pipeline_depth=depth, recovery=recovery_of(made, lambda: Ranks(world_size=2)), privacy=privacy)
        require_whole(ask(bench))
        assert len(made) == 1 and ranks.has_ended and not made[0].has_ended
        bench.core.shut_down()
        assert bench.verified()


@pytest.mark.parametrize("depth", [1, 2])
def test_ranks_that_die_again_and_again_with_progress_between_are_replaced_for_ever(make_bench, depth: int) -> None:  # noqa: F811
    made: list[ToyExecutor] = []
    mortal = lambda: Ranks(lambda plans: killed() if plans == 4 else None)  # noqa: E731
    recovery = recovery_of(made, mortal, restarts_max=1)
    bench = make_bench(mortal(), pipeline_depth=depth, recovery=recovery, max_num_batched_tokens=64)
    require_whole(ask(bench, 300))
    assert len(made) > 5 and bench.core._recovery.count == len(made)


class Speaking(Ranks):
    """Ranks whose fourth step brings a message, or an error in place of taking it."""

    def __init__(self, what: object, at_send: bool) -> None:
        super().__init__()
        self.what, self.at_send = what, at_send

    def send(self, message: bytes) -> None:
        if self.plans == 3 and self.at_send:
            raise self.what
        super().send(message)

    def receive(self) -> list[object]:
        if self.plans == 4 and not self.at_send:
            if isinstance(self.what, Exception):
                raise self.what
            return [*super().receive(), self.what]
        return super().receive()


@pytest.mark.parametrize(
    ("what", "at_send", "cause"),
    [
        (RankFailed(rank=1, message="rank 0 has ended"), False, "rank 1 failed: rank 0 has ended"),
        (RanksStalled("step 3 has had no result"), False, "step 3 has had no result"),
        (killed(), True, "rank 0 was killed by SIGKILL (when nobody did it: out of memory, see the kernel's log)"),
        (RingAbandoned("the process has ended"), True, "the process has ended"),
    ],
)
def test_every_way_to_lose_ranks_is_recovered_and_named(make_bench, what: object, at_send: bool, cause: str) -> None:  # noqa: F811
    """At `send` the plan and what it follows are recorded, and clients have not been told yet."""
    made: list[ToyExecutor] = []
    bench = make_bench(Speaking(what, at_send), recovery=recovery_of(made))
    require_whole(ask(bench))
    bench.core.shut_down()
    frames = [item.events for item in open_log(bench.log_dir).items() if isinstance(item, Frame)]
    assert bench.verified()
    assert [each.cause for events in frames for each in events if isinstance(each, EngineRecovered)] == [cause]


def test_a_drifted_rank_is_replaced_and_stays_named_in_the_log(
    make_bench, capsys: pytest.CaptureFixture[str]  # noqa: F811
) -> None:
    made: list[ToyExecutor] = []
    ranks = ToyExecutor()
    ranks.drift[0] = 3
    bench = make_bench(ranks, recovery=recovery_of(made))
    require_whole(ask(bench))
    bench.core.shut_down()
    assert len(made) == 1 and replay(["verify", "--json", str(bench.log_dir)]) == 1
    assert json.loads(capsys.readouterr().out)["difference"]["step"] == 3


def test_without_restarts_a_loss_ends_the_engine(make_bench) -> None:  # noqa: F811
    made: list[ToyExecutor] = []
    bench = make_bench(Ranks(lambda plans: killed() if plans == 3 else None), recovery=recovery_of(made, restarts_max=0))
    with pytest.raises(ChildDied, match="a last word"):
        ask(bench)
    assert not made


def test_while_there_are_no_ranks_clients_are_heard_and_nothing_is_planned(make_bench) -> None:  # noqa: F811
    made: list[ToyExecutor] = []

    def loading() -> ToyExecutor:
        ranks = Ranks()
        ranks.are_ready = False
        return ranks

    ranks = Ranks()
    bench = make_bench(ranks, recovery=recovery_of(made, loading))
    socket = bench.client()
    ranks.held = True
    bench.say(socket, wish("a", [1, 2, 3], LENGTHS["a"]), wish("gone", [7], 9))
    ranks.death = killed()
    bench.turn(1)
    planned = bench.core.state.planned
    ranks.release()  # late results of the lost ranks
    bench.say(socket, wish("b", [4] * 9, LENGTHS["b"]), AbortRequests(names=("gone",), reason="client"))
    stats = [message for message in bench.heard(socket) if isinstance(message, EngineStats)][-1]
    assert (stats.waiting, stats.running, stats.recoveries, bench.core.state.planned) == (2, 0, 0, planned)
    assert stats.recovering.startswith("The engine's ranks are started again: rank 0 was killed by SIGKILL")
    made[0].are_ready = True
    bench.turn(100)
    heard = bench.heard(socket)
    assert len(tokens_of(heard, "a")) == LENGTHS["a"] and len(tokens_of(heard, "b")) == LENGTHS["b"]
    stats = [message for message in heard if isinstance(message, EngineStats)][-1]
    assert (stats.recovering, stats.recoveries) == ("", 1) and stats.recovery_seconds > 0
    bench.core.shut_down()
    assert bench.verified()


def test_an_engine_ends_in_order_while_its_ranks_start(make_bench) -> None:  # noqa: F811
    made: list[ToyExecutor] = []
    ranks = Ranks(lambda plans: killed() if plans == 3 else None)
    bench = make_bench(ranks, recovery=recovery_of(made, lambda: Loading()))
    heard = ask(bench)
    socket_heard = outputs_of(heard, "a")
    assert socket_heard and not socket_heard[-1].finish
    bench.core.shut_down()
    bench.core.stop_ranks(0.0)
    assert made[0].has_ended and bench.verified()


class Loading(Ranks):
    def __init__(self) -> None:
        super().__init__()
        self.are_ready = False


class Failing(Ranks):
    """Ranks that cannot start."""

    def started(self) -> None:
        raise RankStartFailed("there is no room for the weights")


def test_ranks_that_cannot_start_are_tried_later_each_time_and_then_no_more(
    make_bench, monkeypatch: pytest.MonkeyPatch  # noqa: F811
) -> None:
    now, starts = [100.0], []

    def failing() -> ToyExecutor:
        starts.append(now[0])
        return Failing()

    monkeypatch.setattr(recoveries.time, "monotonic", lambda: now[0])
    bench = make_bench(Ranks(lambda plans: killed() if plans == 3 else None), recovery=recovery_of([], failing))
    with pytest.raises(NoMoreRanks, match="no room for the weights\nThe ranks were started again 10 times in a row without a step's"):
        for _ in range(3000):
            ask(bench, 0) if not bench.core.state.requests else bench.turn(1)
            now[0] += 0.05
    gaps = [round(after - before, 1) for before, after in zip(starts, starts[1:])]
    assert len(starts) == 10 and gaps == pytest.approx([0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 6.4, 10, 10], abs=0.11)


@pytest.mark.parametrize("held_s", [3.0, float("inf")])
def test_ranks_that_the_system_holds_are_waited_for_and_not_for_ever(
    make_bench, monkeypatch: pytest.MonkeyPatch, held_s: float  # noqa: F811
) -> None:
    """The ranks that take their place load when the memory is free, or after a while beside it."""
    now, loaded, made = [100.0], [], []
    lost_s = now[0]

    class Held(Ranks):
        killed = False
        has_ended = property(lambda self: self.killed and now[0] >= lost_s + held_s, lambda self, value: None)

        def kill(self) -> None:
            self.killed = True

    class Next(Ranks):
        def begin(self) -> None:
            loaded.append(now[0] - lost_s)

    monkeypatch.setattr(recoveries.time, "monotonic", lambda: now[0])
    ranks = Held(lambda plans: killed() if plans == 3 else None)
    bench = make_bench(ranks, recovery=recovery_of(made, Next))
    socket = bench.client()
    bench.say(socket, *(wish(name, [1, 2, 3], 12) for name in "ab"))
    for _ in range(200):
        bench.turn(1)
        now[0] += 0.25
    heard = bench.heard(socket)
    assert [tokens_of(heard, name) for name in "ab"] == [expected_tokens(number, 3, 12) for number in range(2)]
    assert len(made) == 1 and loaded == [pytest.approx(min(held_s, recoveries.HELD_MAX_S), abs=1.5)]
    bench.core.shut_down()
    bench.core.stop_ranks(0.0)


def test_ranks_of_other_weights_are_not_taken(make_bench) -> None:  # noqa: F811
    model = ModelFacts(vocab_size=50, position_count_max=64, eos_token_ids=())
    facts = RankReady(model=model, rank=0, page_count_max=9, block_bytes=1, model_digest="as it was", environment={})

    class Others(Ranks):
        def started(self) -> tuple[RankReady, ...]:
            return (RankReady(model=model, rank=0, page_count_max=5, block_bytes=1, model_digest="other", environment={}),)

        def kill(self) -> None:
            ended.append(self)

    ended: list[Others] = []
    recovery = Recovery(lambda generation: Others(), 10, (facts,))
    bench = make_bench(Ranks(lambda plans: killed() if plans == 3 else None), recovery=recovery)
    with pytest.raises(NoMoreRanks, match="differ from those before in model_digest"):
        ask(bench)
    assert len(ended) == 1, "they do not stay either"


# ---- a request that kills the ranks ------------------------------------------------------------------------------


class Poisoned(Ranks):
    """Ranks that die of request `victim` in the step that computes its token at `position`."""

    victim, position = 1, 15

    def _fold(self, rank: int, event: object) -> None:
        super()._fold(rank, event)
        if isinstance(event, StepPlanned):
            scheduled = self._states[rank].in_flight[-1]
            spans = zip(scheduled.ids.tolist(), scheduled.starts.tolist(), (scheduled.starts + scheduled.counts).tolist())
            if any(id_ == self.victim and start <= self.position < end for id_, start, end in spans):
                self.death = killed()
                self.results.pop()  # of this step there is none


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("position", [0, 8, 9, 10, 15, 20])
@pytest.mark.parametrize("victim", [0, 1, 4, 7])
@pytest.mark.parametrize("budget", [64, 16])
def test_a_request_that_kills_the_ranks_is_ended_and_the_others_go_on(
    make_bench, monkeypatch: pytest.MonkeyPatch, depth: int, position: int, victim: int, budget: int  # noqa: F811
) -> None:
    """Where prompts take several steps, one other may be blamed before it (PoisonGuard)."""
    monkeypatch.setattr(recoveries, "FIRST_DELAY_S", 0.0)
    made: list[ToyExecutor] = []

    def poisoned() -> ToyExecutor:
        ranks = Poisoned()
        ranks.victim, ranks.position = victim, position
        return ranks

    config = {"pipeline_depth": depth, "max_num_batched_tokens": budget, "max_num_seqs": 6, "page_count": 80, "all_laws": False}
    bench = make_bench(poisoned(), recovery=recovery_of(made, poisoned), **config)
    socket = bench.client()
    bench.say(socket, *(wish(f"r{number}", [1 + number] * (9 + number % 3), 14) for number in range(8)))
    bench.turn(300)
    heard = bench.heard(socket)
    errors = {number: outputs[-1].error for number in range(8) if (outputs := outputs_of(heard, f"r{number}"))[-1].error}
    assert errors[victim].startswith("the engine's ranks were lost twice in a row while they computed this request")
    assert len(errors) == 1 or (budget == 16 and len(errors) == 2)
    for number in set(range(8)).difference(errors):
        assert tokens_of(heard, f"r{number}") == expected_tokens(number, 9 + number % 3, 14)
    assert 2 <= len(made) <= (4 if budget == 64 else 7)
    bench.core.shut_down()
    assert bench.verified()


def test_one_alone_is_to_blame_at_its_second_death(make_bench, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    monkeypatch.setattr(recoveries, "FIRST_DELAY_S", 0.0)
    made: list[ToyExecutor] = []
    bench = make_bench(Poisoned(), recovery=recovery_of(made, Poisoned))
    socket = bench.client()
    bench.say(socket, wish("first", [1], 3))
    bench.say(socket, wish("poison", [1] * 9, 14))
    assert len(made) == 2 and outputs_of(bench.heard(socket), "poison")[-1].error


def test_one_that_a_second_death_meets_alone_is_blamed_at_the_third(monkeypatch: pytest.MonkeyPatch) -> None:
    """It may have been the first to come back: an operator who kills ranks twice has no quarrel with it."""
    guard, met = recoveries.PoisonGuard(), iter(({RequestId(1): 5, RequestId(2): 5}, {RequestId(1): 5}, {RequestId(1): 5}))
    monkeypatch.setattr(recoveries, "in_flight", lambda state: next(met))
    state = SimpleNamespace(in_flight=(0,), config=SimpleNamespace(speculation=None), next_id=3, cautious=0)
    assert [guard.judge(state).blamed for _ in range(3)] == [None, None, 1]


def test_laws_that_break_are_no_loss(make_bench, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    made: list[ToyExecutor] = []
    bench = make_bench(recovery=recovery_of(made))

    def broken(state: object) -> None:
        raise LawBroken("M1", "made up")

    monkeypatch.setattr(bench.core.engine, "_check", broken)
    with pytest.raises(LawBroken):
        ask(bench)
    assert not made
