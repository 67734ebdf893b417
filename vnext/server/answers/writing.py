"""Writing: a call's answers as a stream of events or as one whole response, for all APIs.

`ChunkWriter` shows the choices of OpenAI's two older APIs, each by a ChoiceRenderer, as chunks or whole; `EventWriter` those of
APIs whose streams show one answer as typed events. Also what a stream's ids say of the request that it began with, and
whether a client goes on with the same one. Views own the shapes; `streaming` owns the response.
"""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, Protocol

import msgspec
from aiohttp import web

from vnext.runtime.protocol.sampling_params import InvalidRequest
from vnext.server.answers.generation import Choice, Generation
from vnext.server.answers.resuming import EventIds
from vnext.server.context.errors import Failure, OtherSystem
from vnext.server.context.server_context import tenant_of
from vnext.server.http.event_ids import CHOICES_MAX, HEADER, LastEvent, Origin
from vnext.server.http.streaming import DONE, SSE, Events, TextFrame, event_frame, frame_of, respond, unhurried
from vnext.text.answer import Delta
from vnext.text.parts import Part, Words

Json = dict[str, Any]
"""An object of an answer, or an event."""
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

    def take(self) -> list[Json]:
        """The choices that have not been shown yet, one per chunk."""

    def text_choice(self, text: str) -> Json:
        """A stream's choice with `text`, in the middle of a plain answer."""


class Streamed:
    """A generation.Reader that sends each delta as an event. `chunk_of` puts choices into a chunk. `ids`: None for none."""

    def __init__(
        self,
        events: Events,
        renderers: Sequence[ChoiceRenderer],
        chunk_of: Callable[[list[Json]], Json],
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
        frames = [frame_of(self._chunk_of([shown])) for shown in renderer.take()]
        if self._ids is not None:
            begin = delta.token_count - len(delta.token_ids)
            frames = self._ids.of_delta(choice.index, begin, delta.token_count, bool(delta.finish), frames)
        if delta.finish:
            self._open -= 1
            return self._events.send(*frames) if self._open else self._events.send_with_end(*frames)
        if not frames:
            return True
        choice.plain = renderer.is_plain and choice.answer.scanner is None
        return self._events.send(*frames)

    def text(self, choice: Choice, text: str) -> bool:
        if not text:
            return True
        ids, frame = self._ids, self._frames.get(choice.index)
        if frame is None:
            renderer, request = self._renderers[choice.index], b"" if ids is None else ids.request
            made = TextFrame(lambda text: self._chunk_of([renderer.text_choice(text)]), request)
            frame = self._frames[choice.index] = made
        if ids is None:
            return self._events.send(frame.of(text))
        count = choice.answer.token_count
        if ids.is_single:
            return self._events.send(frame.numbered(text, count))
        return self._events.send(*ids.of_delta(choice.index, count - 1, count, False, [frame.of(text)]))


class Whole:
    """A generation.Reader that keeps everything until the end."""

    def __init__(self, choices: Sequence[Choice], renderers: Sequence[ChoiceRenderer]) -> None:
        self._renderers = renderers
        for choice, renderer in zip(choices, renderers):
            choice.plain = renderer.is_plain and choice.answer.scanner is None

    def delta(self, choice: Choice, delta: Delta) -> bool:
        renderer = self._renderers[choice.index]
        renderer.push(delta)
        choice.plain = renderer.is_plain and not delta.finish and choice.answer.scanner is None
        return True

    def text(self, choice: Choice, text: str) -> bool:
        self._renderers[choice.index].add(text)
        return True

    async def room(self) -> None:
        """Return at once: there is always room."""


class ChunkWriter:
    """Shows a generation's answers as `choices`. The APIs say what stands beside them."""

    chunk_kind = kind = ""
    """The `object` of a chunk and of the whole."""

    def __init__(self, generation: Generation, renderers: Sequence[ChoiceRenderer], by_token: bool = False) -> None:
        """`by_token`: what an event shows depends on how its tokens came."""
        self.generation, self.call = generation, generation.call
        self.renderers, self._by_token = renderers, by_token

    def usage(self) -> Json:
        """The tokens so far."""
        return self.generation.usage()

    def whole(self) -> Json:
        """The whole response but for its usage, once all answers are complete."""
        raise AssertionError("an API says what its response shows")

    def chunk(self, choices: list[Json], beside: Mapping[str, Any] = {}) -> Json:  # noqa: B006
        """A chunk of a stream, with members `beside` its choices. Its usage is null before the last one, or the count so far."""
        chunk, shown = self.generation.envelope(self.chunk_kind, choices), self.call.usage
        chunk.update(beside)
        if shown.at_end:
            chunk["usage"] = self.usage() if shown.in_each else None
        return chunk

    async def write(self) -> web.StreamResponse:
        """Have the answers computed and show them. A client that has all of a stream already gets the status 204, by which it knows
        that nothing follows."""
        if not self.call.body.stream:
            await self.generation.answer(Whole(self.generation.choices, self.renderers))
            return web.json_response(body=await self._written())
        ids, has_usage = event_ids(self.generation, self._by_token), self.call.usage.at_end
        if ids is None:
            return await respond(self.call.request, partial(self._stream, None))
        if ids.has_all(has_usage + 1):
            return web.Response(status=204)
        answering = _nothing if ids.has_all(has_usage) else partial(self._stream, ids)
        return await respond(self.call.request, answering, lambda: b"".join(ids.closing(DONE, has_usage)))

    async def _written(self) -> bytes:
        """The whole response as JSON: answers with log-probabilities take milliseconds each, and others have their turn between."""
        shown = self.whole()
        if len(shown["choices"]) > 1:
            shown["choices"] = [msgspec.Raw(_encode(each)) async for each in unhurried(shown["choices"], 1)]
        return _encode(shown)

    async def _stream(self, ids: EventIds | None, events: Events) -> None:
        await self.generation.answer(Streamed(events, self.renderers, self.chunk, ids), ids)
        if self.call.usage.at_end:
            last = frame_of(self.generation.envelope(self.chunk_kind, []) | {"usage": self.usage()})
            events.send(*([last] if ids is None else ids.closing(last)))


async def _nothing(events: Events) -> None:
    """Send nothing."""


class Sink(Protocol):
    """Takes a stream's frames: `Events`, or what keeps them."""

    def send(self, *frames: bytes) -> bool: ...

    def send_with_end(self, *frames: bytes) -> bool: ...

    async def room(self) -> None: ...


class Parts(Protocol):
    """What turns deltas into parts: AnswerParts, or what stands before it."""

    @property
    def is_plain(self) -> bool: ...

    def push(self, delta: Delta) -> list[Part]: ...


class EventWriter(ABC):
    """Shows the one answer of a generation as events, or whole. An API says which events it has, and in which form."""

    form = SSE

    def __init__(self, generation: Generation, parts: Parts, by_token: bool) -> None:
        """`by_token`: what an event shows depends on how its tokens came. Raises as `event_ids`."""
        self.generation, self.call, self.parts = generation, generation.call, parts
        self.ids = event_ids(generation, by_token) if self.call.body.stream else None

    @abstractmethod
    def begin(self) -> Iterable[Json]:
        """The events before the first part."""

    @abstractmethod
    def part(self, part: Part) -> Iterable[Json]:
        """The events of a part."""

    @abstractmethod
    def end(self, finish: str, stop_reason: str | int | None) -> Iterable[Json]:
        """The events after the last part. `finish` is "stop" or "length"."""

    @abstractmethod
    def whole(self) -> Json:
        """The whole answer, once it is complete."""

    def frame(self, event: Json) -> bytes:
        """An event as bytes, here under the name of its type."""
        return event_frame(event)

    @abstractmethod
    def fault_frame(self, failure: Failure) -> bytes:
        """What ends a stream in the middle of an answer."""

    @property
    def is_known(self) -> bool:
        """Whether the client has all of the stream with which it goes on."""
        return self.ids is not None and self.ids.has_all(0)

    async def answer(self, events: Sink | None) -> None:
        """Have the answer computed; `events` get it, None for a whole one."""
        await self.generation.answer(_SingleReader(self, events), self.ids)

    async def write(self) -> web.StreamResponse:
        """As ChunkWriter.write."""
        if self.is_known:
            return web.Response(status=204)
        if self.call.body.stream:
            return await respond(self.call.request, self.answer, b"", self.fault_frame, self.form)
        await self.answer(None)
        return web.json_response(body=_encode(self.whole()))


class _SingleReader:
    """A generation.Reader of a call with one answer. Without `events` it sends nothing."""

    def __init__(self, writer: EventWriter, events: Sink | None) -> None:
        self._writer, self._answer, self._events, self._ids = writer, writer.parts, events, writer.ids
        self._has_begun = False

    def delta(self, choice: Choice, delta: Delta) -> bool:
        made: list[Json] = []
        if not self._has_begun:
            self._has_begun = True
            made += self._writer.begin()
        for part in self._answer.push(delta):
            made += self._writer.part(part)
        if delta.finish:
            made += self._writer.end(delta.finish, delta.stop_reason)
        choice.plain = self._answer.is_plain and not delta.finish and choice.answer.scanner is None
        return self._send(made, delta.token_count - len(delta.token_ids), delta.token_count, is_last=bool(delta.finish))

    def text(self, choice: Choice, text: str) -> bool:
        count = choice.answer.token_count
        return self._send(self._writer.part(Words(text)), count - 1, count) if text else True

    async def room(self) -> None:
        if self._events is not None:
            await self._events.room()

    def _send(self, made: Iterable[Json], begin: int, end: int, is_last: bool = False) -> bool:
        if self._events is None:
            return True
        frames = [self._writer.frame(event) for event in made]
        if self._ids is not None:
            frames = self._ids.of_delta(0, begin, end, is_last, frames)
        if is_last:
            return self._events.send_with_end(*frames)
        return self._events.send(*frames) if frames else True


def event_ids(generation: Generation, by_token: bool = False) -> EventIds | None:
    """Those of a stream; None where the client does not say that it reads server-sent events, as EventSource must, and where no
    server could go on, as where tokens depend on the batch. Many clients of OpenAI's API, `vllm bench serve` among them, say
    nothing of the kind, take each event for one line of data, and fail at any other line. Raises InvalidRequest and OtherSystem
    where the client goes on with another stream."""
    call, context, last = generation.call, generation.call.context, generation.call.last
    if last is None and "text/event-stream" not in call.request.headers.get("Accept", "").lower():
        return None
    is_invariant = context.client.ready.environment.get("batch_invariant", "yes").startswith("yes")
    if len(generation.choices) > CHOICES_MAX or not is_invariant:
        if last is not None:
            raise InvalidRequest(f"{HEADER}: this stream cannot be picked up again, leave the header out to begin anew.", HEADER)
        return None
    given = getattr(call.body, "seed", None)
    seed = call.seed if given is None else given % SEEDS
    origin = Origin(
        answer=call.id.partition("-")[2], created_s=call.created_s, seed=seed or 0, cached_tokens=0,
        fingerprint=int(context.identity.fingerprint[3:], 16), digest=_digest(generation),
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


def _digest(generation: Generation) -> int:
    """Equal for the same body with the same key, as prompts and parameters that this server has made of it."""
    call, context = generation.call, generation.call.context
    given = msgspec.structs.replace(call.body, seed=None) if hasattr(call.body, "seed") else call.body
    shown = call.id.partition("-")[0], tenant_of(call.request).owner, generation.model
    parsers = type(context.dialect).__name__, context.marks and (context.marks.open, context.marks.close)
    found = hashlib.blake2b(_encode((given, shown, parsers)), digest_size=8)
    for part in generation.computed():
        found.update(part)
    return int.from_bytes(found.digest(), "big")
