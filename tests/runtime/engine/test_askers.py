"""Who asked for a block last, of all and of one client: a tree of runs beside a table of every block."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np
import pytest

from vnext.runtime.engine.misses import Askers, Run, own_last

Names = tuple[bytes, ...]


class Plain:
    """Each block with the last request that asked for it, and with the last one of each client."""

    def __init__(self) -> None:
        self.last: dict[bytes, int] = {}
        self.own: dict[tuple[bytes, int], int] = {}

    def add(self, names: Names, id_: int, client: int) -> None:
        self.last |= dict.fromkeys(names, id_)
        self.own |= dict.fromkeys(((name, client) for name in names), id_)


def drawn(rng: np.random.Generator, names: list[Names]) -> Names:
    """A prompt's blocks: new ones behind some or all of an earlier prompt's."""
    begin = names[rng.integers(len(names))] if names and rng.random() < 0.9 else ()
    kept = begin[: int(rng.integers(len(begin) + 1))] if rng.random() < 0.7 else begin
    fresh = [rng.bytes(16) for _ in range(int(rng.integers(5)))]
    return (*kept, *fresh) or (rng.bytes(16),)


def runs(first: Iterable[Run]) -> Iterator[Run]:
    for run in first:
        yield run
        yield from runs(run.behind.values())


def plain_own_last(plain: list[Plain], names: Names, client: int) -> int | None:
    for name in reversed(names):
        for each in plain:
            if (name, client) in each.own:
                return each.own[name, client]
    return None


@pytest.mark.parametrize("seed", range(12))
def test_a_tree_of_runs_says_what_a_table_of_blocks_says(seed: int) -> None:
    rng = np.random.default_rng(seed)
    askers, plain, names = [Askers(), Askers()], [Plain(), Plain()], list[Names]()
    for id_ in range(150):
        if id_ == 75:
            askers, plain = [Askers(), askers[0]], [Plain(), plain[0]]
        asked, client = drawn(rng, names), int(rng.integers(3))
        trails = [each.trail(asked[0], asked[1:], client) for each in askers]
        for trail, table in zip(trails, plain):
            said = list[int]()
            for end, run in trail.runs:
                said += [run.last] * (end + 1 - len(said))
            assert said == [table.last[name] for name in asked if name in table.last] and trail.known == len(said) - 1
            assert [trail.last_beyond(blocks) for blocks in range(trail.known)] == said[1:] and (not said or trail.last == said[-1])
        for one in range(3):
            assert own_last(*(each.trail(asked[0], asked[1:], one) for each in askers)) == plain_own_last(plain, asked, one)
        askers[0].add(asked[0], asked[1:], trails[0], id_, client)
        plain[0].add(asked, id_, client)
        names.append(asked)
    for each, table in zip(askers, plain):
        kept, roots = list(runs(each._roots.values())), set(each._roots)
        assert sum(len(run.names) for run in kept) == each._blocks == len({*table.last} - roots)
        assert sum(len(run.own) for run in kept) == each._pairs and each.clients == {client for _, client in table.own}


def test_a_conversation_is_one_run() -> None:
    """However many turns it has."""
    askers, names = Askers(), tuple(bytes([place]) for place in range(200))
    for turn in range(1, 21):
        asked = names[: 10 * turn]
        askers.add(b"root", asked, askers.trail(b"root", asked, 5), turn, 5)
        assert [end for end, _ in askers.trail(b"root", names, 5).runs] == [10 * turn] and askers.size == 10 * turn
