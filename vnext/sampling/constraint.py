"""Constraint: which tokens a request's answer may go on with, as a fold over the tokens that it has so far.

Owns a matcher's phases. Where the answer may begin with reasoning, its first tokens decide: as long as they are those of
the opening mark, the mark may go on, and so may the grammar. While the model reasons, everything is allowed but the end of
the answer; a budget forces the tokens that end the reasoning. After them, or at once where there is none, llguidance matches
the grammar, and a finished grammar admits only an end token. Lists of allowed tokens and banned sequences hold throughout, and
so do the rules for times: an answer begins with one, each text stands between two, they never fall, and none comes thrice in a
row. Source: ApplyTimestampRules of Whisper's decoding.py. That times may outweigh a text is a rule over logits (logits.py).
The fold knows no clock: a grammar that exceeds llguidance's limits fails at the same token on every rank and in every replay.
"""

from __future__ import annotations

import errno
from collections.abc import Iterable, Sequence
from copy import copy
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from vnext.base.spelling import reason
from vnext.base.tokenizer_files import tokenizer_json
from vnext.state.params import GRAMMAR_ROW_MAX, Constraint

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

COMPILED_MAX = 32
"""Grammars that a rank keeps compiled, as much work as hundreds of masks each."""
_WORK = "a position of its grammar has too many items, or takes too much work, simplify it"
"""llguidance's own message quotes its limits, which no client knows."""


class Vocabulary:
    """The texts of a checkpoint's tokens, read when the first grammar needs them.

    `size` is the width of the logits; `end_tokens` end an answer. `folder` holds the checkpoint.
    """

    def __init__(self, folder: Path, size: int, end_tokens: Sequence[int]) -> None:
        self.size, self.end_tokens = size, tuple(end_tokens)
        self._folder = folder
        self._compiled: dict[str, LLMatcher] = {}  # the last ones used come last

    @cached_property
    def tokenizer(self) -> LLTokenizer:
        """Raises OSError without a tokenizer.json, ValueError for one that llguidance cannot read."""
        from llguidance import LLTokenizer  # takes 70 ms, and most ranks never need it

        return LLTokenizer(tokenizer_json(self._folder).decode(), n_vocab=self.size, eos_token=list(self.end_tokens))

    def compiled(self, grammar: str) -> LLMatcher:
        """A matcher at the grammar's beginning, kept for the requests that come with the same one: copy it, never advance it.

        A copy shares nothing that grows with use, so a grammar's limits do not depend on earlier requests. Raises as `tokenizer`.
        """
        if (found := self._compiled.pop(grammar, None)) is None:
            from llguidance import LLMatcher, LLParserLimits  # imported with the tokenizer

            # an error must not show the client's grammar
            limits = LLParserLimits(max_items_in_row=GRAMMAR_ROW_MAX, verbose_errors=False)
            found = LLMatcher(self.tokenizer, grammar, log_level=0, limits=limits)
        self._compiled[grammar] = found
        if len(self._compiled) > COMPILED_MAX:
            del self._compiled[next(iter(self._compiled))]
        return found

    @cached_property
    def everything(self) -> np.ndarray:
        """The mask that allows every token. Not to be written to."""
        return self.mask_of(range(self.size))

    def mask_of(self, tokens: Iterable[int] | slice) -> np.ndarray:
        """The mask that allows these tokens or this part of all: uint32[words], a bit each, the lowest of the first word first."""
        bits = np.zeros(32 * mask_words(self.size), dtype=np.uint8)
        bits[tokens if isinstance(tokens, slice) else list(tokens)] = 1
        return np.packbits(bits, bitorder="little").view(np.uint32)


def mask_words(size: int) -> int:
    return (size + 31) // 32


class TimeRules(NamedTuple):
    """The rules for times behind some tokens. `times`: as a Constraint has them; `bounds`: the last time and the first one that may
    come next; `last`: whether each of the last two tokens is a time, () before the first token."""

    times: tuple[int, ...]
    vocabulary: Vocabulary
    least: int = 0
    last: tuple[bool, ...] = ()

    def behind(self, token: int) -> TimeRules:
        """The rules behind one more token."""
        is_time = token >= self.times[0]
        return self._replace(least=token if is_time else self.least, last=(self.last or (True,))[-1:] + (is_time,))

    def allowed(self) -> np.ndarray:
        """The mask of what may come next. Not to be written to."""
        (first, latest), mask_of = self.times, self.vocabulary.mask_of
        if not self.last:
            return mask_of(slice(first, latest + 1))
        if self.last == (True, True):
            return mask_of(slice(first))
        is_end = self.last == (False, True)
        mask = mask_of(slice(self.least if is_end else self.least + 1, None))
        mask |= mask_of(self.vocabulary.end_tokens if is_end else slice(first))
        return mask


class Matcher:
    """The fold of one request's constraint. Mutable. `error` is a sentence once the grammar could not be followed."""

    def __init__(self, constraint: Constraint, vocabulary: Vocabulary, tokens: Sequence[int] = ()) -> None:
        """`tokens`: those of the answer so far."""
        self._constraint, self._vocabulary = constraint, vocabulary
        self._tail: tuple[int, ...] = ()
        self._recent: tuple[int, ...] = ()
        self._is_begun = False
        self._recent_max = max((len(sequence) - 1 for sequence in constraint.banned), default=0)
        self._listed = vocabulary.mask_of(constraint.allowed) if constraint.allowed else vocabulary.everything
        self._listed = self._listed & ~vocabulary.mask_of(each[0] for each in constraint.banned if len(each) == 1)
        self._sequences = [sequence for sequence in constraint.banned if len(sequence) > 1]
        self._has_lists = bool(constraint.allowed or constraint.banned or constraint.not_first or constraint.times)
        self._times = TimeRules(constraint.times, vocabulary) if constraint.times else None
        self._reasoned = 0
        self._grammar: LLMatcher | None = None
        self.error = ""
        self.is_reasoning = bool(constraint.reasoning_end) and not constraint.reasoning_begin
        self._opened = 0 if constraint.reasoning_begin else -1  # tokens of the opening mark so far, -1 once it is decided
        if not self.is_reasoning:
            self._begin_grammar()
        for token in (*constraint.begun, *tokens):
            self.take(token)

    def take(self, token: int) -> None:
        """The answer goes on with `token`."""
        self._is_begun = True
        if self._times is not None:
            self._times = self._times.behind(token)
        if self._recent_max:
            self._recent = (*self._recent, token)[-self._recent_max :]
        if self._opened >= 0:
            self._open(token)
        elif self.is_reasoning:
            self._reason(token)
        else:
            self._follow(token)

    def _follow(self, token: int) -> None:
        if self._grammar is not None and not self.error and not self._grammar.consume_token(token):
            self._fail(_WORK)

    def copy(self) -> Matcher:
        """A matcher at the same place. What it takes uses up nothing of this one's limits."""
        found = copy(self)
        found._grammar = None if self._grammar is None else self._grammar.deep_copy()
        return found

    def forced(self) -> list[int]:
        """The tokens that spell what the grammar forces next, as the tokenizer would cut it; another cut may be allowed too."""
        if (grammar := self.grammar) is None or self._opened >= 0:
            return []
        forced: list[int] = grammar.deep_copy().compute_ff_tokens()
        return forced

    def allowed(self) -> np.ndarray:
        """Which tokens may come next (bool[V])."""
        mask = np.empty_like(self._listed)
        self.fill(mask)
        return np.unpackbits(mask.view(np.uint8), count=self._vocabulary.size, bitorder="little").view(np.bool_)

    def fill(self, mask: np.ndarray) -> None:
        """Write which tokens may come next (uint32[words], as `Vocabulary.mask_of`)."""
        if (grammar := self.grammar) is not None:
            grammar.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
        self.complete(mask)

    @property
    def grammar(self) -> LLMatcher | None:
        """What computes the mask that `complete` takes; None where it takes any."""
        return None if self.error or self.is_reasoning else self._grammar

    def complete(self, mask: np.ndarray) -> None:
        """Turn the mask that `grammar` wrote into that of the next token, in place."""
        if (grammar := self.grammar) is None:
            mask[:] = self._without_grammar()
        elif grammar.is_error():
            self._fail(_WORK)
        if self._opened >= 0:
            mask |= self._vocabulary.mask_of(self._constraint.reasoning_begin[self._opened :][:1])
        if self._has_lists and not self.error:
            self._apply_lists(mask)
        if self.error:
            mask[:] = self._vocabulary.mask_of(self._vocabulary.end_tokens)

    def _apply_lists(self, mask: np.ndarray) -> None:
        mask &= self._listed
        for sequence in self._sequences:
            if self._ends_with(sequence[:-1]):
                mask[sequence[-1] // 32] &= ~np.uint32(1 << sequence[-1] % 32)
        if not self._is_begun:
            mask &= ~self._vocabulary.mask_of(self._constraint.not_first)
        if self._times is not None:
            mask &= self._times.allowed()
        if not mask.any():
            self._fail("no token is left that may come next")

    def _open(self, token: int) -> None:
        """Take a token while it is not decided whether the answer reasons."""
        begin = self._constraint.reasoning_begin
        if token != begin[self._opened]:
            self._opened = -1
            self._follow(token)
            return
        self._opened += 1
        if self._opened == len(begin):
            self._opened, self._reasoned, self.is_reasoning, self._grammar = -1, len(begin), True, None
        elif self._grammar is not None and not self._grammar.validate_tokens([token]):
            self._grammar = None  # only the mark can go on
        else:
            self._follow(token)

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
            self._grammar = self._vocabulary.compiled(self._constraint.grammar).deep_copy()
        except (OSError, ValueError) as error:
            if isinstance(error, OSError) and error.errno == errno.ENOMEM:  # the step's trouble, not the request's
                raise MemoryError(error.strerror) from error
            self._fail(f"the model's tokenizer cannot be read: {reason(error)}")
            return
        if self._grammar.is_error():
            self._fail("its grammar cannot be read here")

    def _fail(self, why: str) -> None:
        self.error = f"The answer cannot keep to its constraint: {why.partition(chr(10))[0]}."

    def _ends_with(self, tokens: tuple[int, ...]) -> bool:
        """Whether the answer so far does."""
        return self._recent[-len(tokens) :] == tokens

    def _without_grammar(self) -> np.ndarray:
        if self.is_reasoning:
            return self._while_reasoning()
        is_left = self._opened >= 0 and self._constraint.grammar  # by the tokens of the opening mark
        return self._vocabulary.mask_of(()) if is_left else self._vocabulary.everything

    def _while_reasoning(self) -> np.ndarray:
        end, limit, vocabulary = self._constraint.reasoning_end, self._constraint.reasoning_max, self._vocabulary
        if 0 <= limit <= self._reasoned:
            begun = next(size for size in range(len(end) - 1, -1, -1) if self._tail[len(self._tail) - size :] == end[:size])
            return vocabulary.mask_of(end[begun : begun + 1])
        if not self._constraint.grammar:
            return vocabulary.everything
        mask: np.ndarray = vocabulary.everything & ~vocabulary.mask_of(vocabulary.end_tokens) | vocabulary.mask_of(end)
        return mask
