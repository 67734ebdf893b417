"""Which weights drew which tokens of a request: most requests live under one version, some across a change."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import msgspec

from vnext.state.state import Request, Weights


class Span(NamedTuple):
    """Positions [begin, end) of a request that these weights drew; None: those that its engine started with."""

    begin: int
    end: int
    weights: Weights | None


class Answered(msgspec.Struct, kw_only=True):
    """A request and its tokens so far, the prompt's first. `drawn`: the positions from which on other weights drew, with these."""

    request: Request
    tokens: list[int]
    drawn: list[tuple[int, Weights | None]] = []

    def take(self, token: int, weights: Weights | None) -> None:
        """Another token, drawn with these weights."""
        if not self.drawn or self.drawn[-1][1] != weights:
            self.drawn.append((len(self.tokens), weights))
        self.tokens.append(token)

    def spans(self, begin: int) -> Iterator[Span]:
        """What was drawn from position `begin` on, in order."""
        ends = [place for place, _ in self.drawn[1:]] + [len(self.tokens)]
        for (place, weights), end in zip(self.drawn, ends):
            if max(place, begin) < end:
                yield Span(max(place, begin), end, weights)
