"""Contents: all that a state says, as comparable bytes, wherever its arenas keep it.

More than the digest: texts, content keys and cold data too. The simulator compares whole replicas with it, so that a
field which the digest overlooks is still compared, and it notices when folding one state writes into another.
"""

from __future__ import annotations

from collections.abc import Iterator

from vnext.state import extents, rows as columns
from vnext.state.pool import free_blocks
from vnext.state.state import State

STORAGE = (columns.TOKENS_AT, columns.TOKENS_SIZE, columns.TABLE_AT, columns.TABLE_SIZE)


def contents(state: State) -> dict[str, object]:
    """Every part of a state by name. Equal for equal states; places inside arenas and stale queue places do not count."""
    rows, pool = state.rows, state.pool
    cells = rows.cells.copy()
    cells[list(STORAGE)] = 0
    return {
        "scalars": (state.sequence, state.next_id, state.planned, state.committed, state.token_digest, pool.free),
        "counters": state.counters,
        "rows": cells.tobytes(),
        "histories": extents.gather(state.tokens, extents.spans(rows.tokens_at, rows.known)).tobytes(),
        "tables": extents.gather(state.tables, extents.spans(rows.table_at, rows.blocks)).tobytes(),
        "holders": pool.ref.tobytes(),
        "free order": free_blocks(pool).tobytes(),
        "names": dict(pool.names.items()),
        "waiting": state.waiting,
        "requests": dict(state.requests.items()),
        "flights": tuple(part for flight in state.flights for part in _flight(flight)),
    }


def _flight(flight) -> Iterator[int | bytes]:
    yield flight.step
    yield flight.entries.tobytes()
    yield flight.samples.tobytes()


def differences(left: dict[str, object], right: dict[str, object]) -> list[str]:
    """Names of the parts in which two contents differ."""
    return [name for name in left if left[name] != right[name]]
