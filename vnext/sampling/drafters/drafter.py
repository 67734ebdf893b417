"""The contract of a drafter, and which drafter a configuration names."""

from __future__ import annotations

from typing import Protocol

import numpy as np

from vnext.sampling.drafters.ngram import NgramDrafter
from vnext.state.config import Speculation


class Drafter(Protocol):
    """Drafts for one engine. Pure: equal arguments give equal drafts, on every rank and at any time."""

    def drafts(self, tokens: np.ndarray, most: int) -> np.ndarray:
        """Up to `most` tokens that may follow all `tokens` of a request (int32[n], n >= 1 -> int32[m])."""


class NoDrafter:
    """The method `grammar`: only what a grammar forces is drafted (vnext/runtime/batch/masks.py), of constrained requests."""

    def drafts(self, tokens: np.ndarray, most: int) -> np.ndarray:
        return tokens[:0]


def drafter_of(speculation: Speculation) -> Drafter:
    """The drafter of `speculation.method`, for requests without a constraint."""
    if speculation.method == "grammar":
        return NoDrafter()
    return NgramDrafter(speculation.prompt_lookup_min, speculation.prompt_lookup_max)
