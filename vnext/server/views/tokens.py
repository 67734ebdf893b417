"""POST /tokenize and /detokenize: turns a text or a conversation into tokens, and back.

Owns the two bodies, in vLLM's format. The tokens are those that a completion or a chat with the same text would compute.
The model does not run.
"""

from __future__ import annotations

from typing import Any

import msgspec
from aiohttp import web

from vnext.runtime.protocol.sampling_params import InvalidRequest
from vnext.server.answers.chat_request import prompt_tokens
from vnext.server.context.identity import client_of
from vnext.server.context.openai_types import ChatBody, ChatMessage, Tool
from vnext.server.context.server_context import SERVER_CONTEXT, ServerContext
from vnext.server.http.bodies import read_body


class TokenizeBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A text (`prompt`) or a conversation (`messages` with its other fields)."""

    model: str | None = None
    prompt: str | None = None
    add_special_tokens: bool | None = None
    messages: list[ChatMessage] | None = None
    tools: list[Tool] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    return_token_strs: bool | None = None


class DetokenizeBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    model: str | None = None
    tokens: list[int]


_tokenize = msgspec.json.Decoder(TokenizeBody)
_detokenize = msgspec.json.Decoder(DetokenizeBody)


async def tokenize(request: web.Request) -> web.Response:
    """POST /tokenize: {"count", "max_model_len", "tokens", "token_strs"}; the last is null unless it was asked for."""
    context = request.app[SERVER_CONTEXT]
    body = await read_body(request, _tokenize)
    client = client_of(request)
    context.model_name(body.model, client)
    tokens = await _tokens(context, body, client)
    texts = None
    if body.return_token_strs:
        texts = await context.work.run(
            16 * len(tokens), client, lambda: [context.tokenizer.token_text(token).text for token in tokens]
        )
    return _answer(
        {"count": len(tokens), "max_model_len": context.bounds.model_length, "tokens": tokens, "token_strs": texts}
    )


async def detokenize(request: web.Request) -> web.Response:
    """POST /detokenize: {"prompt"}, special tokens spelt out."""
    context = request.app[SERVER_CONTEXT]
    body = await read_body(request, _detokenize)
    context.model_name(body.model, client_of(request))
    context.check_tokens(body.tokens, "tokens", context.bounds.listed_tokens_max)
    [text] = await context.decode([body.tokens], client_of(request), skip_special_tokens=False)
    return _answer({"prompt": text})


def _answer(value: dict[str, Any]) -> web.Response:
    return web.json_response(body=msgspec.json.encode(value))


async def _tokens(context: ServerContext, body: TokenizeBody, client: str) -> list[int]:
    if (body.prompt is None) == (body.messages is None):
        raise InvalidRequest("Either prompt or messages is required, and not both.", "prompt")
    if body.prompt is not None:
        special, count_max = body.add_special_tokens is not False, context.bounds.listed_tokens_max
        [tokens] = await context.encode([body.prompt], special, client, ["prompt"], count_max=count_max)
        return tokens
    assert body.messages is not None
    chat = ChatBody(
        messages=body.messages, tools=body.tools, add_generation_prompt=body.add_generation_prompt,
        continue_final_message=body.continue_final_message, chat_template_kwargs=body.chat_template_kwargs,
    )  # fmt: skip
    return await prompt_tokens(context, chat, client)
