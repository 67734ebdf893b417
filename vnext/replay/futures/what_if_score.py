"""The latencies that clients see under a configuration, their bounds, and whether they justify a recommendation.

Owns figures and the verdict, and the arithmetic of bounds. A hypothetical run's figure is only as good as the
model, and depends on when pauses happened to come. So a run is repeated with both drawn anew, on each log. A configuration is
recommended for figures above all that the unchanged one has on the same log, and that are better in each draw. Differences that
these logs cannot resolve recommend nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from statistics import NormalDist, fmean, variance

import msgspec
import numpy as np

from vnext.replay.futures.what_if_run import Ran
from vnext.replay.reading.objective import Objective, meets

GAIN, MET_GAIN = 0.05, 0.005
"""Smaller gains, in a rate or in the share of requests that meet the objective, justify no change."""
NO_OBJECTIVE = "nothing is recommended without an objective: say what a request should feel, as in --slo ttft=200ms,itl=50ms"


class Between(msgspec.Struct, frozen=True, kw_only=True):
    """Where each figure (see RunScore) of another run would lie, by this run on each of the `logs` and `draws` of their hiccups and
    models."""

    logs: int
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


class Tested:
    """A configuration's runs: for each log the one with its own hiccups, then those with drawn ones."""

    def __init__(self, runs: Sequence[Sequence[RunScore]]) -> None:
        self.runs = runs

    @property
    def run(self) -> RunScore:
        """The first log's, with bounds."""
        first, draws = self.runs[0][0], sum(len(of_log) - 1 for of_log in self.runs)
        between = Between(
            logs=len(self.runs), draws=draws, tokens_s=self._bounds(lambda run: run.tokens_s),
            ttft_ms=(self._bounds(lambda run: run.ttft_ms[0]), self._bounds(lambda run: run.ttft_ms[1])),
            itl_ms=(self._bounds(lambda run: run.itl_ms[0]), self._bounds(lambda run: run.itl_ms[1])),
            met=None if first.met is None else _share(self._bounds(lambda run: run.met or 0.0)),
            good_s=None if first.good_s is None else self._bounds(lambda run: run.good_s or 0.0),
        )  # fmt: skip
        return msgspec.structs.replace(first, between=between)

    def _bounds(self, figure: Callable[[RunScore], float]) -> Bounds:
        values = [[figure(run) for run in of_log] for of_log in self.runs]
        low, high = interval([own for own, *_ in values], [drawn for _, *drawn in values])
        return max(low, 0.0), high


def _share(bounds: Bounds) -> Bounds:
    return bounds[0], min(bounds[1], 1.0)


def worth(run: RunScore) -> tuple[float, ...]:
    """A sort key; greater is better: the objective met more often, then more good answers per second, then earlier
    first tokens at 99 %; without an objective, tokens per second."""
    good = (0.0, run.tokens_s) if run.met is None or run.good_s is None else (round(run.met, 4), run.good_s)
    return good[0], -run.refused, round(good[1], 2), -round(run.ttft_ms[1], 3)


def recommendation(before: Tested, tests: Sequence[Tested]) -> tuple[str, str]:
    """The changes to make and why, or "" and why not."""
    unchanged = before.run
    if unchanged.met is None:
        return "", NO_OBJECTIVE
    better = [test for test in sorted(tests, key=lambda test: worth(test.runs[0][0]), reverse=True)
              if worth(test.runs[0][0]) > worth(unchanged)]  # fmt: skip
    for test in better:
        for name in ("met", "good_s"):
            if _stands_out(name, before, test):
                return test.run.changes, _why(name, unchanged, test.run)
    if not better:
        return "", "nothing that was tried is better"
    return "", "this log cannot tell what was tried from what is: the best lies within the error, or wins by next to nothing"


def _stands_out(name: str, before: Tested, after: Tested) -> bool:
    """Whether a figure is above all of the unchanged configuration's on the same log, and better with the same hiccups."""
    unchanged, run = before.runs[0][0], after.runs[0][0]
    least = unchanged.met + MET_GAIN if name == "met" and unchanged.met is not None else (1 + GAIN) * getattr(unchanged, name)
    if getattr(run, name) <= least or (run.met or 0.0) < (unchanged.met or 0.0):
        return False
    for plain, changed in zip(before.runs, after.runs):
        if getattr(changed[0], name) <= max(getattr(each, name) for each in plain):
            return False
        if not all(getattr(other, name) > getattr(one, name) for one, other in zip(plain, changed)):
            return False
    return True


def _why(name: str, unchanged: RunScore, run: RunScore) -> str:
    low, high = getattr(run.between, name)
    if name == "met":
        sure = "" if high - low < MET_GAIN else f" ({low:.1%} to {high:.1%})"
        return f"{run.met:.1%}{sure} of the requests meet the objective instead of {unchanged.met:.1%}"
    return f"{run.good_s:.2f} requests a second meet the objective instead of {unchanged.good_s:.2f}"


# ---- intervals ---------------------------------------------------------------------------------------------------
# Between which values a figure of another run lies in nine cases of ten, as far as logs can tell. The variance has parts:
# - sampling: when hiccups come, and for how long the machine is slow. A run is repeated on its log's stretches, drawn anew.
# - the model: each of these runs fits it again, to steps with errors of the drawn ones, so what few steps show varies most.
# - run to run: what is the same within a log and another one between two. Several logs of the same settings predict a figure
#   each; what these differ by holds all parts, and counts where it is more. One log cannot show it.
# What is predicted from n runs is itself uncertain by an n-th of a run's variance. A variance that few values estimate may be too
# small, so each counts with its own quantile of Student's t.

Bounds = tuple[float, float]
LEVEL = 0.90
TAIL = (1 + LEVEL) / 2


def interval(runs: Sequence[float], draws: Sequence[Sequence[float]]) -> Bounds:
    """The bounds of a figure that runs on one log or more gave, with the draws of each."""
    values = [*runs, *(value for each in draws for value in each)]
    if min(values) <= 0:
        return _around(runs, draws)
    low, high = _around([math.log(run) for run in runs], [[math.log(value) for value in each] for each in draws])
    return math.exp(low), math.exp(high)


def _around(runs: Sequence[float], draws: Sequence[Sequence[float]]) -> Bounds:
    away = [value - run for run, each in zip(runs, draws) for value in each]
    within = fmean(each * each for each in away) if away else 0.0
    half = student(len(away)) * math.sqrt(within) if away else 0.0
    if len(runs) > 1:
        half = max(half, student(len(runs) - 1) * math.sqrt(variance(runs)))
    half *= math.sqrt(1 + 1 / len(runs))
    return fmean(runs) - half, fmean(runs) + half


def student(freedom: int) -> float:
    """The quantile at TAIL of Student's t: exact for one degree of freedom, within 1.3 % for more (Cornish and Fisher's series)."""
    if freedom == 1:
        return math.tan(math.pi * (TAIL - 0.5))
    z = NormalDist().inv_cdf(TAIL)
    terms = (
        z, (z**3 + z) / 4, (5 * z**5 + 16 * z**3 + 3 * z) / 96, (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
    )  # fmt: skip
    return math.fsum(term / freedom**power for power, term in enumerate(terms))
