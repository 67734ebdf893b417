"""A toy model that can be computed by hand, and its answer to one request alone.

The next token is (seed + the sum over positions p of (p + 1) * token) mod vocabulary: it depends on every token and on
every position. Where a constraint forbids that token, the next one that it allows is taken (`nearest`). `answer` knows
nothing of steps, blocks or batches; the engine's streams must equal it.
"""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import c_uint32
from pathlib import Path

import msgspec
import numpy as np

from vnext.sampling.constraint import Vocabulary
from vnext.state.config import SchedulerConfig
from vnext.state.outputs import Finish
from vnext.state.params import Constraint, Sampling


class Answer(msgspec.Struct, frozen=True):
    """The sampled tokens and the reason why they ended ("" before that); "abort" where a constraint fails."""

    tokens: tuple[int, ...]
    finish: Finish


def next_token(history: Sequence[int], seed: int, vocab_size: int) -> int:
    return (seed + sum(place * token for place, token in enumerate(history, start=1))) % vocab_size


def constrained(config: SchedulerConfig, sampling: Sampling, tokens: Sequence[int], wanted: int) -> int:
    """The token that the model gives after an answer's `tokens` where it wants another."""
    if sampling.constraint is None:
        return wanted
    return nearest(wanted, np.array(sorted(allowed(sampling.constraint, tokens, config.vocab_size, config.eos_token_ids))))


def answer(config: SchedulerConfig, prompt: list[int], sampling: Sampling) -> Answer:
    """The whole answer to one request, computed alone."""
    place = len(prompt)
    tokens: list[int] = []
    total = sampling.seed + sum(at * token for at, token in enumerate(prompt, start=1))
    while len(tokens) < sampling.max_tokens:
        if sampling.constraint is not None and fails(sampling.constraint, tokens, config.vocab_size, config.eos_token_ids):
            return Answer(tuple(tokens), "abort")
        token = constrained(config, sampling, tokens, total % config.vocab_size)
        place += 1
        total += place * token
        tokens.append(token)
        ends = token in sampling.stop_token_ids or (token in config.eos_token_ids and not sampling.ignore_eos)
        if ends and len(tokens) > sampling.min_tokens:
            return Answer(tuple(tokens), "stop")
    return Answer(tuple(tokens), "length")


# ---- toy grammar ---------------------------------------------------------------------------------------------------
# Toy grammars: what constraints are made of where there is no tokenizer, and which tokens a constraint allows.
# A grammar is a line of sets of tokens, such as "1,2 3* 5": each set gives the answer one token, a starred one any number. A
# set that contains BREAKS uses up the grammar's fuel: it fails where an answer gets there. `allowed` states in a few lines,
# from all tokens of an answer at once, what a Matcher (vnext/sampling/constraint.py) folds token by token.

BREAKS = -9


class ToyVocabulary(Vocabulary):
    """Tokens without texts."""

    def __init__(self, size: int, end_tokens: Sequence[int]) -> None:
        super().__init__(Path(), size, end_tokens)

    def compiled(self, grammar: str) -> ToyMatcher:  # type: ignore[override]  # what a Matcher asks of llguidance's
        return ToyMatcher(self, grammar)


class ToyMatcher:
    """A grammar after some tokens, as llguidance's LLMatcher is. Mutable."""

    def __init__(self, vocabulary: Vocabulary, grammar: str, answer: tuple[int, ...] = ()) -> None:
        self._vocabulary, self._grammar, self._answer = vocabulary, grammar, answer

    def deep_copy(self) -> ToyMatcher:
        return ToyMatcher(self._vocabulary, self._grammar, self._answer)

    def consume_token(self, token: int) -> bool:
        """False, and nothing is taken, where the grammar does not allow the token."""
        if token not in next_tokens(self._grammar, self._answer, self._vocabulary.end_tokens):
            return False
        self._answer = (*self._answer, token)
        return True

    def validate_tokens(self, tokens: Sequence[int]) -> int:
        """How many of the tokens may come next, one behind the other."""
        copy = self.deep_copy()
        return next((place for place, token in enumerate(tokens) if not copy.consume_token(token)), len(tokens))

    def compute_ff_tokens(self) -> list[int]:
        """The tokens that are forced: each is the only one that may come next."""
        found: list[int] = []
        while len(only := self._next(found)) == 1 and not only & {*self._vocabulary.end_tokens, BREAKS}:
            found += only
        return found

    def unsafe_compute_mask_ptr(self, address: int, size_bytes: int) -> None:
        mask = self._vocabulary.mask_of(self._next() - {BREAKS})
        (c_uint32 * (size_bytes // 4)).from_address(address)[:] = mask.tolist()

    def is_error(self) -> bool:
        return BREAKS in self._next()

    def _next(self, more: Sequence[int] = ()) -> set[int]:
        return next_tokens(self._grammar, (*self._answer, *more), self._vocabulary.end_tokens)

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
    """The tokens of a vocabulary of `size` that may come after `answer`; the end tokens where the constraint fails."""
    return _listed(constraint, answer, size, end_tokens) or set(end_tokens)


def fails(constraint: Constraint, answer: Sequence[int], size: int, end_tokens: Sequence[int]) -> bool:
    """Whether the constraint cannot be followed behind `answer`."""
    return not _listed(constraint, answer, size, end_tokens)


def forced(constraint: Constraint, answer: Sequence[int], end_tokens: Sequence[int]) -> list[int]:
    """The tokens that the grammar alone forces behind `answer`."""
    begin, found = _reasoned(constraint, answer), list[int]()
    while constraint.grammar and begin >= 0 and not _opening(constraint, answer):
        only = next_tokens(constraint.grammar, (*answer[begin:], *found), end_tokens)
        if len(only) != 1 or only & {*end_tokens, BREAKS}:
            break
        found += only
    return found


def _listed(constraint: Constraint, answer: Sequence[int], size: int, end_tokens: Sequence[int]) -> set[int]:
    """The tokens that grammar and lists leave."""
    begin, everything = _reasoned(constraint, answer), set(range(size))
    if begin < 0:
        found = _while_reasoning(constraint, answer, everything, end_tokens)
    elif not constraint.grammar:
        found = everything
    else:
        behind = answer[begin:]
        found = next_tokens(constraint.grammar, behind, end_tokens) if _fits(constraint, behind, end_tokens) else set()
    if BREAKS in found:
        return set()
    found = found | _opening(constraint, answer)
    found = found & set(constraint.allowed) if constraint.allowed else found
    found = found - (set() if answer else {*constraint.not_first})
    found = found & _timed(constraint.times, answer, size, end_tokens) if constraint.times else found
    return found - {last for *first, last in constraint.banned if not first or [*answer[-len(first) :]] == first}


def _timed(times: Sequence[int], answer: Sequence[int], size: int, end_tokens: Sequence[int]) -> set[int]:
    """The tokens that the rules for times leave."""
    first, latest = times
    if not answer:
        return {*range(first, min(latest + 1, size))}
    texts, earlier = {*range(first)}, [token for token in answer if token >= first]
    if answer[-1] < first:
        return texts | {*range(earlier[-1] + 1 if earlier else first, size)}
    if len(answer) == 1 or answer[-2] >= first:
        return texts
    return {*range(earlier[-1], size), *end_tokens}


def is_finished(constraint: Constraint, answer: Sequence[int], end_tokens: Sequence[int]) -> bool:
    """Whether the grammar of the answer is complete and cannot go on."""
    begin = _reasoned(constraint, answer)
    if _opening(constraint, answer):
        return False
    return bool(constraint.grammar and begin >= 0) and next_tokens(constraint.grammar, answer[begin:], ()) == set()


def _reasoned(constraint: Constraint, answer: Sequence[int]) -> int:
    """The place behind the model's reasoning, 0 where it has not begun, -1 while it reasons."""
    end, begin = [*constraint.reasoning_end], [*constraint.reasoning_begin]
    if [*answer[: len(begin)]] != begin:
        return 0
    ends = range(len(begin) + len(end), len(answer) + 1)
    return next((place for place in ends if [*answer[place - len(end) : place]] == end), -1) if end else 0


def _while_reasoning(constraint: Constraint, answer: Sequence[int], everything: set[int], end_tokens: Sequence[int]) -> set[int]:
    end, thought = [*constraint.reasoning_end], [*answer[len(constraint.reasoning_begin) :]]
    if 0 <= constraint.reasoning_max <= len(answer):
        return {end[max(size for size in range(len(end)) if not size or thought[-size:] == end[:size])]}
    return everything - set(end_tokens) | set(end) if constraint.grammar else everything


def _opening(constraint: Constraint, answer: Sequence[int]) -> set[int]:
    """The token with which the mark that begins reasoning goes on, none where it is decided whether the answer reasons."""
    begin, size = [*constraint.reasoning_begin], len(answer)
    return set(begin[size : size + 1]) if [*answer] == begin[:size] else set()


def _fits(constraint: Constraint, answer: Sequence[int], end_tokens: Sequence[int]) -> bool:
    """Whether the grammar allows the answer so far; only the tokens of an opening mark may have left it."""
    places = range(len(answer) if len(answer) < len(constraint.reasoning_begin) else 0)
    return all(answer[place] in next_tokens(constraint.grammar, answer[:place], end_tokens) for place in places)


def nearest(wanted: int, tokens: np.ndarray) -> int:
    """The first of `tokens` (sorted) from the wanted one on, the first of all behind the last; the wanted one if there are none."""
    return int(tokens[np.searchsorted(tokens, wanted) % len(tokens)]) if len(tokens) else wanted
