"""Laws of pins and tiers: what stays in the cache and until when, kept a second time from the events alone, page by page.

K5 is a law of every state (vnext/state/laws.py). That pins stop nobody is a part of S6 (sim/laws.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from vnext.sim.checks.fitting import first_chunk, longest_hit, needs_slot, snapshot_count
from vnext.sim.checks.plain_state import PlainState
from vnext.state.block_hash import leading_hashes
from vnext.state.errors import LawBroken
from vnext.state.events import (
    AnyEvent,
    ClockTicked,
    EnginePaused,
    EngineRecovered,
    MemoryRanShort,
    PinsYielded,
    PrefixCacheReset,
    RequestAborted,
    StepCommitted,
    WeightsChanged,
    pack_tokens,
)
from vnext.state.outputs import Output
from vnext.state.pool import is_pinned, pinned_count
from vnext.state.recurrent import pinned_max
from vnext.state.state import Request, Waiting, root_of
from vnext.state.store.columns_numpy import group_hash
from vnext.state.store.pins import DEPTHS


class End(NamedTuple):
    """When a pin ends; of those that end together, the one with the smallest `height` leaves first."""

    second: int
    height: int


def _edges(after: PlainState, names: tuple[bytes, ...]) -> list[bool]:
    """Behind which of these blocks a request could go on."""
    states = after.state.pool.states
    return [states is None or states.prefix_index.block_of(name) is not None for name in names]


class PinBook:
    """The pinned pages of one run. Mutable: give it every event once, in order."""

    def __init__(self) -> None:
        self._ends: dict[int, End] = {}
        self._wanted: list[bytes] = []

    def write(self, before: PlainState, event: AnyEvent, after: PlainState, news: tuple[Output, ...]) -> None:
        """K6: a pin lasts until its time is over, others need its place, it yields to a request, or nothing is a hit any more."""
        match event:
            case ClockTicked():
                self._ends = {page: end for page, end in self._ends.items() if end.second > event.seconds}
            case PinsYielded():
                self._leave(event.count)
            case PrefixCacheReset() | WeightsChanged() | EngineRecovered() | EnginePaused(mode="sleep"):
                self._ends.clear()
            case MemoryRanShort() if len(after.state.pool.prefix_index) == 0:
                self._ends.clear()
            case StepCommitted() | RequestAborted():
                for row, id_ in enumerate(before.rows.id):
                    if id_ not in after.rows.id:
                        came = pack_tokens([each.token for each in news if each.id == id_ and each.token >= 0])
                        self._pin(before.state.requests[id_], before.histories[row] + came, after)
                        self._require_snapshots(before, after)
        self._compare(after)

    def _pin(self, request: Request, history: bytes, after: PlainState) -> None:
        """The blocks that a request which leaves wants to stay, and that are a hit. Its last token was never computed for it."""
        state, config = after.state, after.state.config
        for tokens, seconds in request.sampling.retention if config.pinned_pages_max else ():
            count = min(tokens, len(history) // 4 - 1) // config.block_size
            names = leading_hashes(root_of(state, request), history, config.block_size, count)
            groups = range(config.group_count)
            found = state.pool.prefix_index.blocks_of(group_hash(name, group) for name in names for group in groups)
            hits = longest_hit(after, found, _edges(after, names))
            for place, page in enumerate(hits):
                if page is not None:
                    end = End(state.clock + seconds, -(place // config.group_count))
                    self._ends[page] = max(end, self._ends.get(page, end))
            self._leave(len(self._ends) - config.pinned_pages_max)
            if any(page in self._ends for page in hits[-config.group_count :]):
                self._wanted.append(names[len(hits) // config.group_count - 1])

    def _require_snapshots(self, before: PlainState, after: PlainState) -> None:
        """With the blocks stays the snapshot behind the last one, unless pins of snapshots give way in this event."""
        then, now, wanted = before.state.pool.states, after.state.pool.states, self._wanted
        self._wanted = []
        if then is None or now is None or pinned_count(now) >= pinned_max(after.state.config):
            return
        pages = [page for page in now.prefix_index.blocks_of(wanted) if page is not None]
        if (then.pins.displaced if then.pins else 0) == (now.pins.displaced if now.pins else 0):
            loose = [page for page in pages if not is_pinned(now, page)]
            if loose:
                raise LawBroken("K6", f"the snapshots {loose} of pinned prefixes are not pinned")

    def _leave(self, count: int) -> None:
        for page in sorted(self._ends, key=lambda page: (self._ends[page], page))[: max(count, 0)]:
            del self._ends[page]

    def _compare(self, after: PlainState) -> None:
        pins = after.state.pool.pins
        words = [] if pins is None else pins.ends.values().tolist()
        found = {page: End(word // DEPTHS, word % DEPTHS - DEPTHS + 1) for page, word in enumerate(words) if word}
        if found != self._ends:
            differ = sorted(page for page in found.keys() | self._ends.keys() if found.get(page) != self._ends.get(page))
            page = differ[0]
            raise LawBroken("K6", f"page {page} is pinned until {found.get(page)} where it is {self._ends.get(page)}")


# ---- tiers ---------------------------------------------------------------------------------------------------------
# Laws of the disk tier: nobody but its own request waits for a disk, and a reset forgets what is on it.
# K1 is the shadow cache's (rank.py), K3 is a law of every state (vnext/state/laws.py).


def tiers_block_nobody(before: PlainState, preempted: Sequence[int], after: PlainState, best: Waiting | None) -> None:
    """K2: while a transfer holds pages, no row is preempted for want of pages, and the best request without one does not wait for
    them.

    `best`: that one, of those that may be admitted; None where one was.
    """
    if before.state.tier is None or not before.state.tier.transfers:
        return
    if preempted:
        raise LawBroken("K2", f"rows {preempted} give way while blocks are read from disk")
    if best is None or len(after) >= after.state.config.max_num_seqs or before.state.cautious:
        return
    budget = before.state.config.max_num_batched_tokens - sum(after.in_flight[-1].counts)
    if budget > 0 and not needs_slot(after, best) and not first_chunk(before, after, best, budget, transfers=True):
        return
    if budget > 0 and not needs_slot(after, best) and not first_chunk(before, after, best, budget):
        raise LawBroken("K2", f"request {best.id} waits for pages into which blocks are read from disk")


def resets_forget(event: AnyEvent, after: PlainState) -> None:
    """K4: behind a reset nothing is a hit, neither in memory nor on disk, nor what is being read."""
    if not isinstance(event, PrefixCacheReset):
        return
    tier = after.state.tier
    left = 0 if tier is None else len(tier.disk) + sum(len(each.keys) for each in tier.transfers)
    left += len(tier.snapshots.disk) if tier is not None and tier.snapshots is not None else 0
    kept = len(after.state.pool.prefix_index) + snapshot_count(after.state)
    if left or kept:
        raise LawBroken("K4", f"{left} blocks on disk and {kept} in memory outlive a reset")
