"""Parts that both ends of a ring share: errors, bounds, and reading the other side's line.

In the ring a message is its head (8 bytes: size and number), its bytes, and padding to 8. At most half the capacity is
published at once; a longer message follows in parts as the readers make room. Every reader gets every message in order,
including those written before it attached. A full ring blocks the writer, and this is counted; at an empty ring a reader spins
if configured to, then sleeps in the kernel. If an end dies without closing, killed at any instruction, the others notice
(RingAbandoned), and have seen each of its messages either whole or not at all. Layout: memory.py.
"""

from __future__ import annotations

from vnext.runtime.transport.ring.memory_plain import STATE_MASK, PlainMemory, Presence

MESSAGE_BYTES_MAX = 2**30
NANOSECONDS = 1e9
CLOSED = "this end of the ring is closed"
PRESENCES = tuple(Presence)  # by number: asking the enumeration costs ten times as much


class RingClosed(Exception):
    """The other side has left the ring, or this side has closed it: no further message will pass."""


class RingAbandoned(RingClosed):
    """The other side's process has ended without closing the ring: it was killed, or it crashed."""


class RingCorrupt(RuntimeError):
    """The shared memory does not hold a valid ring: another program wrote there, or the two sides differ."""


def look(memory: PlainMemory, line: int) -> tuple[Presence, int]:
    """The presence of a line's owner, and its position. Raises RingCorrupt for an unknown presence."""
    signal, position = memory.look(line)
    state = signal & STATE_MASK
    if state >= len(PRESENCES):
        raise RingCorrupt(f"line {line} of the ring holds the unknown state {state}")
    return PRESENCES[state], position
