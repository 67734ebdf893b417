"""The contract of a drafter, and which drafter a configuration names.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Protocol

import numpy as np

from vnext.base.compiled import load
from vnext.sampling.drafters import automaton_plain
from vnext.state.config import Speculation

# the compiled suffix automaton where it was built, else the plain one; both give equal drafts
_automaton = load("vnext.sampling.drafters._automaton", {"COUNTED_MAX": automaton_plain.COUNTED_MAX})
SuffixAutomaton = automaton_plain.SuffixAutomaton
if not TYPE_CHECKING and _automaton is not None:  # the compiled one has the plain one's signatures
    SuffixAutomaton = _automaton.SuffixAutomaton


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


# ---- the n-gram drafter ------------------------------------------------------------------------------------------
# The n-gram drafter (prompt lookup): what followed the last time the request's newest tokens stood in its text.
#
# Source of the method: A. Saxena, "Prompt Lookup Decoding" (2023).


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


# ---- the suffix drafter ------------------------------------------------------------------------------------------
# The suffix drafter: what most often followed the longest match of the request's newest tokens, in the request's own text and in
# earlier answers of its scope (cache salt and adapter).
#
# The earlier answers follow from the order in which requests finish, which is the same on every rank.
# Source of the method: G. Oliaro et al., "SuffixDecoding" (2024).


TOKENS_MAX = 2**18
"""The tokens of earlier answers that one engine keeps, in all scopes together; each takes about 100 bytes."""

SEGMENTS = 8
"""Answers leave in segments of one scope, the oldest segment first; this many fill the store."""

ANSWER_END = np.array([-1], dtype=np.int32)


class Segment:
    """Some answers of one scope as one text. Mutable."""

    def __init__(self, scope: bytes) -> None:
        self.scope, self.answers, self.text = scope, 0, SuffixAutomaton()

    def add(self, answer: np.ndarray) -> None:
        self.text.extend(np.concatenate((answer, ANSWER_END)))
        self.answers += 1


class EarlierAnswers:
    """Up to `answers_max` answers of up to `tokens_max` tokens together. Mutable; equal calls keep equal answers."""

    def __init__(self, answers_max: int, tokens_max: int = TOKENS_MAX) -> None:
        self._answers_max, self._tokens_max = answers_max, tokens_max
        self._segments: deque[Segment] = deque()  # oldest first
        self._of: dict[bytes, list[Segment]] = {}
        self._answers = self._tokens = 0

    def texts(self, scope: bytes) -> list[SuffixAutomaton]:
        """The texts of a scope, newest first."""
        return [segment.text for segment in reversed(self._of.get(scope, ()))]

    def add(self, scope: bytes, answer: np.ndarray) -> None:
        """Keep an answer (int32[n]); of a long one its end."""
        if not self._answers_max or not len(answer):
            return
        segments = self._of.setdefault(scope, [])
        if not segments or self._is_full(segments[-1]):
            segments.append(Segment(scope))
            self._segments.append(segments[-1])
        before = len(segments[-1].text)
        segments[-1].add(answer[-(self._tokens_max // SEGMENTS) :])
        self._answers, self._tokens = self._answers + 1, self._tokens + len(segments[-1].text) - before
        while self._answers > self._answers_max or self._tokens > self._tokens_max:
            self._forget()

    def _is_full(self, segment: Segment) -> bool:
        return segment.answers * SEGMENTS >= self._answers_max or len(segment.text) * SEGMENTS >= self._tokens_max

    def _forget(self) -> None:
        oldest = self._segments.popleft()
        self._answers, self._tokens = self._answers - oldest.answers, self._tokens - len(oldest.text)
        del self._of[oldest.scope][0]
        if not self._of[oldest.scope]:
            del self._of[oldest.scope]


class SuffixRow:
    """The text of one request. Mutable."""

    def __init__(self, options: Speculation, earlier: EarlierAnswers, scope: bytes, prompt_length: int) -> None:
        self._options, self._earlier, self._scope, self._prompt_length = options, earlier, scope, prompt_length
        self._own = SuffixAutomaton()

    def drafts(self, tokens: np.ndarray, most: int) -> np.ndarray:
        """As Drafter.drafts. The longest match counts, then the request's own text, then the newest answers."""
        self._own.extend(tokens[len(self._own) :])
        recent, options = tokens[-self._options.suffix_decoding_max_tree_depth :], self._options
        factor, share = options.suffix_decoding_max_spec_factor, options.suffix_decoding_min_token_prob
        texts = (self._own, *self._earlier.texts(self._scope))
        matched, drafts = max((text.drafts(recent, most, factor, share) for text in texts), key=lambda found: found[0])
        return np.frombuffer(drafts, dtype=np.int32) if matched >= options.prompt_lookup_min else tokens[:0]

    def finish(self, tokens: np.ndarray) -> None:
        self._earlier.add(self._scope, tokens[self._prompt_length :])


class SuffixDrafter:
    """The rows of one engine and its earlier answers."""

    def __init__(self, options: Speculation) -> None:
        self._options, self._earlier = options, EarlierAnswers(options.suffix_decoding_max_cached_requests)

    def row(self, scope: bytes, prompt_length: int) -> SuffixRow:
        return SuffixRow(self._options, self._earlier, scope, prompt_length)
