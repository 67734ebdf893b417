"""The simulator's quick forms of laws and its second spelling of policies, held against the plain ones."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from itertools import pairwise

import numpy as np
import pytest
from msgspec.structs import replace

from vnext.sched import ranking
from vnext.sched.policies import BUILT_IN
from vnext.sched.sim import house
from vnext.sched.sim.chance import Chance
from vnext.sched.sim.core import Core
from vnext.sched.sim.errors import Divergence
from vnext.sched.sim.order import HOUSE, PATIENCE, policy_keys
from vnext.sched.sim.quick import QUICK, check_after, touched
from vnext.sched.sim.scenario import scenario
from vnext.sched.sim.simulator import simulate
from vnext.sched.sim.snapshot import Snapshot
from vnext.state import extents, laws, rows as columns
from vnext.state.errors import LawBroken
from vnext.state.extents import Arena, Extents
from vnext.state.names import Names
from vnext.state.pool import named_blocks
from vnext.state.reduce import reduce, start
from vnext.state.rows import FIELD_NAMES, STRUCTURE_FIELD_COUNT, Rows
from vnext.state.state import State
from vnext.state.versions import VersionedArray

STRICTER = {laws.writers_are_exclusive}
"""Their quick forms say no to more: a step that writes outside its request's table."""


def states(seeds: range) -> Iterator[State]:
    for seed in seeds:
        first, *rest = simulate(scenario(seed, client_count=25)).events
        state = start(first)
        for event in rest:
            state = reduce(state, event)
            yield state


def broken(law: Callable[[State], None], state: State) -> bool:
    """A law speaks, or finds nothing to read where it looks."""
    try:
        law(state)
    except (LawBroken, LookupError, ValueError):
        return True
    return False


def holds_quickly(quick: Callable[[Snapshot], bool], seen: Snapshot) -> bool:
    try:
        return quick(seen)
    except (LookupError, ValueError):
        return False


# ---- states with one number wrong --------------------------------------------------------------------------------


def with_wrong_cell(state: State, chance: Chance) -> State:
    cells = state.rows.cells.copy()
    cells[chance.below(STRUCTURE_FIELD_COUNT), chance.below(len(state.rows))] += chance.choose((-2, -1, 1, 2))
    return replace(state, rows=Rows(cells))


def written(values: Extents, at: int, value: np.ndarray) -> Extents:
    """Another arena with one other value: what the state itself reads stays as it is."""
    data = values.arena.data.copy()
    data[at] = value[0]
    return Extents(Arena(data), values.used, 0)


def with_wrong_table(state: State, chance: Chance) -> State:
    at = int(state.rows.table_at[chance.below(len(state.rows))])
    block = np.array([chance.below(state.config.block_count)], dtype=np.int32)
    return replace(state, tables=written(state.tables, at, block))


def with_wrong_history(state: State, chance: Chance) -> State:
    at = int(state.rows.tokens_at[chance.below(len(state.rows))])
    return replace(state, tokens=written(state.tokens, at, np.array([99], dtype=np.int32)))


def with_wrong_block(state: State, chance: Chance) -> State:
    pool, block = state.pool, np.array([chance.below(state.config.block_count)])
    kind = chance.below(5)
    if kind == 0:
        return replace(state, pool=replace(pool, free=pool.free + chance.choose((-1, 1))))
    if kind == 1:
        return replace(state, pool=replace(pool, kept=pool.kept + chance.choose((-1, 1))))
    if kind == 2:
        return replace(state, pool=replace(pool, status=pool.status.set(block, pool.status.at(block) - 1)))
    if kind == 3:
        status = pool.status.set(block, np.array([chance.choose((-1, pool.head))]))
        return replace(state, pool=replace(pool, status=chance.choose((status, VersionedArray(pool.status.values().copy(), 5)))))
    return replace(state, pool=replace(pool, head=pool.head + 1))


def with_wrong_name(state: State, chance: Chance) -> State:
    pool, block = state.pool, chance.below(state.config.block_count)
    if chance.happens(50):
        pool = replace(pool, names=Names({**named_blocks(pool), b"a name": block}, pool.names.keys()))
    if chance.happens(50):
        keys = pool.names.keys()
        keys[block] = b"a name"
        pool = replace(pool, names=Names(named_blocks(pool), keys))
    return replace(state, pool=pool)


def with_wrong_flight(state: State, chance: Chance) -> State:
    flight, name = state.flights[-1], chance.choose(("entries", "entries", "entries", "samples", "step", "tokens"))
    at, wrong = chance.below(len(flight.samples)), chance.choose((-1, 1, 40))
    if name in ("step", "tokens"):
        changed = replace(flight, **{name: getattr(flight, name) + 1})
    elif name == "samples":
        changed = replace(flight, samples=flight.samples ^ (np.arange(len(flight.samples)) == at))
    else:
        entries = flight.entries.copy()
        entries[chance.below(4), at] += wrong
        changed = replace(flight, entries=entries, tokens=int(entries[3].sum()))
    return replace(state, flights=(*state.flights[:-1], changed))


def with_wrong_queue(state: State, chance: Chance) -> State:
    entry = chance.choose(state.waiting)
    other = replace(entry, id=max(entry.id + chance.choose((-1, 1)), 0))
    waiting = [state.waiting * 2, state.waiting[1:], tuple(other if each is entry else each for each in state.waiting)]
    if chance.happens(30):
        return replace(state, waiting_sum=state.waiting_sum + 1)
    return replace(state, waiting=chance.choose(waiting))


def with_wrong_count(state: State, chance: Chance) -> State:
    changes = (
        dict(next_id=state.next_id + 1), dict(committed=state.committed + 1), dict(planned=state.planned + 1),
        dict(counters=replace(state.counters, finished=state.counters.finished + 1)),
    )  # fmt: skip
    return replace(state, **chance.choose(changes))


def with_tighter_bounds(state: State, chance: Chance) -> State:
    config = state.config
    bounds = (
        dict(running_max=max(len(state.rows) - 1, 0)), dict(batch_tokens_max=1), dict(prefill_threshold=1),
        dict(chunked_prefill=False), dict(pipeline_depth=0),
    )  # fmt: skip
    return replace(state, config=replace(config, **chance.choose(bounds)))


def wrong(state: State, chance: Chance) -> State:
    """The state with something in it changed that may well break a law."""
    ways = [with_wrong_block, with_wrong_name, with_wrong_count, with_tighter_bounds]
    ways += [with_wrong_cell, with_wrong_cell, with_wrong_table, with_wrong_history] if len(state.rows) else []
    ways += [with_wrong_flight] if state.flights else []
    ways += [with_wrong_queue] if state.waiting else []
    return chance.choose(ways)(state, chance)


def test_quick_forms_see_what_the_laws_see() -> None:
    chance, seen = Chance(7), Counter()
    for state in states(range(300, 330)):
        for other in (state, wrong(state, chance), wrong(state, chance)):
            snapshot = Snapshot(other)
            for _, quick, law in QUICK:
                breaks, holds = broken(law, other), holds_quickly(quick, snapshot)
                assert not (breaks and holds), f"{law.__name__} is broken and its quick form does not see it"
                assert breaks or holds or law in STRICTER, f"{law.__name__} holds and its quick form says no"
                seen[law.__name__] += breaks
    assert set(seen) == {law.__name__ for law in laws.ALL}
    assert min(seen.values()) >= 5, seen


def test_every_law_has_a_quick_form() -> None:
    assert [law for _, _, law in QUICK] == list(laws.ALL)


def test_a_wrong_state_is_found_after_an_event() -> None:
    """Whatever part is wrong counts as touched: the law that reads it is asked, and speaks."""
    chance, found = Chance(8), 0
    for state in states(range(330, 340)):
        other = wrong(state, chance)
        breaks = [law for law in laws.ALL if broken(law, other)]
        same_config = other.config is state.config  # no event changes the configuration
        if breaks and same_config:
            found += 1
            with pytest.raises((LawBroken, Divergence, LookupError, ValueError)):
                check_after(Snapshot(state), Snapshot(other))
    assert found > 200


def test_a_quick_form_that_is_wrong_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    reads, _, law = QUICK[0]
    before, after = next(pair for pair in pairwise(states(range(3, 4))) if pair[0].rows is not pair[1].rows)
    monkeypatch.setattr("vnext.sched.sim.quick.QUICK", ((reads, lambda seen: False, law),))
    assert touched(Snapshot(before), Snapshot(after)) & reads
    with pytest.raises(Divergence, match="bounds_hold holds, and its quick form says that it does not"):
        check_after(Snapshot(before), Snapshot(after))


# ---- snapshots ---------------------------------------------------------------------------------------------------


def test_a_snapshot_made_from_the_one_before_is_a_fresh_one() -> None:
    for seed in range(340, 348):
        events = simulate(scenario(seed, client_count=25)).events
        core = Core(events[0])
        for event in events[1:]:
            core.fold(event)
            fresh = Snapshot(core.state)
            assert all(getattr(fresh, name) == getattr(core.seen, name) for name in Snapshot.__slots__ if name != "state")


def test_a_snapshot_by_hand() -> None:
    state = next(state for state in states(range(3, 4)) if len(state.rows) > 1 and state.flights and state.waiting)
    seen = Snapshot(state)
    for name in ("id", "known", "computed", "pending", "limit", "blocks", "sealed", "prompt", "epoch", "priority"):
        assert getattr(seen, name) == state.rows.cells[FIELD_NAMES.index(name)].tolist()
    at, count = int(state.rows.cells[columns.TABLE_AT, 1]), int(state.rows.blocks[1])
    assert seen.tables[1] == extents.read(state.tables, at, count).tolist() and len(seen) == len(state.rows)
    assert seen.histories[0][: len(state.requests[seen.id[0]].prompt)] == state.requests[seen.id[0]].prompt
    assert seen.flights[-1].starts == state.flights[-1].starts.tolist()


# ---- policies ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", [*BUILT_IN, *house.POLICIES])
def test_policies_are_spelled_twice_and_order_alike(policy: str) -> None:
    met = Counter()
    for seed in range(350, 356):
        drawn = scenario(seed, client_count=30)
        first, *rest = simulate(replace(drawn, config=replace(drawn.config, policy=policy))).events
        state = start(first)
        for event in rest:
            state = reduce(state, event)
            ours, engines = policy_keys(Snapshot(state)), ranking.keys(state)
            assert sorted(ours, key=ours.__getitem__) == sorted(engines, key=engines.__getitem__)
            met["several"] += len(ours) > 1
            met["impatient"] += any(entry.epoch >= PATIENCE for entry in state.waiting)
    assert met["several"] > 300


def test_every_house_policy_is_spelled_twice() -> None:
    assert set(HOUSE) == set(house.POLICIES) and PATIENCE == ranking.PATIENCE
