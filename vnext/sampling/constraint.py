"""Constraint: which tokens a request's answer may go on with, as a fold over the tokens that it has so far.

Owns a matcher's phases. While the model reasons, everything is allowed but the end of the answer; a budget forces the tokens that
end the reasoning. After them, llguidance matches the grammar, and a finished grammar admits only an end token. Lists of
allowed tokens and banned sequences hold throughout. The fold
knows no clock: a grammar that exceeds llguidance's limits fails at the same token on every rank and in every replay.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from vnext.state.params import Constraint

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

TOKENIZER_FILE = "tokenizer.json"


class Vocabulary:
    """The texts of a checkpoint's tokens, read when the first grammar needs them.

    `size` is the width of the logits; `end_tokens` end an answer. `folder` holds the checkpoint.
    """

    def __init__(self, folder: Path, size: int, end_tokens: Sequence[int]) -> None:
        self.size, self.end_tokens = size, tuple(end_tokens)
        self._path = folder / TOKENIZER_FILE

    @cached_property
    def tokenizer(self) -> LLTokenizer:
        """Raises OSError without a tokenizer.json, ValueError for one that llguidance cannot read."""
        from llguidance import LLTokenizer  # takes 70 ms, and most ranks never need it

        return LLTokenizer(self._path.read_text(encoding="utf-8"), n_vocab=self.size, eos_token=list(self.end_tokens))


class Matcher:
    """The fold of one request's constraint. Mutable. `error` is a sentence once the grammar could not be followed."""

    def __init__(self, constraint: Constraint, vocabulary: Vocabulary, tokens: Sequence[int] = ()) -> None:
        """`tokens`: those of the answer so far."""
        self._constraint, self._vocabulary = constraint, vocabulary
        self._tail: tuple[int, ...] = ()
        self._recent: tuple[int, ...] = ()
        self._recent_max = max((len(sequence) - 1 for sequence in constraint.banned), default=0)
        self._not_allowed = self._all_but(constraint.allowed) if constraint.allowed else None
        self._reasoned = 0
        self._grammar: LLMatcher | None = None
        self._forbidden: np.ndarray | None = None
        self._is_stale = True
        self.error = ""
        self.is_reasoning = bool(constraint.reasoning_end)
        if not self.is_reasoning:
            self._begin_grammar()
        for token in tokens:
            self.take(token)

    def take(self, token: int) -> None:
        """The answer goes on with `token`."""
        self._is_stale = True
        if self._recent_max:
            self._recent = (*self._recent, token)[-self._recent_max :]
        if self.is_reasoning:
            self._reason(token)
        elif self._grammar is not None and not self.error and not self._grammar.consume_token(token):
            self._fail(self._grammar.get_error())

    def forbidden(self) -> np.ndarray | None:
        """The tokens that may not come next (bool[V], not to be written to); None if all may."""
        if self._is_stale:
            self._forbidden, self._is_stale = self._with_lists(self._compute()), False
        return self._forbidden

    def _reason(self, token: int) -> None:
        end = self._constraint.reasoning_end
        self._reasoned += 1
        self._tail = (*self._tail, token)[-len(end) :]
        if self._tail == end:
            self.is_reasoning = False
            self._begin_grammar()

    def _begin_grammar(self) -> None:
        if not self._constraint.grammar:
            return
        try:
            tokenizer = self._vocabulary.tokenizer
        except (OSError, ValueError) as error:
            self._fail(f"the model's tokenizer cannot be read: {error}")
            return
        from llguidance import LLMatcher, LLParserLimits  # imported with the tokenizer

        limits = LLParserLimits(verbose_errors=False)  # an error must not show the client's grammar
        self._grammar = LLMatcher(tokenizer, self._constraint.grammar, log_level=0, limits=limits)
        if self._grammar.is_error():
            self._fail(self._grammar.get_error())

    def _fail(self, why: str) -> None:
        self.error = f"The answer cannot keep to its constraint: {why.partition(chr(10))[0]}."

    def _compute(self) -> np.ndarray | None:
        if self.error:
            return self._all_but(self._vocabulary.end_tokens)
        if self.is_reasoning:
            return self._while_reasoning()
        if self._grammar is None:
            return None
        mask = np.frombuffer(self._grammar.compute_bitmask(), dtype=np.uint8)
        if self._grammar.is_error():
            self._fail(self._grammar.get_error())
            return self._all_but(self._vocabulary.end_tokens)
        forbidden: np.ndarray = np.unpackbits(mask, count=self._vocabulary.size, bitorder="little") == 0
        return forbidden

    def _with_lists(self, found: np.ndarray | None) -> np.ndarray | None:
        """What is forbidden, together with what the constraint's lists forbid."""
        if self._not_allowed is not None:
            found = self._not_allowed if found is None else found | self._not_allowed
        if lasts := [sequence[-1] for sequence in self._constraint.banned if self._ends_with(sequence[:-1])]:
            found = np.zeros(self._vocabulary.size, dtype=np.bool_) if found is None else found.copy()
            found[lasts] = True
        if found is not None and not self.error and found.all():
            self._fail("no token is left that may come next")
        return found

    def _ends_with(self, tokens: tuple[int, ...]) -> bool:
        """Whether the answer so far does."""
        return not tokens or self._recent[-len(tokens) :] == tokens

    def _while_reasoning(self) -> np.ndarray | None:
        end, limit = self._constraint.reasoning_end, self._constraint.reasoning_max
        if 0 <= limit <= self._reasoned:
            begun = next(size for size in range(len(end) - 1, -1, -1) if self._tail[len(self._tail) - size :] == end[:size])
            return self._all_but(end[begun : begun + 1])
        if not self._constraint.grammar:
            return None
        forbidden = np.zeros(self._vocabulary.size, dtype=np.bool_)
        forbidden[list(self._vocabulary.end_tokens)] = True
        forbidden[list(end)] = False
        return forbidden

    def _all_but(self, tokens: Sequence[int]) -> np.ndarray:
        forbidden = np.ones(self._vocabulary.size, dtype=np.bool_)
        forbidden[list(tokens)] = False
        return forbidden
