"""Pins: pages that stay for as long as a request has asked, and the clock by which their time passes.

The pages themselves are the pool's (vnext/state/pool.py, store/pins.py). Who pays, and which pins yield, is a decision
(vnext/sched/pinning.py); here the two events are folded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import msgspec

from vnext.state import pool as pools
from vnext.state.errors import require
from vnext.state.events import AnyEvent, ClockTicked, PinsYielded
from vnext.state.recurrent import with_pins_of_blocks
from vnext.state.state import State

replace = msgspec.structs.replace
CLOCK_MAX_S = 2**40


def fold_clock_ticked(state: State, event: ClockTicked) -> State:
    """The state at another time, without the pins that have ended."""
    require(event.seconds > state.clock, f"the clock ticks {event.seconds} where it has ticked {state.clock}: it never goes back")
    require(event.seconds <= CLOCK_MAX_S, f"the clock ticks {event.seconds}, more than {CLOCK_MAX_S} seconds after the start")
    pool = state.pool
    if pool.pins is not None:
        pool = pools.unpin(pool, pool.pins.over(event.seconds), "expired")
        pool = with_pins_of_blocks(state.config, pool, "expired")
    return replace(state, pool=pool, clock=event.seconds)


def fold_pins_yielded(state: State, event: PinsYielded) -> State:
    """The state without the pins that were nearest to their ends."""
    pinned = pools.pinned_pages(state.pool)
    require(0 < event.count <= len(pinned), f"{event.count} pins of {len(pinned)} end")
    pool = pools.unpin(state.pool, pinned[: event.count], "yielded")
    return replace(state, pool=with_pins_of_blocks(state.config, pool, "yielded"))


def illegal(state: State) -> Iterator[AnyEvent]:
    """No clock stands still or goes back, and no pins yield that are not there."""
    yield ClockTicked(seconds=state.clock)
    yield PinsYielded(count=0)
    yield PinsYielded(count=pools.pinned_count(state.pool) + 1)


FOLDS: dict[type[AnyEvent], Callable[..., State]] = {ClockTicked: fold_clock_ticked, PinsYielded: fold_pins_yielded}
