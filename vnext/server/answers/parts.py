"""Answer parts: one answer as parts (vnext/text/parts.py), for every API that shows reasoning and calls.

Owns the answer's parser, the ids of calls whose model writes none, what a request hides (calls after the first, reasoning),
and the number of reasoning tokens. Knows no API: chat, responses and messages render what `push` returns.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import msgspec

from vnext.text.answer import Delta
from vnext.text.parts import CallArguments, CallBegun, CallEnded, Part, Reasoning, Words
from vnext.text.reasoning import Parser, ReasoningParser

ID_CHARACTERS = 9  # Mistral's templates require nine; others accept any number


class AnswerParts:
    """One answer. `one_call` passes on the first call only; without `shows_reasoning` reasoning is left out. `only_calls`: the
    answer is forced to be calls, so that words at its end are the beginning of one that was cut, and are left out.

    `reasoning_tokens` are the tokens between the marks around reasoning.
    """

    def __init__(
        self,
        parser: Parser | None,
        *,
        name: str = "",
        one_call: bool = False,
        only_calls: bool = False,
        shows_reasoning: bool = True,
        marks: tuple[Sequence[int], Sequence[int]] | None = None,
    ) -> None:
        """`marks` are the tokens of the marks around reasoning, where the model reasons. The ids of calls follow from `name`, so
        that they are the same when the answer is computed again."""
        self._parser, self._name = parser, name
        self._thought = None if marks is None else ThoughtCount(*map(list, marks))
        self._one_call, self._only_calls = one_call, only_calls
        self._shows_reasoning = shows_reasoning
        self._begun_count = self._ended_count = self._shown_length = 0

    @property
    def has_called(self) -> bool:
        """Whether the answer has calls so far, and none that broke off."""
        return 0 < self._begun_count == self._ended_count

    @property
    def is_plain(self) -> bool:
        """Whether the rest of the answer is words that need no parser: a reader may take them token by token (`Choice.plain`)
        without `push`."""
        return self._parser is None or (isinstance(self._parser, ReasoningParser) and self._parser.is_plain)

    @property
    def is_parsed(self) -> bool:
        """Whether its words may be less than its text."""
        return self._parser is not None

    @property
    def reasoning_tokens(self) -> int:
        return self._thought.count if self._thought else 0

    def push(self, delta: Delta) -> list[Part]:
        """The parts that a delta completes. Neighbours of one kind are joined."""
        if self._parser is None:
            start, self._shown_length = self._shown_length, self._shown_length + len(delta.text)
            return [Words(delta.text, start)] if delta.text else []
        parts = self._parser.push(delta.text) if delta.text else []
        if delta.finish:
            rest = self._parser.finish(delta.finish == "length")
            parts = parts + [part for part in rest if not (self._only_calls and isinstance(part, Words))]
        if self._thought:
            is_over = isinstance(self._parser, ReasoningParser) and self._parser.is_over
            self._thought.push(delta.token_ids, any(isinstance(part, Reasoning) for part in parts), is_over)
        return joined([shown for part in parts if (shown := self._shown(part))])

    def _shown(self, part: Part) -> Part | None:
        if isinstance(part, Words):
            return part
        if isinstance(part, Reasoning):
            return part if self._shows_reasoning else None
        if self._one_call and part.index > 0:
            return None
        self._ended_count += isinstance(part, CallEnded)
        if not isinstance(part, CallBegun):
            return part
        self._begun_count += 1
        id_ = hashlib.blake2b(f"{self._name}-{self._begun_count}".encode()).hexdigest()[:ID_CHARACTERS]
        return part if part.id else msgspec.structs.replace(part, id=id_)


class ThoughtCount:
    """Counts the tokens between the marks. An answer without reasoning has none."""

    def __init__(self, opening: list[int], closing: list[int]) -> None:
        self._open, self._close = opening, closing
        self._tokens: list[int] = []
        self._is_thought = self._is_over = False

    @property
    def count(self) -> int:
        begun = self._tokens[: len(self._open)] == self._open
        return len(self._tokens) - begun * len(self._open) if self._is_thought else 0

    def push(self, tokens: Sequence[int], is_thought: bool, is_over: bool) -> None:
        """Take in tokens; `is_thought`: their text has reasoning, `is_over`: and its end."""
        self._is_thought = self._is_thought or is_thought
        if self._is_over:
            return
        start = max(0, len(self._tokens) - len(self._close))
        self._tokens += tokens
        for place in range(start, len(self._tokens) - len(self._close) + 1):
            if self._tokens[place : place + len(self._close)] == self._close:
                is_over = True
                del self._tokens[place:]
                break
        self._is_over = is_over


def _joins(last: Part | None, part: Part) -> bool:
    """Whether a text goes on with the next part. Words with something left out between them stay apart."""
    if isinstance(part, Words):
        return isinstance(last, Words) and last.start + len(last.text) == part.start
    return type(last) is type(part) and getattr(last, "index", None) == getattr(part, "index", None)


def joined(parts: Sequence[Part]) -> list[Part]:
    """The parts with neighbouring texts of one kind joined, and without empty ones."""
    found: list[Part] = []
    for part in parts:
        if isinstance(part, (Words, Reasoning, CallArguments)):
            last = found[-1] if found else None
            if not part.text:
                continue
            if isinstance(last, (Words, Reasoning, CallArguments)) and _joins(last, part):
                found[-1] = msgspec.structs.replace(last, text=last.text + part.text)
                continue
        found.append(part)
    return found
