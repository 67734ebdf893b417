"""Contents: all that a state says, in comparable form, wherever its arenas keep it.

More than the digest: texts, content keys and cold data too. The simulator compares whole replicas with it, so that a
field which the digest overlooks is still compared, and it notices when folding one state writes into another.
"""

from __future__ import annotations

import msgspec

from vnext.sim.checks.plain_state import PlainState
from vnext.state.pool import free_blocks
from vnext.state.state import State, Tier
from vnext.state.store import fields
from vnext.state.store.pins import Pins

STORAGE = range(fields.TOKENS_AT, fields.TABLE_SIZE + 1)


def contents(seen: PlainState) -> dict[str, object]:
    """Every part of a state by name. Equal for equal states; places inside arenas and stale queue places do not count."""
    state, pool = seen.state, seen.state.pool
    return {
        "scalars": (state.sequence, state.next_id, state.planned, state.committed, state.token_digest, pool.free, state.cautious),
        "slots": state.slots,
        "tier": _tier(state.tier),
        "pins": (state.clock, _pins(pool.pins)),
        "counters": state.counters,
        "rows": [column for field, column in enumerate(seen.cells) if field not in STORAGE],
        "histories": seen.histories,
        "tables": seen.tables,
        "holders": seen.holders,
        "free order": seen.queued,
        "names": dict(pool.prefix_index.blocks()),
        "waiting": state.waiting,
        "requests": dict(state.requests.mapping()),
        "flights": seen.in_flight,
        "drafting": (seen.tentative, seen.rates),
        "states": _states(state),
    }


def _states(state: State) -> object:
    states, rows = state.pool.states, state.rows.recurrent
    if states is None or rows is None:
        return None
    copies = [(each.before.tolist(), each.after.tolist()) for step in state.in_flight if (each := step.copies)]
    return rows.tolist(), copies, states.ref.tolist(), free_blocks(states).tolist(), dict(states.prefix_index.blocks())


def _tier(tier: Tier | None) -> object:
    if tier is None:
        return None
    counts = tier.capacity, tier.begun, tier.stored, tier.gone, tier.promoted
    return counts, list(tier.disk.oldest_first()), tier.transfers


def _pins(pins: Pins | None) -> object:
    return pins and (pins.ends.values().tolist(), msgspec.structs.astuple(pins)[1:])


def differences(left: dict[str, object], right: dict[str, object]) -> list[str]:
    """Names of the parts in which two contents differ."""
    return [name for name in left if left[name] != right[name]]
