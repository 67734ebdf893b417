"""The ring: byte messages from one writer to several readers through POSIX shared memory. No codec, no process.

In the ring a message is its head (8 bytes: size and number), its bytes, and padding to 8. At most half the capacity is
published at once; a longer message follows in parts as the readers make room. Every reader gets every message in order,
also those written before it attached. A full ring blocks the writer and is counted; at an empty one a reader spins if
it was told to, then sleeps in the kernel. An end that ends without closing, killed at whatever instruction, is noticed
by the others (RingAbandoned), who have seen each of its messages wholly or not at all. Layout: ring_memory.py.
"""

from __future__ import annotations

from vnext.runtime.ring_ends import MESSAGE_BYTES_MAX, RingAbandoned, RingClosed, RingCorrupt
from vnext.runtime.ring_reader import RingReader
from vnext.runtime.ring_writer import CAPACITY_BYTES_DEFAULT, RingWriter

__all__ = [
    "CAPACITY_BYTES_DEFAULT",
    "MESSAGE_BYTES_MAX",
    "RingAbandoned",
    "RingClosed",
    "RingCorrupt",
    "RingReader",
    "RingWriter",
]
