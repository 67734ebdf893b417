"""Single answer: a Reader for APIs whose streams show one answer as typed events.

Passes the answer's parts to a Builder and sends the events that it makes, or drops them for a whole answer.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Protocol

from vnext.server.answers.generation import Choice
from vnext.server.answers.resuming import EventIds
from vnext.server.http.streaming import Events, event_frame
from vnext.text.answer import Delta
from vnext.text.parts import Part, Words

TypedEvent = dict[str, Any]


class Builder(Protocol):
    """One answer in an API's shape."""

    def begin(self) -> Iterable[TypedEvent]:
        """The events before the first part."""

    def part(self, part: Part) -> Iterable[TypedEvent]:
        """The events of a part."""

    def end(self, finish: str, stop_reason: str | int | None) -> Iterable[TypedEvent]:
        """The events after the last part. `finish` is "stop" or "length"."""


class Parts(Protocol):
    """What turns deltas into parts: AnswerParts, or what stands before it."""

    @property
    def is_plain(self) -> bool: ...

    def push(self, delta: Delta) -> list[Part]: ...


class SingleReader:
    """A generation.Reader of a call with one answer. Without `events` it sends nothing. `ids`: None for none."""

    def __init__(self, answer: Parts, builder: Builder, events: Events | None, ids: EventIds | None = None) -> None:
        self._answer, self._builder, self._events, self._ids = answer, builder, events, ids
        self._has_begun = False

    def delta(self, choice: Choice, delta: Delta) -> bool:
        made: list[TypedEvent] = []
        if not self._has_begun:
            self._has_begun = True
            made += self._builder.begin()
        for part in self._answer.push(delta):
            made += self._builder.part(part)
        if delta.finish:
            made += self._builder.end(delta.finish, delta.stop_reason)
        choice.plain = self._answer.is_plain and not delta.finish and not choice.answer.is_scanned
        return self._send(made, delta.token_count - len(delta.token_ids), delta.token_count, is_last=bool(delta.finish))

    def text(self, choice: Choice, text: str) -> bool:
        count = choice.answer.token_count
        return self._send(self._builder.part(Words(text)), count - 1, count) if text else True

    async def room(self) -> None:
        if self._events is not None:
            await self._events.room()

    def _send(self, made: Iterable[TypedEvent], begin: int, end: int, is_last: bool = False) -> bool:
        """Send the events of the tokens from `begin` to `end`."""
        if self._events is None:
            return True
        frames = [event_frame(event) for event in made]
        if self._ids is not None:
            frames = self._ids.of_delta(0, begin, end, is_last, frames)
        if is_last:
            return self._events.send_with_end(*frames)
        return self._events.send(*frames) if frames else True
