"""Objective: what a request should feel, as in `ttft=200ms,itl=50ms`, and whether it did."""

from __future__ import annotations

import re
from typing import Protocol

import msgspec

from vnext.replay.reading.source import UnusableLog

UNITS = {"us": 1.0, "ms": 1e3, "s": 1e6}


class Objective(msgspec.Struct, frozen=True, kw_only=True):
    """The target for a request: at most this many us until its first token, and between two tokens on average; 0: no
    limit."""

    ttft_us: float = 0.0
    itl_us: float = 0.0

    @property
    def is_any(self) -> bool:
        """Whether the objective sets no limit."""
        return not (self.ttft_us or self.itl_us)


class Timed(Protocol):
    """A request with its times in us, and the tokens that its client got."""

    arrived_us: float
    first_us: float
    last_us: float
    tokens: int


def meets(served: Timed, objective: Objective) -> bool:
    """Whether a request met the objective: its first token in time, the others on average."""
    if objective.ttft_us and served.first_us - served.arrived_us > objective.ttft_us:
        return False
    between = (served.last_us - served.first_us) / max(served.tokens - 1, 1)
    return not objective.itl_us or between <= objective.itl_us


def objective_of(text: str) -> Objective:
    """`ttft=200ms,itl=50ms` as an objective. Raises UnusableLog."""
    found: dict[str, float] = {}
    for part in filter(None, text.split(",")):
        match = re.fullmatch(r"(ttft|itl)=(\d+(?:\.\d+)?)(us|ms|s)", part.strip())
        if match is None:
            raise UnusableLog(f"{part!r} is no objective: write ttft=200ms,itl=50ms")
        found[f"{match[1]}_us"] = float(match[2]) * UNITS[match[3]]
    return Objective(**found)
