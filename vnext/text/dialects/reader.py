"""Reader: the text of an answer as a parser takes it in, and the parts made of it.

A parser is a generator over a Reader: it yields where it needs more text, so that it reads as if the whole text were there and
its parts do not depend on how the text is cut. `text[begin:place]` has been read and is not yet part of anything: a call
that proves to be none raises NoCall, and this text becomes words. Reading never goes back, so its time is linear.

A stream gives out a call's arguments as they come. A reader that `holds` gives out a call once it is complete, so that one
that proves to be none after its beginning becomes words as a whole.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator, Iterable
from typing import TypeVar

from vnext.text.parts import SHARE_LOOKED_AT, CallArguments, CallBegun, CallEnded, Part, Reasoning, Words

T = TypeVar("T")
Reading = Generator[None, None, T]
Take = Callable[[str], None]
SPACE = re.compile(r"\s*")


class NoCall(Exception):
    """The text since `begin` is no call, or no longer one."""


class Reader:
    """See the module."""

    def __init__(self, holds: bool = False) -> None:
        self.text = ""
        self.begin = self.place = 0
        self.ended = self.is_cut = False
        self.call_count = 0
        self._holds = holds
        self._held: list[Part] = []  # the parts of a call that is held back
        self._is_calling = self._is_starved = False
        self._parts: list[Part] = []
        self._waiting: list[str] = []
        self._waiting_size = 0
        self._received = 0  # characters, up to the end of `text`

    def add(self, text: str, ended: bool) -> bool:
        """Take in text; returns whether a parser should look at it now."""
        self._waiting.append(text)
        self._waiting_size += len(text)
        self.ended = ended
        if not ended and self._waiting_size * SHARE_LOOKED_AT < len(self.text) - self.begin:
            return False
        self.text = self.text[self.begin :] + "".join(self._waiting)
        self._received += self._waiting_size
        self.place -= self.begin
        self.begin = self._waiting_size = 0
        self._waiting = []
        return True

    def starve(self) -> None:
        """Note that the text has ended where more of it could still have been read."""
        self._is_starved = True

    def take_parts(self) -> list[Part]:
        """The parts since the last time."""
        parts, self._parts = self._parts, []
        return parts

    # ---- reading ---------------------------------------------------------------------------------------------

    def more(self) -> Reading[bool]:
        """Wait for text beyond `place`; False where there is none."""
        while self.place >= len(self.text) and not self.ended:
            yield
        self._is_starved |= self.place >= len(self.text)
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
            if not mark.startswith(self.text[self.place : self.place + len(mark)]):
                return False
            if self.ended:
                self.starve()
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

    def close(self, *marks: str, besides: str = "") -> Reading[bool]:
        """Read one of the marks that end a call, if it follows. What an answer was cut within counts, unless it may also begin
        the mark `besides`."""
        if (yield from self.take(*marks)):
            return True
        rest = self.text[self.place :]
        if not self.ended or not rest or besides.startswith(rest) or not any(mark.startswith(rest) for mark in marks):
            return False
        self.place = len(self.text)
        return True

    def skip_cut(self, marks: tuple[str, ...]) -> Reading[None]:
        """Drop what follows where it is the beginning of a mark within which the answer was cut."""
        for mark in marks:
            if (yield from self.next_is(mark)):
                return
        rest = self.text[self.place :]
        if self.is_cut and rest and any(mark.startswith(rest) for mark in marks):
            self.place = len(self.text)
            self.drop()

    def run(self, pattern: re.Pattern[str], size_max: int) -> Reading[str]:
        """The run of characters that follows; reads nothing. It may be longer than `size_max`, where it goes on."""
        while True:
            found = pattern.match(self.text, self.place)
            size = 0 if found is None else len(found[0])
            if self.place + size < len(self.text) or size > size_max or self.ended:
                self._is_starved |= self.place + size == len(self.text)
                return self.text[self.place : self.place + size]
            yield

    def ends_with(self, *marks: str) -> Reading[bool]:
        """Whether one of the marks follows, or its beginning where the text ends, after space; reads nothing."""
        offset = self.place - self.begin
        yield from self.skip()
        found = False
        for mark in marks:
            found = found or (yield from self.next_is(mark)) or (self.ended and mark.startswith(self.text[self.place :]))
        self.place = self.begin + offset
        return found

    def until(self, *marks: str, size_max: int = 0) -> Reading[str]:
        """As `until_one`, without the mark."""
        return (yield from self.until_one(*marks, size_max=size_max))[0]

    def until_one(self, *marks: str, size_max: int = 0) -> Reading[tuple[str, str]]:
        """Read up to the first of the marks and over it; returns the text before it, and the mark. Raises NoCall at the text's
        end, and where that text is longer than `size_max`, if given."""
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
                return read, found[1]
            self.place = len(self.text)
            if self.ended:
                self.starve()
                raise NoCall
            looked = self.place - self.begin - size + 1
            yield

    # ---- parts -----------------------------------------------------------------------------------------------

    def drop(self) -> None:
        """What has been read is no part of the answer. Of a call that is held back, nothing is dropped yet."""
        if not (self._holds and self._is_calling):
            self.begin = self.place

    def words(self) -> None:
        """What has been read is words."""
        self._give_words(self.text[self.begin : self.place])
        self.drop()

    def begin_call(self, name: str, id_: str = "") -> None:
        self._is_calling = True
        self._give_of_call(CallBegun(self.call_count, name, id_))
        self.call_count += 1
        self.drop()

    def arguments(self, text: str) -> None:
        """A piece of the last call's arguments, made of what has been read."""
        if text:
            self._give_of_call(CallArguments(self.call_count - 1, text))
        self.drop()

    def end_call(self) -> None:
        self._give_of_call(CallEnded(self.call_count - 1))
        self._end_call()
        self.drop()

    def break_off(self) -> None:
        """What has been read since `begin` is no call, or no longer one: it is words, with the whole of a call that is held back.
        The rest of a call that the text's end cuts off is no words."""
        if self._is_starved and (self.is_cut and self.call_count if not self._is_calling else self.is_cut or not self._holds):
            self._end_call()
            self.place = len(self.text)
            self.drop()
            return
        if self._held:
            self.call_count -= 1
            self._held = []
        self._end_call()
        self.words()

    def _end_call(self) -> None:
        self._parts += self._held
        self._held, self._is_calling = [], False

    def _give_of_call(self, part: Part) -> None:
        (self._held if self._holds else self._parts).append(part)

    def _give_words(self, text: str) -> None:
        """What begins at `begin`."""
        if text:
            self._parts.append(Words(text, self._received - len(self.text) + self.begin))

    def _give_reasoning(self, text: str) -> None:
        if text:
            self._parts.append(Reasoning(text))

    def reasoning_until(self, marks: Iterable[str]) -> Reading[str | None]:
        """What follows is reasoning, up to and without the first of the marks, which is read and returned."""
        return (yield from self._flow(self._give_reasoning, tuple(marks), "\n"))

    def words_until(self, marks: Iterable[str]) -> Reading[str | None]:
        """What follows is words, up to the first of the marks, which is read and not yet part of anything, as is the space
        before it. None at the text's end."""
        return (yield from self._flow(self._give_words, tuple(marks), None))

    def _flow(self, give: Take, marks: tuple[str, ...], space: str | None) -> Reading[str | None]:
        """`space`: what is stripped before a mark, and of reasoning also at the text's end."""
        while True:
            found = _first(self.text, marks, self.begin)
            certain = found[0] if found else len(self.text) if self.ended else _certain(self.text, marks, self.begin)
            shown = self.text[self.begin : certain]
            is_last = found is None and self.ended
            shown = shown if is_last and space is None else shown.rstrip(space)
            give(shown)
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


def whole(text: str, read: Callable[[Reader, Take], Reading[None]]) -> str | None:
    """What `read` makes of a text that is all there; None unless it reads the whole of it."""
    reader, made = Reader(), list[str]()
    reader.add(text, True)
    try:
        for _ in read(reader, made.append):
            pass
    except NoCall:
        return None
    return "".join(made) if not text[reader.place :].strip() else None
