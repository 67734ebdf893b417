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
from vnext.state import columns as column_forms, extents, names, rows as columns
from vnext.state.config import SchedulerConfig
from vnext.state.errors import LawBroken
from vnext.state.extents import Arena, Extents
from vnext.state.laws import check_cheap
from vnext.state.names import Names
from vnext.state.planning import ALL_SEEN, NO_ROWS
from vnext.state.pool import HELD, Pool
from vnext.state.rows import Rows
from vnext.state.state import Flight, State
from vnext.state.versions import VersionedArray, VersionedMap

replace = msgspec.structs.replace
_WORD = 2**64 - 1

Draw = Callable[[int], np.ndarray]
"""So many sampled tokens (int32[n])."""


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


def stride(state: State, turns_max: int, draw: Draw) -> Strode:
    """As many steady turns as follow, at most `turns_max`. Raises LawBroken where a turn breaks a cheap law.

    One loop over local names on purpose: at eight rows half of a turn would be the calls of its parts.
    """
    config, depth = state.config, state.config.pipeline_depth
    if len(state.flights) != depth - 1 or not len(state.rows) or config.windows or turns_max < 1:
        return Strode(state, 0, None)
    stores = _Stores(state)
    kernels, size, threshold, budget = column_forms.kernels, config.block_size, config.prefill_threshold, config.batch_tokens_max
    expected, advance, lawful, bounds = kernels.expected, kernels.advance, kernels.lawful, kernels.bounds
    settle, take_tokens, seal, write_tables = kernels.settle, kernels.take_tokens, kernels.seal, kernels.write_tables
    history, tables = stores.tokens.arena.data, stores.tables.arena.data
    cells, count, caches = state.rows.cells, len(state.rows), config.prefix_caching
    planned_cells, settled_cells = np.empty_like(cells), np.empty_like(cells)
    work, places, ends = np.empty((2, count), np.int64), np.empty((2, count), np.int64), np.empty((2, count), bool)
    tokens, blocks = work
    eos = np.array(config.eos_token_ids, dtype=np.int64)
    first = state.waiting[0] if state.waiting and count < config.running_max else None
    flights, turns, generated, token_digest = list(state.flights), 0, 0, state.token_digest
    refused, lawless = None, False
    while turns < turns_max and not lawless:
        # the plan: as fold_step_planned
        total, lacks = expected(cells, work, budget, threshold, size)
        if not total or lacks > stores.free or (first is not None and _may_admit(state, stores, budget - total, lacks)):
            break
        advance(cells, planned_cells, tokens, blocks)
        if lacks:
            write_tables(planned_cells, blocks, stores.take(lacks), tables, 1)
        flight = _flight(state.planned + turns, planned_cells, cells[columns.COMPUTED], tokens, total)
        flights.append(flight)
        cells = planned_cells
        if caches and (pairs := seal(cells, NO_ROWS, history, tables, size, ALL_SEEN)):
            stores.name(pairs)
        least_most = bounds(flight.entries, flight.samples)
        # the commit: as fold_step_committed
        flight = flights[0]
        asked = int(np.count_nonzero(flight.samples))
        if asked != places.shape[1]:
            places, ends = np.empty((2, asked), np.int64), np.empty((2, asked), bool)
        sampled = draw(asked)
        data = sampled.tobytes()
        found = settle(cells, flight.entries, flight.samples, sampled, eos, places, ends)
        lawless = not (lawful(cells, size) and _step_holds(config, least_most, flights[-1]))
        if (
            lawless or found is None or found[0] or found[1]
            or not take_tokens(cells, settled_cells, places[0], sampled, history)
        ):  # fmt: skip
            refused = data
            break
        del flights[0]
        cells = settled_cells
        if caches and (pairs := seal(cells, NO_ROWS, history, tables, size, ALL_SEEN)):
            stores.name(pairs)
        generated += asked
        token_digest = xxhash.xxh3_64_intdigest(data, seed=token_digest)
        turns += 1
        lawless = not lawful(cells, size)
    after = _reached(state, stores, cells, flights, turns, refused is not None)
    if lawless:
        check_cheap(after)
        raise LawBroken("S1", "a stride breaks a law that its state keeps")
    counters = replace(state.counters, generated_tokens=state.counters.generated_tokens + generated)
    return Strode(replace(after, counters=counters, token_digest=token_digest), turns, refused)


def _reached(state: State, stores: _Stores, cells: np.ndarray, flights: list[Flight], turns: int, begun: bool) -> State:
    """The state after so many turns, and a plan more where another one was `begun`."""
    return replace(
        state, sequence=state.sequence + 2 * turns + begun, planned=state.planned + turns + begun,
        committed=state.committed + turns, rows=Rows(cells), tokens=stores.tokens, tables=stores.tables, pool=stores.pool(),
        flights=tuple(flights),
    )  # fmt: skip


def _may_admit(state: State, stores: _Stores, budget: int, lacks: int) -> bool:
    """Whether the scheduler has to look at the queue: there is room for a row."""
    if budget <= 0:
        return False
    if state.config.policy != "fcfs":
        return True
    return not kept_out(state.config, stores.named, stores.status, state.waiting[0], budget, stores.free - lacks)


def _flight(step: int, cells: np.ndarray, starts: np.ndarray, tokens: np.ndarray, total: int) -> Flight:
    """As planning's."""
    rows = len(tokens)
    entries, samples = np.empty((4, rows), np.int64), np.empty(rows, bool)
    count = column_forms.kernels.flight(cells, starts, tokens, entries, samples)
    if count < rows:
        entries, samples = entries[:, :count].copy(), samples[:count]
    return Flight(step, entries, samples, total)


def _step_holds(config: SchedulerConfig, bounds: tuple[int, int, int, int], flight: Flight) -> bool:
    """S1 of the newest step, as laws.py has it."""
    total, smallest, largest, samples = bounds
    return (
        total == flight.tokens <= config.batch_tokens_max
        and smallest >= 1
        and (not config.prefill_threshold or largest <= config.prefill_threshold)
        and (config.chunked_prefill or samples == len(flight.samples))
    )


class _Stores:
    """What a state owns alone, while turns write into it. Mutable: that is the point of it."""

    def __init__(self, state: State) -> None:
        self._pool = pool = state.pool
        self.tokens, self.tables = extents.own(state.tokens), extents.own(state.tables)
        self.status, (self.named, self._keys) = pool.status.donated(), pool.names.donated()
        self.free, self._sum, self._head, self._kept = pool.free, pool.status.sum, pool.head, pool.kept

    def take(self, count: int) -> np.ndarray:
        """As `pool.take`."""
        blocks, queue, kernels = np.empty(count, np.int32), self._pool.queue, column_forms.kernels
        self._head = kernels.oldest(queue.arena.data, self.status, self._head, queue.used, blocks)
        self._sum = (self._sum + kernels.put(self.status, blocks, np.full(count, HELD))) & _WORD
        self.free -= count
        if self._kept:
            self._kept -= len(names.kernels.forget(self.named, self._keys, blocks))
        return blocks

    def name(self, pairs: list[tuple[bytes, int]]) -> None:
        """As `pool.name`."""
        names.kernels.offer(self.named, self._keys, pairs)

    def pool(self) -> Pool:
        """The pool that was reached, in these stores."""
        return replace(
            self._pool, status=VersionedArray(self.status, self._sum), head=self._head, free=self.free, kept=self._kept,
            names=Names(self.named, self._keys),
        )  # fmt: skip
