"""Stamps: when each frame of a log was written, as bytes. Pure: files belong to `vnext.runtime.stamps`.

    file  = magic, wall ns u64, monotonic ns u64, stamp...       both clocks at one moment; little-endian
    stamp = number of the event behind the frame u64, monotonic ns u64
          | number of a step with the highest bit set u64, ns that rank 0 was busy with it u64

They lie beside the log's segments and are no part of it: no decision depends on a time, so a log without stamps, or with a
few missing, replays as ever. Only trace and what-if ask for them. A torn tail is a shorter file.
"""

from __future__ import annotations

import struct

import msgspec
import numpy as np

MAGIC = b"vnextTIM"
STAMPS_SUFFIX = ".vnexttimes"
head = struct.Struct("<8sQQ")
stamp = struct.Struct("<QQ")
STEP_BIT = 1 << 63


class Stamps(msgspec.Struct, frozen=True):
    """`events` and `times_ns` int64[n], ascending: the frame that ends before this event was written at this monotonic
    time. `wall_minus_monotonic_ns` turns it into the clock of arrivals. `busy_ns`: how long a step took on rank 0."""

    events: np.ndarray
    times_ns: np.ndarray
    wall_minus_monotonic_ns: int
    busy_ns: dict[int, int]


def parse(data: bytes) -> Stamps | None:
    """The stamps of one file, None if it is none. Those behind a first one that goes backwards are left out."""
    if len(data) < head.size:
        return None
    magic, wall_ns, monotonic_ns = head.unpack_from(data)
    if magic != MAGIC:
        return None
    whole = (len(data) - head.size) // stamp.size * stamp.size
    pairs = np.frombuffer(data, dtype="<u8", offset=head.size, count=whole // 8).astype(np.int64).reshape(-1, 2)
    steps = pairs[:, 0] < 0  # the highest bit
    busy = dict(zip((pairs[steps, 0] & (STEP_BIT - 1)).tolist(), pairs[steps, 1].tolist()))
    pairs = pairs[~steps]
    back = (np.diff(pairs, axis=0) < 0).any(axis=1).nonzero()[0]
    pairs = pairs[: back[0] + 1] if len(back) else pairs
    return Stamps(pairs[:, 0], pairs[:, 1], wall_ns - monotonic_ns, busy)
