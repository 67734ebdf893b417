"""The latencies that clients see under a configuration, their bounds, and whether they justify a recommendation.

Owns figures, their bounds and the verdict. A hypothetical run's figure is only as good as the model, and depends on
when pauses happened to come. So a run is repeated with redrawn hiccups, and a figure's bounds cover all results. A
configuration is recommended for figures that lie outside of the bounds of the unchanged one and are better in each
draw. Differences that this log cannot resolve recommend nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np

from vnext.replay.futures.what_if_run import Ran
from vnext.replay.reading.objective import Objective, meets

GAIN, MET_GAIN = 0.05, 0.005
"""Smaller gains, in a rate or in the share of requests that meet the objective, justify no change."""
NO_OBJECTIVE = "nothing is recommended without an objective: say what a request should feel, as in --slo ttft=200ms,itl=50ms"


Bounds = tuple[float, float]


class Between(msgspec.Struct, frozen=True, kw_only=True):
    """The least and the greatest of each figure (see RunScore), over a run and its `draws` of other hiccups."""

    draws: int
    ttft_ms: tuple[Bounds, Bounds]
    itl_ms: tuple[Bounds, Bounds]
    tokens_s: Bounds
    met: Bounds | None
    good_s: Bounds | None


class RunScore(msgspec.Struct, frozen=True, kw_only=True):
    """One configuration's outcome. Times are in ms at the median and 99 %; `tokens_s` is over the whole run; `met` is
    the share of requests that met the objective, rejected ones counted as missed, and `good_s` those per second:
    None without an objective.

    `changes` is the difference from the log's configuration, "" for its own. `between` is None if no hiccups were
    drawn. Of the `steps`, `larger` have more tokens or requests than any of the log; their times are extrapolated.
    """

    changes: str
    ttft_ms: tuple[float, float]
    itl_ms: tuple[float, float]
    tokens_s: float
    met: float | None
    good_s: float | None
    requests: int
    refused: int
    steps: int
    larger: int
    preemptions: int
    hit_rate: float
    seconds: float
    between: Between | None = None


def score(changes: str, ran: Ran, objective: Objective) -> RunScore:
    """Score a run by its clients' latencies."""
    came = [served for served in ran.served if not served.is_older]
    reported = [served for served in came if served.tokens]
    first = np.array([served.first_us - served.arrived_us for served in reported])
    began_us = min((served.arrived_us for served in ran.served), default=0.0)
    seconds = max(ran.end_us - began_us, 1.0) / 1e6
    good, count = sum(meets(served, objective) for served in reported), len(came) + ran.refused
    met, good_s = (None, None) if objective.is_any else (good / count if count else 1.0, good / seconds)
    return RunScore(
        changes=changes, ttft_ms=_ms(first), itl_ms=_ms(ran.gaps_us), tokens_s=(len(ran.gaps_us) + len(reported)) / seconds,
        met=met, good_s=good_s, requests=count, refused=ran.refused, steps=ran.steps, larger=ran.larger,
        preemptions=ran.preemptions, hit_rate=ran.hit_tokens / max(ran.queried_tokens, 1), seconds=seconds,
    )  # fmt: skip


def _ms(values_us: np.ndarray) -> tuple[float, float]:
    if not len(values_us):
        return 0.0, 0.0
    middle, far = (np.percentile(values_us, (50, 99)) / 1e3).tolist()
    return middle, far


# ---- how sure that is --------------------------------------------------------------------------------------------


def with_bounds(run: RunScore, draws: Sequence[RunScore]) -> RunScore:
    """A run with the bounds of each figure."""
    every = [run, *draws]
    ttft_ms, itl_ms = _both([each.ttft_ms for each in every]), _both([each.itl_ms for each in every])
    met, good_s = (None if run.met is None else _bounds([getattr(each, name) for each in every]) for name in ("met", "good_s"))
    tokens_s = _bounds([each.tokens_s for each in every])
    return msgspec.structs.replace(run, between=Between(
        draws=len(draws), ttft_ms=ttft_ms, itl_ms=itl_ms, tokens_s=tokens_s, met=met, good_s=good_s,
    ))  # fmt: skip


def _both(pairs: Sequence[tuple[float, float]]) -> tuple[Bounds, Bounds]:
    return _bounds([one for one, _ in pairs]), _bounds([other for _, other in pairs])


def _bounds(values: Sequence[float]) -> Bounds:
    return min(values), max(values)


def worth(run: RunScore) -> tuple[float, ...]:
    """A sort key; greater is better: the objective met more often, then more good answers per second, then earlier
    first tokens at 99 %; without an objective, tokens per second."""
    good = (0.0, run.tokens_s) if run.met is None or run.good_s is None else (round(run.met, 4), run.good_s)
    return good[0], -run.refused, round(good[1], 2), -round(run.ttft_ms[1], 3)


def recommendation(unchanged: RunScore, runs: Sequence[RunScore], draws: dict[str, list[RunScore]]) -> tuple[str, str]:
    """The changes to make and why, or "" and why not. `draws` by changes, with the same hiccups for all of them."""
    if unchanged.met is None:
        return "", NO_OBJECTIVE
    better = [run for run in sorted(runs, key=worth, reverse=True) if worth(run) > worth(unchanged)]
    for run in better:
        for name in ("met", "good_s"):
            if run.changes in draws and _stands_out(name, unchanged, run, draws[""], draws[run.changes]):
                return run.changes, _why(name, unchanged, run)
    if not better:
        return "", "nothing that was tried is better"
    return "", "this log cannot tell what was tried from what is: the best lies within the error, or wins by next to nothing"


def _stands_out(
    name: str, unchanged: RunScore, run: RunScore, plain: Sequence[RunScore], changed: Sequence[RunScore]
) -> bool:
    """Whether a figure lies outside of the unchanged configuration's bounds, and is better in every draw of hiccups."""
    before, after = getattr(unchanged, name), getattr(run, name)
    least = before + MET_GAIN if name == "met" else (1 + GAIN) * before
    if after <= max(least, getattr(unchanged.between, name)[1]) or (run.met or 0.0) < (unchanged.met or 0.0):
        return False
    return all(getattr(other, name) > getattr(one, name) for one, other in zip(plain, changed))


def _why(name: str, unchanged: RunScore, run: RunScore) -> str:
    low, high = getattr(run.between, name)
    if name == "met":
        sure = "" if high - low < MET_GAIN else f" ({low:.1%} to {high:.1%})"
        return f"{run.met:.1%}{sure} of the requests meet the objective instead of {unchanged.met:.1%}"
    return f"{run.good_s:.2f} requests a second meet the objective instead of {unchanged.good_s:.2f}"
