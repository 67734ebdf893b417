"""Tool calls: separates the calls in an answer's text from the words around them, independent of token boundaries.

Owns the two formats in which models write calls, the choice of one from a chat template, and the text held back while it may
be a call. Loses nothing: text that looks like a call but is none stays text. The result does not depend on the pieces in
which the text came, so a stream and a whole answer are equal. Runs no tool and checks no argument.

    tagged   words <tool_call>{"name": ..., "arguments": {...}}</tool_call>      Qwen 2.5 and 3, Hermes, SmolLM 3
    bare     {"name": ..., "parameters": {...}} or a list of these, nothing else Llama 3.x, Mistral, Phi 4 mini
             (some of them write special tokens before it, which the text omits)
"""

from __future__ import annotations

import json
import re
from typing import Any, Literal

import msgspec

from vnext.text.reasoning import overlap

Form = Literal["tagged", "bare"]
OPEN, CLOSE = "<tool_call>", "</tool_call>"
CALLS_MAX = 128


class Call(msgspec.Struct, frozen=True):
    """A tool's name and its arguments as the text of a JSON object."""

    name: str
    arguments: str


Piece = str | Call


def form_of(template: str) -> Form | None:
    """The format of calls in a chat template; None where it knows no tools, or writes calls in an unsupported format."""
    if re.search(r"\btools\b", template) is None or "<function=" in template:
        return None
    return "tagged" if OPEN in template else "bare"


class CallScanner:
    """Searches one text for calls. Space between words and a call, and between calls, is not part of the words."""

    def __init__(self, form: Form) -> None:
        self._take = self._tagged if form == "tagged" else self._bare
        self._held = ""
        self._words_begun = False
        self._after_call = False

    def push(self, text: str) -> list[Piece]:
        """Take in `text`; returns the pieces that are certain by now."""
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
        certain = len(self._held) if ended else start if start >= 0 else len(self._held) - overlap(self._held, OPEN)
        words = self._held[:certain] if ended else self._held[:certain].rstrip()
        self._held = self._held[len(words) :]
        return pieces + self._words(words)

    def _words(self, text: str) -> list[Piece]:
        text = text.lstrip() if self._after_call else text
        self._after_call = self._after_call and not text
        return [text] if text else []

    def _bare(self, ended: bool) -> list[Piece]:
        """The pieces of a bare answer, which is all calls or all words: its first character shows whether it may be calls."""
        if not self._words_begun and self._held.lstrip()[:1] in ("", "{", "["):
            if not ended:
                return []
            if calls := read_calls(self._held):
                return [*calls]
        self._words_begun = True
        words, self._held = self._held, ""
        return [words] if words else []


def read_calls(text: str) -> list[Call]:
    """The calls in a text that is one JSON object, a list of them, or several with semicolons or nothing in between.

    [] for any other text.
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
    """A call from its JSON object. Llama names the arguments "parameters"; some models encode the object once more as text."""
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
