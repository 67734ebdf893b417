"""Memory beside the heap: zeros, aligned, writable, and gone with the array."""

from __future__ import annotations

import resource
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from cpu_levels import needs_native, using

from vnext.kernels.codes import Codes, Scales
from vnext.kernels.cpu import native
from vnext.kernels.cpu.linear import linear, pack_codes
from vnext.kernels.cpu.memory import ALIGNMENT, HUGE_PAGE_BYTES, Arena, apart, huge

HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")


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


@needs_native
@pytest.mark.skipif(not HUGE_PAGES.exists() or "[never]" in HUGE_PAGES.read_text(), reason="this system gives no huge pages")
def test_what_a_thread_computes_in_lies_in_huge_pages() -> None:
    """A product of codes rounds its rows into 6 MB of a thread's own, which are more than 1,500 pages of 4 KiB."""
    weight = pack_codes(Codes(np.zeros((32, 1024), np.uint8), 4, Scales(np.ones((32, 32), np.float32))), dtype=torch.float32)
    x, faults = torch.zeros(4096, 1024), list[int]()

    def multiply() -> None:
        before = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt
        linear(x, weight)
        faults.append(resource.getrusage(resource.RUSAGE_THREAD).ru_minflt - before)

    with using(native.level()):
        for _ in range(3):
            thread = threading.Thread(target=multiply)
            thread.start()
            thread.join()
    assert min(faults) < 500, "a system whose memory lies in pieces may have no huge page for one of them"
