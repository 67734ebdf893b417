"""Thirty ways in which people lose the prefix cache, each by its name, through the real reducer and scheduler: the cause and the
place that an answer's usage names."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from asked import SIZE, Asked

from vnext.runtime.protocol.stats import CacheMiss
from vnext.state.events import EnginePaused, WeightsChanged

BOS = [1]
SYSTEM = list(range(10, 25))
TOOLS = [*range(30, 34), *range(34, 38)]
TALK = list(range(40, 60))
PROMPT = [*BOS, *SYSTEM, *TOOLS, *TALK]
"""44 tokens: 16 of instruction, 8 of two tools, 20 of messages."""
ANSWER = [*range(60, 68), *range(70, 86)]
"""Eight tokens of reasoning and sixteen of text."""
EXAMPLES = [list(range(30, 50)), list(range(50, 70))]
OWN = 5
"""The client's number."""
Breaker = Callable[[], CacheMiss | None]


def changed(*parts: list[int], before: list[int] = PROMPT) -> Breaker:
    """Ask for one prompt and then for another one."""

    def ask() -> CacheMiss | None:
        asked = Asked(page_count=64)
        assert asked.ask(before, client=OWN) is None
        return asked.ask([token for part in parts for token in part], client=OWN)

    return ask


def put(prompt: list[int], at: int, *tokens: int, over: int = 0) -> list[int]:
    """The prompt with these tokens at a place, in the place of `over` others."""
    return [*prompt[:at], *tokens, *prompt[at + over :]]


def answered(returned: list[int]) -> Breaker:
    """The next turn has these tokens where the answer had ANSWER."""

    def ask() -> CacheMiss | None:
        asked = Asked(page_count=64)
        asked.begin(PROMPT[:24], max_tokens=len(ANSWER), client=OWN)
        asked.run_out(*ANSWER)
        return asked.ask([*PROMPT[:24], *returned, 95, 96], client=OWN)

    return ask


def flooded(pages: int, others: int, length: int = 40) -> Breaker:
    """Other clients' prompts come between two of the same."""

    def ask() -> CacheMiss | None:
        asked = Asked(page_count=pages)
        asked.ask(PROMPT, client=OWN)
        for other in range(others):
            asked.ask([2 + other, *[90 + other] * (length - 1)], client=OWN + 1 + other)
        return asked.ask(PROMPT, client=OWN)

    return ask


def reset() -> CacheMiss | None:
    asked = Asked(page_count=64)
    asked.ask(PROMPT, client=OWN)
    asked.engine.reset()
    return asked.ask(PROMPT, client=OWN)


def ranks_lost() -> CacheMiss | None:
    asked = Asked(page_count=64)
    asked.ask(PROMPT, client=OWN)
    asked.engine.recover()
    return asked.ask(PROMPT, client=OWN)


def talks_in_turns() -> CacheMiss | None:
    """Two talks in a cache that holds one of them."""
    asked = Asked(page_count=13)
    other = [2, *range(60, 99)]
    asked.ask(PROMPT, client=OWN)
    asked.ask(other, client=OWN)
    return asked.ask(PROMPT, client=OWN)


def answer_evicted() -> CacheMiss | None:
    asked = Asked(page_count=64)
    asked.ask(PROMPT[:24], max_tokens=13, client=OWN)
    asked.engine.reset()
    return asked.ask([*PROMPT[:24], *[9] * 13, 80, 81, 82], client=OWN)


def burst() -> CacheMiss | None:
    """Two of the same at once, of whose tokens a step takes a part."""
    asked = Asked(page_count=64, long_prefill_token_threshold=8, pipeline_depth=2)
    asked.begin(PROMPT, client=OWN)
    return asked.begin(PROMPT, client=OWN)


def fan_out() -> CacheMiss | None:
    """Agents of another client begin with the instruction that is being computed."""
    asked = Asked(page_count=64, long_prefill_token_threshold=8, pipeline_depth=2)
    asked.begin([*PROMPT[:24], *range(60, 80)], client=OWN + 1)
    return asked.begin(PROMPT, client=OWN)


def window_gone() -> CacheMiss | None:
    """The pages of a sliding window have left; those of full attention stand there."""
    asked = Asked(page_count=40, windows=(0, 8))
    asked.ask(PROMPT, client=OWN)
    asked.ask([2, *[90] * 39], client=OWN + 1)
    return asked.ask(PROMPT, client=OWN)


def other_salt() -> CacheMiss | None:
    asked = Asked(page_count=64)
    asked.ask(PROMPT, client=OWN, cache_salt="a")
    return asked.ask(PROMPT, client=OWN, cache_salt="b")


def salt_left_out() -> CacheMiss | None:
    asked = Asked(page_count=64)
    asked.ask(PROMPT, client=OWN, cache_salt="a")
    return asked.ask(PROMPT, client=OWN)


def adapters(first: str, second: str) -> Breaker:
    def ask() -> CacheMiss | None:
        asked = Asked(page_count=64, max_loras=2)
        asked.ask(PROMPT, client=OWN, adapter=first)
        return asked.ask(PROMPT, client=OWN, adapter=second)

    return ask


def other_weights() -> CacheMiss | None:
    asked = Asked(page_count=64)
    asked.ask(PROMPT, client=OWN)
    for event in (EnginePaused(mode="keep"), WeightsChanged(version=1, digest="d", path="p"), EnginePaused(mode="")):
        asked.engine.fold(event)
    return asked.ask(PROMPT, client=OWN)


BREAKERS: dict[str, tuple[Breaker, str, int]] = {
    "the time of day in the instruction": (changed(put(PROMPT, 3, 77, over=1)), "changed", 3),
    "the date behind the first token": (changed(put(PROMPT, 1, 77, over=1)), "changed", 1),
    "a request's number at the end of the instruction": (changed(put(PROMPT, 15, 77, over=1)), "changed", 15),
    "a counter among the tools": (changed(put(PROMPT, 20, 77, over=1)), "changed", 20),
    "a user's name in the instruction": (changed(put(PROMPT, 5, 77, 78)), "changed", 5),
    "a user's name that is gone": (changed(put(PROMPT, 5, over=2)), "changed", 5),
    "tools in another order": (changed(BOS, SYSTEM, TOOLS[4:], TOOLS[:4], TALK), "changed", 16),
    "a tool more": (changed(put(PROMPT, 20, 70, 71, 72, 73)), "changed", 20),
    "a tool less": (changed(put(PROMPT, 20, over=4)), "changed", 20),
    "another description of a tool": (changed(put(PROMPT, 22, 77, over=1)), "changed", 22),
    "examples in another order": (
        changed(PROMPT[:4], *EXAMPLES[::-1], TALK[-10:], before=[*PROMPT[:4], *EXAMPLES[0], *EXAMPLES[1], *TALK[-10:]]), "changed", 4
    ),
    "another space in the template": (changed(put(PROMPT, 9, 77, 78, over=1)), "changed", 9),
    "the oldest turn left out": (changed(PROMPT[:24], TALK[4:]), "changed", 24),
    "a summary in the place of old turns": (changed(PROMPT[:24], [77, 78], TALK[8:]), "changed", 24),
    "a tool's result cut short": (changed(PROMPT[:26], PROMPT[30:]), "changed", 26),
    "another role's header": (changed(put(PROMPT, 28, 77, over=1)), "changed", 28),
    "the last message edited": (changed(put(PROMPT, 37, 77, over=1)), "changed", 37),
    "an answer without its reasoning": (answered(ANSWER[8:]), "changed", 24),
    "an answer in other tokens": (answered(put(ANSWER, 6, 98, 99, over=1)), "changed", 30),
    "the cache was reset": (reset, "evicted", 0),
    "the ranks were lost": (ranks_lost, "evicted", 0),
    "a flood of other prompts": (flooded(pages=14, others=3), "evicted", 0),
    "two talks in a cache for one": (talks_in_turns, "evicted", 12),
    "an answer that had left": (answer_evicted, "evicted", 0),
    "the same prompt at once": (burst, "computing", 8),
    "agents that begin at once": (fan_out, "computing", 8),
    "a window whose pages have left": (window_gone, "incomplete", 28),
    "another salt": (other_salt, "salt", 0),
    "a salt left out": (salt_left_out, "salt", 0),
    "another adapter": (adapters("a" * 16, "b" * 16), "adapter", 0),
    "an adapter in the place of the model": (adapters("", "b" * 16), "adapter", 0),
    "other weights": (other_weights, "weights", 0),
}  # fmt: skip


@pytest.mark.parametrize("name", BREAKERS)
def test_a_breaker_is_named(name: str) -> None:
    ask, reason, at_token = BREAKERS[name]
    miss = ask()
    assert miss is not None and (miss.reason, miss.at_token) == (reason, at_token)
    assert miss.lost_tokens >= SIZE and miss.lost_tokens % SIZE == 0


def test_there_are_thirty_of_every_reason() -> None:
    assert len(BREAKERS) >= 30
    assert {reason for _, reason, _ in BREAKERS.values()} == {"changed", "evicted", "computing", "incomplete", "salt", "adapter", "weights"}
