"""Columns: a log's requests, steps and events as tables for notebooks and files, `vnext.replay.Log`.

Owns the columns' names and units. The rows of requests and steps are those of the ledger (causes/ledger.py).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path

import numpy as np

from vnext.log.codec import Frame
from vnext.replay.causes.ledger import Ledger, ledger
from vnext.replay.reading.source import open_log
from vnext.replay.reading.times import Clock, timestamps_of
from vnext.state.traits import line_of

Columns = Mapping[str, np.ndarray]
"""A table: each column an array, all of one length."""


class Log:
    """A log as tables. `pandas.DataFrame(Log("logs/engine").requests)` is a frame.

    `requests` has `id`, `name`, `client` (hexadecimal), `priority`, `prompt_tokens`, `tokens` (answered), `came`, `first`, `last`
    and `ended` (seconds since 1970; nan where unknown), `ttft_ms`, `itl_ms` (the mean gap), `e2e_ms`, `step_ms` (its part of the
    steps' time) and `end` ("length", "stop", "abort (client)"; "" while it lives).

    `steps` has `step`, `ended` (seconds since 1970), `ms`, `busy_ms` (rank 0 computed; 0 where the log does not say), `tokens`,
    `requests`, `queue` (who waited), `free` (pages), `again` (tokens computed once more) and `stopped` ("" for a step; else what
    held the engine up in a stretch without one).

    `events` has `event` (its number), `at` (seconds since 1970, nan where unknown), `kind`, `step` (-1 for those of no step) and
    `line`, which tells a person what it says without tokens.

    A log without timestamps has a step for each millisecond from 0 on. Raises UnusableLog.
    """

    def __init__(self, path: str | Path) -> None:
        self._log = open_log(Path(path))
        self._timestamps = found = timestamps_of(self._log)
        self._wall_s = found.wall_minus_monotonic_ns / 1e9 if found is not None else 0.0

    @cached_property
    def ledger(self) -> Ledger:
        return ledger(self._log)

    @cached_property
    def requests(self) -> Columns:
        return requests_of(self.ledger, self._wall_s)

    @cached_property
    def steps(self) -> Columns:
        return steps_of(self.ledger, self._wall_s)

    @cached_property
    def events(self) -> Columns:
        frames = [item for item in self._log.items() if isinstance(item, Frame)]
        events = [event for frame in frames for event in frame.events]
        sizes = np.array([len(frame.events) for frame in frames], np.int64)
        firsts = np.array([frame.first_event for frame in frames], np.int64)
        ends_us = Clock(self._timestamps, absolute=True).frames_us(firsts + sizes)
        return {
            "event": np.repeat(firsts - np.cumsum(sizes) + sizes, sizes) + np.arange(len(events)),
            "at": np.repeat(ends_us / 1e6 + self._wall_s, sizes),
            "kind": np.array([type(event).__name__ for event in events], object),
            "step": np.array([getattr(event, "step", -1) for event in events], np.int64),
            "line": np.array([line_of(event) for event in events], object),
        }


def requests_of(written: Ledger, wall_s: float) -> Columns:
    """`Log.requests` of a ledger whose time 0 is `wall_s` seconds after 1970."""
    lives = written.lives
    times = ("came_us", "first_us", "last_us", "ended_us")
    came, first, last, ended = (_seconds([getattr(life, name) for life in lives.values()], wall_s) for name in times)
    tokens = np.array([life.tokens for life in lives.values()], np.int64)
    return {
        "id": np.array(list(lives), np.int64),
        "name": np.array([life.name for life in lives.values()], object),
        "client": np.array([f"{life.client:016x}" if life.client else "" for life in lives.values()], object),
        "priority": np.array([life.priority for life in lives.values()], np.int64),
        "prompt_tokens": np.array([life.prompt for life in lives.values()], np.int64),
        "tokens": tokens, "came": came, "first": first, "last": last, "ended": ended,
        "ttft_ms": 1e3 * (first - came),
        "itl_ms": 1e3 * (last - first) / np.where(tokens > 1, tokens - 1, np.nan),
        "e2e_ms": 1e3 * (last - came),
        "step_ms": np.array([life.step_us for life in lives.values()]) / 1e3,
        "end": np.array([life.end for life in lives.values()], object),
    }  # fmt: skip


def steps_of(written: Ledger, wall_s: float) -> Columns:
    """`Log.steps` of a ledger, as `requests_of`."""
    entries = written.entries

    def column(name: str) -> np.ndarray:
        return np.array([getattr(entry, name) for entry in entries])

    sizes = np.array([entry.features for entry in entries]).reshape(-1, 4)
    return {
        "step": column("step"), "ended": _seconds(column("end_us").tolist(), wall_s), "ms": column("us") / 1e3,
        "busy_ms": column("busy_us") / 1e3, "tokens": sizes[:, 0].astype(np.int64), "requests": sizes[:, 1].astype(np.int64),
        "queue": column("queue"), "free": column("free"),
        "again": np.array([sum(entry.again.values()) for entry in entries], np.int64),
        "stopped": np.array([entry.stopped for entry in entries], object),
    }  # fmt: skip


def _seconds(times_us: Sequence[float | None], wall_s: float) -> np.ndarray:
    """Times of a ledger in seconds since 1970 (float64[n], nan where unknown)."""
    return np.array([np.nan if us is None else us for us in times_us], np.float64) / 1e6 + wall_s
