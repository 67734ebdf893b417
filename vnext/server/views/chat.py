"""POST /v1/chat/completions: continues a conversation.

Owns the translation of the body and the shapes of the answers; `generation` does the work in between.
"""

from __future__ import annotations

import time
from functools import partial
from typing import Any

import msgspec
from aiohttp import web

from vnext.sampling_params import InvalidRequest, SamplingParams
from vnext.server.answers.beams import generation_of
from vnext.server.answers.generation import Choice, Generation
from vnext.server.answers.logprobs import chat_logprobs, speller
from vnext.server.answers.readers import Streamed, Whole
from vnext.server.answers.tools import ToolCalls
from vnext.server.context.conversation import shown_tools
from vnext.server.context.identity import answer_id, identify
from vnext.server.context.openai_types import ChatBody, continuous_usage, include_usage, sampling_params
from vnext.server.context.server_context import SERVER_CONTEXT, ServerContext, client_of
from vnext.server.http.bodies import read_body
from vnext.server.http.streaming import Events, frame_of, respond
from vnext.text.answer import Delta

_DECODER = msgspec.json.Decoder(ChatBody)


async def create_chat_completion(request: web.Request) -> web.StreamResponse:
    """The view."""
    context = request.app[SERVER_CONTEXT]
    body = await read_body(request, _DECODER, ChatBody)
    started_s = time.monotonic()
    identify(request, body.request_id)
    tools = shown_tools(body, context.tool_form)
    params = _params(body, context, tools is not None and context.tool_form == "tagged")
    include_usage(body)
    with context.limiter.enter(max(params.n, 1), client_of(request)):
        prompt = await prompt_tokens(context, body, tools, client_of(request))
        generation = _start(context, answer_id(request, "chatcmpl"), body, prompt, params, started_s)
        renderers = [
            _ChoiceRenderer(context, choice, params, _calls(context, body, tools), body)
            for choice in generation.choices
        ]
        if body.stream:
            return await respond(request, partial(_stream, generation, renderers, body))
        return web.json_response(body=msgspec.json.encode(await _complete(generation, renderers, body)))


class _ChoiceRenderer:
    """Renders one choice in this API's shape."""

    def __init__(
        self, context: ServerContext, choice: Choice, params: SamplingParams, calls: ToolCalls | None, body: ChatBody
    ) -> None:
        self._context = context
        self._count = params.logprobs
        self._spell = speller(context.tokenizer, body.return_tokens_as_token_ids)
        self._calls = calls
        self.index = choice.index
        self._with_ids = bool(body.return_token_ids)
        self._ids: list[int] = []
        self.is_plain = params.logprobs is None and calls is None and not self._with_ids and not continuous_usage(body)
        self.started = False
        self.texts: list[str] = []
        self.logprobs: list[dict[str, Any]] = []
        self.finish: str | None = None
        self.stop_reason: str | int | None = None

    def push(self, delta: Delta) -> None:
        """Take in a delta."""
        self._ids += delta.token_ids
        if self._count is not None:
            self.logprobs += chat_logprobs(self._context.tokenizer, self._spell, delta, self._count)
        self.finish, self.stop_reason = delta.finish or None, delta.stop_reason
        if self._calls is None:
            self.texts.append(delta.text)
            return
        self.texts.append(self._calls.push(delta.text, bool(delta.finish)))
        if self.finish == "stop" and self._calls.count:
            self.finish = "tool_calls"

    def add(self, text: str) -> None:
        """Take in a plain answer's text."""
        self.texts.append(text)

    def choice(self) -> dict[str, Any]:
        """The whole answer."""
        message = {"role": "assistant", "content": "".join(self.texts), "refusal": None}
        if calls := self._calls.take() if self._calls else []:
            message |= {"content": message["content"] or None, "tool_calls": calls}
        return self._choice("message", message, self._take_logprobs())

    def take(self) -> list[dict[str, Any]]:
        """The choices that a stream has not shown yet, one per chunk; the very first names the role."""
        first = [] if self.started else [self._first_choice()]
        self.started = True
        text, logprobs = "".join(self.texts), self._take_logprobs()
        self.texts = []
        delta: dict[str, Any] = {"content": text} if text else {}
        if calls := self._calls.take_numbered() if self._calls else []:
            delta["tool_calls"] = calls
        if not delta and not self.finish and not (logprobs and logprobs["content"]):
            return first
        return [*first, self._choice("delta", delta, logprobs)]

    def text_choice(self, text: str) -> dict[str, Any]:
        """A stream's choice with `text`, in the middle of a plain answer."""
        return self._plain_choice("delta", {"content": text}, None)

    def _first_choice(self) -> dict[str, Any]:
        return self._plain_choice("delta", {"role": "assistant", "content": ""}, None) | {"finish_reason": None}

    def _take_logprobs(self) -> dict[str, Any] | None:
        taken, self.logprobs = self.logprobs, []
        return None if self._count is None else {"content": taken, "refusal": None}

    def _choice(self, name: str, content: dict[str, Any], logprobs: dict[str, Any] | None) -> dict[str, Any]:
        ids, self._ids = {"token_ids": self._ids} if self._with_ids else {}, []
        return self._plain_choice(name, content, logprobs) | ids

    def _plain_choice(self, name: str, content: dict[str, Any], logprobs: dict[str, Any] | None) -> dict[str, Any]:
        return {
            "index": self.index,
            name: content,
            "logprobs": logprobs,
            "finish_reason": self.finish,
            "stop_reason": self.stop_reason,
        }


async def _complete(generation: Generation, renderers: list[_ChoiceRenderer], body: ChatBody) -> dict[str, Any]:
    await generation.answer(Whole(generation.choices, renderers))
    answer = generation.envelope("chat.completion", [renderer.choice() for renderer in renderers]) | {
        "usage": generation.usage()
    }
    return answer | ({"prompt_token_ids": generation.prompts[0]} if body.return_token_ids else {})


async def _stream(generation: Generation, renderers: list[_ChoiceRenderer], body: ChatBody, events: Events) -> None:
    usage = generation.chunk_usage(body)

    def chunk_of(choices: list[dict[str, Any]]) -> dict[str, Any]:
        begins = body.return_token_ids and "role" in choices[0]["delta"]
        return _chunk(generation, choices) | ({"prompt_token_ids": generation.prompts[0]} if begins else {}) | usage()

    await generation.answer(Streamed(events, renderers, chunk_of))
    if include_usage(body):
        events.send(frame_of(_chunk(generation, []) | {"usage": generation.usage()}))


def _chunk(generation: Generation, choices: list[dict[str, Any]]) -> dict[str, Any]:
    return generation.envelope("chat.completion.chunk", choices)


def _start(
    context: ServerContext, call_id: str, body: ChatBody, prompt: list[int], params: SamplingParams, started_s: float
) -> Generation:
    """Check the body and make its generation. Errors name this API's fields."""
    try:
        return generation_of(context, call_id=call_id, body=body, prompts=[prompt], params=params, started_s=started_s)
    except InvalidRequest as error:
        names = {"prompt": "messages", "logprobs": "top_logprobs"}
        if body.max_completion_tokens is not None:
            names["max_tokens"] = "max_completion_tokens"
        name = names.get(error.param or "", error.param)
        message = error.message.replace("the prompt", "the messages").replace(f"{error.param} is ", f"{name} is ")
        raise InvalidRequest(message, name, error.code) from error


def _calls(context: ServerContext, body: ChatBody, tools: list[dict[str, Any]] | None) -> ToolCalls | None:
    """One answer's calls; None where the model has no tools."""
    form = context.tool_form
    return None if tools is None or form is None else ToolCalls(form, one=body.parallel_tool_calls is False)


def _params(body: ChatBody, context: ServerContext, marked_calls: bool) -> SamplingParams:
    """The body's parameters. `marked_calls`: special tokens stay in the text, because some models mark calls with them."""
    if body.response_format is not None and body.response_format.type != "text":
        raise InvalidRequest(
            f"response_format is {body.response_format.type!r}: only 'text' is supported, leave it out.",
            "response_format",
        )
    if body.modalities is not None and body.modalities != ["text"]:
        raise InvalidRequest(f"modalities is {body.modalities}: only ['text'] is supported.", "modalities")
    if body.top_logprobs is not None and not body.logprobs:
        raise InvalidRequest("top_logprobs is only allowed when logprobs is true.", "top_logprobs")
    logprobs = (body.top_logprobs or 0) if body.logprobs else None
    params = sampling_params(body, max_tokens=None, **context.settings.sampling_defaults.sampling())
    wanted = params.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    skip = params.skip_special_tokens and not marked_calls
    return msgspec.structs.replace(params, logprobs=logprobs, max_tokens=wanted, skip_special_tokens=skip)


async def prompt_tokens(
    context: ServerContext, body: ChatBody, tools: list[dict[str, Any]] | None, client: str
) -> list[int]:
    """The conversation as tokens. The template writes special tokens itself. Raises InvalidRequest, Overloaded."""
    context.model_name(body.model)
    if context.template is None:
        raise InvalidRequest(
            "This model has no chat template: use /v1/completions, or start the server with --chat-template.",
            "messages",
        )
    text = await context.render(body, tools, client)
    [tokens] = await context.encode([text], False, client, ["messages"], "messages")
    if not tokens:
        raise InvalidRequest("The chat template made an empty prompt of these messages: send some text.", "messages")
    return tokens
