"""Retention: for how long the beginning of a prompt stays in the cache, in the words of each API."""

from __future__ import annotations

from typing import NamedTuple

from vnext.sampling_params import InvalidRequest

TTLS_S = {"5m": 300, "1h": 3600}
"""Of Anthropic's `cache_control`; "5m" is the default."""
DAY_S = 86_400
RETENTIONS_S = {"in_memory": 0, "in-memory": 0, "24h": DAY_S}
"""OpenAI's `prompt_cache_retention`; 0 is the cache as it is, which keeps what has room."""


class Breakpoint(NamedTuple):
    """The conversation up to and with its first `messages` messages stays for `seconds`."""

    messages: int
    seconds: int


def retention_s(asked: str | None) -> int:
    """The seconds for which `prompt_cache_retention` keeps a prompt, 0 for no promise. Raises InvalidRequest."""
    if asked and asked not in RETENTIONS_S:
        raise InvalidRequest(
            f"prompt_cache_retention is {asked!r}: it must be 'in_memory' or '24h'.", "prompt_cache_retention"
        )
    return RETENTIONS_S[asked] if asked else 0


def needed(breakpoints: list[Breakpoint]) -> list[Breakpoint]:
    """Those that no later one covers, the longest prefix first: a later one that lasts as long keeps all before it."""
    found: list[Breakpoint] = []
    for each in sorted(breakpoints, reverse=True):
        if not found or each.seconds > found[-1].seconds:
            found.append(each)
    return found
