"""Samples: where a step samples. An entry that samples does so behind its last known token, and behind each of its drafts."""

from __future__ import annotations

import msgspec
import numpy as np

from vnext.state.events import StepCommitted
from vnext.state.state import State, StepInFlight
from vnext.state.store import extents


class SamplePoints(msgspec.Struct, frozen=True):
    """The samples of a step: the entry of each, and how many of the entry's tokens come behind it (int64[S] each)."""

    entries: np.ndarray
    back: np.ndarray


def sample_points(scheduled: StepInFlight) -> SamplePoints:
    """The samples of a step whose drafts are all computed, in order."""
    sampled = scheduled.samples.nonzero()[0]
    if scheduled.drafts is None or not scheduled.drafts.any():
        return SamplePoints(sampled, np.zeros_like(sampled))
    sizes = scheduled.drafts[sampled] + 1
    return SamplePoints(sampled.repeat(sizes), sizes.repeat(sizes) - 1 - extents.spans(np.zeros_like(sizes), sizes))


def runs_in(event: StepCommitted, asked: int) -> tuple[np.ndarray, np.ndarray]:
    """A commit's numbers of tokens and of drafts for each of the `asked` requests that sampled (int64[n] each)."""
    if not event.counts and not event.drafted:
        return np.ones(asked, dtype=np.int64), np.zeros(asked, dtype=np.int64)
    return np.frombuffer(event.counts, np.uint8).astype(np.int64), np.frombuffer(event.drafted, np.uint8).astype(np.int64)


def still_owed(state: State) -> frozenset[int]:
    """The requests that take their samples of the oldest step in flight: they have not given way since it was planned."""
    scheduled, rows = state.in_flight[0], state.rows
    running = dict(zip(rows.id.tolist(), rows.preemption_count.tolist()))
    sampling = zip(scheduled.ids[scheduled.samples].tolist(), scheduled.preemption_counts[scheduled.samples].tolist())
    return frozenset(id_ for id_, preemptions in sampling if running.get(id_) == preemptions)


def with_kept_drafts(scheduled: StepInFlight, event: StepCommitted) -> StepInFlight:
    """The oldest step in flight with those drafts alone that its commit has kept."""
    if scheduled.drafts is None:
        return scheduled
    counts, _ = runs_in(event, int(np.count_nonzero(scheduled.samples)))
    entries, drafts = scheduled.entries.copy(), np.zeros_like(scheduled.drafts)
    drafts[scheduled.samples] = counts - 1
    entries[3] += drafts - scheduled.drafts
    return msgspec.structs.replace(scheduled, entries=entries, tokens=int(entries[3].sum()), drafts=drafts)
