"""Joins the notes of consecutive segments (client_latency.py) into those of the whole log.

Owns what spans two segments: a request that arrived in one and got its next token in another, and a step planned in one
and committed in another. A log that begins in the middle knows nothing of the time before.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import chain, groupby
from operator import attrgetter

import msgspec

from vnext.replay.reading.client_latency import (
    NONE,
    Alive,
    ClientLatency,
    Early,
    First,
    Gap,
    Step,
    Timed,
    Worst,
    first_of,
    gap_met,
)

replace = msgspec.structs.replace


class Joined(msgspec.Struct, frozen=True):
    """The worst of each kind in a whole log, and how often each time occurred."""

    firsts: Worst[First]
    gaps: Worst[Gap]
    steps: Worst[Step]
    clock: str


def joined(parts: Sequence[ClientLatency]) -> Joined:
    """Join the notes of all segments. If some have timestamps, segments without any contribute no times."""
    clock = "stamps" if any(part.clock == "stamps" for part in parts) else "steps"
    reported = [part for part in parts if part.clock == clock]
    firsts = Worst(_worst(each.firsts for each in reported), _sums(reported, "first_us"))
    gaps = Worst(_worst(each.gaps for each in reported), _sums(reported, "gap_us"))
    steps = Worst(_worst(each.steps for each in reported), _sums(reported, "step_us"))
    found = Joined(firsts, gaps, steps, clock)
    before: ClientLatency | None = None
    alive: dict[int, Alive] = {}
    for part in parts:
        last = before if before is not None and part.clock == before.clock == clock else None
        if last is not None:
            for early in part.early:
                _close_step(found, early, last)
        alive = _close_requests(None if last is None else found, part, alive)
        before = part
    return found


def _worst(parts: Iterable[list[Timed]]) -> list[Timed]:
    """The worst entries of all segments, worst first; of equal entries the earlier one."""
    return sorted(chain.from_iterable(parts), key=lambda entry: -entry.ms)


def _sums(parts: Sequence[ClientLatency], kind: str) -> dict[int, int]:
    sums: dict[int, int] = {}
    for part in parts:
        for value, count in getattr(part, kind).items():
            sums[value] = sums.get(value, 0) + count
    return sums


def _close_step(found: Joined, early: Early, before: ClientLatency) -> None:
    """Close a step that was planned in the segment before."""
    planned_us, last_us = before.planned_us.get(early.done.step), early.last_us or before.last_us
    if planned_us is not None:
        ms = (early.us - max(planned_us, last_us or 0.0)) / 1e3
        found.steps.meet(ms, lambda: replace(early.done, ms=ms))


def _close_requests(found: Joined | None, part: ClientLatency, before: dict[int, Alive]) -> dict[int, Alive]:
    """Close the gaps of requests that arrived before this segment. Returns the requests alive at its end."""
    for step, opened in groupby(part.opened, key=attrgetter("step")):
        waited = []
        for each in opened:
            whole = _followed(before.get(each.alive.id), each.alive)
            if found is None or whole is None or whole.us is None:
                continue
            ms = (each.us - whole.us) / 1e3
            if whole.step == NONE:
                found.firsts.meet(ms, lambda: first_of(whole, step, ms))  # noqa: B023  made at once
            else:
                waited.append((ms, whole, 1))
        if found is not None and waited:
            gap_met(found.gaps, waited, step)
    return {
        each.id: each if not each.is_older else _followed(before.get(each.id), each) or each for each in part.alive
    }


def _followed(before: Alive | None, now: Alive) -> Alive | None:
    """A request that has received no token since the segment before, with the notes of both segments."""
    if before is None or before.is_older:
        return None
    admitted = now if before.admitted_step == NONE else before
    return replace(
        before, admitted_step=admitted.admitted_step, cached=admitted.cached, preempted=before.preempted + now.preempted,
        most=max(before.most, now.most),
    )  # fmt: skip



