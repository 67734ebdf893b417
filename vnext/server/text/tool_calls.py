"""Tool calls in an answer's text: told apart from the words around them, wherever the tokens' borders lie.

Owns the two ways in which models write calls, which one a chat template teaches, and the text held back while it may be
a call. Nothing is lost: what looks like a call and is none is text again. The result does not depend on the pieces in
which the text came, so a stream and a whole answer say the same. Runs no tool and checks no argument.

    tagged   words <tool_call>{"name": ..., "arguments": {...}}</tool_call>      Qwen 2.5 and 3, Hermes, SmolLM 3
    bare     {"name": ..., "parameters": {...}} or a list of such, all of it     Llama 3.x, Mistral, Phi 4 mini
             (what some of them write before it are special tokens, which the text leaves out)
"""

from __future__ import annotations

import json
import re
from typing import Any, Literal

import msgspec

Form = Literal["tagged", "bare"]
OPEN, CLOSE = "<tool_call>", "</tool_call>"
CALLS_MAX = 128


class Call(msgspec.Struct, frozen=True):
    """A tool's name and its arguments as the text of a JSON object."""

    name: str
    arguments: str


Piece = str | Call


def form_of(template: str) -> Form | None:
    """The form that a chat template teaches; None where it knows no tools, or writes calls in a form that is not read."""
    if re.search(r"\btools\b", template) is None or "<function=" in template:
        return None
    return "tagged" if OPEN in template else "bare"


class CallScanner:
    """Looks for calls in one text. Space between words and a call, and between calls, is no part of the words."""

    def __init__(self, form: Form) -> None:
        self._take = self._tagged if form == "tagged" else self._bare
        self._held = ""
        self._words_begun = False
        self._after_call = False

    def push(self, text: str) -> list[Piece]:
        """What is certain after `text` came."""
        self._held += text
        return self._take(False)

    def finish(self) -> list[Piece]:
        """The rest: the text has ended."""
        return self._take(True)

    def _tagged(self, ended: bool) -> list[Piece]:
        pieces: list[Piece] = []
        while (start := self._held.find(OPEN)) >= 0:
            stop = self._held.find(CLOSE, start)
            if stop < 0 and not ended:
                break
            end = len(self._held) if stop < 0 else stop + len(CLOSE)
            calls = read_calls(self._held[start + len(OPEN) : end].removesuffix(CLOSE))
            pieces += self._words(self._held[:start].rstrip() if calls else self._held[:end])
            self._after_call = self._after_call or bool(calls)
            pieces += calls
            self._held = self._held[end:]
        certain = len(self._held) if ended else start if start >= 0 else len(self._held) - _overlap(self._held, OPEN)
        words = self._held[:certain] if ended else self._held[:certain].rstrip()
        self._held = self._held[len(words) :]
        return pieces + self._words(words)

    def _words(self, text: str) -> list[Piece]:
        text = text.lstrip() if self._after_call else text
        self._after_call = self._after_call and not text
        return [text] if text else []

    def _bare(self, ended: bool) -> list[Piece]:
        """An answer is calls as a whole, or words as a whole: its first character says which it may be."""
        if not self._words_begun and self._held.lstrip()[:1] in ("", "{", "["):
            if not ended:
                return []
            if calls := read_calls(self._held):
                return [*calls]
        self._words_begun = True
        words, self._held = self._held, ""
        return [words] if words else []


def read_calls(text: str) -> list[Call]:
    """The calls that a text is: one JSON object, a list of them, or several with semicolons or nothing between.

    [] where it is anything else.
    """
    decoder, found, place = json.JSONDecoder(), [], _skip(text, 0)
    try:
        while place < len(text):
            value, place = decoder.raw_decode(text, place)
            place = _skip(text, place)
            found += [_call(each) for each in (value if isinstance(value, list) else [value])]
    except (ValueError, RecursionError):
        return []
    calls = [call for call in found if call is not None]
    return calls if len(calls) == len(found) <= CALLS_MAX else []


def _skip(text: str, place: int) -> int:
    while place < len(text) and text[place] in " \t\r\n;":
        place += 1
    return place


def _call(value: Any) -> Call | None:
    """Llama calls arguments parameters; some models write the object once more as a text."""
    if not isinstance(value, dict) or not isinstance(value.get("name"), str) or not value["name"]:
        return None
    arguments = value.get("arguments", value.get("parameters", {}))
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError):
            return None
    if not isinstance(arguments, dict):
        return None
    return Call(value["name"], json.dumps(arguments, ensure_ascii=False))


def _overlap(text: str, mark: str) -> int:
    """The longest end of the text that begins the mark."""
    return next((size for size in range(min(len(text), len(mark) - 1), 0, -1) if text.endswith(mark[:size])), 0)
