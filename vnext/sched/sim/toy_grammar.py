"""Toy grammars: what constraints are made of where there is no tokenizer, and which tokens a constraint allows.

A grammar is a line of sets of tokens, such as "1,2 3* 5": each set gives the answer one token, a starred one any number. `allowed`
states in a few lines, from all tokens of an answer at once, what a Matcher (vnext/sampling/constraint.py) folds token by token.
"""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import c_uint32
from pathlib import Path

import numpy as np

from vnext.sampling.constraint import Vocabulary
from vnext.state.params import Constraint


class ToyVocabulary(Vocabulary):
    """Tokens without texts."""

    def __init__(self, size: int, end_tokens: Sequence[int]) -> None:
        super().__init__(Path(), size, end_tokens)

    def compiled(self, grammar: str) -> ToyMatcher:  # type: ignore[override]  # what a Matcher asks of llguidance's
        return ToyMatcher(self, grammar)


class ToyMatcher:
    """A grammar after some tokens, as llguidance's LLMatcher is. Mutable."""

    def __init__(self, vocabulary: Vocabulary, grammar: str) -> None:
        self._vocabulary, self._grammar = vocabulary, grammar
        self._answer: tuple[int, ...] = ()

    def deep_copy(self) -> ToyMatcher:
        return ToyMatcher(self._vocabulary, self._grammar)

    def consume_token(self, token: int) -> bool:
        """False, and nothing is taken, where the grammar does not allow the token."""
        if token not in next_tokens(self._grammar, self._answer, self._vocabulary.end_tokens):
            return False
        self._answer = (*self._answer, token)
        return True

    def unsafe_compute_mask_ptr(self, address: int, size_bytes: int) -> None:
        mask = self._vocabulary.mask_of(next_tokens(self._grammar, self._answer, self._vocabulary.end_tokens))
        (c_uint32 * (size_bytes // 4)).from_address(address)[:] = mask.tolist()

    def is_error(self) -> bool:
        return False

    def get_error(self) -> str:
        return "the toy grammar does not allow the token"


def next_tokens(grammar: str, answer: Sequence[int], end_tokens: Sequence[int]) -> set[int]:
    """The tokens that the grammar allows after `answer`; the end tokens where it is complete, and behind them."""
    sets = [({*map(int, each.rstrip("*").split(","))}, each.endswith("*")) for each in grammar.split()]
    places = _reached(sets, {0})
    for token in answer:
        taken = (place for place, (tokens, _) in enumerate(sets) if place in places and token in tokens)
        places = _reached(sets, {place if sets[place][1] else place + 1 for place in taken})
    found = set().union(*(sets[place][0] for place in places if place < len(sets)))
    return found | set(end_tokens) if len(sets) in places or not found else found


def _reached(sets: list[tuple[set[int], bool]], places: set[int]) -> set[int]:
    for place, (_, is_starred) in enumerate(sets):
        if place in places and is_starred:
            places.add(place + 1)
    return places


def allowed(constraint: Constraint, answer: Sequence[int], size: int, end_tokens: Sequence[int]) -> set[int]:
    """The tokens of a vocabulary of `size` that may come after `answer`."""
    begin, everything = _reasoned(constraint, answer), set(range(size))
    if begin < 0:
        found = _while_reasoning(constraint, answer, everything, end_tokens)
    else:
        found = next_tokens(constraint.grammar, answer[begin:], end_tokens) if constraint.grammar else everything
    found = found & set(constraint.allowed) if constraint.allowed else found
    found -= {last for *first, last in constraint.banned if not first or [*answer[-len(first) :]] == first}
    return found or set(end_tokens)


def is_finished(constraint: Constraint, answer: Sequence[int], end_tokens: Sequence[int]) -> bool:
    """Whether the grammar of the answer is complete and cannot go on."""
    begin = _reasoned(constraint, answer)
    return bool(constraint.grammar and begin >= 0) and next_tokens(constraint.grammar, answer[begin:], ()) == set()


def _reasoned(constraint: Constraint, answer: Sequence[int]) -> int:
    """The place behind the model's reasoning, -1 while it reasons."""
    end = [*constraint.reasoning_end]
    ends = range(len(end), len(answer) + 1)
    return next((place for place in ends if [*answer[place - len(end) : place]] == end), -1) if end else 0


def _while_reasoning(constraint: Constraint, answer: Sequence[int], everything: set[int], end_tokens: Sequence[int]) -> set[int]:
    end = [*constraint.reasoning_end]
    if 0 <= constraint.reasoning_max <= len(answer):
        return {end[max(size for size in range(len(end)) if not size or [*answer[-size:]] == end[:size])]}
    return everything - set(end_tokens) | set(end) if constraint.grammar else everything


def nearest(wanted: int, tokens: np.ndarray) -> int:
    """The first of `tokens` (sorted) from the wanted one on, the first of all behind the last; the wanted one if there are none."""
    return int(tokens[np.searchsorted(tokens, wanted) % len(tokens)]) if len(tokens) else wanted
