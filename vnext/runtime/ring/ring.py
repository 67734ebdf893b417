"""The ring: byte messages from one writer to several readers through POSIX shared memory. No codec, no process.

In the ring a message is its head (8 bytes: size and number), its bytes, and padding to 8. At most half the capacity is
published at once; a longer message follows in parts as the readers make room. Every reader gets every message in order,
including those written before it attached. A full ring blocks the writer, and this is counted; at an empty ring a reader spins
if configured to, then sleeps in the kernel. If an end dies without closing, killed at any instruction, the others notice
(RingAbandoned), and have seen each of its messages either whole or not at all. Layout: memory.py.
"""

from __future__ import annotations

from vnext.runtime.ring.common import MESSAGE_BYTES_MAX, RingAbandoned, RingClosed, RingCorrupt
from vnext.runtime.ring.reader import RingReader
from vnext.runtime.ring.writer import CAPACITY_BYTES_DEFAULT, RingWriter

__all__ = [
    "CAPACITY_BYTES_DEFAULT",
    "MESSAGE_BYTES_MAX",
    "RingAbandoned",
    "RingClosed",
    "RingCorrupt",
    "RingReader",
    "RingWriter",
]
