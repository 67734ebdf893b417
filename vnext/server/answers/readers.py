"""Readers: turn a call's answers into a stream of events or into one whole response, for all APIs.

`Streamed` and `Whole` pass each delta to an API's ChoiceRenderer and send the result; `SingleReader` passes the parts of one
answer to an API whose streams show typed events. Also what a stream's ids say of the request that it began with, and whether a
client goes on with the same one. Views own the shapes; `streaming` owns the response.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

import msgspec
from aiohttp import web

from vnext.runtime.protocol.sampling_params import InvalidRequest
from vnext.server.answers.generation import Choice, Generation
from vnext.server.answers.resuming import Call, EventIds
from vnext.server.context.errors import OtherSystem
from vnext.server.context.server_context import SERVER_CONTEXT, tenant_of
from vnext.server.http.event_ids import CHOICES_MAX, HEADER, LastEvent, Origin, reads_ids
from vnext.server.http.streaming import DONE, Answering, Events, TextFrame, event_frame, frame_of, respond
from vnext.text.answer import Delta
from vnext.text.parts import Part, Words

TypedEvent = dict[str, Any]
SEEDS = 2**64
_encode = msgspec.json.Encoder().encode


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


def event_ids(
    request: web.Request, call: Call, generation: Generation, body: msgspec.Struct, by_token: bool = False
) -> EventIds | None:
    """Those of a stream; None where the client reads none, and where no server could go on, as where tokens depend on the batch.
    Raises InvalidRequest and OtherSystem where the client goes on with another stream."""
    context, last = request.app[SERVER_CONTEXT], call.last
    if last is None and not reads_ids(request.headers):
        return None
    is_invariant = context.client.ready.environment.get("batch_invariant", "yes").startswith("yes")
    if len(generation.choices) > CHOICES_MAX or not is_invariant:
        if last is not None:
            raise InvalidRequest(f"{HEADER}: this stream cannot be picked up again, leave the header out to begin anew.", HEADER)
        return None
    given = getattr(body, "seed", None)
    seed = call.seed if given is None else given % SEEDS
    origin = Origin(
        answer=call.id.partition("-")[2], created_s=call.created_s, seed=seed or 0, cached_tokens=0,
        fingerprint=int(context.fingerprint[3:], 16), digest=_digest(request, generation, body),
    )  # fmt: skip
    if last is not None:
        _check(origin, last, len(generation.choices))
    return EventIds(origin, generation.choices, last, by_token)


def _check(origin: Origin, last: LastEvent, count: int) -> None:
    if origin.fingerprint != last.origin.fingerprint:
        raise OtherSystem(
            f"{HEADER} is of a stream of the system {last.origin.system_fingerprint}, and this one is {origin.system_fingerprint}, "
            "whose text may differ: ask a server like the first, or leave the header out to begin anew."
        )
    if (origin.digest, origin.seed) != (last.origin.digest, last.origin.seed) or count != len(last.choices):
        sentence = f"{HEADER} is of a stream that began with another request: send that one's body and key again"
        raise InvalidRequest(f"{sentence}, or leave the header out to begin anew.", HEADER)


def _digest(request: web.Request, generation: Generation, body: msgspec.Struct) -> int:
    """Equal for the same body with the same key, as prompts and parameters that this server has made of it."""
    context = request.app[SERVER_CONTEXT]
    given = msgspec.structs.replace(body, seed=None) if hasattr(body, "seed") else body
    shown = generation.id.partition("-")[0], tenant_of(request).owner, generation.model
    parsers = type(context.dialect).__name__, context.marks and (context.marks.open, context.marks.close)
    found = hashlib.blake2b(_encode((given, shown, parsers)), digest_size=8)
    for part in generation.computed():
        found.update(part)
    return int.from_bytes(found.digest(), "big")
