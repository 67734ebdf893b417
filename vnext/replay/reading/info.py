"""info: counts what is in a log without folding it.

Owns the counts and percentiles that the events alone give; `show` answers what needs a state.
"""

from __future__ import annotations

from collections import Counter

import msgspec
import numpy as np

from vnext.log.codec import Frame, LogEnd, SegmentHeader, schema_digest
from vnext.log.reading import Skim
from vnext.replay.reading.source import Log
from vnext.state.events import (
    EngineRecovered,
    RequestAborted,
    RequestArrived,
    RequestResumed,
    StepCommitted,
    StepPlanned,
    WeightsChanged,
)

PERCENTILES = (50, 90, 99, 100)
RECOVERIES_SHOWN = 16


class Recovery(msgspec.Struct, frozen=True, kw_only=True):
    """A recovery: the number of its event, its sentence, and the requests below which it was cautious (0: it was not)."""

    event: int
    cause: str
    cautious: int


class Continues(msgspec.Struct, frozen=True, kw_only=True):
    """The log of the engine core that ended before this one began, what it holds, why it ended, and the requests that came back
    from it with `tokens` of their answers."""

    log: str
    frames: int
    cause: str
    requests: int
    tokens: int


class Info(msgspec.Struct, frozen=True, kw_only=True, rename={"snapshot_bytes": "keyframe_bytes"}):
    """Sizes are in tokens or bytes as named; percentiles are at 50, 90, 99 and 100. `batch` is samples per step.

    The header omits its snapshot, which takes `snapshot_bytes`. `header.first_event` exceeds 1 where older segments are
    missing. `sampled_tokens` includes tokens that a preemption dropped and that were sampled again. `size_bytes` were
    written and take `room_bytes` on disk, fewer where segments are compressed. `recoveries` counts the times that all ranks
    were replaced, the last of which are in `last_recoveries`. `weights` are those of the last change, "" without one.
    """

    header: SegmentHeader
    snapshot_bytes: int
    schema_is_ours: bool
    segments: int
    size_bytes: int
    frames: int
    frames_lost: int
    events: dict[str, int]
    requests: int
    aborted: int
    steps: int
    preemptions: int
    prompt_tokens: int
    sampled_tokens: int
    bytes_per_sampled_token: float
    room_bytes: int
    rank_digests: int
    arrivals_seconds: float
    prompt_percentiles: list[int]
    batch_percentiles: list[int]
    end: LogEnd
    continues: Continues | None = None
    recoveries: int = 0
    last_recoveries: list[Recovery] = []
    weights: str = ""


class _Counts:
    """Running totals over frames."""

    def __init__(self) -> None:
        self.frames = self.frames_lost = self.rank_digests = self.aborted = self.preemptions = self.steps = 0
        self.events: Counter[str] = Counter()
        self.prompts: list[np.ndarray] = []
        self.batches: list[np.ndarray] = []
        self.arrivals_ns: list[np.ndarray] = []
        self.begun: EngineRecovered | None = None
        self.weights: WeightsChanged | None = None
        self.recoveries: list[Recovery] = []
        self.resumed = self.resumed_tokens = 0

    def skim(self, run: Skim) -> None:
        found = run.counts
        self.frames += found.frames
        self.steps += found.plans
        self.preemptions += found.preempted
        self.aborted += found.aborted
        self.rank_digests += found.rank_digests
        self.batches.append(run.batches)
        self.prompts.append(run.prompts)
        self.arrivals_ns.append(run.times)
        self.events["RequestArrived"] += found.arrivals
        self.events["RequestAborted"] += found.aborts
        self.events["StepPlanned"] += found.plans
        self.events["StepCommitted"] += found.commits

    def frame(self, frame: Frame) -> None:
        self.frames += 1
        self.frames_lost += frame.lost
        self.rank_digests += len(frame.rank_digests)
        for number, event in enumerate(frame.events, frame.first_event):
            self.events[type(event).__name__] += 1
            self.event(number, event)

    def event(self, number: int, event: object) -> None:
        if isinstance(event, RequestResumed):
            self.resumed += 1
            self.resumed_tokens += len(event.generated) // 4
        match event:
            case WeightsChanged():
                self.weights = event
            case EngineRecovered() if number == 1:
                self.begun = event
            case EngineRecovered():
                self.recoveries.append(Recovery(event=number, cause=event.cause, cautious=event.cautious))
            case StepCommitted():
                self.batches.append(np.array([len(event.tokens) // 4]))
            case StepPlanned():
                self.steps += 1
                self.preemptions += len(event.preempted)
            case RequestArrived():
                self.prompts.append(np.array([len(event.prompt) // 4]))
                self.arrivals_ns.append(np.array([event.arrival_ns]))
            case RequestAborted():
                self.aborted += len(event.ids)


def info(log: Log) -> Info:
    """Count the log's longest valid prefix."""
    counts, segments, end = _Counts(), 0, None
    for item in log.items(skim=True):
        if isinstance(item, Skim):
            counts.skim(item)
        elif isinstance(item, Frame):
            counts.frame(item)
        elif isinstance(item, LogEnd):
            end = item
        else:
            segments += 1
    assert end is not None, "every reading ends with a LogEnd"
    return _summary(log, counts, segments, end)


def _summary(log: Log, counts: _Counts, segments: int, end: LogEnd) -> Info:
    batches, prompts, times = map(_joined, (counts.batches, counts.prompts, counts.arrivals_ns))
    sampled, size_bytes = int(batches.sum()), log.size_bytes
    return Info(
        header=msgspec.structs.replace(log.header, snapshot=b""),
        snapshot_bytes=len(log.header.snapshot),
        schema_is_ours=log.header.schema == schema_digest(),
        segments=segments,
        size_bytes=size_bytes,
        frames=counts.frames,
        frames_lost=counts.frames_lost,
        events={name: count for name, count in counts.events.items() if count},
        requests=len(prompts),
        aborted=counts.aborted,
        steps=counts.steps,
        preemptions=counts.preemptions,
        prompt_tokens=int(prompts.sum()),
        sampled_tokens=sampled,
        room_bytes=sum(path.stat().st_size for path in log.paths),
        bytes_per_sampled_token=size_bytes / sampled if sampled else 0.0,
        rank_digests=counts.rank_digests,
        arrivals_seconds=int(np.ptp(times)) / 1e9 if len(times) else 0.0,
        prompt_percentiles=percentiles(prompts),
        batch_percentiles=percentiles(batches),
        end=end,
        continues=_continues(counts),
        recoveries=len(counts.recoveries),
        last_recoveries=counts.recoveries[-RECOVERIES_SHOWN:],
        weights=f"version {counts.weights.version} ({counts.weights.digest})" if counts.weights else "",
    )


def _continues(counts: _Counts) -> Continues | None:
    begun = counts.begun
    if begun is None:
        return None
    return Continues(
        log=begun.log, frames=begun.frames, cause=begun.cause, requests=counts.resumed, tokens=counts.resumed_tokens
    )


def _joined(parts: list[np.ndarray]) -> np.ndarray:
    return np.concatenate([np.empty(0, dtype=np.int64), *parts])


def percentiles(values: np.ndarray) -> list[int]:
    """The values at PERCENTILES, each an observed one; empty for no values."""
    return np.percentile(values, PERCENTILES, method="lower").astype(int).tolist() if len(values) else []
