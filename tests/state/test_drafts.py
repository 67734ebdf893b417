"""Drafts in the state: a step commits up to k + 1 tokens of a request, and nothing else differs from an engine without drafts."""

from __future__ import annotations

import random

import numpy as np
import pytest
from core_drive import Engine

from vnext.log.snapshot import decode, encode, load, snapshot
from vnext.runtime.rank import draft_costs
from vnext.sched.schedule import schedule
from vnext.state.config import Speculation
from vnext.state.errors import IllegalEvent
from vnext.state.events import DraftCostsMeasured, StepCommitted, StepPlanned, pack_tokens
from vnext.state.outputs import Output
from vnext.state.store import fields
from vnext.state.store.drafts_numpy import paying

THREE = Speculation(num_speculative_tokens=3)


def answer(id_: int, place: int) -> int:
    """What the model samples: the id of the request and the place in its answer decide."""
    return 1 + (id_ * 31 + place * 7) % 98


class Drafted(Engine):
    """An engine whose drafters are right as often as `accept` says: given the number of drafts, how many are kept."""

    def __init__(self, accept, **changes: object) -> None:
        super().__init__(**changes)
        self._accept = accept
        self.streams: dict[int, list[int]] = {}
        self.finishes: dict[int, str] = {}

    def take(self, news: list[Output]) -> None:
        for output in news:
            assert output.id not in self.finishes
            self.streams.setdefault(output.id, []).append(output.token)
            if output.finish:
                self.finishes[output.id] = output.finish

    def commit_oldest(self, stop: dict[int, int]) -> None:
        """Commit the oldest step; `stop` {request: place of an end token in its answer}."""
        state = self.state
        scheduled = state.in_flight[0]
        drafts = scheduled.drafts if scheduled.drafts is not None else [0] * len(scheduled.samples)
        tokens, counts, drafted = [], [], []
        for id_, start, planned, samples in zip(scheduled.ids.tolist(), scheduled.starts.tolist(), drafts, scheduled.samples):
            if not samples:
                continue
            count = scheduled.counts[scheduled.ids.tolist().index(id_)]
            request = state.requests.mapping().get(id_)
            first = int(start + count - planned) - (request.prompt_length if request else 0)
            there = random.Random(id_ * 1000 + first).randint(0, int(planned)) if planned else 0
            kept = 1 + self._accept(there)
            tokens += [0 if stop.get(id_) == place else answer(id_, place) for place in range(first, first + kept)]
            counts.append(kept)
            drafted.append(there)
        event = StepCommitted(step=scheduled.step, tokens=pack_tokens(tokens), counts=bytes(counts), drafted=bytes(drafted))
        self.fold(event if any(drafted) else StepCommitted(step=scheduled.step, tokens=pack_tokens(tokens)))
        self.take(self.news)


ACCEPT = {"all": lambda there: there, "none": lambda there: 0, "half": lambda there: there // 2}


def run(engine: Drafted, seed: int, stop: dict[int, int]) -> None:
    rng, arrived, wishes = random.Random(seed), 0, random.Random(seed + 1000)
    for _ in range(3000):
        if arrived < 12 and rng.random() < 0.3:
            sampling = {"min_tokens": wishes.randint(0, 6)} if wishes.random() < 0.3 else {}
            prompt = [wishes.randint(1, 9) for _ in range(wishes.randint(1, 12))]
            engine.arrive(prompt, max_tokens=wishes.randint(1, 30), **sampling)
            arrived += 1
        if rng.random() < 0.8:
            engine.plan()
        if engine.state.in_flight and (rng.random() < 0.5 or len(engine.state.in_flight) == engine.state.config.pipeline_depth):
            engine.commit_oldest(stop)
        if arrived == 12 and not engine.state.requests and not engine.state.in_flight:
            return
    raise AssertionError("requests still live")


@pytest.mark.parametrize("windows", [(), (0, 6)], ids=["full", "window"])
@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("accept", sorted(ACCEPT))
@pytest.mark.parametrize("page_count", [12, 60])
def test_streams_are_those_without_drafts(windows: tuple[int, ...], depth: int, accept: str, page_count: int) -> None:
    for seed in range(6):
        stop, changes = {2: 5, 4: 9, 6: 0, 7: 12}, dict(windows=windows, page_count=page_count * (2 if windows else 1), max_model_len=45)
        plain = Drafted(ACCEPT[accept], pipeline_depth=depth, **changes)
        drafting = Drafted(ACCEPT[accept], pipeline_depth=depth, speculation=THREE, **changes)
        run(plain, seed, stop)
        run(drafting, seed, stop)
        assert drafting.streams == plain.streams and drafting.finishes == plain.finishes
        assert drafting.free == plain.free
        counters = drafting.state.counters
        assert counters.generated_tokens == plain.state.counters.generated_tokens
        assert counters.draft_tokens > 0 and (counters.accepted_tokens > 0) == (accept != "none")
        if accept == "all":
            assert drafting.state.committed < plain.state.committed


def test_a_step_takes_back_what_was_not_kept() -> None:
    engine = Engine(speculation=THREE)
    id_ = engine.arrive([1, 2, 3], max_tokens=20)
    engine.plan()
    engine.commit(7)
    assert engine.plan() == {id_: 4} and engine.field(id_, "computed") == 7 and engine.field(id_, "placeholders") == 4
    engine.fold(StepCommitted(step=1, tokens=pack_tokens([8, 9]), counts=bytes([2]), drafted=bytes([3])))
    assert engine.tokens(id_) == [1, 2, 3, 7, 8, 9]
    assert (engine.field(id_, "known"), engine.field(id_, "computed"), engine.field(id_, "placeholders")) == (6, 5, 0)
    assert engine.state.rows.drafting[fields.TENTATIVE].tolist() == [0]


def test_the_next_step_in_flight_starts_where_the_kept_drafts_end() -> None:
    engine = Engine(speculation=THREE, pipeline_depth=2)
    engine.arrive([1, 2, 3], max_tokens=20)
    engine.plan()
    engine.commit(7)
    engine.plan()
    engine.plan()
    assert engine.state.in_flight[1].starts.tolist() == [7]
    engine.fold(StepCommitted(step=1, tokens=pack_tokens([8, 9]), counts=bytes([2]), drafted=bytes([3])))
    assert engine.state.in_flight[0].starts.tolist() == [5]


def test_a_step_in_flight_moves_for_the_requests_that_took_drafts_back_alone() -> None:
    """Not for one that kept its drafts, has left, or has given way since the step was planned."""
    engine = Engine(speculation=THREE, pipeline_depth=3, page_count=40)
    ids = kept, left, given_way, back = tuple(engine.arrive([number, 2, 3], max_tokens=20) for number in range(4))
    engine.plan()
    engine.commit(7, 7, 7, 7)
    engine.plan()
    engine.plan()
    assert engine.state.in_flight[1].ids.tolist() == [*ids] and engine.state.in_flight[1].starts.tolist() == [7, 7, 7, 7]
    engine.abort(left)
    engine.fold(StepPlanned(step=3, preempted=(engine.running.index(given_way),)))
    tokens = [place for place in range(11, 25)]
    engine.fold(StepCommitted(step=1, tokens=pack_tokens(tokens), counts=bytes([4, 4, 4, 2]), drafted=bytes([3, 3, 3, 3])))
    assert engine.running == [kept, back]
    assert engine.state.in_flight[0].starts.tolist() == [7, 7, 7, 5]


def test_drafts_end_where_the_answer_must() -> None:
    engine = Engine(speculation=THREE)
    id_ = engine.arrive([1, 2, 3], max_tokens=3)
    engine.plan()
    engine.commit(7)
    assert engine.plan() == {id_: 2}
    engine.fold(StepCommitted(step=1, tokens=pack_tokens([8, 9]), counts=bytes([2]), drafted=bytes([1])))
    assert [output.finish for output in engine.news] == ["", "length"]


def test_drafts_that_are_never_kept_end_but_for_a_trial() -> None:
    engine = Engine(speculation=Speculation(num_speculative_tokens=3, row_cost=300), max_model_len=400, page_count=120)
    id_, taken = engine.arrive([1], max_tokens=300), []
    while engine.state.requests:
        counts = engine.plan()
        drafts = int(engine.state.in_flight[0].drafts[0])
        taken.append(counts[id_] - 1)
        drafted = {"counts": bytes([1]), "drafted": bytes([drafts])} if drafts else {}
        engine.fold(StepCommitted(step=engine.state.committed, tokens=pack_tokens([7]), **drafted))
    assert taken[1] == 3 and set(taken[20:]) == {0, 1} and sum(taken[20:]) == sum(n % 32 == 0 for n in range(21, 301))


def test_costs_that_are_measured_again_decide_from_then_on() -> None:
    """A start on a busy machine said that no draft pays; the snapshot of such a state decides alike."""
    engine = Engine(speculation=Speculation(num_speculative_tokens=3, row_cost=1000, row_cost_many=1000, step_cost=900))
    engine.arrive([1], max_tokens=40)

    def drafts_of_next_step() -> int:
        engine.plan()
        (count,) = engine.state.in_flight[0].drafts.tolist()
        engine.fold(StepCommitted(step=engine.state.committed, tokens=pack_tokens([7])))
        return count

    assert [drafts_of_next_step() for _ in range(4)] == [0, 0, 0, 0]
    started = engine.state.config
    engine.fold(DraftCostsMeasured(row_cost=40, step_cost=0, row_cost_many=60))
    loaded = load(decode(encode(snapshot(engine.state), 2)), started)
    assert loaded.config == engine.state.config and schedule(loaded) == schedule(engine.state)
    assert drafts_of_next_step() == 3
    for costs, why in (((40, 0, 60), "as before"), ((-1, 0, 0), "thousandths"), ((0, 1001, 0), "thousandths")):
        with pytest.raises(IllegalEvent, match=why):
            engine.fold(DraftCostsMeasured(row_cost=costs[0], step_cost=costs[1], row_cost_many=costs[2]))
    with pytest.raises(IllegalEvent, match="without drafts"):
        Engine().fold(DraftCostsMeasured(row_cost=1, step_cost=0, row_cost_many=0))


def test_trials_are_rarer_where_a_row_costs_much() -> None:
    cells, drafting = np.zeros((fields.FIELD_COUNT, 1), dtype=np.int64), np.zeros((2, 1), dtype=np.int64)
    for row_cost, every in ((0, 32), (500, 64), (1000, 128), (4000, 256), (10**6, 256)):
        lengths = np.arange(1, 1025)
        by, room = (3, row_cost, 0, row_cost), np.array([3])
        due = [int(paying(with_length(cells, length), drafting[fields.RATE], room, by)[0]) for length in lengths]
        assert due == (lengths % every == 0).tolist()


def wanted(rates: list[int], step_cost: int, length: int = 1) -> list[int]:
    """The drafts of rows with these rates, at most 4 and 100 thousandths each."""
    cells, room = np.zeros((fields.FIELD_COUNT, len(rates)), dtype=np.int64), np.array([4] * (len(rates) - 1) + [1])
    return paying(with_length(cells, length), np.array(rates), room, (4, 100, step_cost, 100)).tolist()


def test_a_step_drafts_if_all_drafts_together_pay_for_it() -> None:
    """512 is a rate of a half: of four drafts 15/16 are kept, each worth 1.1 steps of one row and costing 0.1."""
    assert wanted([512], 0) == [1] and wanted([0, 512], 0) == [0, 1], "the last row has room for one"
    assert wanted([512, 0], 0) == [2, 0], "two rows: the third of 1/8 is not worth 0.1 * 2 / 1.2"
    # 0.75 tokens are worth 0.9, and cost half of (0.2 + f) * 2
    assert wanted([512, 0], 240) == [2, 0] and wanted([512, 0], 260) == [0, 0]
    assert wanted([1024, 1024], 1000) == [4, 1]


def test_beside_many_rows_a_draft_costs_what_it_costs_there() -> None:
    """12 rows take 1 + 8 * 0.1 + 4 * 0.25 steps of one row: a draft must be kept in 12 * 0.25 / 2.8 of all cases, which is never."""
    assert fields.FEW_ROWS == draft_costs.ROWS, "as it is measured"
    cells, rates = np.zeros((fields.FIELD_COUNT, 12), dtype=np.int64), np.full(12, 1024)
    cells[fields.KNOWN] = 1
    for many, drafts in ((100, 4), (200, 4), (250, 0)):
        assert paying(cells, rates, np.full(12, 4), (4, 100, 0, many)).tolist() == [drafts] * 12
    assert paying(cells[:, :8], rates[:8], np.full(8, 4), (4, 100, 0, 250)).tolist() == [4] * 8


def test_a_trial_is_longer_where_drafting_costs_a_step_something() -> None:
    """One draft that is kept would not raise the rate enough to pay."""
    assert wanted([0, 0], 0, length=32) == [1, 1] and wanted([0, 0], 500, length=32) == [3, 1] and wanted([0, 0], 500, length=33) == [0, 0]


def with_length(cells: np.ndarray, length: int) -> np.ndarray:
    cells[fields.KNOWN] = length
    return cells


def test_a_request_bounds_its_own_drafts() -> None:
    engine = Engine(speculation=THREE, max_num_batched_tokens=40)
    ids = [engine.arrive([1, 2, 3], max_tokens=20, num_speculative_tokens=bound) for bound in (-1, 0, 1, 64)]
    engine.plan()
    engine.commit(*[7] * 4)
    taken = engine.plan()
    assert [taken[id_] - 1 for id_ in ids] == [3, 0, 1, 3]


def test_drafts_never_preempt_and_are_never_admitted_over_the_budget() -> None:
    engine = Engine(speculation=THREE, page_count=4, max_num_batched_tokens=6)
    one, two = engine.arrive([1, 2, 3, 4], max_tokens=4), engine.arrive([5, 6, 7, 8], max_tokens=4)
    engine.plan()
    engine.plan()
    assert engine.state.counters.preempted == 0
    while engine.state.in_flight:
        engine.commit(*[9] * int(engine.state.in_flight[0].samples.sum()))
    assert sum(engine.plan().values()) <= 6 and engine.running == [one, two]


@pytest.mark.parametrize(
    ("counts", "drafted", "tokens", "sentence"),
    [
        ([5], [3], [1, 1, 1, 1, 1], "keeps more tokens"),
        ([0], [3], [], "keeps more tokens"),
        ([3], [1], [1, 1, 1], "keeps more tokens"),
        ([1], [4], [1], "more drafts than were planned"),
        ([2], [3], [1], "were counted"),
        ([1, 1], [0, 0], [1, 1], "sampled for 2 requests"),
        ([1], [], [1], "sampled for 1 requests"),
        ([1], [0], [-1], "negative"),
    ],
)
def test_a_commit_that_does_not_fit_its_step_is_illegal(counts, drafted, tokens, sentence: str) -> None:
    engine = Engine(speculation=THREE)
    engine.arrive([1, 2, 3], max_tokens=20)
    engine.plan()
    engine.commit(7)
    engine.plan()
    with pytest.raises(IllegalEvent, match=sentence):
        engine.fold(StepCommitted(step=1, tokens=pack_tokens(tokens), counts=bytes(counts), drafted=bytes(drafted)))


def test_a_commit_with_drafts_is_illegal_without_speculation() -> None:
    engine = Engine()
    engine.arrive([1, 2, 3])
    engine.plan()
    with pytest.raises(IllegalEvent, match="without speculation"):
        engine.fold(StepCommitted(step=0, tokens=pack_tokens([1]), counts=bytes([1]), drafted=bytes([0])))
