"""Answer parts: one answer as parts (vnext/text/parts.py), for every API that shows reasoning and calls.

Owns the answer's parser, the ids of calls whose model writes none, what a request hides (calls after the first, reasoning),
and the reason of an answer's end. Knows no API: chat, responses and messages render what `push` returns.
"""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from typing import Protocol

import msgspec

from vnext.text.answer import Delta
from vnext.text.parts import CallArguments, CallBegun, CallEnded, Part, Reasoning, Words
from vnext.text.tool_calls import Call, CallScanner, Form

ID_CHARACTERS = 9  # Mistral's templates require nine; others accept any number


class Parser(Protocol):
    """A dialect's parser of one answer."""

    def push(self, text: str) -> list[Part]:
        """Take in a text; returns the parts that are certain by now."""

    def finish(self) -> list[Part]:
        """The rest: the text has ended."""


class AnswerParts:
    """One answer. `one_call` passes on the first call only; without `shows_reasoning` reasoning is left out.

    `call_count` counts the calls so far. `is_plain`: the rest of the answer is words that need no parser, so that a reader may
    take them token by token (`Choice.plain`) without `push`.
    """

    def __init__(self, parser: Parser | None, *, one_call: bool = False, shows_reasoning: bool = True) -> None:
        self._parser = parser
        self._one_call = one_call
        self._shows_reasoning = shows_reasoning
        self.call_count = 0

    @property
    def is_plain(self) -> bool:
        return self._parser is None

    def push(self, delta: Delta) -> list[Part]:
        """The parts that a delta completes. Neighbours of one kind are joined."""
        if self._parser is None:
            return [Words(delta.text)] if delta.text else []
        parts = self._parser.push(delta.text) if delta.text else []
        if delta.finish:
            parts = parts + self._parser.finish()
        return joined([shown for part in parts if (shown := self._shown(part))])

    def _shown(self, part: Part) -> Part | None:
        if isinstance(part, Words):
            return part
        if isinstance(part, Reasoning):
            return part if self._shows_reasoning else None
        if self._one_call and part.index > 0:
            return None
        if not isinstance(part, CallBegun):
            return part
        self.call_count += 1
        return part if part.id else msgspec.structs.replace(part, id=uuid.uuid4().hex[:ID_CHARACTERS])


def joined(parts: Sequence[Part]) -> list[Part]:
    """The parts with neighbouring texts of one kind joined, and without empty ones."""
    found: list[Part] = []
    for part in parts:
        if isinstance(part, (Words, Reasoning, CallArguments)):
            last = found[-1] if found else None
            if not part.text:
                continue
            if type(last) is type(part) and getattr(last, "index", None) == getattr(part, "index", None):
                found[-1] = msgspec.structs.replace(part, text=last.text + part.text)
                continue
        found.append(part)
    return found


class ScannedCalls:
    """A Parser of the two formats that CallScanner reads."""

    def __init__(self, form: Form) -> None:
        self._scanner = CallScanner(form)
        self._count = 0

    def push(self, text: str) -> list[Part]:
        return self._parts(self._scanner.push(text))

    def finish(self) -> list[Part]:
        return self._parts(self._scanner.finish())

    def _parts(self, pieces: Sequence[str | Call]) -> list[Part]:
        parts: list[Part] = []
        for piece in pieces:
            if isinstance(piece, str):
                parts.append(Words(piece))
                continue
            index, self._count = self._count, self._count + 1
            parts += [CallBegun(index, piece.name), CallArguments(index, piece.arguments), CallEnded(index)]
        return parts
