"""Window: a part of a log by the clock, as people say it: `14:03`, `14:03:20.5`, `2026-11-28T14:03`, all UTC, or `+12.5`, seconds
after the log's first time.
"""

from __future__ import annotations

import argparse
import re
from datetime import UTC, datetime, timedelta
from typing import NamedTuple

import numpy as np

from vnext.log.timestamps import Timestamps
from vnext.replay.reading.folding import FrameFolded, fold_items
from vnext.replay.reading.index import Index
from vnext.replay.reading.source import Log, UnusableLog
from vnext.replay.reading.times import timestamps_of

FORMS = "write 14:03, 14:03:20, 2026-11-28T14:03 (UTC) or +12.5 (seconds after the log's beginning)"
_CLOCK = re.compile(r"(?:(\d{4}-\d\d-\d\d)[T ])?(\d\d?:\d\d)(?::(\d\d(?:\.\d{1,6})?))?Z?")


MINUTE_US, AROUND_US = 60e6, 2.5e6


class Window(NamedTuple):
    """From one time up to another, in microseconds since the machine's start, as `Clock(absolute=True)` has them."""

    from_us: float
    to_us: float

    def has(self, us: float | None) -> bool:
        """Whether a time lies in it; one that is unknown lies only in the window of all times."""
        return self.from_us <= us < self.to_us if us is not None else self == ALWAYS

    def holds(self, us: np.ndarray) -> np.ndarray:
        """As `has`, for many times (float64[n], nan where unknown; bool[n])."""
        return np.ones(len(us), bool) if self == ALWAYS else (us >= self.from_us) & (us < self.to_us)


ALWAYS = Window(-np.inf, np.inf)


def window_of(timestamps: Timestamps | None, begin: str, end: str) -> Window:
    """The window from `begin` to `end`, each as the module says or "" for the log's own. Raises UnusableLog."""
    found = Window(time_of(timestamps, begin) if begin else -np.inf, time_of(timestamps, end) if end else np.inf)
    if found.from_us >= found.to_us:
        raise UnusableLog(f"--from {begin} is not before --to {end}")
    return found


def window_at(timestamps: Timestamps | None, text: str) -> Window:
    """What a time means alone: 14:03 its whole minute, one with seconds what is around it. Raises UnusableLog."""
    us = time_of(timestamps, text)
    is_minute = text.count(":") == 1 and not text.startswith("+")
    return Window(us, us + MINUTE_US) if is_minute else Window(us - AROUND_US, us + AROUND_US)


def add_at(asking: argparse.ArgumentParser) -> None:
    says = "only this minute (14:03, UTC), or what is around 14:03:20 or +12.5"
    asking.add_argument("--at", metavar="TIME", default="", help=says)


def add_window(asking: argparse.ArgumentParser) -> None:
    add_at(asking)
    asking.add_argument("--from", dest="begin", metavar="TIME", default="", help="only from this time on")
    asking.add_argument("--to", dest="end", metavar="TIME", default="", help="only up to this time")


def asked_window(log: Log, asked: argparse.Namespace) -> Window:
    """The window that a command's options name, in which something was recorded. Raises UnusableLog."""
    return recorded(timestamps_of(log), named_window(log, asked))


def named_window(log: Log, asked: argparse.Namespace) -> Window:
    """As `asked_window`, whatever was recorded."""
    if not (asked.at or asked.begin or asked.end):
        return ALWAYS
    if asked.at and (asked.begin or asked.end):
        raise UnusableLog("--at says the whole window: leave --from and --to out")
    timestamps = timestamps_of(log)
    return window_at(timestamps, asked.at) if asked.at else window_of(timestamps, asked.begin, asked.end)


def recorded(timestamps: Timestamps | None, window: Window) -> Window:
    """The window itself. Raises UnusableLog where the log has times and none is in it, and says which are nearest."""
    if window == ALWAYS or timestamps is None:
        return window
    begin, end = np.searchsorted(timestamps.times_ns, np.array(window) * 1e3)
    if begin < end:
        return window
    found = [_said(timestamps, place) for place in (begin - 1, begin) if 0 <= place < len(timestamps.times_ns)]
    if len(found) == 2:
        raise UnusableLog(f"nothing was recorded between these times: the nearest are {found[0]} and {found[1]} UTC")
    raise UnusableLog(f"nothing was recorded between these times: {_span(timestamps)}")


def _span(timestamps: Timestamps) -> str:
    return f"the log is of {_said(timestamps, 0)} to {_said(timestamps, len(timestamps.times_ns) - 1)} UTC"


def _said(timestamps: Timestamps, place: int) -> str:
    wall_ns = int(timestamps.times_ns[place]) + timestamps.wall_minus_monotonic_ns
    return f"{datetime.fromtimestamp(wall_ns / 1e9, UTC):%Y-%m-%d %H:%M:%S}"


def time_of(timestamps: Timestamps | None, text: str) -> float:
    """A time as in `Window`. A time of day is the first one that is not before the log's beginning, by a minute. Raises
    UnusableLog."""
    if timestamps is None:
        raise UnusableLog(f"{text}: the log has no times, so steps have only numbers")
    first_ns = int(timestamps.times_ns[0])
    if text.startswith("+"):
        try:
            return first_ns / 1e3 + float(text) * 1e6
        except ValueError:
            raise UnusableLog(f"{text} is no time: {FORMS}") from None
    beginning = datetime.fromtimestamp((first_ns + timestamps.wall_minus_monotonic_ns) / 1e9, UTC)
    return first_ns / 1e3 + (_moment(text, beginning) - beginning) / timedelta(microseconds=1)


def _moment(text: str, beginning: datetime) -> datetime:
    found = _CLOCK.fullmatch(text.strip())
    try:
        if found is None:
            raise ValueError
        day = found[1] or f"{beginning:%Y-%m-%d}"
        minute = datetime.strptime(f"{day} {found[2]}", "%Y-%m-%d %H:%M").replace(tzinfo=UTC)
        moment = minute + timedelta(seconds=float(found[3] or 0))
    except ValueError:
        raise UnusableLog(f"{text} is no time: {FORMS}") from None
    is_earlier = not found[1] and moment < beginning - timedelta(minutes=1)
    return moment + timedelta(days=1) if is_earlier else moment


def step_at(index: Index, text: str, is_clamped: bool = False) -> int:
    """The number of a step: itself, or the step planned last at a time (as the module says). Raises UnusableLog, for a time behind
    the log's end unless the last step is meant by it (`is_clamped`)."""
    if text.isdecimal() and text.isascii():
        return int(text)
    timestamps = timestamps_of(index.log)
    us = time_of(timestamps, text)
    assert timestamps is not None  # else there is no time
    end_ns = np.inf if is_clamped else timestamps.times_ns[-1] + 1e3 * MINUTE_US  # a minute may be rounded up
    if not timestamps.times_ns[0] <= us * 1e3 < end_ns:
        where = "before the log's first time" if us * 1e3 < timestamps.times_ns[0] else "after the log's last time"
        raise UnusableLog(f"{text} is {where}: {_span(timestamps)}")
    return planned_by(index, timestamps, us) - 1


def planned_by(index: Index, timestamps: Timestamps, us: float) -> int:
    """How many steps had been planned at a time, as in `Window`."""
    frame = int(np.searchsorted(timestamps.times_ns, us * 1e3, side="right")) - 1
    if frame < 0:
        return index.segments[0].counts[1]
    next_event = int(timestamps.events[frame])
    place = index.at_event(next_event)
    state = place.state
    for item in fold_items(place.state, place.items):
        if state.sequence >= next_event:
            break
        state = item.state if isinstance(item, FrameFolded) else state
    return state.planned
