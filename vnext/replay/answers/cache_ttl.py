"""cache --ttl: what it would have saved, and cost, to keep every request's blocks for some time after their last use.

Owns the intervals in which nobody uses a block. A retention keeps it for the first part of each; it pays where the next use comes
within it and the cache had lost the block. Times are those of the log's timestamps; without them, of its arrivals and ticks.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence

import msgspec
import numpy as np

from vnext.replay.reading.folding import Folded
from vnext.replay.reading.source import Log, UnusableLog
from vnext.replay.reading.times import Clock, timestamps_of
from vnext.state.events import ClockTicked, RequestArrived

UNITS_S = {"s": 1, "m": 60, "h": 3600, "d": 86_400}
TTLS_MAX = 16


class Retention(msgspec.Struct, frozen=True, kw_only=True):
    """Had each block of a request stayed for `ttl_s` after its last use: `saved` more tokens would have been hits, and blocks would
    have been held for `block_seconds` in sum, `blocks_max` of them at once."""

    ttl_s: int
    saved: int
    block_seconds: float
    blocks_max: int


def ttls_of(text: str) -> list[int]:
    """Seconds of each of "5m,1h". Raises UnusableLog for other texts."""
    found = [re.fullmatch(r"([1-9][0-9]{0,8})([smhd])", each) for each in text.split(",")]
    if not all(found) or len(found) > TTLS_MAX:
        raise UnusableLog(f"--ttl is {text!r}: write up to {TTLS_MAX} times such as 30s,5m,1h,1d")
    return sorted({int(each[1]) * UNITS_S[each[2]] for each in found if each})


class Retentions:
    """All times while a log is folded. Mutable."""

    def __init__(self, log: Log, ttls_s: Sequence[int]) -> None:
        self._clock, self._started_ns = Clock(timestamps_of(log)), log.header.started.started_ns
        self._ttls_s, self._size = ttls_s, log.header.started.config.block_size
        self._now_s = 0.0
        self._users: Counter[bytes] = Counter()
        self._idle_since_s: dict[bytes, float] = {}
        self._keys: dict[int, tuple[bytes, ...]] = {}
        self._idle: list[tuple[float, float]] = []
        self._saved = [0] * len(ttls_s)

    def hear(self, item: Folded) -> None:
        """Take the time of an event."""
        event = item.event
        if self._clock.timestamped:
            now_us = self._clock.known_us(item.frame_end, item.after.committed)
            self._now_s = self._now_s if now_us is None else now_us / 1e6
        elif isinstance(event, RequestArrived):
            self._now_s = max(self._now_s, event.arrival_ns / 1e9)
        elif isinstance(event, ClockTicked):
            self._now_s = max(self._now_s, self._started_ns / 1e9 + event.seconds)

    def begin(self, id_: int, keys: tuple[bytes, ...], found: int) -> None:
        """A request joins the batch with `found` of its prompt's blocks from the cache; `keys` are those that it could have."""
        idle_s = [self._now_s - since if (since := self._idle_since_s.get(key)) is not None else None for key in keys]
        for place, ttl_s in enumerate(self._ttls_s):
            count = found
            while count < len(keys) and (self._users[keys[count]] or ((gap := idle_s[count]) is not None and gap <= ttl_s)):
                self._saved[place] += 0 if self._users[keys[count]] else self._size
                count += 1
        for key in keys:
            if (since := self._idle_since_s.pop(key, None)) is not None:
                self._idle.append((since, self._now_s))
        self._users.update(keys)
        self._keys[id_] = keys

    def end(self, id_: int, keys: tuple[bytes, ...]) -> None:
        """A request has ended: its blocks that no other request uses are idle. `keys` are those of its prompt and its answer."""
        for key in self._keys.pop(id_, ()):
            self._users[key] -= 1
            if not self._users[key]:
                del self._users[key]
                self._idle_since_s[key] = self._now_s
        self._idle_since_s |= {key: self._now_s for key in keys if key not in self._users and key not in self._idle_since_s}

    def answer(self) -> list[Retention]:
        """For each time, the shortest first."""
        spans = np.array([*self._idle, *((since, self._now_s) for since in self._idle_since_s.values())]).reshape(-1, 2)
        return [self._retention(spans, ttl_s, saved) for ttl_s, saved in zip(self._ttls_s, self._saved)]

    def _retention(self, spans: np.ndarray, ttl_s: int, saved: int) -> Retention:
        starts, ends = spans[:, 0], np.minimum(spans[:, 1], spans[:, 0] + ttl_s)
        moments = np.concatenate((starts, ends))
        changes = np.repeat((1, -1), len(spans))[np.lexsort((np.repeat((1, 0), len(spans)), moments))]
        most = int(np.cumsum(changes).max(initial=0))
        return Retention(ttl_s=ttl_s, saved=saved, block_seconds=round(float((ends - starts).sum()), 3), blocks_max=most)
