"""Readers: turn a call's answers into a stream of events or into one whole response, for both APIs.

Pass each delta to the API's ChoiceRenderer and send the result. Views own the shapes; `streaming` owns the response.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from aiohttp import web

from vnext.server.answers.generation import Choice
from vnext.server.answers.resuming import EventIds
from vnext.server.http.streaming import DONE, Answering, Events, TextFrame, frame_of, respond
from vnext.text.answer import Delta


class ChoiceRenderer(Protocol):
    """One choice in an API's shape."""

    @property
    def is_plain(self) -> bool:
        """Whether, from now on, the renderer shows nothing but the text of a token in the middle of an answer."""

    def push(self, delta: Delta) -> None:
        """Take in a delta."""

    def add(self, text: str) -> None:
        """Take in a plain answer's text."""

    def take(self) -> list[dict[str, Any]]:
        """The choices that have not been shown yet, one per chunk."""

    def text_choice(self, text: str) -> dict[str, Any]:
        """A stream's choice with `text`, in the middle of a plain answer."""


class Streamed:
    """A generation.Reader that sends each delta as an event. `chunk_of` puts choices into a chunk. `ids`: None for none."""

    def __init__(
        self,
        events: Events,
        renderers: Sequence[ChoiceRenderer],
        chunk_of: Callable[[list[dict[str, Any]]], dict[str, Any]],
        ids: EventIds | None = None,
    ) -> None:
        self._ids = ids
        self._events, self._renderers, self._chunk_of = events, renderers, chunk_of
        self._frames: dict[int, TextFrame] = {}
        self._open = len(renderers)
        self.room = events.room

    def delta(self, choice: Choice, delta: Delta) -> bool:
        renderer = self._renderers[choice.index]
        renderer.push(delta)
        shown = renderer.take()
        frames = [frame_of(self._chunk_of([each])) for each in shown]
        if self._ids is not None:
            begin = delta.token_count - len(delta.token_ids)
            frames = self._ids.of_delta(choice.index, begin, delta.token_count, bool(delta.finish), frames)
        if delta.finish:
            self._open -= 1
            return self._events.send(*frames) if self._open else self._events.send_with_end(*frames)
        if not frames:
            return True
        choice.plain = renderer.is_plain and not choice.answer.is_scanned
        return self._events.send(*frames)

    def text(self, choice: Choice, text: str) -> bool:
        if not text:
            return True
        frame, ids = self._frames.get(choice.index) or self._frame(choice.index), self._ids
        if ids is None:
            return self._events.send(frame.of(text))
        count = choice.answer.token_count
        if ids.is_single:
            return self._events.send(frame.numbered(text, count))
        return self._events.send(*ids.of_delta(choice.index, count - 1, count, False, [frame.of(text)]))

    def _frame(self, index: int) -> TextFrame:
        renderer, request = self._renderers[index], b"" if self._ids is None else self._ids.request
        frame = self._frames[index] = TextFrame(lambda text: self._chunk_of([renderer.text_choice(text)]), request)
        return frame


class Whole:
    """A generation.Reader that keeps everything until the end."""

    def __init__(self, choices: Sequence[Choice], renderers: Sequence[ChoiceRenderer]) -> None:
        self._renderers = renderers
        for choice, renderer in zip(choices, renderers):
            choice.plain = renderer.is_plain and not choice.answer.is_scanned

    def delta(self, choice: Choice, delta: Delta) -> bool:
        renderer = self._renderers[choice.index]
        renderer.push(delta)
        choice.plain = renderer.is_plain and not delta.finish and not choice.answer.is_scanned
        return True

    def text(self, choice: Choice, text: str) -> bool:
        self._renderers[choice.index].add(text)
        return True

    async def room(self) -> None:
        """Return at once: there is always room."""


def closing(ids: EventIds | None, event: bytes) -> list[bytes]:
    """An event behind the ends of all choices, as far as the client lacks it."""
    return [event] if ids is None else ids.closing(event)


async def streamed(request: web.Request, answering: Answering, ids: EventIds | None, has_usage: bool) -> web.StreamResponse:
    """`respond` with a stream that ends with [DONE]; `has_usage`: and an event before it. A client that has all of it already gets
    the status 204, by which it knows that nothing follows."""
    if ids is None:
        return await respond(request, answering)
    if ids.has_all(has_usage + 1):
        return web.Response(status=204)
    if ids.has_all(has_usage):
        answering = _nothing
    return await respond(request, answering, lambda: b"".join(ids.closing(DONE, has_usage)))


async def _nothing(events: Events) -> None:
    """Send nothing."""
