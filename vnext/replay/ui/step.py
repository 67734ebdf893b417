"""One step for the page: the plan, the batch, the queue with its reasons, the blocks, and the events since the last
step.

Owns the format of these answers. They are plain values: numbers, names and flags, but no token and no text.
"""

from __future__ import annotations

import base64
from typing import Any

import numpy as np

from vnext.replay.ui.walk import Moment
from vnext.sched.admission import Wait
from vnext.sched.explain import Explanation, explain
from vnext.sched.policies import BUILT_IN
from vnext.state.digest import digest, hexadecimal
from vnext.state.state import Request, State, Waiting
from vnext.state.traits import line_of
from vnext.state.windows import row_blocks

FREE, KEPT, HELD, SHARED = range(4)
NOBODY = -1


def step_view(moment: Moment) -> dict[str, Any]:
    """The step as the page shows it. Positions are tokens, ids count arrivals."""
    state = moment.after
    scheduled = state.in_flight[-1]
    work = {
        id_: (start, count, samples)
        for id_, start, count, samples in zip(
            scheduled.ids.tolist(), scheduled.starts.tolist(), scheduled.counts.tolist(), scheduled.samples.tolist()
        )
    }
    waits = {wait.id: wait for wait in explained(moment).waits}
    return {
        "step": moment.step,
        "event": moment.event,
        "digest": hexadecimal(digest(state)),
        "tokens": scheduled.tokens,
        "budget": state.config.max_num_batched_tokens,
        "in_flight": len(state.in_flight),
        "rows": [_row(state, row, work, waits) for row in range(len(state.rows))],
        "queue": [_queued(entry, state.requests[entry.id], waits.get(entry.id)) for entry in state.waiting],
        "admitted": len(moment.plan.admitted),
        "preempted": [int(moment.before.rows.id[row]) for row in moment.plan.preempted],
        "expected": not (moment.plan.admitted or moment.plan.preempted or moment.plan.changed),
        "blocks": block_map(state),
        "since": [{"event": number, "line": line_of(event)} for number, event in moment.since],
        "counters": {name: getattr(state.counters, name) for name in state.counters.__struct_fields__},
    }


def explained(moment: Moment) -> Explanation:
    """Why requests wait in this step. Empty if none waits, or if the policy is the engine's own, which would have to be
    imported."""
    plan = moment.plan
    if moment.before.config.policy not in BUILT_IN:
        return Explanation(plan, ())
    if moment.before.waiting or plan.preempted or plan.changed:
        return explain(moment.before)
    return Explanation(plan, ())


def reason(wait: Wait | None) -> dict[str, Any] | None:
    return None if wait is None else {"why": wait.why, "need": wait.need, "have": wait.have, "behind": wait.behind}


def _row(state: State, row: int, work: dict[int, tuple[int, int, bool]], waits: dict[int, Wait]) -> dict[str, Any]:
    id_ = int(state.rows.id[row])
    start, count, samples = work.get(id_, (0, 0, False))
    request = state.requests[id_]
    return {
        "id": id_,
        **named(request),
        "prompt": request.prompt_length,
        "known": int(state.rows.known[row]),
        "start": start,
        "count": count,
        "samples": samples,
        "blocks": int(state.rows.blocks[row]),
        "limit": int(state.rows.limit[row]),
        "wait": reason(waits.get(id_)),
    }


def named(request: Request) -> dict[str, str]:
    """What people may call it by: its name, and its client's number (hexadecimal, "" where none is known)."""
    return {"name": request.name, "client": f"{request.client:016x}" if request.client else ""}


def _queued(entry: Waiting, request: Request, wait: Wait | None) -> dict[str, Any]:
    return {
        "id": entry.id,
        **named(request),
        "known": entry.known,
        "priority": entry.priority,
        "epoch": entry.preemption_count,
        "wait": reason(wait),
    }


def block_map(state: State) -> dict[str, Any]:
    """Every block: `kinds` u8[N] (free, kept, held, shared) and `owners` i32[N] (a holder's id), base64."""
    status = state.pool.status.values()
    kinds = np.where(status < -1, SHARED, np.where(status < 0, HELD, FREE)).astype(np.uint8)
    kept = np.array(list(state.pool.prefix_index.blocks().values()), dtype=np.int64)
    kinds[kept[status[kept] >= 0]] = KEPT
    owners = np.full(len(status), NOBODY, dtype="<i4")
    for row in range(len(state.rows)):
        owners[row_blocks(state, row)] = state.rows.id[row]
    return {"count": len(status), "kinds": _text(kinds), "owners": _text(owners)}


def _text(values: np.ndarray) -> str:
    return base64.b64encode(values.tobytes()).decode()
