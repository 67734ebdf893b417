"""stat: what the steps of a log were like, in percentiles.

Owns the summary. Counts come from the index's tallies (tally.py) and, as far as events alone tell, from `info`.
"""

from __future__ import annotations

import msgspec

from vnext.replay.index import Index
from vnext.replay.info import PERCENTILES, Info, info
from vnext.replay.tally import added, percentiles
from vnext.state.state import Counters


class Stat(msgspec.Struct, frozen=True, kw_only=True):
    """Percentiles are at 50, 90, 99 and 100, over steps: `step_us` microseconds from a step to the next (empty where the
    log tells no time), tokens computed, requests in the step, queued and running ones, free blocks.

    `hit_rate` is the part of asked prompt tokens that the prefix cache had, `tokens_per_s` sampled tokens by step times.
    """

    steps: int
    seconds: float
    step_us: list[int]
    tokens: list[int]
    batch: list[int]
    queue: list[int]
    running: list[int]
    free_blocks: list[int]
    computed_tokens: int
    sampled_tokens: int
    tokens_per_s: float
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


def stat(index: Index) -> Stat:
    """The whole log's summary. UnusableLog if nothing of it can be folded."""
    directories = [segment.directory for segment in index.segments]
    tally, counted = added([each.tally for each in directories]), info(index.log)
    last, first = (Counters(**dict(zip(Counters.__struct_fields__, each))) for each in (tally.last, tally.first))
    queried = last.prefix_queried_tokens - first.prefix_queried_tokens
    hits = last.prefix_hit_tokens - first.prefix_hit_tokens
    steps, preempted = sum(tally.tokens.values()), last.preempted - first.preempted
    timed = sum(tally.step_us.values())
    seconds = sum(value * count for value, count in tally.step_us.items()) / 1e6
    return Stat(
        steps=steps,
        seconds=seconds,
        step_us=percentiles(tally.step_us, PERCENTILES),
        tokens=percentiles(tally.tokens, PERCENTILES),
        batch=percentiles(tally.requests, PERCENTILES),
        queue=percentiles(tally.queue, PERCENTILES),
        running=percentiles(tally.running, PERCENTILES),
        free_blocks=percentiles(tally.free, PERCENTILES),
        computed_tokens=sum(value * count for value, count in tally.tokens.items()),
        sampled_tokens=counted.sampled_tokens,
        tokens_per_s=counted.sampled_tokens * timed / steps / seconds if seconds and steps else 0.0,
        queried_tokens=queried,
        hit_tokens=hits,
        hit_rate=hits / queried if queried else 0.0,
        preemptions=preempted,
        preemptions_per_1000_steps=1000 * preempted / steps if steps else 0.0,
        finished=last.finished - first.finished,
        aborted=last.aborted - first.aborted,
        size_bytes=counted.size_bytes,
        bytes_per_sampled_token=counted.bytes_per_sampled_token,
        stopped=_stopped(counted, [each.stopped for each in directories]),
    )


def _stopped(counted: Info, reasons: list[str]) -> str:
    """Why less than the whole log is counted, "" if it is whole."""
    return next(filter(None, reasons), "") or ("" if counted.end.kind == "complete" else str(counted.end))
