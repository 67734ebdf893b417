"""The n-gram drafter (prompt lookup): what followed the last time the request's newest tokens stood in its text.

Source of the method: A. Saxena, "Prompt Lookup Decoding" (2023).
"""

from __future__ import annotations

import numpy as np


class NgramDrafter:
    """Looks for the last `longest` tokens, or fewer, but no fewer than `shortest`. The longest match counts, then the latest."""

    def __init__(self, shortest: int, longest: int) -> None:
        self._shortest, self._longest = shortest, longest

    def row(self, scope: bytes, prompt_length: int) -> NgramDrafter:
        return self

    def finish(self, tokens: np.ndarray) -> None: ...

    def drafts(self, tokens: np.ndarray, most: int) -> np.ndarray:
        """Up to `most` drafts (int32[m]); a match that overlaps the end continues with its own repetition."""
        ends, length = np.flatnonzero(tokens[:-1] == tokens[-1]), 1
        while length < self._longest and len(ends):
            longer = ends[ends >= length]
            longer = longer[tokens[longer - length] == tokens[-1 - length]]
            if len(longer) == 0:
                break
            ends, length = longer, length + 1
        if len(ends) == 0 or length < self._shortest:
            return tokens[:0]
        period = len(tokens) - 1 - ends[-1]
        drafts: np.ndarray = tokens[ends[-1] + 1 + np.arange(most) % period]
        return drafts
