"""PlainState: the numbers of one state as plain lists, taken once after each event and read by everything that checks it.

States of the simulator are tiny: one call of numpy costs more than a whole loop over their rows. And what was taken stays:
an older version of an array would first have to be turned round (see vnext/state/store/versions.py).
"""

from __future__ import annotations

from typing import NamedTuple

import msgspec
import numpy as np

from vnext.state.config import SchedulerConfig
from vnext.state.pool import HELD, free_blocks
from vnext.state.state import State, StepInFlight, Tier
from vnext.state.store import fields
from vnext.state.store.extents import Extents
from vnext.state.store.pins import Pins


class Step(msgspec.Struct, frozen=True):
    """A step in flight; one entry for each scheduled request. `owed` are (id, preemption_count) of those that sample, `drafts`
    how many of an entry's tokens are drafts."""

    step: int
    ids: list[int]
    preemption_counts: list[int]
    starts: list[int]
    counts: list[int]
    samples: list[bool]
    owed: list[tuple[int, int]]
    drafts: list[int]

    @property
    def owners(self) -> list[tuple[int, int]]:
        """(id, preemption_count) of each entry."""
        return list(zip(self.ids, self.preemption_counts))


class PlainRows(NamedTuple):
    """The first columns of the rows (fields.py), each a list over the rows."""

    id: list[int]
    known: list[int]
    computed: list[int]
    placeholders: list[int]
    limit: list[int]
    blocks: list[int]
    hashed_blocks: list[int]
    prompt: list[int]
    preemption_count: list[int]


class PlainState:
    """Never written after it was taken.

    `cells` are all columns of the rows, of which `rows` names the first; `tables` the rows' whole tables, `held` what of them a
    query to come may see and the row must hold, `histories` their known tokens (int32 bytes); `in_flight` the steps in flight,
    oldest first; `holders` and `places` of all blocks. With speculation, `tentative` are the rows' drafts in flight, `rates` how
    often their drafts were kept, and `at_least` the tokens computed if no draft in flight is kept.
    """

    cells: list[list[int]]
    tables: list[list[int]]
    held: list[list[int]]
    histories: list[bytes]
    holders: list[int]
    places: list[int]
    tentative: list[int]
    rates: list[int]
    at_least: list[int]

    def __init__(self, state: State, before: PlainState | None = None) -> None:
        """`before`: an earlier snapshot, whose lists serve again where the state has the same parts."""
        self.state = state
        self.in_flight = _steps_in_flight(state, before)
        if before is not None and before.state.pool is state.pool:
            self.holders, self.places = before.holders, before.places
        else:
            status = state.pool.status.values().tolist()
            self.holders = [-word if word < 0 else 0 for word in status]
            self.places = [word if word >= 0 else HELD for word in status]
        old = before if before is not None and before.state.rows is state.rows else None
        cells: list[list[int]] = state.rows.cells.tolist() if old is None else old.cells
        self.cells, self.rows = cells, PlainRows(**dict(zip(PlainRows._fields, cells)))
        drafting = state.rows.drafting
        self.tentative, self.rates = ([], []) if drafting is None else drafting.tolist()
        self.at_least = [all_kept - drafts for all_kept, drafts in zip(self.rows.computed, self.tentative or [0] * len(self))]
        if old is not None and old.state.tables is state.tables and old.state.tokens is state.tokens:
            self.tables, self.held, self.histories = old.tables, old.held, old.histories
            return
        groups = state.config.group_count
        counts = [blocks * groups for blocks in self.rows.blocks]
        self.tables = [part.tolist() for part in _ranges(state.tables, cells[fields.TABLE_AT], counts)]
        self.held = self._held() if state.config.windows else self.tables
        self.histories = [part.tobytes() for part in _ranges(state.tokens, cells[fields.TOKENS_AT], self.rows.known)]

    def __len__(self) -> int:
        return len(self.rows.id)

    def _held(self) -> list[list[int]]:
        """Pages that still have a token in sight of the next query, counted token by token: not as windows.py reckons."""
        size, windows = self.state.config.block_size, self.state.config.windows
        groups = len(windows)
        return [  # `in_sight` of each page's last token, spelled out: it is asked more often than anything else
            [
                page
                for place, page in enumerate(table)
                if (window := windows[place % groups]) == 0 or place // groups * size + size - 1 > computed - window
            ]
            for table, computed in zip(self.tables, self.at_least)
        ]

    @property
    def queued(self) -> list[int]:
        """Free and kept blocks in the order in which they will be taken."""
        blocks: list[int] = free_blocks(self.state.pool).tolist()
        return blocks


def in_sight(config: SchedulerConfig, group: int, token: int, query: int) -> bool:
    """Whether a query at this position sees the token, in the layers of this group, as far as windows go."""
    window = config.windows[group] if config.windows else 0
    return window == 0 or token > query - window


def _ranges(values: Extents, at: list[int], counts: list[int]) -> list[np.ndarray]:
    data = values.arena.data
    return [data[first : first + count] for first, count in zip(at, counts)]


def _steps_in_flight(state: State, before: PlainState | None) -> tuple[Step, ...]:
    """The steps in flight; those that were in flight before are as they were."""
    if before is None:
        return tuple(_step(scheduled) for scheduled in state.in_flight)
    if before.state.in_flight is state.in_flight:
        return before.in_flight
    old, lists = before.state.in_flight, before.in_flight
    gone = state.committed - before.state.committed
    return tuple(
        lists[place] if place < len(old) and old[place] is scheduled else _step(scheduled)
        for place, scheduled in enumerate(state.in_flight, start=gone)
    )


def _step(scheduled: StepInFlight) -> Step:
    ids, preemptions, samples = scheduled.ids.tolist(), scheduled.preemption_counts.tolist(), scheduled.samples.tolist()
    owed = [(id_, preemptions) for id_, preemptions, asks in zip(ids, preemptions, samples) if asks]
    drafts = [0] * len(ids) if scheduled.drafts is None else scheduled.drafts.tolist()
    return Step(scheduled.step, ids, preemptions, scheduled.starts.tolist(), scheduled.counts.tolist(), samples, owed, drafts)


class Divergence(Exception):
    """A cache, a replica or a stream is not what it must be: a bug of the engine."""


# ---- contents ------------------------------------------------------------------------------------------------------
# Contents: all that a state says, in comparable form, wherever its arenas keep it.
# More than the digest: texts, content keys and cold data too. The simulator compares whole replicas with it, so that a field
# which the digest overlooks is still compared, and it notices when folding one state writes into another.

STORAGE = range(fields.TOKENS_AT, fields.TABLE_SIZE + 1)


def contents(seen: PlainState) -> dict[str, object]:
    """Every part of a state by name. Equal for equal states; places inside arenas and stale queue places do not count."""
    state, pool = seen.state, seen.state.pool
    return {
        "scalars": (state.sequence, state.next_id, state.planned, state.committed, state.token_digest, pool.free, state.cautious),
        "slots": state.slots,
        "tier": _tier(state.tier),
        "inputs": (state.encoding, state.sought),
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
    queued, names = free_blocks(states).tolist(), dict(states.prefix_index.blocks())
    return _pins(states.pins), rows.tolist(), copies, states.ref.tolist(), queued, names


def _tier(tier: Tier | None) -> object:
    if tier is None:
        return None
    counts = tier.capacity, tier.begun, tier.stored, tier.gone, tier.promoted
    return counts, list(tier.disk.oldest_first()), tier.transfers, _tier(tier.snapshots)


def _pins(pins: Pins | None) -> object:
    return pins and (pins.ends.values().tolist(), msgspec.structs.astuple(pins)[1:])


def differences(left: dict[str, object], right: dict[str, object]) -> list[str]:
    """Names of the parts in which two contents differ."""
    return [name for name in left if left[name] != right[name]]
