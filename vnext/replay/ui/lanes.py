"""Request lanes: what each request did in a window of steps, as runs of equal steps."""

from __future__ import annotations

from typing import Any

from vnext.replay.ui.step import explained, reason
from vnext.replay.ui.walk import Moment

WINDOW_MAX = 240


def lanes(moments: list[Moment]) -> list[dict[str, Any]]:
    """Lanes in order of arrival: {"id", "runs": [[first, last, kind, reason or None], ...]}.

    Kinds: `prompt` (positions that were known), `answer` (one token), `wait` (in the queue, or running without work).
    """
    found: dict[int, list[list]] = {}
    for moment in moments:
        scheduled = moment.after.in_flight[-1]
        for id_, count, samples in zip(scheduled.ids.tolist(), scheduled.counts.tolist(), scheduled.samples.tolist()):
            _extend(found, id_, moment.step, "answer" if samples and count == 1 else "prompt", None)
        for wait in explained(moment).waits:
            _extend(found, wait.id, moment.step, "wait", reason(wait))
    return [{"id": id_, "runs": runs} for id_, runs in sorted(found.items())]


def _extend(found: dict[int, list[list]], id_: int, step: int, kind: str, why: dict | None) -> None:
    runs = found.setdefault(id_, [])
    if runs and runs[-1][1] == step - 1 and runs[-1][2] == kind and _same(runs[-1][3], why):
        runs[-1][1] = step
        runs[-1][3] = why
    else:
        runs.append([step, step, kind, why])


def _same(one: dict | None, other: dict | None) -> bool:
    return (one and one["why"]) == (other and other["why"])
