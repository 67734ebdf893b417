"""Retention: for how long the beginning of a prompt stays in the cache, in the words of each API."""

from __future__ import annotations

from typing import NamedTuple

TTLS_S = {"5m": 300, "1h": 3600}
"""Of Anthropic's `cache_control`; "5m" is the default."""


class Breakpoint(NamedTuple):
    """The conversation up to and with its first `messages` messages stays for `seconds`."""

    messages: int
    seconds: int


def needed(breakpoints: list[Breakpoint]) -> list[Breakpoint]:
    """Those that no later one covers, the longest prefix first: a later one that lasts as long keeps all before it."""
    found: list[Breakpoint] = []
    for each in sorted(breakpoints, reverse=True):
        if not found or each.seconds > found[-1].seconds:
            found.append(each)
    return found
