"""Askers: which requests asked for which blocks lately, as a tree of the beginnings that prompts have in common.

A block's name is a digest of everything before it, so prompts that have a block in common have all before it. Blocks that the
same requests asked for are therefore one run, and the place where a prompt departs from it is found by halves: a request costs the
runs on its way, not its blocks.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

import msgspec

Trail = Sequence[tuple[int, "Run"]]
"""The runs along a prompt's blocks, first to last, each with the number of leading blocks up to where it and the prompt part."""


class Run(msgspec.Struct):
    """Consecutive blocks (their names), the last request that asked for them, the last one of each client, and the runs behind them
    by their first blocks. Mutable."""

    names: tuple[bytes, ...]
    last: int
    own: dict[int, int]
    behind: dict[bytes, Run]

    def common(self, names: Sequence[bytes], at: int) -> int:
        """How many blocks from `at` are this run's."""
        own, size = self.names, min(len(self.names), len(names) - at)
        if not size or own[size - 1] == names[at + size - 1]:
            return size
        return bisect_left(range(size), True, key=lambda place: own[place] != names[at + place])

    def split(self, at: int) -> None:
        """Make a run of its own of what stands behind its first `at` blocks."""
        rest = Run(self.names[at:], self.last, dict(self.own), self.behind)
        self.names, self.behind = self.names[:at], {rest.names[0]: rest}


class Askers:
    """Of one generation of requests, which is `size` large: that many blocks, or clients of runs. Mutable."""

    def __init__(self) -> None:
        self._roots: dict[bytes, Run] = {}
        self._blocks = self._pairs = 0
        self.clients = set[int]()

    @property
    def size(self) -> int:
        return max(self._blocks, self._pairs)

    def trail(self, root: bytes, names: Sequence[bytes]) -> Trail:
        """The runs along these blocks behind a root, as far as somebody asked for them: first the root's own, of no block."""
        trail, at, run = list[tuple[int, Run]](), 0, self._roots.get(root)
        while run is not None:
            at += run.common(names, at)
            trail.append((at, run))
            # where the prompt has left the run, none of its names is behind it
            run = run.behind.get(names[at]) if at < len(names) else None
        return trail

    def add(self, root: bytes, names: tuple[bytes, ...], trail: Trail, id_: int, client: int) -> None:
        """A request of a client asks for these blocks, which have this trail."""
        at, last = 0, None
        for end, run in trail:
            if end - at < len(run.names):
                run.split(end - at)
                self._pairs += len(run.own)
            self._pairs += client not in run.own
            run.last = run.own[client] = id_
            at, last = end, run
        if last is None:
            last = self._roots[root] = Run((), id_, {client: id_}, {})
            self._pairs += 1
        self.clients.add(client)
        self._blocks += len(names) - at
        if at == len(names):
            return
        if last.names and not last.behind and len(last.own) == 1:
            last.names += names[at:]  # a conversation goes on
        else:
            last.behind[names[at]] = Run(names[at:], id_, {client: id_}, {})
            self._pairs += 1


def known(trail: Trail) -> int:
    """How many leading blocks somebody asked for; -1 if not even for the root."""
    return trail[-1][0] if trail else -1


def own_last(trails: Sequence[Trail], client: int) -> int | None:
    """The client's last request that asked for the most of the leading blocks, in the first of the trails that has it."""
    found = [next(((end, run.own[client]) for end, run in reversed(trail) if client in run.own), (-1, None)) for trail in trails]
    return max(found, key=lambda each: each[0])[1]
