"""Refusals: said at arrival, in one sentence with the value and the remedy, and asserted by the reducer."""

from __future__ import annotations

import re

import pytest
from core_drive import Engine, arrival_of, config_of

from vnext.state.config import request_length_max
from vnext.state.errors import IllegalEvent
from vnext.state.feasibility import refusal
from vnext.state.windows import pages_needed

CASES = [
    (dict(), [], 4, "the prompt is empty: send at least one token"),
    (dict(), [1], 0, "max_tokens is 0: ask for at least 1"),
    (dict(), [1], -5, "max_tokens is -5"),
    (dict(), [1] * 60, 5, "the prompt has 60 tokens and max_tokens is 5.*at most 4 tokens"),
    (dict(), [1] * 70, 5, "at most 0 tokens"),
    (dict(page_count=3), [1] * 10, 4, "the cache's 12"),
    (dict(chunked_prefill=False, max_num_batched_tokens=8), [1] * 6, 4, "chunked prefill is off"),
    (
        dict(windows=(0,), page_count=3),
        [1] * 13,
        4,
        "max_tokens is 4, which may take 4 blocks at once where the cache has 3",
    ),
    (dict(windows=(0,), page_count=3), [1] * 14, 4, "may take 5 blocks at once"),
]
SERVED = [
    (dict(), [1] * 60, 4),
    (dict(page_count=3), [1] * 10, 3),
    (dict(page_count=3), [1] * 12, 1),
    (dict(page_count=1, block_size=1), [1], 1),
    (dict(chunked_prefill=False, max_num_batched_tokens=8), [1] * 6, 3),
    (dict(max_num_batched_tokens=1), [1] * 30, 30),
]


@pytest.mark.parametrize(("changes", "prompt", "max_tokens", "message"), CASES)
def test_what_can_never_be_served_is_refused(changes: dict, prompt: list[int], max_tokens: int, message: str) -> None:
    reason = refusal(config_of(**changes), arrival_of(0, prompt, max_tokens))
    assert reason is not None and re.search(message, reason) and "\n" not in reason
    engine = Engine(**changes)
    with pytest.raises(IllegalEvent):
        engine.arrive(prompt, max_tokens)
    assert engine.state.next_id == 0


@pytest.mark.parametrize(("changes", "prompt", "max_tokens"), SERVED)
def test_what_just_fits_is_served_to_its_last_token(changes: dict, prompt: list[int], max_tokens: int) -> None:
    engine = Engine(**changes)
    engine.arrive(prompt, max_tokens)
    engine.run_out()
    assert engine.state.counters.generated_tokens == max_tokens and engine.state.counters.preempted == 0


@pytest.mark.parametrize(
    ("changes", "length"),
    [
        (dict(), 64),
        (dict(page_count=3), 13),
        (dict(max_num_batched_tokens=8), 64),
        (dict(chunked_prefill=False, max_num_batched_tokens=8), 9),
        (dict(chunked_prefill=False, max_num_batched_tokens=99), 64),
    ],
)
def test_the_longest_request_is_served_and_no_longer_one(changes: dict, length: int) -> None:
    config = config_of(**changes)
    assert request_length_max(config) == length
    assert refusal(config, arrival_of(0, [1] * (length - 1), 1)) is None
    assert refusal(config, arrival_of(0, [1] * (length - 1), 2)) is not None


@pytest.mark.parametrize(("windows", "tokens", "pages"), [((0,), 40, 10), ((100,), 4, 1), ((5,), 40, 10), ((5, 0), 60, 25)])
def test_a_window_never_needs_more_pages_than_all_tokens_take(windows: tuple[int, ...], tokens: int, pages: int) -> None:
    """A window of 5 beside a step of 32 tokens sees 35 of them: 9 blocks of 4 and the one that it begins in."""
    assert pages_needed(config_of(windows=windows), tokens) == pages
