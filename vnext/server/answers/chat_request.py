"""Chat request: from a chat body to a running generation and the parts of its answers.

Owns the checks of a chat's fields, the prompt's tokens and the choice of a parser. APIs that are a chat in another shape
(responses, messages) translate their body to a ChatBody and start here; errors name the chat's fields.

    chat = ChatRequest(context, body)                                     checks; raises InvalidRequest
    with context.limiter.enter(chat.answer_count, client):
        generation = await chat.start(call_id, client, started_s)         renders, tokenizes; raises InvalidRequest, Overloaded
        parts = [chat.parts() for _ in generation.choices]                parts[choice.index].push(delta) -> list[Part]
"""

from __future__ import annotations

from typing import Any

import msgspec

from vnext.sampling_params import InvalidRequest, SamplingParams
from vnext.server.answers.beams import generation_of
from vnext.server.answers.generation import Generation
from vnext.server.answers.parts import AnswerParts, ScannedCalls
from vnext.server.context.conversation import shown_tools
from vnext.server.context.openai_types import ChatBody, sampling_params
from vnext.server.context.server_context import ServerContext


class ChatRequest:
    """See the module."""

    def __init__(self, context: ServerContext, body: ChatBody) -> None:
        self._context = context
        self._body = body
        self.tools = shown_tools(body, context.tool_form)
        self.params = _params(body, context, self.tools is not None and context.tool_form == "tagged")
        self.answer_count = max(self.params.n, 1)

    async def start(self, call_id: str, client: str, started_s: float) -> Generation:
        """The generation, not yet sent: `answer` sends it. Raises InvalidRequest, ModelUnknown, Overloaded, EngineDead."""
        prompt = await prompt_tokens(self._context, self._body, self.tools, client)
        try:
            return generation_of(
                self._context,
                call_id=call_id,
                body=self._body,
                prompts=[prompt],
                params=self.params,
                started_s=started_s,
            )
        except InvalidRequest as error:
            raise _in_words_of_chat(error, self._body) from error

    def parts(self) -> AnswerParts:
        """For one answer."""
        form = self._context.tool_form
        parser = None if self.tools is None or form is None else ScannedCalls(form)
        return AnswerParts(parser, one_call=self._body.parallel_tool_calls is False)

    def finish_reason(self, parts: AnswerParts, finish: str) -> str:
        """OpenAI's reason for the end of an answer: "tool_calls" where a complete answer has calls."""
        return "tool_calls" if finish == "stop" and parts.call_count else finish


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


def _in_words_of_chat(error: InvalidRequest, body: ChatBody) -> InvalidRequest:
    names = {"prompt": "messages", "logprobs": "top_logprobs"}
    if body.max_completion_tokens is not None:
        names["max_tokens"] = "max_completion_tokens"
    name = names.get(error.param or "", error.param)
    message = error.message.replace("the prompt", "the messages").replace(f"{error.param} is ", f"{name} is ")
    return InvalidRequest(message, name, error.code)


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
