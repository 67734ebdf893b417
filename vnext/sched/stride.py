"""Strides: many steady turns in one compiled call. The fast twin of `schedule` and `reduce` for futures that nobody looks into.

A turn is one plan and one commit. It is steady when the plan is the expected one, nobody is admitted or gives way, and
nobody ends. `_stride.c` folds such turns by the same functions in the same order (vnext/state/columns.h, names.h), but in
stores that the state owns alone, with no state built between two of them. The first turn that is not steady is left to
`schedule` and `reduce`, which are the oracle: a stride's state equals theirs in every part (tests/sched/test_stride.py).
Where nothing was compiled there are no strides.

May: write into the stores of the state it is given. So that state must come from `own_copy` or from folding such a one, and
is not to be used afterwards.
"""

from __future__ import annotations

import msgspec
import numpy as np
import xxhash

from vnext.sched.admission import kept_out
from vnext.state import extents
from vnext.state.errors import LawBroken
from vnext.state.extents import Arena, Extents
from vnext.state.laws import check_cheap
from vnext.state.names import Names
from vnext.state.rows import Rows
from vnext.state.state import Flight, State
from vnext.state.versions import VersionedArray, VersionedMap

try:
    from vnext.sched import _stride
except ImportError:  # not built: no compiler when vnext was installed
    _stride = None

replace = msgspec.structs.replace
_DONE, _REFUSED, _LAWLESS = range(3)  # as _stride.c ends


class Samples:
    """Tokens that are drawn, one step's after the other; from the first again where a step's do not fit behind `at`."""

    __slots__ = ("at", "values")

    def __init__(self, values: np.ndarray, at: int = 0) -> None:
        """`values` int32[n], no fewer than a step can ask for."""
        self.values, self.at = values, at

    def draw(self, count: int) -> np.ndarray:
        """The next ones (int32[count])."""
        first = 0 if self.at + count > len(self.values) else self.at
        self.at = first + count
        return self.values[first : self.at]


class Strode(msgspec.Struct, frozen=True):
    """The state after so many steady turns. `tokens` (int32 bytes) were drawn for its oldest step, whose plan's turn was
    begun and whose commit is not steady, and are still to be folded; None where no turn was begun."""

    state: State
    turns: int
    tokens: bytes | None


def own_copy(state: State) -> State:
    """The same state in stores of its own: older and newer versions of the given one stay as they are."""
    pool = state.pool
    return replace(
        state,
        tokens=_copy(state.tokens),
        tables=_copy(state.tables),
        requests=VersionedMap(dict(state.requests.items())),
        pool=replace(
            pool, status=VersionedArray(pool.status.values().copy(), pool.status.sum), queue=_copy(pool.queue),
            names=Names(dict(pool.names.blocks()), pool.names.keys()),
        ),
    )  # fmt: skip


def _copy(values: Extents) -> Extents:
    return Extents(Arena(values.arena.data.copy()), values.used, 0)


def stride(state: State, turns_max: int, samples: Samples) -> Strode:
    """As many steady turns as follow, at most `turns_max`. Raises LawBroken where a turn breaks a cheap law."""
    config, is_full = state.config, len(state.flights) == state.config.pipeline_depth - 1
    if _stride is None or turns_max < 1 or not len(state.rows) or config.windows or not is_full:
        return Strode(state, 0, None)
    return _Turns(state, turns_max).taken(samples)


class _Turns:
    """One call of the compiled turns: what it is handed, and the state that it reaches."""

    def __init__(self, state: State, turns_max: int) -> None:
        pool, depth = state.pool, state.config.pipeline_depth
        width = max(len(state.rows), *(len(flight.samples) for flight in state.flights), 1)
        self._state = state
        self._cells = state.rows.cells.copy()
        self._tokens, self._tables = extents.own(state.tokens), extents.own(state.tables)
        self._status, self._named = pool.status.donated(), pool.names.donated()
        self._entries, self._asks = np.empty((depth, 4, width), np.int64), np.empty((depth, width), bool)
        self._counts, self._spans = np.empty((depth, 2), np.int64), np.empty((turns_max, 2), np.int32)
        for place, flight in enumerate(state.flights):
            count = len(flight.samples)
            self._entries[place, :, :count], self._asks[place, :count] = flight.entries, flight.samples
            self._counts[place] = count, flight.tokens

    def taken(self, samples: Samples) -> Strode:
        """The turns, taken."""
        state, config, pool = self._state, self._state.config, self._state.pool
        looks = bool(state.waiting) and len(state.rows) < config.running_max
        stores = (
            self._cells, self._tokens.arena.data, self._tables.arena.data, self._status, pool.queue.arena.data, pool.queue.used,
            pool.head, pool.free, pool.kept, pool.status.sum, *self._named,
        )  # fmt: skip
        steps = (
            np.empty((3, self._asks.shape[1]), np.int64), np.array(config.eos_token_ids, np.int64), samples.values, samples.at,
            self._entries, self._asks, self._counts, self._spans,
        )  # fmt: skip
        settings = (
            *self._asks.shape, len(self._spans), config.batch_tokens_max, config.prefill_threshold, config.block_size,
            config.prefix_caching, not config.chunked_prefill, self._may_admit if looks else None,
        )  # fmt: skip
        ended, turns, plans, free, sum_, head, kept, samples.at = _stride.run(stores, steps, settings)
        pool = replace(
            pool, status=VersionedArray(self._status, sum_), head=head, free=free, kept=kept, names=Names(*self._named)
        )
        reached = replace(self._reached(samples, turns, plans), pool=pool, tokens=self._tokens, tables=self._tables)
        if ended == _LAWLESS:
            check_cheap(reached)
            raise LawBroken("S1", "a stride breaks a law that its state keeps")
        return Strode(reached, turns, self._drawn(samples, turns) if ended == _REFUSED else None)

    def _reached(self, samples: Samples, turns: int, plans: int) -> State:
        """The state after so many commits and plans, but for its stores."""
        state, digest, generated = self._state, self._state.token_digest, 0
        drawn = memoryview(samples.values)
        for first, count in self._spans[:turns].tolist():
            digest = xxhash.xxh3_64_intdigest(drawn[first : first + count], seed=digest)
            generated += count
        counters = replace(state.counters, generated_tokens=state.counters.generated_tokens + generated)
        flights = (*state.flights[turns:], *map(self._flight, range(max(turns - len(state.flights), 0), plans)))
        return replace(
            state, sequence=state.sequence + turns + plans, planned=state.planned + plans, committed=state.committed + turns,
            rows=Rows(self._cells), flights=flights, counters=counters,
            token_digest=digest,
        )  # fmt: skip

    def _flight(self, plan: int) -> Flight:
        """The step of the stride's so many-th plan, as planning's."""
        state, slot = self._state, (len(self._state.flights) + plan) % len(self._counts)
        count, tokens = self._counts[slot].tolist()
        return Flight(state.planned + plan, self._entries[slot, :, :count].copy(), self._asks[slot, :count].copy(), tokens)

    def _drawn(self, samples: Samples, turn: int) -> bytes:
        """What was drawn for the commit of a turn."""
        first, count = self._spans[turn].tolist()
        return samples.values[first : first + count].tobytes()

    def _may_admit(self, budget: int, free: int) -> bool:
        """Whether the scheduler has to look at the queue, as the stores are now."""
        state = self._state
        return state.config.policy != "fcfs" or not kept_out(
            state.config, self._named[0], self._status, state.waiting[0], budget, free
        )


def implementation() -> str:
    """For `vnext doctor`."""
    return "none" if _stride is None else "compiled"
