"""A steady turn is what `match_samples`, `reduce` and `schedule` make of the same commit, in either form, and others
are left to them."""

from __future__ import annotations

from collections import Counter
from itertools import product

import numpy as np
import pytest
from msgspec.structs import replace

from tests.sim.scenario_draw import draw_clients, draw_config
from vnext.log.snapshot import snapshot
from vnext.sched import turn
from vnext.sched.schedule import schedule
from vnext.sched.turn import steady_run, steady_turn
from vnext.sim.rng import Rng
from vnext.state.config import SchedulerConfig, Speculation
from vnext.state.digest import digest
from vnext.state.events import (
    EngineStarted,
    PrefixCacheReset,
    RequestAborted,
    RequestArrived,
    StepCommitted,
    StepPlanned,
    pack_tokens,
)
from vnext.state.feasibility import refusal
from vnext.state.fold_commit import finish
from vnext.state.laws import check
from vnext.state.outputs import going_of, outputs_apart
from vnext.state.params import Sampling
from vnext.state.reduce import fold, reduce, start
from vnext.state.state import State
from vnext.state.store import columns, columns_numpy, fields

COMMITS = 400
FORMS = [form for form in (columns_numpy, columns._columns) if form is not None]


def arrivals(rng: Rng, config: SchedulerConfig) -> list[RequestArrived]:
    return [
        RequestArrived(id=0, name="", prompt=pack_tokens(client.prompt), sampling=client.sampling, priority=0, arrival_ns=0)
        for client in draw_clients(rng, config, 30)
        if client.prompt
    ]


def disturbed(rng: Rng, state: State, coming: list[RequestArrived], percent: int = 6) -> State:
    """Now and then somebody comes, leaves, or what was cached is forgotten."""
    if rng.happens(percent):
        event = replace(rng.choose(coming), id=state.next_id, name=str(state.next_id))
        state = state if refusal(state.config, event) else reduce(state, event)
    if len(state.rows) and rng.happens(percent // 2):
        state = reduce(state, RequestAborted(ids=(int(state.rows.id[rng.below(len(state.rows))]),), reason="client"))
    return reduce(state, PrefixCacheReset()) if rng.happens(1) else state


def planned(state: State, lacks_one: bool = False) -> State:
    """With all plans that there are, or without the last one that fits."""
    while len(state.in_flight) + lacks_one < state.config.pipeline_depth and (plan := schedule(state)) is not None:
        state = reduce(state, plan)
    return state


def compared(before: State, event: StepCommitted) -> tuple[State, bool]:
    """The state after a commit, by the oracle unless the turn is steady; and whether it is. All that a turn says is compared."""
    reported = snapshot(before)
    turn = steady_turn(before, event)
    assert snapshot(before) == reported, "the state before stays as it was"
    after, matched = fold(before, event)
    if turn is None:
        assert snapshot(before) == reported
        return after, False
    plan = schedule(after)
    assert plan == StepPlanned(step=before.planned), "it admits, changes and preempts nothing"
    expected = reduce(after, plan)
    assert snapshot(turn.state) == snapshot(expected) and digest(turn.state) == digest(expected)
    assert (
        turn.state.token_digest == expected.token_digest
        and turn.state.in_flight[-1].tokens == expected.in_flight[-1].tokens
    )
    check(turn.state)
    for name in ("rows", "tokens", "samples", "stopped", "at_limit"):
        assert np.array_equal(getattr(turn.matched, name), getattr(matched, name)), name
    going, ended = outputs_apart(before, after, matched)
    assert not ended and turn.matched.ended == 0
    for name in ("ids", "tokens", "cached"):
        assert getattr(turn.going, name).tobytes() == getattr(going, name).tobytes(), name
    assert snapshot(before) == reported
    return turn.state, True


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.__name__.split(".")[-1])
@pytest.mark.parametrize("first", range(0, 24, 6))
def test_a_turn_is_what_reducer_and_scheduler_say(first: int, form: object, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(columns, "impl", form)
    counted = Counter(steady for seed in range(first, first + 6) for steady in turns_of(seed))
    assert min(counted[True], counted[False]) > 60, counted


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.__name__.split(".")[-1])
def test_turns_at_once_are_those_that_are_steady_one_by_one(form: object, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(columns, "impl", form)
    seen = Counter[str]()
    for seed in range(9):
        rng, speculation = Rng(seed), Speculation(row_cost=300) if seed % 3 == 2 else None
        config = SchedulerConfig(
            block_size=rng.choose([2, 4]), page_count=rng.choose([16, 20, 60]), max_num_batched_tokens=rng.choose([24, 40]),
            max_num_seqs=rng.between(2, 9), max_model_len=60, vocab_size=900, pipeline_depth=rng.between(1, 3), eos_token_ids=(7,),
            policy=rng.choose(["fcfs", "priority"]), speculation=speculation, prefix_caching=seed % 7 > 0,
        )  # fmt: skip
        sampling = Sampling(seed=0, max_tokens=40)
        coming = [
            RequestArrived(id=0, name="", prompt=pack_tokens([*range(9, 9 + rng.between(1, 20))]), sampling=sampling, priority=0, arrival_ns=0)
            for _ in range(9)
        ]
        state = start(EngineStarted(config=config, model="", model_digest="", world_size=1, environment={}, started_ns=0))
        for _ in range(COMMITS // 5):
            state = planned(disturbed(rng, state, coming, 25), rng.below(3) == 0)
            if state.in_flight:
                most, ends = max(rng.below(14) - 2, 0), rng.happens(50)
                asked = int(state.in_flight[0].samples.sum()) + 1
                tokens = [rng.below(config.vocab_size) for _ in range((most + 1) * max(len(state.rows), asked))]
                state = compared_run(state, pack_tokens(tokens), most, seen, ends)
    assert min(seen["turn"], seen["run"], seen["end"]) > 50 and min(seen["joins"], seen["waits"], seen["gone"]) > 5, seen
    assert min(seen["leads"], seen["ends"], seen["half"], seen["early"], seen["finished"]) > 15, seen


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.__name__.split(".")[-1])
def test_turns_end_where_somebody_who_waits_may_join(form: object, monkeypatch: pytest.MonkeyPatch) -> None:
    """The running request makes blocks that the waiting one hits, or the step's tokens do not suffice for all of its prompt."""
    monkeypatch.setattr(columns, "impl", form)
    seen = Counter[str]()
    for places, budget, length, end, first in product(range(24, 40, 3), (14, 64), (5, 6), (54, 55, 57), (1, 21)):
        config = SchedulerConfig(
            block_size=2 + 2 * (places % 2), page_count=places // (2 + 2 * (places % 2)), max_num_batched_tokens=budget,
            max_num_seqs=4, max_model_len=60, vocab_size=99, pipeline_depth=4,
        )  # fmt: skip
        state = start(EngineStarted(config=config, model="", model_digest="", world_size=1, environment={}, started_ns=0))
        for number, (tokens, most) in enumerate(((range(1, length + 1), 16), (range(50, end), 16), (range(first, first + 13), 1))):
            state = reduce(state, RequestArrived(
                id=number, name="", prompt=pack_tokens([*tokens]), priority=0, arrival_ns=0,
                sampling=Sampling(seed=0, max_tokens=most, ignore_eos=True),
            ))  # fmt: skip
            if number == 1:
                state = planned(reduce(planned(state), StepCommitted(step=0, tokens=pack_tokens([length + 1, 90]))))
        tokens = [token for known in range(length + 1, length + 15) for token in (known + 1, 90)]
        compared_run(planned(state), pack_tokens(tokens), 14, seen)
    assert min(seen["turn"], seen["waits"], seen["joins"]) > 5, seen


def compared_run(before: State, tokens: bytes, most: int, seen: Counter[str], ends: bool = False) -> State:
    """The state behind a run, which the oracle has said too, and behind one commit more, which ends it unless `most` did."""
    reported = snapshot(before)
    run = steady_run(before, memoryview(tokens), most, ends)
    if run is not None and run.gone:
        run = replace(run, state=finish(run.state, run.gone, "finished"))
    counts, state, drawn = run.counts if run else [], before, 0
    if run is not None and run.leads:
        assert schedule(state) == StepPlanned(step=state.planned)
        state = reduce(state, schedule(state))
        seen["leads"] += 1
    for number, count in enumerate(counts):
        event = StepCommitted(step=state.committed, tokens=tokens[drawn : drawn + 4 * count])
        after, matched = fold(state, event)
        seen["gone"] += 4 * len(matched.rows) < len(event.tokens)
        if run.ended and number == len(counts) - 1:
            assert matched.rows[matched.stopped | matched.at_limit].tolist() == run.gone and (ends or number < most)
            is_surely_steady = number < most and not matched.ended and schedule(after) == StepPlanned(step=state.planned)
            assert not is_surely_steady or (state.waiting and len(state.rows) < state.config.max_num_seqs)
            state, drawn = after, drawn + 4 * count
            seen["ends"] += number == most
            seen["early"] += number < most
            seen["finished"] += len(run.gone)
            seen["half"] += not number and not run.leads
            continue
        assert not matched.ended and number < most
        state, drawn = after, drawn + 4 * count
        assert schedule(after) == StepPlanned(step=state.planned)
        state = reduce(after, schedule(after))
        seen["turn"] += 1
        seen["waits"] += bool(state.waiting) and len(state.rows) < state.config.max_num_seqs
    if run is not None:
        assert snapshot(run.state) == snapshot(state) and digest(run.state) == digest(state)
        assert run.state.token_digest == state.token_digest and snapshot(before) == reported
        assert [each.tokens for each in run.state.in_flight] == [each.tokens for each in state.in_flight]
        check(run.state)
        seen["run"] += 1
    if not state.in_flight or (run is not None and run.ended):
        return state
    event = StepCommitted(step=state.committed, tokens=tokens[drawn : drawn + 4 * int(state.in_flight[0].samples.sum())])
    if len(counts) < most and len(event.tokens) == 4 * int(state.in_flight[0].samples.sum()):
        is_surely_over = not state.waiting or len(state.rows) == state.config.max_num_seqs
        assert steady_turn(state, event) is None or not is_surely_over
        seen["end"] += 1
    if len(event.tokens) < 4 * int(state.in_flight[0].samples.sum()):
        return state
    after, _ = fold(state, event)
    plan = schedule(after)
    seen["joins"] += bool(plan is not None and plan.admitted)
    return after


def turns_of(seed: int) -> list[bool]:
    """Whether each turn of a run was steady."""
    rng = Rng(seed)
    speculation = Speculation(row_cost=rng.choose([0, 300, 3000]), step_cost=rng.choose([0, 700]), row_cost_many=rng.choose([0, 40, 900])) if seed % 3 == 2 else None
    config = replace(draw_config(rng), page_count=rng.choose([12, 40, 200]), windows=(), speculation=speculation)
    if seed % 4 == 1:
        config = replace(config, microbatches=2 + seed % 3, pipeline_depth=2 + seed % 3, max_num_seqs=12, page_count=200)
    coming, seen = arrivals(rng, config), []
    state = start(EngineStarted(config=config, model="", model_digest="", world_size=1, environment={}, started_ns=0))
    for _ in range(COMMITS):
        state = planned(disturbed(rng, state, coming))
        if state.in_flight:
            count = int(state.in_flight[0].samples.sum())
            tokens = pack_tokens([rng.below(config.vocab_size or 64) for _ in range(count)])
            state, steady = compared(state, StepCommitted(step=state.committed, tokens=tokens))
            seen.append(steady)
    return seen


def steady_state(**changes: object) -> State:
    """Two requests that decode."""
    config = SchedulerConfig(
        block_size=4, page_count=40, max_num_batched_tokens=64, max_num_seqs=4, max_model_len=64, vocab_size=99
    )
    state = start(
        EngineStarted(config=replace(config, **changes), model="", model_digest="", world_size=1, environment={}, started_ns=0)
    )
    event = next(event for event in arrivals(Rng(3), config) if not refusal(config, event))
    sampling = replace(event.sampling, max_tokens=40, min_tokens=0, stop_token_ids=(), ignore_eos=True)
    for number in range(2):
        state = reduce(state, replace(event, id=number, name=str(number), prompt=pack_tokens([1, 2, 3]), sampling=sampling))
    state = planned(state)
    state = reduce(state, StepCommitted(step=0, tokens=pack_tokens([5, 6])))
    return planned(state)


def test_what_is_no_steady_turn_is_left_to_the_others() -> None:
    """Wrong steps, wrong numbers of tokens, tokens below zero, and states that are not their stores' newest."""
    state = steady_state()
    fine = StepCommitted(step=1, tokens=pack_tokens([7, 8]))
    for wrong in (
        replace(fine, step=2), replace(fine, tokens=pack_tokens([7])), replace(fine, tokens=fine.tokens + b"\0"),
        replace(fine, tokens=pack_tokens([7, -1])), replace(fine, tokens=pack_tokens([7, 8, 9])),
    ):  # fmt: skip
        assert steady_turn(state, wrong) is None
    found = compared(state, fine)
    assert found[1] and found[0].planned == state.planned + 1
    assert steady_turn(state, fine) is None, "another future has the stores by now"


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.__name__.split(".")[-1])
def test_a_plan_that_has_no_blocks_is_left_to_the_scheduler(form: object, monkeypatch: pytest.MonkeyPatch) -> None:
    """It has to preempt."""
    monkeypatch.setattr(columns, "impl", form)
    state, steady = steady_state(page_count=11), True
    while steady:
        state, steady = compared(state, StepCommitted(step=state.committed, tokens=pack_tokens([7, 8])))
    assert state.pool.free == 1 and schedule(state).preempted


@pytest.mark.skipif(columns._columns is None, reason="the compiled columns are not built here: no C compiler was found")
def test_the_compiled_form_measures_what_it_is_given() -> None:
    """Arrays that are too short are no steady turn, and nothing is written behind an end."""
    state, turn = steady_state(), columns._columns.turn
    cells, step_entries, pool = state.rows.cells, state.in_flight[0], state.pool
    step = [cells, np.empty((0, 0), np.int64), step_entries.entries, step_entries.samples, np.array([7, 8], "<i4"), np.empty(0, np.int64)]
    stores = [state.tokens.arena.data, state.tables.arena.data, pool.queue.arena.data, pool.status.values()]
    out = [np.empty_like(cells), np.empty((4, 2), np.int64), np.empty(2, bool), np.empty((6, 2), np.int64), np.empty(2, np.int32)]
    numbers = (64, 0, 4, 40, pool.head, pool.queue.used, True, False, 1, 2, 0, 0)
    assert turn(tuple(step), tuple(stores), tuple(out), numbers, ()) is not None
    for given, place in ((step, 0), (step, 2), (step, 3), (step, 4), (stores, 0), *((out, place) for place in range(5))):
        whole = given[place]
        given[place] = whole[:0] if whole is stores[0] else whole[..., :1].copy()
        assert turn(tuple(step), tuple(stores), tuple(out), numbers, ()) is None, (len(given), place)
        given[place] = whole
    for wrong, by in ((numbers[:-1], ()), ((*numbers, 0), ()), ([*numbers], ()), (numbers, (0, 0, 0, 0)), (numbers, [])):
        with pytest.raises(TypeError):
            turn(tuple(step), tuple(stores), tuple(out), wrong, by)


@pytest.mark.skipif(columns._columns is None, reason="the compiled columns are not built here: no C compiler was found")
def test_compiled_turns_measure_what_they_are_given() -> None:
    """As one does; and they end where tokens or pages' places do."""
    state, turns = steady_state(), columns._columns.turns
    cells, pool, flight = state.rows.cells, state.pool, tuple((each.entries, each.samples) for each in state.in_flight)
    step = [cells, np.empty((0, 0), np.int64), flight, np.full(12, 9, "<i4"), np.empty(0, np.int64)]
    stores = state.tokens.arena.data, state.tables.arena.data, pool.queue.arena.data, pool.status.values()
    depth, int64 = len(flight), np.int64
    out = [
        np.empty((2, *cells.shape), int64), np.empty((depth + 1, 4, 2), int64), np.empty((depth + 1, 2), bool),
        np.empty((6, 2), int64), np.empty(20, np.int32), np.empty((10, 4), int64),
    ]  # fmt: skip
    numbers, run = (64, 0, 4, 40, pool.head, pool.queue.used, True, False, 1, 2, 0, 0), (depth, 10, False, False)
    assert turns(tuple(step), stores, tuple(out), numbers, (), run)[:2] == (6, False)
    assert turns(tuple(step), stores, tuple(out), numbers, (), (depth, 5, False, True))[:2] == (5, True)
    for wrong in ((depth, 10, True, False), (depth, 10, False, True), (depth, -1, False, True), (depth + 1, 9, False, False), (0, 9, False, False)):
        assert turns(tuple(step), stores, tuple(out), numbers, (), wrong) is None, wrong
    for given, place, most in ((step, 3, 3), *((out, place, 0) for place in range(4)), (out, 4, 0), (out, 5, 0)):
        whole = given[place]
        given[place] = whole[: len(whole) // 2] if whole is not out[4] else whole[:1]
        found = turns(tuple(step), stores, tuple(out), numbers, (), run)
        assert (found[0] if found else 0) <= most, (len(given), place)
        given[place] = whole


def test_news_of_some_rows_name_the_requests_in_them() -> None:
    cells = np.zeros((fields.BLOCK_HASH_0 + 4, 3), dtype=np.int64)
    cells[fields.ID], cells[fields.CACHED] = (7, 8, 9), (1, 2, 3)
    going = going_of(cells, np.array([0, 2]), np.array([50, 60], dtype=np.int32))
    assert (going.ids.tolist(), going.tokens.tolist(), going.cached.tolist()) == ([7, 9], [50, 60], [1, 3])


def test_arrays_that_turns_share_cannot_be_written() -> None:
    assert not any(array.flags.writeable for array in (turn._ends((1, 2)), *turn._shared(3)))
