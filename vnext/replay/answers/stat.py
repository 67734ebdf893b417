"""stat: what the steps of a log were like, in percentiles.

Owns the summary. The counts come from the index (step_counts.py) and, where events alone suffice, from `info`.
"""

from __future__ import annotations

import msgspec

from vnext.replay.reading.between import between
from vnext.replay.reading.index import Index
from vnext.replay.reading.info import PERCENTILES, Info, info
from vnext.replay.reading.step_counts import StepCounts, added, percentiles
from vnext.replay.reading.window import ALWAYS, Window
from vnext.state.state import Counters


class Stat(msgspec.Struct, frozen=True, kw_only=True):
    """Percentiles are at 50, 90, 99 and 100, over steps: `step_us` microseconds from one step to the next (empty if the
    log has no times), tokens computed, requests in the step, queued and running requests, free blocks.

    `hit_rate` is the share of asked prompt tokens that the prefix cache had; `tokens_per_s` is sampled tokens by step
    times. `tokens_per_s` and `seconds` are None if the log has no times.
    """

    steps: int
    seconds: float | None
    step_us: list[int]
    tokens: list[int]
    batch: list[int]
    queue: list[int]
    running: list[int]
    free_blocks: list[int]
    computed_tokens: int
    sampled_tokens: int
    tokens_per_s: float | None
    queried_tokens: int
    hit_tokens: int
    hit_rate: float
    preemptions: int
    preemptions_per_1000_steps: float
    finished: int
    aborted: int
    size_bytes: int
    bytes_per_sampled_token: float
    stopped: str


def stat(index: Index, window: Window = ALWAYS) -> Stat:
    """The summary of a log, or of a window; its size is the whole log's. Raises UnusableLog if nothing of it can be folded."""
    if window == ALWAYS:
        directories, counted = [segment.directory for segment in index.segments], info(index.log)
        return _stat(added([each.step_counts for each in directories]), counted, [each.stopped for each in directories])
    part = between(index, window)
    counted = msgspec.structs.replace(info(index.log), sampled_tokens=part.sampled_tokens)
    return _stat(part.step_counts, counted, [part.stopped])


def _stat(step_counts: StepCounts, counted: Info, reasons: list[str]) -> Stat:
    last, first = (
        Counters(**dict(zip(Counters.__struct_fields__, each))) for each in (step_counts.last, step_counts.first)
    )
    queried = last.prefix_queried_tokens - first.prefix_queried_tokens
    hits = last.prefix_hit_tokens - first.prefix_hit_tokens
    steps, preempted = sum(step_counts.tokens.values()), last.preempted - first.preempted
    timed = sum(step_counts.step_us.values())
    seconds = sum(value * count for value, count in step_counts.step_us.items()) / 1e6
    return Stat(
        steps=steps,
        seconds=seconds or None,
        step_us=percentiles(step_counts.step_us, PERCENTILES),
        tokens=percentiles(step_counts.tokens, PERCENTILES),
        batch=percentiles(step_counts.requests, PERCENTILES),
        queue=percentiles(step_counts.queue, PERCENTILES),
        running=percentiles(step_counts.running, PERCENTILES),
        free_blocks=percentiles(step_counts.free, PERCENTILES),
        computed_tokens=sum(value * count for value, count in step_counts.tokens.items()),
        sampled_tokens=counted.sampled_tokens,
        tokens_per_s=counted.sampled_tokens * timed / steps / seconds if seconds and steps else None,
        queried_tokens=queried,
        hit_tokens=hits,
        hit_rate=hits / queried if queried else 0.0,
        preemptions=preempted,
        preemptions_per_1000_steps=1000 * preempted / steps if steps else 0.0,
        finished=last.finished - first.finished,
        aborted=last.aborted - first.aborted,
        size_bytes=counted.size_bytes,
        bytes_per_sampled_token=counted.bytes_per_sampled_token,
        stopped=_stopped(counted, reasons),
    )


def _stopped(counted: Info, reasons: list[str]) -> str:
    """Why less than the whole log is counted, "" if it is whole."""
    return next(filter(None, reasons), "") or ("" if counted.end.kind == "complete" else str(counted.end))
