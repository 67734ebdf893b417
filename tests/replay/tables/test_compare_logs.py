"""compare: the change that was made between two logs is named, and none where there is none."""

from __future__ import annotations

import numpy as np
import pytest
from log_drive import record, small_config

from tests.replay.log_answers import answer
from vnext.replay import Log
from vnext.replay.tables.compare import NAMES, holm, of_requests, step_ratio


def test_a_log_is_like_itself(tmp_path, capsys) -> None:
    log = record(tmp_path / "one", timestamped=True)
    code, found = answer(capsys, "compare", log, log)
    assert code == 0 and found["differs"] == [] and found["step_ratio"] == 1.0 and found["first"] == "the logs have the same events"
    assert all(each["one"] == each["other"] and each["low"] is None for each in found["figures"]), "nothing of it is chance"


def test_other_settings_and_the_first_other_decision_are_named(tmp_path, capsys) -> None:
    one, other = (record(tmp_path / f"{seqs}", config=small_config(max_num_seqs=seqs), timestamped=True) for seqs in (6, 2))
    code, found = answer(capsys, "compare", one, other)
    assert code == 0 and found["differs"][0] == "settings differ: max_num_seqs is 2 instead of 6"
    assert answer(capsys, "fleet", one, other)[1]["settings"] == ["2 has other settings than 6: max_num_seqs is 2 instead of 6"]
    assert found["first"].startswith(f"step {answer(capsys, 'diff', one, other)[1]['step']}")
    figures = {each["name"]: each for each in found["figures"]}
    assert figures["tokens of an answer, mean"]["one"] == pytest.approx(Log(one).requests["tokens"].mean())
    assert figures["hit rate"]["other"] == answer(capsys, "stat", other)[1]["hit_rate"]


def steps(scale: float, more_large: int) -> dict[str, np.ndarray]:
    tokens = np.array([1] * 20 + [8] * (10 + more_large))
    return {"tokens": tokens, "requests": np.minimum(tokens, 4), "ms": scale * (3.0 + tokens)}


@pytest.mark.parametrize("more_large", [0, 100])
def test_steps_of_one_size_are_compared_whatever_else_ran(more_large: int) -> None:
    assert step_ratio(steps(1.0, 0), steps(1.5, more_large)) == pytest.approx(1.5)


def test_a_size_of_one_log_alone_compares_nothing() -> None:
    assert step_ratio(steps(1.0, 0), steps(1.0, 0) | {"tokens": np.full(30, 99)}) is None


def columns(rng: np.random.Generator, count: int = 100, shift: float = 0.0, *, alike: float = 0.0) -> dict[str, np.ndarray]:
    """Requests whose figures are chance, each by `alike` like the one before it."""
    noise = rng.normal(size=(len(NAMES), count))
    for place in range(1, count):
        noise[:, place] = alike * noise[:, place - 1] + np.sqrt(1 - alike**2) * noise[:, place]
    return {name: np.exp(row) * 10 + shift for name, row in zip(NAMES, noise)}


@pytest.mark.parametrize(("count", "alike"), [(100, 0.0), (400, 0.8)])
def test_chance_alone_is_seldom_taken_for_a_change(count: int, alike: float) -> None:
    rng = np.random.default_rng(11)
    wrong = sum(
        any(each.is_real for each in of_requests(columns(rng, count, alike=alike), columns(rng, count, alike=alike)))
        for _ in range(60)
    )
    assert wrong <= 12  # 5 % of 60 are 3; a stretch tells less than its requests do, so some more


def test_a_change_of_one_figure_is_found_among_the_others() -> None:
    rng = np.random.default_rng(3)
    one, other = columns(rng, 300), columns(rng, 300)
    other["ttft_ms"] = other["ttft_ms"] * 1.6
    found = {each.name: each for each in of_requests(one, other)}
    assert [name for name, each in found.items() if each.is_real] == ["first token, ms, mean", "first token, ms, median"]
    assert (mean := found["first token, ms, mean"]).low < 0.6 < mean.high


def test_what_one_log_does_not_know_is_not_compared() -> None:
    rng = np.random.default_rng(3)
    one, other = columns(rng), columns(rng) | {"itl_ms": np.full(100, np.nan)}
    assert not any(each.name.startswith("gap") for each in of_requests(one, other))


def test_several_tests_are_judged_together() -> None:
    assert holm(np.array([0.01, 0.04, 0.03])) == pytest.approx([0.03, 0.06, 0.06])
    assert holm(np.array([0.9, 0.5])) == pytest.approx([1.0, 1.0]) and not len(holm(np.array([])))
