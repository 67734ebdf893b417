"""Memory outside the heap, in huge pages where available, for weights that every step reads from start to end.

With 4 KiB pages, a core waits for address translations and for its prefetcher, which stops at a page's end.
"""

from __future__ import annotations

import ctypes
import mmap
import platform

import numpy as np

HUGE_PAGE_BYTES = 2 << 20
CHUNK_BYTES = 64 << 20
ALIGNMENT = 4096
DONTNEED, HUGEPAGE = 4, 14  # Linux's numbers for the advice
MAP_FIXED = 16


MBIND = {"x86_64": 237, "aarch64": 235}
MPOL_INTERLEAVE = 3

_nodes: tuple[int, ...] = ()


def spread_over(nodes: tuple[int, ...]) -> None:
    """From now on `spread` puts pages on these NUMA nodes in turn; () leaves them where they are first written."""
    global _nodes
    _nodes = nodes


def spread(array: np.ndarray) -> np.ndarray:
    """Put the pages of an array on the nodes in turn, before anything is written: which thread reads a page of the cache is not
    known. Where the system refuses (a container may), they lie where they are first written. The array itself."""
    if _nodes and platform.machine() in MBIND:
        mask = np.zeros(max(_nodes) // 64 + 1, dtype=np.uint64)
        for node in _nodes:
            mask[node // 64] |= np.uint64(1 << node % 64)
        begin = array.ctypes.data // mmap.PAGESIZE * mmap.PAGESIZE
        size = array.ctypes.data + array.nbytes - begin
        words = (ctypes.c_ulong(each) for each in (begin, size, MPOL_INTERLEAVE, mask.ctypes.data, 64 * len(mask) + 1, 0))
        ctypes.CDLL(None).syscall(ctypes.c_long(MBIND[platform.machine()]), *words)
    return array


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


def give_back(first: int, size_bytes: int) -> None:
    """Give the memory of the whole pages in [first, first + size_bytes) back to the system. They stay where they are and read as
    zeros; who writes them takes memory again."""
    begin, end = -(-first // ALIGNMENT) * ALIGNMENT, (first + size_bytes) // ALIGNMENT * ALIGNMENT
    if end > begin and ctypes.CDLL(None, use_errno=True).madvise(ctypes.c_void_p(begin), ctypes.c_size_t(end - begin), DONTNEED):
        raise OSError(ctypes.get_errno(), "memory cannot be given back")


def in_place_of(mapped: np.ndarray) -> None:
    """Put new memory that reads as zeros, in huge pages where available, in the place of a whole mapping of a file, uint8. The file
    stays as it is, and so do the addresses."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    place, size = ctypes.c_void_p(mapped.ctypes.data), ctypes.c_size_t(-(-len(mapped) // mmap.PAGESIZE) * mmap.PAGESIZE)
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_FIXED
    if libc.mmap(place, size, mmap.PROT_READ | mmap.PROT_WRITE, flags, -1, ctypes.c_long(0)) != place.value:
        raise OSError(ctypes.get_errno(), "memory cannot be had")
    libc.madvise(place, size, HUGEPAGE)


def huge(size_bytes: int) -> np.ndarray:
    """uint8 [size_bytes] of zeros, aligned to a huge page and asking for them.

    Private: what could be shared counts as shared memory, for which Linux gives no huge pages by itself.
    """
    area = mmap.mmap(-1, size_bytes + HUGE_PAGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        area.madvise(mmap.MADV_HUGEPAGE)
    whole = np.frombuffer(area, dtype=np.uint8)
    start = -whole.ctypes.data % HUGE_PAGE_BYTES
    return whole[start : start + size_bytes]
