"""cache --curve: the hit rate that a prefix cache of any size would have had, from one pass over a log.

Owns the stack. Pages that nobody holds leave the cache oldest first, so a cache of N pages has what lies among the N youngest: each
block that a prompt asks for has one least size at which it is a hit (stack distances: Mattson, Gecsei, Slutz, Traiger, Evaluation
techniques for storage hierarchies, 1970). Requests come, run and end when they did; a size at which they would have waited for
pages is below the curve.
"""

from __future__ import annotations

from collections import Counter

import msgspec
import numpy as np
from rich.console import Console

from vnext.replay.console import render
from vnext.replay.reading.folding import Folded, first_state
from vnext.replay.reading.source import Log, UnusableLog
from vnext.state.block_hash import block_hashes
from vnext.state.events import EngineRecovered, PrefixCacheReset
from vnext.state.preempt import row_tokens
from vnext.state.state import State, root_of
from vnext.state.windows import row_blocks

CHUNK = 4096
POINTS = 12
NEVER = 1 << 62
"""The size at which a block is a hit that no earlier text has."""
ENOUGH = 0.99
BAR, BAR_WIDTH = "#", 40


class CurvePoint(msgspec.Struct, frozen=True, kw_only=True):
    """A cache of so many `pages` would have had `found` of the prompts' tokens, which is `hit_rate` of those asked for."""

    pages: int
    found: int
    hit_rate: float


class Curve(msgspec.Struct, frozen=True, kw_only=True):
    """`points` by size, from the most pages that requests held at once to those with which nothing is evicted. The log's engine had
    `pages`; with `enough` of them 99 % of the hits are there that are to be had."""

    pages: int
    enough: int
    points: list[CurvePoint]


class CacheCurve:
    """The least sizes, while a log is folded. Mutable."""

    def __init__(self, log: Log) -> None:
        config = log.header.started.config
        self._size, self._page_count = config.block_size, config.page_count
        if config.group_count > 1 or first_state(log).pool.states is not None:
            raise UnusableLog("--curve knows caches of one kind of page; the layers of this model have windows or states")
        self._stack = _Stack()
        self._place: dict[bytes, int] = {}  # block hash -> where its page lies in the stack
        self._held = Counter[bytes]()  # block hash -> how many running requests hold its page
        self._names: dict[int, tuple[bytes, ...]] = {}  # running request -> its blocks' hashes,
        self._counts: dict[int, int] = {}  # of which so many are complete
        self._forgotten: dict[int, int] = {}  # and so many of those are not in the cache any more
        self._sizes: list[np.ndarray] = []
        self._most_held = 0

    def hear(self, item: Folded) -> None:
        """Take one folded event. Raises UnusableLog for a cache of another kind."""
        before, after = item.before, item.after
        if after.pool.pins is not None or after.tier is not None:
            raise UnusableLog("--curve knows caches without pins (cache_control) and without a disk")
        held = after.pool.page_count - after.pool.free
        self._most_held = max(self._most_held, held)
        old, new = before.rows.id, after.rows.id
        if len(old) != len(new) or not np.array_equal(old, new):
            self._refresh(before)
            for row in np.flatnonzero(~np.isin(old, new)).tolist():
                self._leave(before, row)
            self._join(after, np.flatnonzero(~np.isin(new, old)).tolist(), held)
        if isinstance(item.event, PrefixCacheReset | EngineRecovered):
            self._refresh(before)
            self._place.clear()
            self._held.clear()
            self._forgotten = dict(self._counts)

    def done(self) -> Curve:
        sizes = np.sort(np.concatenate([np.empty(0, np.int64), *self._sizes]))
        least = max(self._most_held, 1)
        known = np.maximum(sizes[sizes < NEVER], least)
        most = int(known[-1]) if len(known) else least
        pages = {self._page_count, *np.geomspace(least, most, POINTS).round().astype(int).tolist()}
        counts = {each: int(np.searchsorted(sizes, each, side="right")) for each in sorted(pages) if each >= least}
        points = [
            CurvePoint(pages=each, found=self._size * count, hit_rate=count / max(len(sizes), 1)) for each, count in counts.items()
        ]
        enough = int(known[int(np.ceil(ENOUGH * len(known))) - 1]) if len(known) else least
        return Curve(pages=self._page_count, enough=enough, points=points)

    def _refresh(self, state: State) -> None:
        """Note the blocks that running requests have completed."""
        for row, (id_, hashed) in enumerate(zip(state.rows.id.tolist(), state.rows.hashed_blocks.tolist())):
            if hashed > self._counts.get(id_, 0) and id_ in self._names:
                if hashed > len(self._names[id_]):
                    self._names[id_] = self._hashes(state, row)
                self._hold(id_, hashed)

    def _hold(self, id_: int, count: int) -> None:
        self._held.update(self._names[id_][self._counts[id_] : count])
        self._counts[id_] = count

    def _hashes(self, state: State, row: int) -> tuple[bytes, ...]:
        request = state.requests[int(state.rows.id[row])]
        if not self._hits_max(state, row) or not state.config.prefix_caching:
            return ()
        return block_hashes(root_of(state, request), row_tokens(state, row).tobytes(), self._size)

    def _hits_max(self, state: State, row: int) -> int:
        request = state.requests[int(state.rows.id[row])]
        return request.hits_max(state.config)

    def _join(self, after: State, rows: list[int], held: int) -> None:
        """Requests join the batch: what each asks of the cache, and that it holds what it found; `held` pages have holders then."""
        asked, new = list[np.ndarray](), list[int]()
        for row in rows:
            id_, known = int(after.rows.id[row]), int(after.rows.known[row])
            names = self._names[id_] = self._hashes(after, row)
            self._counts[id_] = 0
            wanted = names[: min(known - 1, self._hits_max(after, row)) // self._size]
            found = next((place for place, name in enumerate(wanted) if not self._has(name)), len(wanted))
            below = np.array([self._place.get(name, -1) for name in wanted[:found]], np.int64)
            shared = [name in self._held for name in wanted[: int(after.rows.cached[row]) // self._size]]
            depths = np.where(below < 0, 0, self._stack.above(below) + 1)
            asked.append(np.concatenate([depths, np.full(len(wanted) - found, NEVER)]))
            new.append(len(row_blocks(after, row)) - sum(shared))
            self._stack.remove(below[below >= 0])
            for name in wanted[:found]:
                self._place.pop(name, None)
            self._hold(id_, max(found, min(int(after.rows.hashed_blocks[row]), len(names))))
        held_before = held - sum(new)
        for row, depths, pages in zip(rows, asked, new):
            if not after.rows.preemption_count[row]:  # else it would find its own blocks
                sizes = np.where((depths > 0) & (depths < NEVER), depths + held_before, depths)
                self._sizes.append(np.maximum.accumulate(sizes))  # a prefix is a hit as far as all of it is
            held_before += pages

    def _has(self, name: bytes) -> bool:
        return name in self._place or name in self._held

    def _leave(self, before: State, row: int) -> None:
        """A request leaves the batch: its pages that nobody else holds go onto the stack, the last one first."""
        id_ = int(before.rows.id[row])
        names, count, forgotten = self._names.pop(id_, ()), self._counts.pop(id_, 0), self._forgotten.pop(id_, 0)
        alone = [name for name in names[forgotten:count] if self._held[name] == 1]
        self._held.subtract(names[forgotten:count])
        for name in alone:
            del self._held[name]
        incomplete = max(len(row_blocks(before, row)) - count, 0)
        first = self._stack.push(incomplete + len(alone) + forgotten) + incomplete
        self._place.update(zip(reversed(alone), range(first, first + len(alone))))


class _Stack:
    """Pages without a holder by the order in which they lost it. Mutable."""

    def __init__(self) -> None:
        self._is_there, self._sums, self._next = np.zeros((1, CHUNK), bool), np.zeros(1, np.int64), 0

    def push(self, count: int) -> int:
        """Put so many pages on top; returns the place of the first."""
        first, self._next = self._next, self._next + count
        while self._next > self._is_there.size:
            self._is_there = np.concatenate([self._is_there, np.zeros_like(self._is_there)])
            self._sums = np.concatenate([self._sums, np.zeros_like(self._sums)])
        self._is_there.reshape(-1)[first : self._next] = True
        self._count(np.arange(first, self._next), 1)
        return first

    def remove(self, places: np.ndarray) -> None:
        self._is_there.reshape(-1)[places] = False
        self._count(places, -1)

    def _count(self, places: np.ndarray, change: int) -> None:
        np.add.at(self._sums, places // CHUNK, change)

    def above(self, places: np.ndarray) -> np.ndarray:
        """How many pages lie above each of these places (int64[n]; anything for a negative place)."""
        found = np.zeros(len(places), np.int64)
        higher = np.cumsum(self._sums[::-1])[::-1] - self._sums
        for chunk in np.unique(places[places >= 0] // CHUNK).tolist():
            inside = np.flatnonzero(places // CHUNK == chunk)
            there = self._is_there[chunk].astype(np.int64)
            found[inside] = (there.sum() - np.cumsum(there))[places[inside] % CHUNK] + higher[chunk]
        return found


def print_curve(console: Console, answer: Curve) -> None:
    """A line for each size, with a bar; the engine's own is marked."""
    rows = [
        {"pages": f"{each.pages:,}{' (this engine)' if each.pages == answer.pages else ''}", "found": f"{each.found:,}",
         "hit rate": f"{each.hit_rate:.1%}", "": BAR * round(BAR_WIDTH * each.hit_rate)} for each in answer.points
    ]  # fmt: skip
    render.records(console, "caches of other sizes", ("pages", "found", "hit rate", ""), rows)
    console.print(f"{render.counted(answer.enough, 'page')} have {ENOUGH:.0%} of the hits that there are for a cache of any size")
