"""Silence of the core and stalls of its ranks: what counts as too long, and what does not."""

from __future__ import annotations

import logging

import pytest

from vnext.runtime.client import silence
from vnext.runtime.client.silence import INTERVAL_S, SILENT_S, Silence
from vnext.runtime.engine.progress import LATE_MIN_S, UNSEEN_MIN_S, UNSEEN_TOKEN_S, Progress


def looks(progress: Progress, step: int, tokens: int, seconds: float, from_s: float = 0.0) -> float:
    """Look twice a second for so long; the time then."""
    for half in range(int(2 * seconds) + 1):
        progress.look(from_s + half / 2, step, tokens)
    return from_s + seconds


def test_a_step_is_late_by_what_steps_of_its_size_have_taken() -> None:
    progress = Progress(300.0)
    for _ in range(5):
        progress.took(64, 4.0)
        progress.took(1, 0.01)
    looks(progress, 7, 70, 39)
    assert not progress.is_late and progress.silent_s == 39  # ten times four seconds
    looks(progress, 8, 70, 41)
    assert progress.is_late and not progress.is_over
    looks(progress, 9, 1, LATE_MIN_S)
    assert not progress.is_late
    looks(progress, 10, 1, LATE_MIN_S + 1)
    assert progress.is_late


def test_a_first_step_of_its_size_gets_time_for_each_token() -> None:
    progress = Progress(300.0)
    progress.took(1, 0.01)
    looks(progress, 0, 2048, 2048 * UNSEEN_TOKEN_S)
    assert not progress.is_late
    looks(progress, 1, 4, UNSEEN_MIN_S)
    assert not progress.is_late
    looks(progress, 2, 4, UNSEEN_MIN_S + 1)
    assert progress.is_late and not progress.is_over


def test_one_slow_step_is_forgotten() -> None:
    progress = Progress(300.0)
    progress.took(4, 100.0)
    for _ in range(500):
        progress.took(4, 0.1)
    looks(progress, 0, 4, LATE_MIN_S + 1)
    assert progress.is_late


def test_a_step_is_over_past_the_timeout_and_never_for_none() -> None:
    for timeout_s, over_after_s in ((300.0, 300), (60.0, 60), (20.0, 20), (0.0, None)):
        progress = Progress(timeout_s)
        progress.took(4, 0.01)
        looks(progress, 0, 4, 299 if over_after_s is None else over_after_s)
        assert progress.is_late and not progress.is_over, timeout_s
        looks(progress, 1, 4, 100_000 if over_after_s is None else over_after_s + 1)
        assert progress.is_over == (over_after_s is not None), timeout_s


def test_a_slow_machines_steps_are_not_over_at_the_timeout() -> None:
    progress = Progress(300.0)
    progress.took(2000, 60.0)
    looks(progress, 0, 2000, 1799)
    assert progress.is_late and not progress.is_over
    looks(progress, 1, 2000, 1801)
    assert progress.is_over


def test_time_in_which_the_engine_core_was_stopped_is_not_the_ranks() -> None:
    progress = Progress(300.0)
    progress.took(1, 0.01)
    now_s = looks(progress, 3, 1, 5)
    progress.look(now_s + 3600, 3, 1)
    assert not progress.is_late and progress.silent_s < 10


def test_nothing_in_flight_is_no_silence() -> None:
    progress = Progress(3.0)
    looks(progress, -1, 0, 100)
    assert progress.silent_s == 0 and not progress.is_late


def test_a_core_is_asked_once_and_silent_when_it_does_not_answer(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, silence.__name__)
    found = Silence()
    assert [found.look() for _ in range(4)] == [False, True, False, False] and found.sentence == ""
    for _ in range(int(SILENT_S / INTERVAL_S)):
        found.look()
    assert f"has not answered for {SILENT_S + 2:.0f} s" in found.sentence
    found.has_heard = True
    assert found.sentence == ""
    assert [found.look() for _ in range(3)] == [False, True, False]
    assert [message[:40] for message in caplog.messages] == [
        "The engine core has not answered for 5 s", "The engine core answers again."
    ]  # fmt: skip


def test_a_core_that_talks_is_never_asked() -> None:
    found = Silence()
    for _ in range(100):
        found.has_heard = True
        assert not found.look() and found.sentence == ""
