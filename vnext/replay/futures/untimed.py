"""A log without times (imported from a trace, or recorded by an early version) on the step times of another log.

Owns the outside events and their times: requests at their arrival times, the first at 0.
"""

from __future__ import annotations

from msgspec.structs import replace

from vnext.replay.futures.drafts_seen import DraftsSeen
from vnext.replay.futures.loads import Loads
from vnext.replay.futures.revived import revived
from vnext.replay.futures.step_times import Outside, Recorded
from vnext.replay.reading.folding import Folded, first_state, fold
from vnext.replay.reading.source import Log
from vnext.state.events import (
    EnginePaused,
    EngineRecovered,
    PrefixCacheReset,
    RequestAborted,
    RequestArrived,
    RequestResumed,
    StepCommitted,
    WeightsChanged,
    unpack_tokens,
)
from vnext.state.outputs import outputs


def on_times_of(log: Log, learnt: Recorded) -> Recorded:
    """The requests of `log` with the steps of `learnt`, none of which is the log's own. An abort comes after as many
    tokens as the log had reported, a reset of the cache together with the request before it."""
    first = first_state(log)
    lives, outside, now_us, began_ns = revived(first), [], 0.0, None
    answers = {life.arrival.id: unpack_tokens(life.last).tolist() for life in lives}
    drafts = DraftsSeen({}, {})
    for item in fold(log):
        if not isinstance(item, Folded):
            continue
        event = item.event
        if isinstance(event, StepCommitted):
            drafts.hear(item.before.in_flight[0], event, answers)
        for news in outputs(item.before, event, item.after):
            if news.token >= 0:
                answers.setdefault(news.id, []).append(news.token)
        if isinstance(event, RequestResumed):
            answers[event.id] = unpack_tokens(event.generated).tolist()
        if isinstance(event, RequestArrived):
            began_ns = event.arrival_ns if began_ns is None else began_ns
            now_us = max(now_us, (event.arrival_ns - began_ns) / 1e3)
        if isinstance(event, RequestAborted):
            reported = {id_: len(answers.get(id_, ())) for id_ in event.ids}
            outside.append(Outside(now_us, replace(event, reason="stop"), reported))
        elif isinstance(event, RequestArrived | PrefixCacheReset | EngineRecovered):
            outside.append(Outside(now_us, event, {}))
        elif isinstance(event, WeightsChanged) or (isinstance(event, EnginePaused) and event.mode == "sleep"):
            outside.append(Outside(now_us, PrefixCacheReset(), {}))
    return replace(
        learnt, first=first, lives=lives, outside=outside, entries=[], commits=[], answers=answers, events=[], times_us=[],
        loads=Loads([], learnt.loads.took_us), drafts=drafts, places={},
    )  # fmt: skip
