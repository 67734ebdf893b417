"""Pure choices of a device's runtime: sizes, forms, the cache's share of a GPU's memory, when a shared prefix is read once."""

from __future__ import annotations

import numpy as np
import pytest
from core_drive import Engine

from vnext.runtime.gpu.buckets import (
    Choice,
    Shapes,
    checked_rows,
    choose_variant,
    default_rows,
    default_tokens,
    padded,
    unit_room,
)
from vnext.runtime.gpu.cascade import Costs, common_blocks, pays
from vnext.runtime.gpu.device import Memory
from vnext.runtime.protocol.settings import SettingsError
from vnext.runtime.rank.gpu_loading import cache_bytes

SHAPES = Shapes((1, 2, 4), (16, 24))
GIB = 2**30


@pytest.mark.parametrize("most", [1, 3, 8, 63, 256, 1000])
def test_every_count_finds_the_smallest_size_that_holds_it(most: int) -> None:
    for sizes in (default_rows(most), default_tokens(most)):
        assert sizes == tuple(sorted(set(sizes))) and sizes[-1] == most
        for count in range(1, most + 1):
            size = padded(count, sizes)
            assert size >= count and all(other < count or other >= size for other in sizes)
        assert padded(most + 1, sizes) is None
    assert all(padded(count, default_tokens(most)) <= max(1.5 * count, 16) for count in range(1, most + 1))


def test_asked_sizes_become_buckets() -> None:
    assert checked_rows((8, 2, 8, 500), 64) == (2, 8, 64)


def test_room_for_splits_doubles() -> None:
    assert [unit_room(3, splits) for splits in (1, 3, 4, 6, 7, 25)] == [3, 3, 6, 6, 12, 48]


@pytest.mark.parametrize(
    ("tokens", "is_decode", "shares", "choice"),
    [
        (3, True, False, Choice("graph", 4)),
        (3, True, True, Choice("pieces", 16)),
        (3, False, False, Choice("pieces", 16)),
        (5, True, False, Choice("pieces", 16)),
        (24, False, False, Choice("pieces", 24)),
        (25, False, False, Choice("eager", 25)),
    ],
)
def test_the_form_of_a_step(tokens: int, is_decode: bool, shares: bool, choice: Choice) -> None:
    assert choose_variant(tokens, is_decode, shares, SHAPES) == choice


def test_the_cache_takes_what_its_share_leaves() -> None:
    """80 GiB, of which others hold 10; weights and the largest step 30, two of them the trial's own cache."""
    memory = Memory(total=80 * GIB, free=35 * GIB, cached=35 * GIB, peak=30 * GIB)
    assert cache_bytes(memory, 0.9, 2 * GIB, GIB) == 72 * GIB - 10 * GIB - 28 * GIB - GIB
    with pytest.raises(SettingsError, match="0.4 of 80.0 GiB leaves no memory for the cache: other programs hold 10.0"):
        cache_bytes(memory, 0.4, 2 * GIB, GIB)


def test_a_shared_prefix_pays_by_its_length_and_its_rows() -> None:
    costs = Costs(token_bytes=131_072, layer_count=32)
    assert not pays(255, 64, False, costs), "less than a split is not shared"
    assert pays(256, 2, False, costs), "beside pieces it costs nothing"
    assert not pays(1024, 2, True, costs) and pays(4096, 64, True, costs), "a graph is left for a good reason only"


def test_common_blocks_are_counted_as_far_as_every_query_sees_them_whole() -> None:
    engine = Engine(page_count=60)
    engine.arrive([*range(1, 18)], max_tokens=9)
    engine.step()
    engine.arrive([*range(1, 15), 40, 41, 42], max_tokens=9)
    engine.arrive([*range(1, 17), 50], max_tokens=9)
    engine.plan()
    scheduled, everybody = engine.state.in_flight[-1], slice(None)
    assert common_blocks(engine.state, everybody, scheduled.starts) == 3, "blocks of four, of which twelve tokens are alike"
    assert common_blocks(engine.state, np.array([0, 2]), scheduled.starts[[0, 2]]) == 4
    assert common_blocks(engine.state, np.array([0]), scheduled.starts[:1]) == 0
    alone = Engine(page_count=60, prefix_caching=False)
    for _ in range(2):
        alone.arrive([*range(1, 18)], max_tokens=9)
        alone.step()
    alone.plan()
    assert common_blocks(alone.state, everybody, alone.state.in_flight[-1].starts) == 0
