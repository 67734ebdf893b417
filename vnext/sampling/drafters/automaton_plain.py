"""A suffix automaton that counts: the substrings of a text, and how often each token followed each of them. In Python.

A state stands for all substrings that end at the same places; its link is the longest suffix of them that also ends elsewhere.
_automaton.c does the same, faster; tests compare both with a search through the text.
Source of the structure: A. Blumer et al., "The smallest automaton recognizing the subwords of a text" (1985).
"""

from __future__ import annotations

import numpy as np

NOTHING = -1
COUNTED_MAX = 64
"""The most suffixes of the text, longest first, that one token counts for: a text of one repeated token has as many as tokens."""


class SuffixAutomaton:
    """The substrings of a text that grows. `len` is the number of its tokens. Mutable."""

    def __init__(self) -> None:
        self._tokens, self._last = 0, 0
        self._lengths, self._links = [0], [NOTHING]
        self._next: list[dict[int, int]] = [{}]
        self._counts: list[dict[int, int]] = [{}]
        self._best: list[int | None] = [None]

    def __len__(self) -> int:
        return self._tokens

    def extend(self, tokens: np.ndarray) -> None:
        """The text grows by `tokens` (int32[n]). A negative token is never drafted: a draft ends there."""
        for token in tokens.tolist():
            self._append(token)

    def drafts(self, recent: np.ndarray, most: int, factor: float, share: float) -> tuple[int, bytes]:
        """How many of the newest tokens of `recent` (int32[n]) the text holds with something behind them, and up to `most` tokens
        (int32 bytes) of which each followed most often, then latest: at most `factor` times as many as were matched, and none
        whose likelihood, the product of the counts' shares up to it, is below `share`."""
        state, matched = self._match(recent.tolist())
        most = min(most, int(factor * matched))
        found: list[int] = []
        likelihood = 1.0
        while len(found) < most and (token := self._best[state]) is not None and state > 0:
            likelihood *= self._counts[state][token] / sum(self._counts[state].values())
            if token < 0 or likelihood < share:
                break
            found.append(token)
            state = self._with_more(self._next[state][token])
        return matched, np.array(found, dtype=np.int32).tobytes()

    def _match(self, recent: list[int]) -> tuple[int, int]:
        state, matched = 0, 0
        for token in recent:
            while state > 0 and token not in self._next[state]:
                state = self._links[state]
                matched = self._lengths[state]
            if token in self._next[state]:
                state, matched = self._next[state][token], matched + 1
        found = self._with_more(state)
        return found, matched if found == state else self._lengths[found]

    def _with_more(self, state: int) -> int:
        """The longest suffix of a state that something follows; the root at worst."""
        while state > 0 and self._best[state] is None:
            state = self._links[state]
        return state

    def _append(self, token: int) -> None:
        new, state = self._state(self._lengths[self._last] + 1), self._last
        while state != NOTHING and token not in self._next[state]:
            self._next[state][token] = new
            self._counts[state][token] = 0
            self._count(state, token)
            state = self._links[state]
        self._links[new] = 0 if state == NOTHING else self._suffix(state, token)
        for _ in range(COUNTED_MAX):
            if state == NOTHING:
                break
            self._count(state, token)
            state = self._links[state]
        self._tokens, self._last = self._tokens + 1, new

    def _suffix(self, state: int, token: int) -> int:
        """The state of the substring that is `state`'s longest with `token`, split from a longer one where needed."""
        longer = self._next[state][token]
        if self._lengths[longer] == self._lengths[state] + 1:
            return longer
        split = self._state(self._lengths[state] + 1)
        self._next[split], self._counts[split] = self._next[longer].copy(), self._counts[longer].copy()
        self._best[split], self._links[split] = self._best[longer], self._links[longer]
        self._links[longer] = split
        while state != NOTHING and self._next[state].get(token) == longer:
            self._next[state][token] = split
            state = self._links[state]
        return split

    def _count(self, state: int, token: int) -> None:
        counts, best = self._counts[state], self._best[state]
        counts[token] += 1
        if best is None or counts[token] >= counts[best]:
            self._best[state] = token

    def _state(self, length: int) -> int:
        self._lengths.append(length)
        self._links.append(NOTHING)
        self._next.append({})
        self._counts.append({})
        self._best.append(None)
        return len(self._lengths) - 1
