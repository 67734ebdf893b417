"""What-if's intervals hold another run's figure nine times in ten, by parts: where one is left out they do not."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from test_replay_what_if import Machine, machine_log, real_config

from vnext.replay.futures import what_if_score
from vnext.replay.futures.what_if import candidates, what_if
from vnext.replay.futures.what_if_score import RunScore, interval, student
from vnext.replay.reading.objective import Objective
from vnext.replay.reading.source import UnusableLog

TRIES = 1_500


def covered(logs: int, runs_sd: float, sampling_sd: float, draws: int = 8, forget: Sequence[str] = ()) -> float:
    """How often the interval from so many logs holds the figure of another run, of which the truth is drawn: what a run has of its own,
    and what the moments do to it. Draws know the second alone."""
    rng, held = np.random.default_rng(7), 0
    for _ in range(TRIES):
        centre = rng.normal(0, 3)
        runs = centre + rng.normal(0, runs_sd, logs) + rng.normal(0, sampling_sd, logs)
        drawn = runs[:, None] + rng.normal(0, sampling_sd, (logs, draws // logs))
        if "sampling" in forget:
            drawn = np.repeat(runs[:, None], draws // logs, axis=1)
        if "runs" in forget:
            runs, drawn = runs[:1], drawn[:1]
        low, high = interval(np.exp(runs).tolist(), np.exp(drawn).tolist())
        held += low <= np.exp(centre + rng.normal(0, runs_sd) + rng.normal(0, sampling_sd)) <= high
    return held / TRIES


@pytest.mark.parametrize(
    ("logs", "runs_sd", "sampling_sd"),
    [(1, 0.0, 0.1), (2, 0.0, 0.1), (4, 0.0, 0.1), (2, 0.1, 0.1), (4, 0.1, 0.1), (2, 0.2, 0.05), (4, 0.2, 0.05), (8, 0.1, 0.02)],
)
def test_another_run_is_within_its_interval_nine_times_in_ten(logs: int, runs_sd: float, sampling_sd: float) -> None:
    assert 0.88 <= covered(logs, runs_sd, sampling_sd) <= 0.98


@pytest.mark.parametrize(
    ("logs", "runs_sd", "sampling_sd", "forgotten"),
    [(4, 0.1, 0.05, "runs"), (2, 0.2, 0.05, "runs"), (1, 0.0, 0.1, "sampling"), (1, 0.05, 0.1, "sampling")],
)
def test_without_a_part_it_is_not(logs: int, runs_sd: float, sampling_sd: float, forgotten: str) -> None:
    assert covered(logs, runs_sd, sampling_sd, forget=(forgotten,)) < 0.8


def test_one_log_knows_nothing_of_the_others() -> None:
    """What the docs say of it."""
    assert covered(1, 0.2, 0.05) < 0.6


PACES = ((1.0, 1.25, 0.85, 1.1), (1.2, 0.9, 1.0, 0.8), (0.9, 1.05, 1.3, 1.0))
"""How slow a machine is in three runs that were recorded, and in one that was not: by a truth drawn with 15 %."""


def test_machines_that_differ_from_run_to_run_are_within_it_if_their_logs_are_given(tmp_path, monkeypatch) -> None:
    """Real runs of a scheduler on machines of a known pace: a setting is predicted from three logs, then the fourth machine runs with
    it. From one log the interval knows its own moments alone."""
    held, alone, figures = 0, 0, 0
    for number, paces in enumerate(PACES):
        logs = []
        for run, pace in enumerate(paces):
            monkeypatch.setattr(Machine, "pace", pace)
            config = real_config(max_num_seqs=3) if run == len(paces) - 1 else real_config()
            logs.append(machine_log(tmp_path / f"{number}-{run}", config, 10 * number + run, 80, 6_000, noise_percent=20))
        happened = what_if(logs[-1], [], Objective()).recorded
        for like in (logs[1:-1], []):
            (said,) = what_if(logs[0], candidates(["max_num_seqs=3"], []), Objective(), like=like).runs
            pairs = [(said.between.itl_ms[0], happened.itl_ms[0]), (said.between.itl_ms[1], happened.itl_ms[1]),
                     (said.between.ttft_ms[0], happened.ttft_ms[0])]  # fmt: skip
            inside = sum(low <= value <= high for (low, high), value in pairs)
            assert said.between.logs == 1 + len(like) and said.between.draws == 8
            held, alone = held + inside * bool(like), alone + inside * (not like)
        figures += 3
    assert held >= figures - 1 and alone <= figures - 3, (held, alone)


def test_logs_of_other_settings_are_not_like_it(tmp_path) -> None:
    one, other = machine_log(tmp_path / "one", arrivals=30), machine_log(tmp_path / "other", real_config(max_num_seqs=3), arrivals=30)
    with pytest.raises(UnusableLog, match="is a log of other settings"):
        what_if(one, [], Objective(), like=[other])


def test_a_figure_that_is_always_the_same_has_no_width() -> None:
    assert interval([5.0], [[5.0] * 8]) == pytest.approx((5.0, 5.0)) and interval([0.0], [[0.0] * 8]) == (0.0, 0.0)
    assert interval([0.0, 1.0], [[0.0], [1.0]])[0] < 0, "a share is no factor"


def test_no_bound_lies_where_no_figure_can() -> None:
    """Where some runs keep every promise and others none, and gaps are 0 in some."""
    plain: dict[str, Any] = dict(changes="", tokens_s=9.0, requests=8, refused=0, steps=9, larger=0, preemptions=0, hit_rate=0.0, seconds=1.0)
    runs = [
        RunScore(met=share, good_s=8 * share, ttft_ms=(share, 7.0), itl_ms=(share, share), **plain) for share in (0.6, 0.0, 1.0, 0.2)
    ]
    between = what_if_score.Tested([runs]).run.between
    figures = (*between.ttft_ms, *between.itl_ms, between.tokens_s, between.met, between.good_s)
    assert [low >= 0 for low, _ in figures] == [True] * 7 and between.met == (0.0, 1.0) and between.good_s[1] > 8


def test_the_quantile_is_students() -> None:
    known = {1: 6.314, 2: 2.920, 3: 2.353, 4: 2.132, 7: 1.895, 15: 1.753, 30: 1.697, 1000: 1.646}
    assert {freedom: student(freedom) for freedom in known} == pytest.approx(known, rel=0.013)
