"""Contents: all that a state says, in comparable form, wherever its arenas keep it.

More than the digest: texts, content keys and cold data too. The simulator compares whole replicas with it, so that a
field which the digest overlooks is still compared, and it notices when folding one state writes into another.
"""

from __future__ import annotations

from vnext.sched.sim.snapshot import Snapshot
from vnext.state import rows as columns

STORAGE = range(columns.TOKENS_AT, columns.TABLE_SIZE + 1)


def contents(seen: Snapshot) -> dict[str, object]:
    """Every part of a state by name. Equal for equal states; places inside arenas and stale queue places do not count."""
    state, pool = seen.state, seen.state.pool
    return {
        "scalars": (state.sequence, state.next_id, state.planned, state.committed, state.token_digest, pool.free),
        "counters": state.counters,
        "rows": [column for field, column in enumerate(seen.cells) if field not in STORAGE],
        "histories": seen.histories,
        "tables": seen.tables,
        "holders": seen.holders,
        "free order": seen.queued,
        "names": dict(pool.names.blocks()),
        "waiting": state.waiting,
        "requests": dict(state.requests.mapping()),
        "flights": seen.flights,
    }


def differences(left: dict[str, object], right: dict[str, object]) -> list[str]:
    """Names of the parts in which two contents differ."""
    return [name for name in left if left[name] != right[name]]
