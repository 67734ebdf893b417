"""POST /v1/chat/completions: a conversation is continued.

Owns the translation of that body and the shapes of its answers. What happens in between is `generation`'s.
"""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

import msgspec
from aiohttp import web

from vnext.sampling_params import InvalidRequest, SamplingParams
from vnext.server.conversation import begins_answer, shown_messages, shown_tools, up_to_the_last_words
from vnext.server.edge import EDGE, Edge
from vnext.server.generation import Choice, Generation
from vnext.server.logprobs import chat_logprobs
from vnext.server.openai_types import (
    UNSUPPORTED,
    ChatBody,
    decode_chat,
    include_usage,
    refuse_unsupported,
    sampling_params,
)
from vnext.server.streaming import respond
from vnext.server.text.answer import Delta
from vnext.server.tools import ToolCalls

_UNSUPPORTED = (
    *UNSUPPORTED, "functions", "function_call", "audio", "web_search_options", "echo", "add_special_tokens", "documents",
    "chat_template", "return_token_ids",
)  # fmt: skip


async def create_chat_completion(request: web.Request) -> web.StreamResponse:
    """The view."""
    edge = request.app[EDGE]
    data = await request.read()
    started_s = time.monotonic()
    body = decode_chat(data)
    tools = shown_tools(body, edge.tool_form)
    params = _params(body, edge, tools is not None and edge.tool_form == "tagged")
    with_usage = include_usage(body)
    with edge.gate.enter(max(params.n, 1)):
        prompt = await prompt_tokens(edge, body, tools)
        generation = _start(edge, body, prompt, params, started_s)
        views = [_View(edge, choice, params, _calls(edge, body, tools)) for choice in generation.choices]
        if body.stream:
            return await respond(request, _chunks(generation, views, with_usage))
        return web.json_response(body=msgspec.json.encode(await _complete(generation, views)))


class _View:
    """One choice in this API's shape."""

    def __init__(self, edge: Edge, choice: Choice, params: SamplingParams, calls: ToolCalls | None) -> None:
        self._edge = edge
        self._count = params.logprobs
        self._calls = calls
        self.index = choice.index
        self.started = False
        self.texts: list[str] = []
        self.logprobs: list[dict[str, Any]] = []
        self.finish: str | None = None
        self.stop_reason: str | int | None = None

    def push(self, delta: Delta) -> None:
        """Add to what is to be shown."""
        if self._count is not None:
            self.logprobs += chat_logprobs(self._edge.tokenizer, delta, self._count)
        self.finish, self.stop_reason = delta.finish or None, delta.stop_reason
        if self._calls is None:
            self.texts.append(delta.text)
            return
        self.texts.append(self._calls.push(delta.text, bool(delta.finish)))
        if self.finish == "stop" and self._calls.count:
            self.finish = "tool_calls"

    def choice(self) -> dict[str, Any]:
        """The whole answer."""
        message = {"role": "assistant", "content": "".join(self.texts), "refusal": None}
        if calls := self._calls.take() if self._calls else []:
            message |= {"content": message["content"] or None, "tool_calls": calls}
        return self._choice("message", message, self._take_logprobs())

    def first_choice(self) -> dict[str, Any]:
        """A stream's first chunk names the role."""
        self.started = True
        return self._choice("delta", {"role": "assistant", "content": ""}, None) | {"finish_reason": None}

    def next_choice(self) -> dict[str, Any] | None:
        """What was not shown yet; None when there is nothing."""
        text, logprobs = "".join(self.texts), self._take_logprobs()
        self.texts = []
        delta: dict[str, Any] = {"content": text} if text else {}
        if calls := self._calls.take_numbered() if self._calls else []:
            delta["tool_calls"] = calls
        if not delta and not self.finish and not (logprobs and logprobs["content"]):
            return None
        return self._choice("delta", delta, logprobs)

    def _take_logprobs(self) -> dict[str, Any] | None:
        taken, self.logprobs = self.logprobs, []
        return None if self._count is None else {"content": taken, "refusal": None}

    def _choice(self, name: str, content: dict[str, Any], logprobs: dict[str, Any] | None) -> dict[str, Any]:
        return {
            "index": self.index,
            name: content,
            "logprobs": logprobs,
            "finish_reason": self.finish,
            "stop_reason": self.stop_reason,
        }


async def _complete(generation: Generation, views: list[_View]) -> dict[str, Any]:
    async with aclosing(generation.deltas()) as deltas:
        async for choice, delta in deltas:
            views[choice.index].push(delta)
    choices = [view.choice() for view in views]
    return generation.envelope("chat.completion", choices) | {"usage": generation.usage()}


async def _chunks(
    generation: Generation, views: list[_View], with_usage: bool
) -> AsyncGenerator[dict[str, Any], None]:
    usage = {"usage": None} if with_usage else {}
    async with aclosing(generation.deltas()) as deltas:
        async for choice, delta in deltas:
            view = views[choice.index]
            view.push(delta)
            if not view.started:
                yield _chunk(generation, [view.first_choice()]) | usage
            if (shown := view.next_choice()) is not None:
                yield _chunk(generation, [shown]) | usage
    if with_usage:
        yield _chunk(generation, []) | {"usage": generation.usage()}


def _chunk(generation: Generation, choices: list[dict[str, Any]]) -> dict[str, Any]:
    return generation.envelope("chat.completion.chunk", choices)


def _start(
    edge: Edge, body: ChatBody, prompt: list[int], params: SamplingParams, started_s: float
) -> Generation:
    """Errors name this API's fields."""
    try:
        return Generation(edge, kind="chatcmpl", body=body, prompts=[prompt], params=params, started_s=started_s)
    except InvalidRequest as error:
        names = {"prompt": "messages", "logprobs": "top_logprobs"}
        if body.max_completion_tokens is not None:
            names["max_tokens"] = "max_completion_tokens"
        name = names.get(error.param or "", error.param)
        message = error.message.replace("The prompt has", "The prompt made of messages has")
        raise InvalidRequest(message.replace(f"{error.param} is ", f"{name} is "), name) from error


def _calls(edge: Edge, body: ChatBody, tools: list[dict[str, Any]] | None) -> ToolCalls | None:
    """One answer's calls, where the model was told of tools."""
    form = edge.tool_form
    return None if tools is None or form is None else ToolCalls(form, one=body.parallel_tool_calls is False)


def _params(body: ChatBody, edge: Edge, marked_calls: bool) -> SamplingParams:
    """`marked_calls`: special tokens stay in the text, since some models' marks of a call are such."""
    refuse_unsupported(body, _UNSUPPORTED)
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
    params = sampling_params(body, max_tokens=None, **edge.settings.sampling_defaults.sampling())
    wanted = params.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    skip = params.skip_special_tokens and not marked_calls
    return msgspec.structs.replace(params, logprobs=logprobs, max_tokens=wanted, skip_special_tokens=skip)


async def prompt_tokens(edge: Edge, body: ChatBody, tools: list[dict[str, Any]] | None) -> list[int]:
    """The conversation as tokens. The template writes special tokens itself. Raises InvalidRequest."""
    edge.model_name(body.model)
    messages = shown_messages(body, edge.tool_form)
    if edge.template is None:
        raise InvalidRequest(
            "This model has no chat template: use /v1/completions, or start the server with --chat-template.",
            "messages",
        )
    effort = {} if body.reasoning_effort is None else {"reasoning_effort": body.reasoning_effort}
    variables = {"tools": tools} | effort | (body.chat_template_kwargs or {})
    text = edge.template.render(messages, variables, begins_answer(body))
    if body.continue_final_message:
        text = up_to_the_last_words(text, messages)
    tokens = await edge.encode(text, add_special_tokens=False)
    if not tokens:
        raise InvalidRequest("The chat template made an empty prompt of these messages: send some text.", "messages")
    return tokens
