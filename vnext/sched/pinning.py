"""Pinning: when the clock ticks for pins, and which of them yield. Pure.

Pins keep their pages while others wait for memory. If nobody could go on otherwise, the pins that end first yield, as many as it
takes. The clock ticks only for pins, so a log in which nothing happens does not grow.
"""

from __future__ import annotations

import numpy as np
from msgspec.structs import replace

from vnext.sched.admission import chunk, pages_of
from vnext.sched.preemption import make_room
from vnext.sched.ranking import places_best_first
from vnext.state.allocate import fits, hit_tokens_of, prefix_hits, shared
from vnext.state.events import ClockTicked, PinsYielded
from vnext.state.expected import expected_work, first_up_to_inputs, room_of
from vnext.state.facilities.adapters import may_run
from vnext.state.facilities.tier import transferring
from vnext.state.pool import HELD
from vnext.state.state import State

TICK_S = 10
"""Seconds between two ticks, at least: pins end up to so much late."""
NOTHING = np.empty(0, dtype=np.int32)


def next_tick(state: State, seconds: int, retaining: bool) -> ClockTicked | None:
    """The tick that is due at this second; None if none is. `retaining`: a request that lives, or comes now, makes pins when it
    ends."""
    if seconds <= state.clock:
        return None
    due_s = tick_due_s(state, retaining)
    return ClockTicked(seconds=seconds) if due_s is not None and due_s <= seconds else None


def tick_due_s(state: State, retaining: bool) -> int | None:
    """The second of the next tick; None while nothing depends on the clock."""
    pins = state.pool.pins
    ends = [pins.next_end()] if pins is not None and pins.count else []
    return min((*ends, *([state.clock + TICK_S] if retaining else [])), default=None)


def next_yield(state: State) -> PinsYielded | None:
    """The pins that yield now; None while somebody can go on without that."""
    pins = state.pool.pins
    if pins is None or not pins.count or state.in_flight or state.paused not in ("", "wait"):
        return None
    lacking, hits = _lacking(state)
    if lacking <= 0:
        return None
    pages = pins.first_to_leave()
    gains = (state.pool.status.at(pages) == HELD) & ~np.isin(pages, hits)
    enough = int(np.searchsorted(np.cumsum(gains), lacking)) + 1
    return PinsYielded(count=min(enough, len(pages)))


def _lacking(state: State) -> tuple[int, np.ndarray]:
    """How many pages the request lacks that would go on first, and which pages it hits (int32[n]); 0 where somebody can go on."""
    state = replace(state, config=replace(state.config, input_units=0))  # with nothing in flight an input is encoded at once
    config, pool = state.config, state.pool
    work = expected_work(state)
    if len(state.rows):
        stuck = work.pages_sum > pool.free and make_room(state) is None
        return (work.pages_sum - pool.free if stuck else 0), NOTHING
    moving = transferring(state)
    best = [place for place in places_best_first(state, len(moving) + 1) if state.waiting[place].id not in moving][:1]
    if not best or not may_run(state, state.waiting[best[0]].id):
        return 0, NOTHING
    entry = state.waiting[best[0]]
    table = prefix_hits(config, pool, entry)
    hits, start = shared(config, table), hit_tokens_of(config, table)
    tokens = chunk(config, entry.known - start, config.max_num_batched_tokens)
    tokens, _ = first_up_to_inputs(state, entry, start, tokens, room_of(state))
    if tokens == 0 or fits(config, pool, table, tokens):
        return 0, NOTHING
    return pages_of(config, pool, table, tokens) - pool.free, hits
