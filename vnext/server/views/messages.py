"""POST /v1/messages and /v1/messages/count_tokens: Anthropic's API, over the same generation as a chat."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import msgspec
from aiohttp import web

from vnext.runtime.protocol.sampling_params import ContextExceeded, InvalidRequest
from vnext.server.answers.chat_request import ChatRequest, prompt_tokens
from vnext.server.answers.generation import OWN_USAGE, Generation
from vnext.server.answers.parts import AnswerParts
from vnext.server.answers.writing import EventWriter, Json
from vnext.server.call import admit
from vnext.server.context.errors import Failure, in_names
from vnext.server.context.identity import client_of
from vnext.server.context.server_context import SERVER_CONTEXT
from vnext.server.http.bodies import read_body
from vnext.server.http.streaming import event_frame
from vnext.server.messages.blocks import Event, MessageBuilder
from vnext.server.messages.bodies import CountTokensBody, MessagesBody
from vnext.server.messages.translation import breakpoints_of, chat_body, check_calls, names_of
from vnext.text.parts import Part

_MESSAGES = msgspec.json.Decoder(MessagesBody)
_COUNT = msgspec.json.Decoder(CountTokensBody)


async def create_message(request: web.Request) -> web.StreamResponse:
    call = await admit(request, "msg", _MESSAGES)
    body: MessagesBody = call.body
    with in_words_of(body):
        chat = ChatRequest(call, chat_body(body, call.context.marks is not None, call.context.sees))
        check_calls(body)
    breakpoints = breakpoints_of(body)
    with in_words_of(body), call.context.limiter.enter(chat.answer_count, call.client):
        generation = await chat.start(shrinks=True, breakpoints=breakpoints)
        return await MessageWriter(chat, generation).write()


async def count_tokens(request: web.Request) -> web.Response:
    context = request.app[SERVER_CONTEXT]
    body = await read_body(request, _COUNT)
    with in_words_of(body):
        chat = chat_body(body, context.marks is not None, context.sees)
        tokens = await prompt_tokens(context, chat, client_of(request))
    return web.json_response(body=msgspec.json.encode({"input_tokens": len(tokens)}))


@contextmanager
def in_words_of(body: CountTokensBody) -> Iterator[None]:
    """Errors name this API's fields. A prompt that is too long is an error in Anthropic's words: clients look for them and shorten
    the conversation."""
    try:
        with in_names(names_of(body)):
            yield
    except ContextExceeded as error:
        if not error.count:
            raise
        sentence = f"prompt is too long: {max(error.count, error.most + 1)} tokens > {error.most} maximum"
        raise InvalidRequest(sentence, "messages", error.code) from error


class MessageWriter(EventWriter):
    """Shows an answer as a message. `message` is the whole one, once it is complete."""

    def __init__(self, chat: ChatRequest, generation: Generation) -> None:
        self._parts: AnswerParts = chat.parts()
        super().__init__(generation, self._parts, chat.is_parsed)
        self._builder = MessageBuilder({"id": self.call.id.replace("-", "_", 1), "model": generation.model})
        self.message: Json = {}

    def begin(self) -> list[Event]:
        return self._builder.begin(self._usage())

    def part(self, part: Part) -> Iterable[Event]:
        return self._builder.part(part)

    def end(self, finish: str, stop_reason: str | int | None) -> list[Event]:
        sequence, usage = stop_reason if isinstance(stop_reason, str) else None, self._usage()
        if finish == "length":  # `start` may have shrunk what was asked for
            is_all = usage["output_tokens"] >= self.call.body.max_tokens
            reason = "max_tokens" if is_all else "model_context_window_exceeded"
        elif self._parts.has_called:
            reason = "tool_use"
        else:
            reason = "end_turn" if sequence is None else "stop_sequence"
        events = self._builder.end(reason, sequence, usage)
        self.message = self._builder.message(reason, sequence, usage)
        return events

    def _usage(self) -> Json:
        """At Anthropic, input tokens that the cache held do not count as input tokens, nor do those up to the last breakpoint,
        which are in the cache from now on."""
        usage = self.generation.usage()
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        created = max(0, self.generation.kept_tokens - cached)
        return {
            "input_tokens": usage["prompt_tokens"] - cached - created,
            "cache_creation_input_tokens": created,
            "cache_read_input_tokens": cached,
            "output_tokens": usage["completion_tokens"],
        } | {name: usage[name] for name in OWN_USAGE if name in usage}

    def whole(self) -> Json:
        return self.message

    def fault_frame(self, failure: Failure) -> bytes:
        return event_frame(failure.anthropic_body())
