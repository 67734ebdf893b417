"""Memory outside the heap, in huge pages where available, for weights that every step reads from start to end.

With 4 KiB pages, a core waits for address translations and for its prefetcher, which stops at a page's end.
"""

from __future__ import annotations

import mmap

import numpy as np

HUGE_PAGE_BYTES = 2 << 20
CHUNK_BYTES = 64 << 20
ALIGNMENT = 4096


class Arena:
    """Hands out zeroed buffers side by side in huge pages. Never frees: a buffer keeps its chunk alive."""

    def __init__(self) -> None:
        self._chunk = np.empty(0, dtype=np.uint8)
        self._used = 0

    def take(self, size_bytes: int) -> np.ndarray:
        """uint8 [size_bytes], aligned to 4 KiB."""
        if self._used + size_bytes > len(self._chunk):
            self._chunk = huge(max(CHUNK_BYTES, size_bytes))
            self._used = 0
        taken = self._chunk[self._used : self._used + size_bytes]
        self._used += -(-size_bytes // ALIGNMENT) * ALIGNMENT
        return taken


def apart(size_bytes: int) -> np.ndarray:
    """uint8 [size_bytes] of zeros in pages of their own, which go back to the system with the array.

    For what is large and short-lived: on the heap it would leave holes between what stays.
    """
    return np.frombuffer(mmap.mmap(-1, size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS), dtype=np.uint8)


def huge(size_bytes: int) -> np.ndarray:
    """uint8 [size_bytes] of zeros, aligned to a huge page and asking for them.

    Private: what could be shared counts as shared memory, for which Linux gives no huge pages unless told to.
    """
    area = mmap.mmap(-1, size_bytes + HUGE_PAGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        area.madvise(mmap.MADV_HUGEPAGE)
    whole = np.frombuffer(area, dtype=np.uint8)
    start = -whole.ctypes.data % HUGE_PAGE_BYTES
    return whole[start : start + size_bytes]
