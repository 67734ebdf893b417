"""vnext's control plane as control_plane.py measures it: the states, prompts and steps of perf/bench_state.py."""

from __future__ import annotations

import control_measuring

from perf.bench_state import (
    BLOCK_SIZE,
    LONG_PROMPT,
    LongPrompts,
    advance,
    committed,
    steady_decode,
)
from vnext.base.version import __version__
from vnext.runtime.transport.ring.broadcast import encode_events
from vnext.sched.schedule import schedule
from vnext.state.events import AnyEvent
from vnext.state.laws import check_cheap
from vnext.state.outputs import outputs
from vnext.state.pool import new_pool, release, take
from vnext.state.reduce import fold, reduce

POOL_BLOCKS = 20_000


class Steady:
    """Asynchronous mode: plan the next step, then commit the oldest and make its outputs, as
    vnext/runtime/engine/engine_core.py does."""

    def __init__(self, request_count: int) -> None:
        self.state = steady_decode(request_count)
        self._reported: tuple[AnyEvent, ...] = ()

    def step(self) -> object:
        plan = schedule(self.state)
        self.state = reduce(self.state, plan)
        check_cheap(self.state)
        before, commit = self.state, committed(self.state)
        self.state, effects = fold(before, commit)
        check_cheap(self.state)
        self._reported = (commit, plan)
        return outputs(before, commit, self.state, effects)

    def bare(self) -> object:
        """perf/bench_state.py's step: no outputs."""
        self.state = advance(self.state)
        return self.state

    def message(self) -> bytes:
        self.step()
        return self.encode()

    def encode(self) -> bytes:
        return encode_events(self._reported)

    def running(self) -> int:
        return len(self.state.rows)


class Prompts:
    """LongPrompts, an arrival at a time."""

    def __init__(self, shared: bool) -> None:
        self._engine = LongPrompts(shared)

    def next(self) -> None:
        self._arrival = self._engine.next_arrival()

    def arrive(self) -> object:
        self._engine.state = reduce(self._engine.state, self._arrival)
        return self._engine.state

    def first(self) -> int:
        plan = schedule(self._engine.state)
        self._engine.state = reduce(self._engine.state, plan)
        return plan.admitted[0][1]


class Pool:
    """Blocks of a pool that nothing else uses."""

    def __init__(self) -> None:
        self._pool = new_pool(POOL_BLOCKS)

    def turn(self, count: int) -> None:
        self._pool, taken = take(self._pool, count)
        self._pool = release(self._pool, taken)


def main() -> None:
    channel = control_measuring.private_output()
    rows = control_measuring.measured_loop() | control_measuring.measured_blocks(Pool().turn)
    rows |= control_measuring.measured_prompts(Prompts, tokens_hit=BLOCK_SIZE, tokens_miss=LONG_PROMPT)
    for request_count in control_measuring.RUNNING:
        steady = Steady(request_count)
        rows |= control_measuring.measured_steps(steady, request_count)
        rows[f"bare_{request_count}"] = control_measuring.measured_us(steady.bare, control_measuring.STEPS)
    control_measuring.tell(channel, {"version": __version__, "mode": "asynchronous, cheap laws checked"}, {"vnext": rows})


if __name__ == "__main__":
    main()
