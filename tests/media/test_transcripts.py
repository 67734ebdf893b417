"""Transcripts: segments of tokens, and which of several answers to a window is its transcript."""

from __future__ import annotations

import pytest

from vnext.server.answers.transcripts import Trial, chosen_of, compression_ratio, segments_of, without_times

FIRST = 100
GOOD, UNLIKELY = Trial(0.2, [1, 2], [-0.5] * 3, 1.0), Trial(0.0, [1, 2], [-2.0] * 3, 1.0)
REPEATS = Trial(0.4, [1] * 9, [-0.1] * 10, 9.0)


def test_a_mean_counts_the_end() -> None:
    assert Trial(0.0, [1, 2], [-1.0, -2.0, -3.0], 1.0).avg_logprob == -2.0
    assert Trial(0.0, [1, 2], [-1.0, -2.0], 1.0).avg_logprob == -1.0  # cut off before its end


@pytest.mark.parametrize(
    ("trials", "chosen"),
    [
        ([GOOD], 0), ([UNLIKELY, GOOD], 1), ([UNLIKELY, REPEATS], 0), ([REPEATS, UNLIKELY], 1), ([REPEATS, REPEATS._replace(tokens=[1])], 0),
        ([UNLIKELY._replace(silence=0.7)], 0), ([UNLIKELY, UNLIKELY._replace(silence=0.5, logprobs=[-3.0] * 3)], 0),
        ([REPEATS, UNLIKELY._replace(silence=0.7)], 1), ([GOOD._replace(silence=0.9)], 0),
    ],
)  # fmt: skip
def test_the_first_good_answer_counts_and_otherwise_the_likeliest_without_repetitions(trials: list[Trial], chosen: int) -> None:
    assert chosen_of(trials) is trials[chosen]


def test_what_is_unlikely_and_probably_silent_is_no_speech() -> None:
    assert UNLIKELY._replace(silence=0.61).is_silent and not UNLIKELY._replace(silence=0.6).is_silent
    assert not UNLIKELY.is_silent and not GOOD._replace(silence=1.0).is_silent
    assert GOOD._replace(logprobs=[-1.0] * 3).is_good and not GOOD._replace(compression_ratio=2.41).is_good


def test_repetitions_are_what_deflate_shortens() -> None:
    assert compression_ratio(" the same words " * 20) > 2.4 > compression_ratio("Nobody knew where the sound was coming from.")
    assert compression_ratio("") == 0.0


def test_segments_know_their_places_and_take_time() -> None:
    tokens = [FIRST, 1, 2, FIRST + 10, FIRST + 10, 3, FIRST + 20, FIRST + 20, 4, FIRST + 20, FIRST + 30, 5]
    found, on_s = segments_of(tokens, FIRST, 1.0)
    assert [(each.tokens, each.place) for each in found] == [([1, 2], 1), ([3], 5)] and on_s == 0.4
    assert [tokens[each.place :][: len(each.tokens)] for each in found] == [each.tokens for each in found]
    beyond = [FIRST, 1, FIRST + 60, FIRST + 60, 2, FIRST + 70]
    assert [each.tokens for each in segments_of(beyond, FIRST, 1.0)[0]] == [[1]]


def test_answers_without_times_keep_the_log_probability_of_their_end() -> None:
    assert without_times([1, FIRST, 2], [-1.0, -2.0, -3.0, -4.0], FIRST) == ([1, 2], [-1.0, -3.0, -4.0])
