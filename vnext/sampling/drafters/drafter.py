"""The contract of a drafter, and which drafter a configuration names."""

from __future__ import annotations

from typing import Protocol

import numpy as np

from vnext.sampling.drafters.ngram import NgramDrafter
from vnext.sampling.drafters.suffix import SuffixDrafter
from vnext.state.config import Speculation


class RowDrafter(Protocol):
    """Drafts for one request while it has a row of the batch."""

    def drafts(self, tokens: np.ndarray, most: int) -> np.ndarray:
        """Up to `most` tokens that may follow all `tokens` of the request (int32[n], n >= 1 -> int32[m]). `tokens` begin with
        those of the call before."""

    def finish(self, tokens: np.ndarray) -> None:
        """The request has ended with these tokens (int32[n])."""


class Drafter(Protocol):
    """Drafts for one engine. Equal calls in equal order give equal drafts, on every rank; nothing else may matter."""

    def row(self, scope: bytes, prompt_length: int) -> RowDrafter:
        """A request takes a row, anew after a preemption. Its drafts may follow from requests of the same `scope` alone."""


class NoDrafter:
    """Of methods that do not draft from tokens alone: `grammar` drafts what a grammar forces (vnext/runtime/batch/masks.py), and
    `draft_model`, `eagle3` and `mtp` compute drafts (vnext/runtime/batch/draft_batch.py)."""

    def row(self, scope: bytes, prompt_length: int) -> NoDrafter:
        return self

    def drafts(self, tokens: np.ndarray, most: int) -> np.ndarray:
        return tokens[:0]

    def finish(self, tokens: np.ndarray) -> None: ...


def drafter_of(speculation: Speculation) -> Drafter:
    """The drafter of `speculation.method`, for requests without a constraint."""
    if speculation.method in ("grammar", "draft_model", "eagle3", "mtp"):
        return NoDrafter()
    if speculation.method == "suffix":
        return SuffixDrafter(speculation)
    return NgramDrafter(speculation.prompt_lookup_min, speculation.prompt_lookup_max)
