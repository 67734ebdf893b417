"""Digest of a state: equal on every replica that folded the same events.

It covers structure: counts, bounds, rows, block tables, holders, the order of free blocks, the queue, steps in flight.
It contains no token value and no content key, so a log whose texts were replaced has the same digests;
`State.token_digest` chains the committed tokens beside it.
"""

from __future__ import annotations

import numpy as np
import xxhash

from vnext.state import extents
from vnext.state.rows import STRUCTURE_FIELD_COUNT
from vnext.state.state import State


def digest(state: State) -> int:
    """xxh3-64 over the state's structure."""
    return xxhash.xxh3_64_intdigest(b"".join(part for _, part in parts(state)))


def parts(state: State) -> list[tuple[str, bytes]]:
    """What is digested, by name: comparing two states part by part names what differs."""
    rows, pool = state.rows, state.pool
    table = extents.gather(state.tables, extents.spans(rows.table_at, rows.blocks))
    return [
        ("scalars", _scalars(state)),
        ("rows", rows.cells[:STRUCTURE_FIELD_COUNT].tobytes()),
        ("tables", table.tobytes()),
        ("holders", pool.ref.tobytes()),
        ("free order", pool.place.tobytes()),
        ("waiting", _queue(state)),
        ("flights", b"".join(_flight(flight) for flight in state.flights)),
    ]


def _scalars(state: State) -> bytes:
    pool, counters = state.pool, state.counters
    values = [
        state.sequence, state.next_id, state.planned, state.committed, len(state.rows), len(state.waiting),
        len(state.requests), len(state.flights), pool.head, pool.free, len(pool.names), len(pool.named),
        counters.finished, counters.aborted, counters.preempted, counters.prompt_tokens, counters.generated_tokens,
        counters.prefix_queried_tokens, counters.prefix_hit_tokens,
    ]  # fmt: skip
    return np.array(values, dtype=np.int64).tobytes()


def _queue(state: State) -> bytes:
    entries = [(entry.id, entry.known, entry.epoch, entry.cached) for entry in state.waiting]
    return np.array(entries, dtype=np.int64).tobytes()


def _flight(flight) -> bytes:
    columns = (flight.ids, flight.epochs, flight.starts, flight.counts, flight.samples)
    return flight.step.to_bytes(8, "little") + b"".join(column.tobytes() for column in columns)
