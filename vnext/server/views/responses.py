"""POST /v1/responses and what is kept of it: OpenAI's Responses API, over the same generation as a chat."""

from __future__ import annotations

import hashlib
import re
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import ExitStack
from functools import partial, wraps
from typing import Any

import msgspec
from aiohttp import web

from vnext.runtime.protocol.sampling_params import InvalidRequest
from vnext.server.answers.chat_request import ChatRequest, prompt_tokens
from vnext.server.answers.generation import OWN_USAGE, Generation
from vnext.server.answers.logprobs import ChatLogprobs, speller
from vnext.server.answers.writing import EventWriter, Json, Sink
from vnext.server.call import admit
from vnext.server.context.api_keys import Tenant
from vnext.server.context.errors import Failure, FileUnknown, in_names
from vnext.server.context.identity import client_of
from vnext.server.context.server_context import SERVER_CONTEXT, tenant_of
from vnext.server.http.background import BACKGROUND, Running, send_all
from vnext.server.http.bodies import read_body
from vnext.server.http.event_ids import HEADER
from vnext.server.http.pages import Pages, ordered, page_of
from vnext.server.http.siblings import SIBLINGS, asked_by_sibling
from vnext.server.http.streaming import event_frame, respond
from vnext.server.responses.bodies import Item, ResponsesBody
from vnext.server.responses.items import Event, ItemBuilder
from vnext.server.responses.store import ResponseStore, Stored
from vnext.server.responses.translation import chat_body, check_calls, input_items, named_tools, names_of, with_items
from vnext.text.answer import Delta
from vnext.text.parts import Part, Words

RESPONSES = web.AppKey("responses", ResponseStore)
View = Callable[[web.Request], Awaitable[web.StreamResponse]]
PAGES = Pages(usual=20, most=100)
_DECODER = msgspec.json.Decoder(ResponsesBody)


async def create_response(request: web.Request) -> web.StreamResponse:
    store, tenant = request.app[RESPONSES], tenant_of(request)
    call = await admit(request, "resp", _DECODER)
    await _fetch_stored(request, call.body)
    body = with_items(call.body, store.finder(tenant))
    call = msgspec.structs.replace(call, body=body)
    earlier = _earlier(store, body.previous_response_id, tenant)
    with in_names(names_of(body)):
        chat = ChatRequest(call, chat_body(body, earlier, call.context.shown))
        check_calls(body, earlier)
    with in_names(names_of(body)), ExitStack() as held:
        if body.background:
            _check_background(body, store)
        held.enter_context(call.context.limiter.enter(chat.answer_count, call.client))
        generation = await chat.start(shrinks=True)

        def keep(response: dict[str, Any], frames: Sequence[bytes] = ()) -> None:
            store.put(response, input_items(body), earlier, tenant.owner, frames)

        writer = ResponseWriter(chat, generation, keep)
        if writer.is_known or not body.background:
            return await writer.write()
        if call.last is not None and (known := await _known(request, writer.head("queued")["id"])) is not None:
            return known
        return await _begin(request, writer, held.pop_all())


async def count_input_tokens(request: web.Request) -> web.Response:
    """POST /v1/responses/input_tokens: the size of the prompt that such a body would become."""
    store, tenant = request.app[RESPONSES], tenant_of(request)
    body = await read_body(request, _DECODER)
    await _fetch_stored(request, body)
    body, context = with_items(body, store.finder(tenant)), request.app[SERVER_CONTEXT]
    with in_names(names_of(body)):
        chat = chat_body(body, _earlier(store, body.previous_response_id, tenant), context.shown)
        tokens = await prompt_tokens(context, chat, client_of(request))
    counted = {"object": "response.input_tokens", "input_tokens": len(tokens)}
    return web.json_response(body=msgspec.json.encode(counted))


async def _begin(request: web.Request, writer: ResponseWriter, held: ExitStack) -> web.StreamResponse:
    """Have a response made without its client, who gets what there is of it now, or its stream. `held` is held until its end."""
    running, streams = Running(tenant_of(request).owner, writer.head("in_progress")), bool(writer.call.body.stream)

    async def make(running: Running) -> None:
        with held:
            await writer.answer(running if streams else None)
        writer.keep(writer.response, running.whole)

    def failed(failure: Failure) -> None:
        frame = writer.fault_frame(failure)
        if streams:
            running.send(frame)
        writer.keep(writer.response, running.whole)

    def cancelled() -> None:
        writer.cancel()
        writer.keep(writer.response, running.whole)

    request.app[RESPONSES].begin(running.now, input_items(writer.call.body), running.owner)
    request.app[BACKGROUND].begin(running, make, failed, cancelled)
    if streams:
        return await respond(request, partial(running.follow, place=0), b"", writer.fault_frame)
    return web.json_response(body=msgspec.json.encode(writer.head("queued")))


async def _fetch_stored(request: web.Request, body: ResponsesBody) -> None:
    """Take in from siblings what a body refers to, as far as this process lacks it."""
    store, tenant = request.app[RESPONSES], tenant_of(request)
    items = body.input if isinstance(body.input, list) else ()
    for id_ in (body.previous_response_id, *(item.id for item in items if item.kind == "item_reference")):
        if id_ and not store.holder(id_, tenant):
            if not (found := await request.app[SIBLINGS].stored(request, id_)):
                return  # the request is refused
            store.keep(*msgspec.msgpack.decode(found, type=tuple[str, Stored]))


def _anywhere(view: View) -> View:
    """The view of a response, which a sibling answers where this process has no such response."""

    @wraps(view)
    async def view_anywhere(request: web.Request) -> web.StreamResponse:
        try:
            return await view(request)
        except FileUnknown:
            if (found := await request.app[SIBLINGS].answer(request)) is None:
                raise
            return found

    return view_anywhere


@_anywhere
async def get_response(request: web.Request) -> web.StreamResponse:
    """GET /v1/responses/{response_id}; with `stream` the events behind the one that `starting_after` numbers, also of a response in
    progress."""
    id_ = request.match_info["response_id"]
    if asked_by_sibling(request) == "stored":
        id_ = request.app[RESPONSES].holder(id_, tenant_of(request))
        return web.Response(body=msgspec.msgpack.encode((id_, _stored(request, id_))))
    if request.query.get("stream") == "true":
        return await _follow(request, id_)
    running = request.app[BACKGROUND].get(id_, tenant_of(request))
    return web.json_response(body=msgspec.json.encode(running.now) if running else _stored(request, id_).response)


async def _follow(request: web.Request, id_: str) -> web.StreamResponse:
    """The events of a background response behind the one that the client names. Raises FileUnknown, InvalidRequest."""
    running, forgotten = request.app[BACKGROUND].get(id_, tenant_of(request)), 0
    if running:
        frames, forgotten = running.frames, running.forgotten
    else:
        found = _stored(request, id_)
        frames = found.frames() if found.events else []
    if not (frames or forgotten):
        why = "this response was not created with background and stream, or its events took too much room to be kept"
        raise InvalidRequest(f"stream is true: {why}.", "stream")
    place = _place(request, frames, forgotten)
    following = partial(running.follow, place=place) if running else partial(send_all, frames=frames[place:])
    return await respond(request, following, b"")


async def _known(request: web.Request, id_: str) -> web.StreamResponse | None:
    """The rest of a response's stream, if this process or a sibling makes it in the background, or has stored it so."""
    tenant = tenant_of(request)
    found = request.app[RESPONSES].get(id_, tenant)
    if request.app[BACKGROUND].get(id_, tenant) is not None or (found is not None and found.events):
        return await _follow(request, id_)
    return await request.app[SIBLINGS].stream(request, id_)


@_anywhere
async def cancel_response(request: web.Request) -> web.Response:
    """POST /v1/responses/{response_id}/cancel: the response as it is then; one that has ended stays as it is."""
    id_, background = request.match_info["response_id"], request.app[BACKGROUND]
    if running := background.get(id_, tenant_of(request)):
        await background.end(running)
    found = _stored(request, id_)
    if not msgspec.json.decode(found.response)["background"]:
        raise InvalidRequest(f"The response {id_[:60]!r} was not created with background: only such a one can be cancelled.")
    return web.json_response(body=found.response)


async def delete_response(request: web.Request) -> web.Response:
    id_ = request.match_info["response_id"]
    if running := request.app[BACKGROUND].get(id_, tenant_of(request)):
        await request.app[BACKGROUND].end(running)
    is_deleted = request.app[RESPONSES].delete(id_, tenant_of(request))
    if not (await request.app[SIBLINGS].deleted(request) or is_deleted):
        raise FileUnknown(_unknown(id_))
    return web.json_response(body=msgspec.json.encode({"id": id_, "object": "response", "deleted": True}))


@_anywhere
async def list_input_items(request: web.Request) -> web.Response:
    """GET /v1/responses/{response_id}/input_items, newest first unless `order` is asc."""
    found = _stored(request, request.match_info["response_id"])
    items = [_shown(item, f"{request.match_info['response_id']}_{place}") for place, item in enumerate(found.input())]
    page, has_more = page_of(ordered(items[::-1], request.query), lambda item: item["id"], request.query, PAGES)
    ids = [item["id"] for item in page] or [None]
    shown = {"object": "list", "data": page, "first_id": ids[0], "last_id": ids[-1], "has_more": has_more}
    return web.json_response(body=msgspec.json.encode(shown))


class ResponseWriter(EventWriter):
    """Shows an answer as items, and is the parts that these are made of, with their log-probabilities. `response` is the whole
    answer, once it is complete; `keep` stores it, with the frames of its stream."""

    def __init__(self, chat: ChatRequest, generation: Generation, keep: Callable[..., None]) -> None:
        super().__init__(generation, self, by_token=True)  # its events are numbered
        body, tokenizer = self.call.body, self.call.context.tokenizer
        self._of_answer, count, spell = chat.parts(), chat.params.logprobs, speller(tokenizer, False)
        self._entries = None if count is None else ChatLogprobs(tokenizer, spell, count, self._of_answer.is_parsed)
        self._of_words: list[list[dict[str, Any]]] = []  # of the parts that are to come
        self._chat, self.keep = chat, keep
        name = hashlib.blake2b(self.call.id.encode(), digest_size=16).hexdigest()
        self._builder = ItemBuilder(named_tools(body), "reasoning.encrypted_content" in (body.include or ()), name)
        self._head = _head(f"resp_{name}", generation, chat, body)  # an id that nobody can guess: it opens the store
        self._sequence_number = 0
        self.response: dict[str, Any] = {}

    async def answer(self, events: Sink | None) -> None:
        """As EventWriter; stores a response whose client waits for it."""
        await super().answer(events)
        if self.call.body.store is not False and not self.call.body.background:
            self.keep(self.response)

    def whole(self) -> dict[str, Any]:
        return self.response

    @property
    def is_plain(self) -> bool:
        """As AnswerParts; a token with log-probabilities comes as a delta."""
        return self._entries is None and self._of_answer.is_plain

    def push(self, delta: Delta) -> list[Part]:
        """As AnswerParts. The log-probabilities of reasoning and of calls are dropped."""
        found = self._of_answer.push(delta)
        if self._entries is not None:
            self._builder.logprobs += self._entries.push(delta)
            self._of_words += [self._entries.of(part) for part in found if isinstance(part, Words)]
            if delta.finish and self._of_words:
                self._of_words[-1] += self._entries.rest()
        return found

    def begin(self) -> list[Event]:
        response = self.head("in_progress")
        return self._numbered([{"type": f"response.{name}", "response": response} for name in ("created", "in_progress")])

    def part(self, part: Part) -> Iterable[Event]:
        if isinstance(part, Words) and self._of_words:
            self._builder.logprobs += self._of_words.pop(0)
        return self._numbered(self._builder.part(part))

    def end(self, finish: str, stop_reason: str | int | None) -> list[Event]:
        status = "incomplete" if finish == "length" else "completed"
        events = self._builder.complete(status)
        reason = {"reason": "max_output_tokens"} if finish == "length" else None
        last = {"output": self._builder.items, "usage": self._usage(), "completed_at": int(time.time())}
        self.response = self.head(status) | last | {"incomplete_details": reason}
        return self._numbered([*events, {"type": f"response.{status}", "response": self.response}])

    def fault_frame(self, failure: Failure) -> bytes:
        """What ends a stream in the middle of an answer."""
        fault = {"code": failure.code or failure.type, "message": failure.body()["error"]["message"]}
        self.response = response = self.head("failed") | {"error": fault}
        return b"".join(map(event_frame, self._numbered([{"type": "response.failed", "response": response}])))

    def cancel(self) -> None:
        """The answer ends where it is."""
        self._builder.complete("incomplete")
        self.response = self.head("cancelled") | {"output": self._builder.items, "usage": self._usage()}

    def head(self, status: str) -> dict[str, Any]:
        """The response without what the answer brings."""
        return self._head | {"status": status}

    def _numbered(self, events: Sequence[Event]) -> list[Event]:
        first, self._sequence_number = self._sequence_number, self._sequence_number + len(events)
        return [event | {"sequence_number": first + place} for place, event in enumerate(events)]

    def _usage(self) -> dict[str, Any]:
        usage = self._chat.usage(self.generation)
        thought = usage.get("completion_tokens_details", {}).get("reasoning_tokens", 0)
        return {
            "input_tokens": usage["prompt_tokens"],
            "input_tokens_details": {"cached_tokens": usage["prompt_tokens_details"]["cached_tokens"], "cache_write_tokens": 0},
            "output_tokens": usage["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": thought},
            "total_tokens": usage["total_tokens"],
        } | {name: usage[name] for name in OWN_USAGE if name in usage}


def _head(id_: str, generation: Generation, chat: ChatRequest, body: ResponsesBody) -> dict[str, Any]:
    """The members that an answer does not change."""
    params, text = chat.params, body.text
    format_ = {"type": "text"} if text is None or text.format is None else _given(text.format)
    return {
        "id": id_,
        "object": "response",
        "created_at": generation.call.created_s,
        "model": generation.model,
        "instructions": body.instructions,
        "previous_response_id": body.previous_response_id,
        "store": body.store is not False,
        "background": body.background is True,
        "tools": [_given(tool) for tool in body.tools or ()],
        "tool_choice": body.tool_choice or "auto",
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "text": {"format": format_},
        "reasoning": {"effort": None, "summary": None} if body.reasoning is None else msgspec.to_builtins(body.reasoning),
        "max_output_tokens": body.max_output_tokens,
        "temperature": params.temperature,
        "top_p": params.top_p,
        "top_logprobs": body.top_logprobs or 0,
        "truncation": body.truncation or "disabled",
        "service_tier": "default",
        "metadata": body.metadata or {},
        "output": [],
        "usage": None,
        "error": None,
        "incomplete_details": None,
    }


def _given(struct: msgspec.Struct) -> dict[str, Any]:
    """The members that a client sent."""
    return {name: value for name, value in msgspec.to_builtins(struct).items() if value is not None}


def _shown(item: Item, id_: str) -> dict[str, Any]:
    """An input item as OpenAI lists it: with a type and an id, and its text as a part."""
    shown: Json = {"type": "message", "id": id_, "status": "completed"} | msgspec.to_builtins(item)
    if isinstance(item.content, str):
        shown["content"] = [{"type": "output_text" if item.role == "assistant" else "input_text", "text": item.content}]
    return shown


def _check_background(body: ResponsesBody, store: ResponseStore) -> None:
    if body.store is False or not store.keeps:
        why = "store is false" if body.store is False else "this server stores no responses (--max-stored-responses)"
        raise InvalidRequest(f"background is true and {why}: nobody could read the response, leave background out.", "background")


def _place(request: web.Request, frames: Sequence[bytes], first: int = 0) -> int:
    """The number of the first event that a client lacks: behind `starting_after`, or behind the one whose id it sends. `first` is
    that of `frames`."""
    if (given := request.headers.get(HEADER)) and "starting_after" not in request.query:
        head = f"id: {given}\n".encode(errors="surrogateescape")
        found = next((place for place, frame in enumerate(frames) if frame.startswith(head)), None)
        if found is None:
            raise InvalidRequest(f"{HEADER} is {given[:60]!r}, which is no id of this response's events.", HEADER)
        return first + found + 1
    after = request.query.get("starting_after", "-1")
    if not re.fullmatch(r"-1|[0-9]{1,9}", after):
        raise InvalidRequest(f"starting_after is {after[:60]!r}: it must be the sequence_number of an event.", "starting_after")
    return int(after) + 1


def _stored(request: web.Request, id_: str) -> Stored:
    """The response of this id. Raises FileUnknown."""
    if (found := request.app[RESPONSES].get(id_, tenant_of(request))) is None:
        raise FileUnknown(_unknown(id_))
    return found


def _earlier(store: ResponseStore, id_: str | None, tenant: Tenant) -> tuple[Item, ...]:
    """The conversation that ended with a response. Raises InvalidRequest."""
    if not id_:
        return ()
    if (found := store.get(id_, tenant)) is None:
        sentence = f"previous_response_id: {_unknown(id_)} Send its items as input."
        raise InvalidRequest(sentence, "previous_response_id", "previous_response_not_found")
    return found.conversation()


def _unknown(id_: str) -> str:
    return f"There is no response {id_[:60]!r} here: it was not stored, or was dropped for later ones."
