"""Digest of a state: equal on every replica that folded the same events.

It covers structure: counts, bounds, rows, block tables, holders, the order of free blocks, the queue, steps in flight.
It contains no token value and no content key, so a log whose texts were replaced has the same digests;
`State.token_digest` chains the committed tokens beside it.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

import numpy as np
import xxhash

from vnext.state import extents
from vnext.state.rows import FIELD_NAMES, STRUCTURE_FIELD_COUNT
from vnext.state.state import State

DIGEST_VERSION = 2
"""Counts the ways in which `digest` and `details` were ever computed: a log says which one is meant. A log that does not
say is of version 1, from before they were counted. tests/golden/logs must be added to when this number changes."""
SCALAR_NAMES = (
    "sequence next_id planned committed row_count waiting_sum request_count flight_count pool.head pool.free "
    "pool.names pool.status_sum finished aborted preempted prompt_tokens generated_tokens prefix_queried_tokens prefix_hit_tokens"
).split()
DETAIL_NAMES = (
    *SCALAR_NAMES, *(f"rows.{name}" for name in FIELD_NAMES[:STRUCTURE_FIELD_COUNT]), "tables", "holders and free order",
    "waiting", "flights",
)  # fmt: skip
_WORD = 2**64 - 1


def digest(state: State) -> int:
    """xxh3-64 over the state's structure.

    Block tables, holders, the order of free blocks and the queue enter by the sums that are kept of them (TABLE_SUM,
    VersionedArray.sum, State.waiting_sum), so that a digest costs what a step has changed; law Y1 holds each sum to what
    it stands for.
    """
    hashed = xxhash.xxh3_64_intdigest
    words = [*_scalars(state), hashed(state.rows.cells[:STRUCTURE_FIELD_COUNT])]
    for flight in state.flights:
        words += (flight.step, hashed(flight.entries), hashed(flight.samples))
    return hashed(struct.pack(f"<{len(words)}Q", *words))


def parts(state: State) -> list[tuple[str, bytes]]:
    """What the digest stands for, by name and in full: comparing two states part by part names what differs."""
    rows, pool = state.rows, state.pool
    table = extents.gather(state.tables, extents.spans(rows.table_at, rows.blocks * state.config.group_count))
    return [
        ("scalars", b"".join(word.to_bytes(8, "little") for word in _scalars(state))),
        ("rows", rows.cells[:STRUCTURE_FIELD_COUNT].tobytes()),
        ("tables", table.tobytes()),
        ("holders and free order", pool.status.values().tobytes()),
        ("waiting", _queue(state)),
        ("flights", b"".join(_flight(flight) for flight in state.flights)),
    ]


def details(state: State) -> tuple[int, ...]:
    """One word (uint64) for each of DETAIL_NAMES: two states compared word by word differ in the fields so named.

    Proportional to the state, where `digest` is to a step's changes: for what two replicas tell of each other seldom.
    """
    hashed, cells = xxhash.xxh3_64_intdigest, state.rows.cells
    named = dict(parts(state))
    columns = [hashed(np.ascontiguousarray(cells[field])) for field in range(STRUCTURE_FIELD_COUNT)]
    rest = [hashed(named[name]) for name in DETAIL_NAMES[-4:]]
    return tuple(word & _WORD for word in (*_scalars(state), *columns, *rest))


def histories(state: State) -> tuple[int, ...]:
    """One word (uint64) for the tokens of each live request: the rows in their order, then the queue. Proportional to them."""
    hashed, rows = xxhash.xxh3_64_intdigest, state.rows
    told = [hashed(extents.read(state.tokens, at, known)) for at, known in zip(rows.tokens_at.tolist(), rows.known.tolist())]
    return (*told, *(hashed(entry.tokens) for entry in state.waiting))


def requests_otherwise(state: State, words: Sequence[int]) -> tuple[int, ...]:
    """The requests whose tokens a replica with the same structure has otherwise: `words` are its `histories`."""
    ids = (*state.rows.id.tolist(), *(entry.id for entry in state.waiting))
    return tuple(id_ for id_, mine, theirs in zip(ids, histories(state), words) if mine != theirs)


def hexadecimal(value: int) -> str:
    """A digest as it is written for people."""
    return f"{value:016x}"


def _scalars(state: State) -> tuple[int, ...]:
    pool, counters = state.pool, state.counters
    return (
        state.sequence, state.next_id, state.planned, state.committed, len(state.rows), state.waiting_sum,
        len(state.requests), len(state.flights), pool.head, pool.free, 2 * len(pool.names), pool.status.sum,
        counters.finished, counters.aborted, counters.preempted, counters.prompt_tokens, counters.generated_tokens,
        counters.prefix_queried_tokens, counters.prefix_hit_tokens,
    )  # fmt: skip


def _queue(state: State) -> bytes:
    entries = [(entry.id, entry.known, entry.epoch, entry.cached) for entry in state.waiting]
    return np.array(entries, dtype=np.int64).tobytes()


def _flight(flight) -> bytes:
    return flight.step.to_bytes(8, "little") + flight.entries.tobytes() + flight.samples.tobytes()
