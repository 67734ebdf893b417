"""Refusals: said at arrival, in one sentence with the value and the remedy, and asserted by the reducer."""

from __future__ import annotations

import re

import pytest
from core_drive import Engine, arrival_of, config_of

from vnext.state.errors import IllegalEvent
from vnext.state.refusal import refusal

CASES = [
    (dict(), [], 4, "the prompt is empty: send at least one token"),
    (dict(), [1], 0, "max_tokens is 0: ask for at least 1"),
    (dict(), [1], -5, "max_tokens is -5"),
    (dict(), [1] * 60, 5, "the prompt has 60 tokens and max_tokens is 5.*at most 4 tokens"),
    (dict(), [1] * 70, 5, "at most 0 tokens"),
    (dict(block_count=3), [1] * 10, 4, "the cache's 12"),
    (dict(chunked_prefill=False, batch_tokens_max=8), [1] * 6, 4, "chunked prefill is off"),
]
SERVED = [
    (dict(), [1] * 60, 4),
    (dict(block_count=3), [1] * 10, 3),
    (dict(block_count=3), [1] * 12, 1),
    (dict(block_count=1, block_size=1), [1], 1),
    (dict(chunked_prefill=False, batch_tokens_max=8), [1] * 6, 3),
    (dict(batch_tokens_max=1), [1] * 30, 30),
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
