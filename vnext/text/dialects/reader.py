"""Reader: the text of an answer as a parser takes it in, and the parts made of it.

A parser is a generator over a Reader: it yields where it needs more text, so that it reads as if the whole text were there and
its parts do not depend on how the text is cut. `text[begin:place]` has been read and is not yet part of anything: a call
that proves to be none raises NoCall, and this text becomes words. Reading never goes back, so its time is linear.
"""

from __future__ import annotations

import re
from collections.abc import Generator, Iterable
from typing import TypeVar

from vnext.text.parts import SHARE_LOOKED_AT, CallArguments, CallBegun, CallEnded, Part, Reasoning, Words

T = TypeVar("T")
Reading = Generator[None, None, T]
SPACE = re.compile(r"\s*")


class NoCall(Exception):
    """The text since `begin` is no call, or no longer one."""


class Reader:
    """See the module."""

    def __init__(self) -> None:
        self.text = ""
        self.begin = self.place = 0
        self.ended = False
        self.call_count = 0
        self._parts: list[Part] = []
        self._waiting: list[str] = []
        self._waiting_size = 0

    def add(self, text: str, ended: bool) -> bool:
        """Take in text; returns whether a parser should look at it now."""
        self._waiting.append(text)
        self._waiting_size += len(text)
        self.ended = ended
        if not ended and self._waiting_size * SHARE_LOOKED_AT < len(self.text) - self.begin:
            return False
        self.text = self.text[self.begin :] + "".join(self._waiting)
        self.place -= self.begin
        self.begin = self._waiting_size = 0
        self._waiting = []
        return True

    def take_parts(self) -> list[Part]:
        """The parts since the last time."""
        parts, self._parts = self._parts, []
        return parts

    # ---- reading ---------------------------------------------------------------------------------------------

    def more(self) -> Reading[bool]:
        """Wait for text beyond `place`; False where there is none."""
        while self.place >= len(self.text) and not self.ended:
            yield
        return self.place < len(self.text)

    def skip(self, pattern: re.Pattern[str] = SPACE) -> Reading[None]:
        """Read on over a run of characters."""
        while (yield from self.more()):
            found = pattern.match(self.text, self.place)
            end = self.place if found is None else found.end()
            if end == self.place:
                return
            self.place = end

    def next_is(self, mark: str) -> Reading[bool]:
        """Whether `mark` follows; reads nothing."""
        while True:
            if self.text.startswith(mark, self.place):
                return True
            if self.ended or not mark.startswith(self.text[self.place : self.place + len(mark)]):
                return False
            yield

    def take(self, *marks: str) -> Reading[str | None]:
        """Read the first of the marks that follows; None where none does."""
        for mark in marks:
            if (yield from self.next_is(mark)):
                self.place += len(mark)
                return mark
        return None

    def expect(self, *marks: str) -> Reading[str]:
        """The same. Raises NoCall where none does."""
        found = yield from self.take(*marks)
        if found is None:
            raise NoCall
        return found

    def until(self, *marks: str, size_max: int = 0) -> Reading[str]:
        """Read up to the first of the marks and over it; returns the text before it. Raises NoCall at the text's end, and where
        that text is longer than `size_max`, if given."""
        size, looked = max(map(len, marks)), 0  # counted from `begin`, because `add` moves both
        start = self.place - self.begin
        while True:
            found = _first(self.text, marks, self.begin + max(start, looked))
            read = self.text[self.begin + start : len(self.text) if found is None else found[0]]
            if size_max and len(read) > size_max + (size if found is None else 0):
                self.place = self.begin + start
                raise NoCall
            if found is not None:
                self.place = found[0] + len(found[1])
                return read
            self.place = len(self.text)
            if self.ended:
                raise NoCall
            looked = self.place - self.begin - size + 1
            yield

    # ---- parts -----------------------------------------------------------------------------------------------

    def drop(self) -> None:
        """What has been read is no part of the answer."""
        self.begin = self.place

    def words(self) -> None:
        """What has been read is words."""
        self._give(Words(self.text[self.begin : self.place]))
        self.drop()

    def begin_call(self, name: str, id_: str = "") -> None:
        self._parts.append(CallBegun(self.call_count, name, id_))
        self.call_count += 1
        self.drop()

    def arguments(self, text: str) -> None:
        """A piece of the last call's arguments, made of what has been read."""
        self._give(CallArguments(self.call_count - 1, text))
        self.drop()

    def end_call(self) -> None:
        self._parts.append(CallEnded(self.call_count - 1))
        self.drop()

    def _give(self, part: Words | Reasoning | CallArguments) -> None:
        if part.text:
            self._parts.append(part)

    def reasoning_until(self, marks: Iterable[str]) -> Reading[str | None]:
        """What follows is reasoning, up to and without the first of the marks, which is read and returned."""
        return (yield from self._flow(Reasoning, tuple(marks), "\n"))

    def words_until(self, marks: Iterable[str]) -> Reading[str | None]:
        """What follows is words, up to the first of the marks, which is read and not yet part of anything, as is the space
        before it. None at the text's end."""
        return (yield from self._flow(Words, tuple(marks), None))

    def _flow(self, kind: type[Words] | type[Reasoning], marks: tuple[str, ...], space: str | None) -> Reading[str | None]:
        while True:
            found = _first(self.text, marks, self.begin)
            certain = found[0] if found else len(self.text) if self.ended else _certain(self.text, marks, self.begin)
            shown = self.text[self.begin : certain]
            is_last = found is None and self.ended
            shown = shown if is_last and kind is Words else shown.rstrip(space)
            self._give(kind(shown))
            self.begin += len(shown)
            self.place = certain if found is None else certain + len(found[1])
            if found is not None:
                return found[1]
            if is_last:
                self.drop()
                return None
            yield


def _first(text: str, marks: tuple[str, ...], start: int) -> tuple[int, str] | None:
    """The place of the first mark, and the mark."""
    return min(((place, mark) for mark in marks if (place := text.find(mark, start)) >= 0), default=None)


def _certain(text: str, marks: tuple[str, ...], start: int) -> int:
    """Where the part of the text ends that begins no mark."""
    start = max(start, len(text) - max(map(len, marks), default=1))
    return next((place for place in range(start, len(text)) if any(mark.startswith(text[place:]) for mark in marks)), len(text))
