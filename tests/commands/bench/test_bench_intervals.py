"""Intervals of percentiles: ranks that books have, and as many true values inside as they promise."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from vnext.commands.bench.vllm_figures import interval, ranks

RUNS = 400


def test_ranks_are_those_of_the_tables() -> None:
    """Conover, Practical Nonparametric Statistics, 3.2; a percentile lies beyond all values with chance share ** count."""
    assert (ranks(20, 0.5), ranks(100, 0.5)) == ((6, 15), (40, 61))
    assert 0.99**367 > 0.025 > 0.99**368 and ranks(367, 0.99)[1] == 368 and ranks(368, 0.99)[1] == 368
    assert ranks(1, 0.5) == (0, 2) and ranks(5, 1.0) == (0, 6) and ranks(0, 0.5) == (0, 1)


def test_too_few_values_have_no_bound() -> None:
    low, high = interval([np.array([float(each)]) for each in range(100)], 99)
    assert low is not None and 90 <= low <= 97 and high is None
    assert interval([np.array([3.0])], 50) == (None, None)
    assert interval([np.full(4, 2.0)] * 300, 50) == (2.0, 2.0)


def held(draw: Callable[[np.random.Generator], list[np.ndarray]], true: float, percent: float, merge: bool = False) -> float:
    """The share of runs whose interval holds the true value. `merge` takes the values of all requests as independent."""
    random, inside = np.random.default_rng(7), 0
    for _ in range(RUNS):
        values = draw(random)
        low, high = interval([np.concatenate(values)] if merge else values, percent)
        inside += (low is None or low <= true) and (high is None or true <= high)
    return inside / RUNS


@pytest.mark.parametrize(("count", "percent"), [(30, 50), (200, 90), (1000, 99)])
def test_independent_values_are_held_as_often_as_promised(count: int, percent: float) -> None:
    true = float(np.percentile(np.random.default_rng(1).lognormal(size=1_000_000), percent))
    assert 0.93 <= held(lambda random: [np.array([each]) for each in random.lognormal(size=count)], true, percent) <= 0.99


def test_tokens_of_one_answer_are_alike() -> None:
    """Sixty answers of twenty gaps each; as twelve hundred independent gaps they promise too much."""

    def draw(random: np.random.Generator, count: int = 60) -> list[np.ndarray]:
        return [speed * random.lognormal(size=20) for speed in random.lognormal(sigma=0.5, size=count)]

    true = float(np.percentile(np.concatenate(draw(np.random.default_rng(2), 50_000)), 50))
    assert held(draw, true, 50) >= 0.92 and held(draw, true, 50, merge=True) < 0.85
