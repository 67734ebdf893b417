"""Snapshot: the numbers of one state as plain lists, taken once after each event and read by everything that checks it.

States of the simulator are tiny: one call of numpy costs more than a whole loop over their rows. And what was taken stays:
an older version of an array would first have to be turned round (see vnext/state/versions.py).
"""

from __future__ import annotations

import msgspec
import numpy as np

from vnext.state import rows as columns
from vnext.state.config import SchedulerConfig
from vnext.state.extents import Extents
from vnext.state.pool import HELD, free_blocks
from vnext.state.state import Flight, State


class Step(msgspec.Struct, frozen=True):
    """A step in flight; one entry for each scheduled request. `owed` are (id, epoch) of those that sample."""

    step: int
    ids: list[int]
    epochs: list[int]
    starts: list[int]
    counts: list[int]
    samples: list[bool]
    owed: list[tuple[int, int]]


class Snapshot:
    """Never written after it was taken.

    `cells` are all columns of the rows, the named ones below each a list over the rows; `tables` the rows' whole tables,
    `held` what of them a query to come may see and the row must hold, `histories` their
    known tokens (int32 bytes); `flights` the steps in flight, oldest first; `holders` and `places` of
    all blocks.
    """

    __slots__ = (
        "state", "cells", "id", "known", "computed", "pending", "limit", "blocks", "sealed", "prompt", "epoch", "priority",
        "tables", "held", "histories", "flights", "holders", "places",
    )  # fmt: skip

    def __init__(self, state: State, before: Snapshot | None = None) -> None:
        """`before`: an earlier snapshot, whose lists serve again where the state has the same parts."""
        self.state = state
        self.flights = _flights(state, before)
        if before is not None and before.state.pool is state.pool:
            self.holders, self.places = before.holders, before.places
        else:
            status = state.pool.status.values().tolist()
            self.holders = [-word if word < 0 else 0 for word in status]
            self.places = [word if word >= 0 else HELD for word in status]
        old = before.state if before is not None else None
        same_rows = old is not None and old.rows is state.rows
        self.cells = cells = before.cells if same_rows else state.rows.cells.tolist()
        (self.id, self.known, self.computed, self.pending, self.limit, self.blocks, self.sealed, self.prompt, self.epoch,
         self.priority) = cells[:10]  # fmt: skip
        if same_rows and old.tables is state.tables and old.tokens is state.tokens:
            self.tables, self.held, self.histories = before.tables, before.held, before.histories
            return
        groups = state.config.group_count
        counts = [blocks * groups for blocks in self.blocks]
        self.tables = [part.tolist() for part in _ranges(state.tables, cells[columns.TABLE_AT], counts)]
        self.held = self._held() if state.config.windows else self.tables
        self.histories = [part.tobytes() for part in _ranges(state.tokens, cells[columns.TOKENS_AT], self.known)]

    def __len__(self) -> int:
        """Rows."""
        return len(self.id)

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
            for table, computed in zip(self.tables, self.computed)
        ]

    @property
    def queued(self) -> list[int]:
        """Free and kept blocks in the order in which they will be taken."""
        return free_blocks(self.state.pool).tolist()


def in_sight(config: SchedulerConfig, group: int, token: int, query: int) -> bool:
    """Whether a query at this position sees the token, in the layers of this group, as far as windows go."""
    window = config.windows[group] if config.windows else 0
    return window == 0 or token > query - window


def _ranges(values: Extents, at: list[int], counts: list[int]) -> list[np.ndarray]:
    data = values.arena.data
    return [data[first : first + count] for first, count in zip(at, counts)]


def _flights(state: State, before: Snapshot | None) -> tuple[Step, ...]:
    """The steps in flight; those that were in flight before are as they were."""
    if before is None:
        return tuple(_step(flight) for flight in state.flights)
    if before.state.flights is state.flights:
        return before.flights
    old, lists = before.state.flights, before.flights
    gone = state.committed - before.state.committed
    return tuple(
        lists[place] if place < len(old) and old[place] is flight else _step(flight)
        for place, flight in enumerate(state.flights, start=gone)
    )


def _step(flight: Flight) -> Step:
    ids, epochs, samples = flight.ids.tolist(), flight.epochs.tolist(), flight.samples.tolist()
    owed = [(id_, epoch) for id_, epoch, asks in zip(ids, epochs, samples) if asks]
    return Step(flight.step, ids, epochs, flight.starts.tolist(), flight.counts.tolist(), samples, owed)
