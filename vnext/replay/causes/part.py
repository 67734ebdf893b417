"""Part: the steps of a log that a question is about, with those before them that may have made the trouble.

Owns what is read for a question. A part is a log of its own in a folder that goes when the answer is there.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec

from vnext.replay.causes.ledger import Counted
from vnext.replay.console.commands import index_of
from vnext.replay.reading.between import steps_between
from vnext.replay.reading.folding import FrameFolded, first_state, fold_items
from vnext.replay.reading.index import Index, require_request
from vnext.replay.reading.naming import request_of
from vnext.replay.reading.source import Log, UnusableLog, open_log
from vnext.replay.reading.times import timestamps_of
from vnext.replay.reading.window import ALWAYS, Window, planned_by, recorded, window_at
from vnext.state.events import RequestArrived

BEFORE, AFTER = 1000, 200
"""So many steps around what is asked about are read."""


class Asked(msgspec.Struct, frozen=True, kw_only=True):
    """What to explain: a time, a request or a client; all of the log where nothing is given."""

    at: str = ""
    request: str = ""
    client: str = ""


@contextmanager
def part_of(path: Path, asked: Asked) -> Iterator[tuple[Log, Counted, Window]]:
    """The part of a log that a question is about, which requests and which times of it count. Raises UnusableLog."""
    log = open_log(path)
    if asked.request and asked.client:
        raise UnusableLog("--request names one request, whose client is known: leave --client out")
    number = request_of(log, asked.request) if asked.request else -1
    timestamps = timestamps_of(log)
    window = recorded(timestamps, window_at(timestamps, asked.at)) if asked.at else ALWAYS
    counts = _of_client(log, asked.client) if asked.client else lambda id_: number in (-1, id_)
    index = index_of(path) if number >= 0 or asked.at else None
    if index is not None and number >= 0:
        require_request(index, number)
    if index is None or index.last.planned - index.segments[0].counts[1] <= BEFORE + AFTER:
        yield log, counts, window
        return
    first, end = _steps_of(index, number) if number >= 0 else (0, index.last.planned)
    if timestamps is not None and asked.at:
        begins, ends = (planned_by(index, timestamps, us) for us in window)
        first, end = max(first, begins), min(end, ends)
    with steps_between(index, first - BEFORE, max(first, end) + AFTER) as part:
        yield part, counts, window


def _steps_of(index: Index, number: int) -> tuple[int, int]:
    """The steps planned before a request came and until it ended."""
    place = index.at_request(number)
    state, first = place.state, place.state.planned
    for item in fold_items(state, place.items):
        if isinstance(item, FrameFolded):
            first = first if number < state.next_id else item.state.planned
            state = item.state
            if number < state.next_id and number not in state.requests:
                break
    return first, state.planned


def _of_client(log: Log, asked: str) -> Counted:
    """Whether a request is of the one client whose number begins so. Raises UnusableLog."""
    of = {id_: each.client for id_, each in first_state(log).requests.items()}
    frames = (item for item in log.items() if hasattr(item, "events"))
    of |= {event.id: event.client for frame in frames for event in frame.events if isinstance(event, RequestArrived)}
    wanted = {client for client in of.values() if f"{client:016x}".startswith(asked.lower())}
    if len(wanted) != 1:
        raise UnusableLog(f"--client {asked}: {len(wanted)} clients of this log begin so; `vnext-replay clients` lists them")
    (client,) = wanted
    return lambda id_: of.get(id_) == client
