"""Memory beside the heap: zeros, aligned, writable, and gone with the array."""

from __future__ import annotations

import numpy as np
import pytest

from vnext.kernels.cpu.memory import ALIGNMENT, HUGE_PAGE_BYTES, Arena, apart, huge


@pytest.mark.parametrize("make", [apart, huge])
def test_areas_are_zeros_to_write_to(make) -> None:
    first, second = make(5000), make(5000)
    assert first.shape == (5000,) and first.dtype == np.uint8 and not first.any()
    first.fill(7)
    assert not second.any() and first.sum() == 35000


def test_huge_areas_begin_where_huge_pages_do() -> None:
    assert huge(3 * HUGE_PAGE_BYTES + 5).ctypes.data % HUGE_PAGE_BYTES == 0


def test_an_arena_s_buffers_do_not_overlap() -> None:
    arena = Arena()
    taken = [arena.take(size) for size in (1, 4096, 10_000, 80 << 20, 3)]
    for number, buffer in enumerate(taken):
        assert buffer.ctypes.data % ALIGNMENT == 0
        buffer.fill(number + 1)
    assert [int(buffer.min()) for buffer in taken] == [int(buffer.max()) for buffer in taken] == [1, 2, 3, 4, 5]
