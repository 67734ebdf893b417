"""Strides: many steady turns at once, in place. The fast twin of `schedule` and `reduce` for futures that nobody looks into.

A turn is one plan and one commit. It is steady when the plan is the expected one, nobody is admitted or gives way, and
nobody ends. Such turns are folded by the same kernels in the same order, but in stores that the state owns alone, with no
state built between two of them. The first turn that is not steady is left to `schedule` and `reduce`, which are the oracle:
a stride's state equals theirs in every part (tests/sched/test_stride.py).

May: write into the stores of the state it is given. So that state must come from `own_copy` or from folding such a one, and
is not to be used afterwards.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import numpy as np
import xxhash

from vnext.sched.admission import kept_out
from vnext.state import columns as column_forms, extents, rows as columns
from vnext.state.errors import LawBroken
from vnext.state.extents import Arena, Extents
from vnext.state.laws import check_cheap
from vnext.state.planning import ALL_SEEN, NO_ROWS
from vnext.state.rows import Rows
from vnext.state.state import Flight, State
from vnext.state.versions import VersionedArray, VersionedMap

replace = msgspec.structs.replace
_WORD = 2**64 - 1

Draw = Callable[[int], np.ndarray]
"""So many sampled tokens (int32[n])."""


class Strode(msgspec.Struct, frozen=True):
    """The state after so many steady turns. `tokens` (int32 bytes) were drawn for its oldest step, whose plan's turn was
    begun and whose commit is not steady; None where no turn was begun."""

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
            names=VersionedMap(dict(pool.names.items())),
        ),
    )  # fmt: skip


def _copy(values: Extents) -> Extents:
    return Extents(Arena(values.arena.data.copy()), values.used, 0)


def stride(state: State, turns_max: int, draw: Draw) -> Strode:
    """As many steady turns as follow, at most `turns_max`. Raises LawBroken where a turn breaks a cheap law."""
    config = state.config
    ready = len(state.flights) == config.pipeline_depth - 1 and len(state.rows) > 0 and not config.windows
    if not ready or turns_max < 1:
        return Strode(state, 0, None)
    walk = _Stride(state, draw)
    tokens = None
    while walk.turns < turns_max and walk.plan() and (tokens := walk.commit()) is None:
        walk.turns += 1
    return Strode(walk.state(), walk.turns, tokens)


class _Stride:
    """The parts of a state that steady turns change. Mutable: that is the point of it."""

    def __init__(self, state: State, draw: Draw) -> None:
        config, pool = state.config, state.pool
        self.turns = 0
        self._before, self._draw, self._config = state, draw, config
        self._cells = state.rows.cells
        self._buffers = np.empty_like(self._cells), np.empty_like(self._cells)
        self._tokens, self._tables = extents.own(state.tokens), extents.own(state.tables)
        self._status, self._names = pool.status.donated(), pool.names.donated()
        self._status_sum, self._head, self._free, self._kept = pool.status.sum, pool.head, pool.free, pool.kept
        self._flights = list(state.flights)
        self._planned, self._generated, self._token_digest = state.planned, 0, state.token_digest
        self._eos = np.array(config.eos_token_ids, dtype=np.int64)
        self._budget = config.batch_tokens_max
        self._has_room = len(state.rows) < config.running_max
        self._seals = config.prefix_caching

    def plan(self) -> bool:
        """Fold the expected plan; False, and nothing done, where the scheduler has more to say than that."""
        config, kernels, cells, out = self._config, column_forms.kernels, self._cells, self._buffers[0]
        work = np.empty((2, cells.shape[1]), dtype=np.int64)
        tokens, blocks = work
        total, lacks = kernels.expected(cells, work, self._budget, config.prefill_threshold, config.block_size)
        if not total or lacks > self._free or self._may_admit(total, lacks):
            return False
        kernels.advance(cells, out, tokens, blocks)
        if lacks:
            kernels.write_tables(out, blocks, self._take(lacks), self._tables.arena.data, 1)
        self._flights.append(self._flight(out, cells[columns.COMPUTED], tokens, total))
        self._planned += 1
        self._cells = out
        self._seal()
        return True

    def _may_admit(self, total: int, lacks: int) -> bool:
        """Whether the scheduler has to look at the queue."""
        before, budget = self._before, self._budget - total
        if not before.waiting or not self._has_room or budget <= 0:
            return False
        if self._config.policy != "fcfs":
            return True
        return not kept_out(self._config, self._names, self._status, before.waiting[0], budget, self._free - lacks)

    def _take(self, count: int) -> np.ndarray:
        """As `pool.take`."""
        blocks, queue = np.empty(count, dtype=np.int32), self._before.pool.queue
        self._head = column_forms.kernels.oldest(queue.arena.data, self._status, self._head, queue.used, blocks)
        change = column_forms.kernels.put(self._status, blocks, np.full(count, -1))
        self._status_sum = (self._status_sum + change) & _WORD
        self._free -= count
        if self._kept:
            for block in blocks.tolist():
                key = self._names.pop(block, None)
                if key is not None:
                    del self._names[key]
                    self._kept -= 1
        return blocks

    def _flight(self, cells: np.ndarray, starts: np.ndarray, tokens: np.ndarray, total: int) -> Flight:
        rows = len(tokens)
        entries, samples = np.empty((4, rows), dtype=np.int64), np.empty(rows, dtype=bool)
        count = column_forms.kernels.flight(cells, starts, tokens, entries, samples)
        if count < rows:
            entries, samples = entries[:, :count].copy(), samples[:count]
        return Flight(self._planned, entries, samples, total)

    def _seal(self) -> None:
        """As `planning.seal` and `pool.name`; then the cheap laws of this state."""
        cells, size = self._cells, self._config.block_size
        if self._seals:
            arenas = self._tokens.arena.data, self._tables.arena.data
            pairs = column_forms.kernels.seal(cells, NO_ROWS, *arenas, size, ALL_SEEN)
            if pairs:
                names = self._names
                fresh = {key: block for key, block in reversed(pairs) if key not in names}
                names.update(fresh)
                names.update(zip(fresh.values(), fresh))
        if not (column_forms.kernels.lawful(cells, size) and self._step_holds()):
            check_cheap(self.state())
            raise LawBroken("S1", "a stride breaks a law that its state keeps")

    def _step_holds(self) -> bool:
        if not self._flights:
            return True
        flight, config = self._flights[-1], self._config
        total, smallest, largest, samples = column_forms.kernels.bounds(flight.entries, flight.samples)
        return (
            total == flight.tokens <= self._budget
            and smallest >= 1
            and (not config.prefill_threshold or largest <= config.prefill_threshold)
            and (config.chunked_prefill or samples == len(flight.samples))
        )

    def commit(self) -> bytes | None:
        """Fold the oldest step's samples; where that is not steady, they are returned and nothing is done."""
        flight, cells, out, kernels = self._flights[0], self._cells, self._buffers[1], column_forms.kernels
        count = int(np.count_nonzero(flight.samples))
        sampled = self._draw(count)
        places, ends = np.empty((2, count), dtype=np.int64), np.empty((2, count), dtype=bool)
        found = kernels.settle(cells, flight.entries, flight.samples, sampled, self._eos, places, ends)
        data = sampled.tobytes()
        if found is None or found[0] or found[1]:
            return data
        if not kernels.take_tokens(cells, out, places[0], sampled, self._tokens.arena.data):
            return data
        del self._flights[0]
        self._cells = out
        self._generated += count
        self._token_digest = xxhash.xxh3_64_intdigest(data, seed=self._token_digest)
        self._seal()
        return None

    def state(self) -> State:
        """The state that was reached, in the stores of the one before."""
        before, pool = self._before, self._before.pool
        planned = self._planned - before.planned
        committed = len(before.flights) + planned - len(self._flights)
        return replace(
            before,
            sequence=before.sequence + planned + committed,
            planned=self._planned,
            committed=before.committed + committed,
            rows=Rows(self._cells),
            tokens=self._tokens,
            tables=self._tables,
            pool=replace(
                pool, status=VersionedArray(self._status, self._status_sum), head=self._head, free=self._free,
                kept=self._kept, names=VersionedMap(self._names),
            ),
            flights=tuple(self._flights),
            counters=replace(before.counters, generated_tokens=before.counters.generated_tokens + self._generated),
            token_digest=self._token_digest,
        )  # fmt: skip
