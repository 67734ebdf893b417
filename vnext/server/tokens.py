"""POST /tokenize and /detokenize: what a text or a conversation is as tokens here, and the way back.

Owns these two bodies, in vLLM's form. The tokens are those that a completion or a chat of the same words would compute; nothing
is computed with them.
"""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
from aiohttp import web

from vnext.sampling_params import InvalidRequest
from vnext.server.chat import prompt_tokens
from vnext.server.conversation import shown_tools
from vnext.server.edge import EDGE, Edge
from vnext.server.openai_types import ChatBody, ChatMessage, Tool, decode_body

DECODE_INLINE_TOKENS_MAX = 1_000  # more take milliseconds, in which nobody's tokens would be sent


class TokenizeBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A text (`prompt`) or a conversation (`messages` and what belongs to it)."""

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
    edge = request.app[EDGE]
    body = decode_body(_tokenize, await request.read(), TokenizeBody)
    edge.model_name(body.model)
    tokens = await _tokens(edge, body)
    texts = [edge.tokenizer.token_text(token).text for token in tokens] if body.return_token_strs else None
    return web.json_response(
        {"count": len(tokens), "max_model_len": edge.model_length, "tokens": tokens, "token_strs": texts}
    )


async def detokenize(request: web.Request) -> web.Response:
    """POST /detokenize: {"prompt"}, special tokens spelt out."""
    edge = request.app[EDGE]
    body = decode_body(_detokenize, await request.read(), DetokenizeBody)
    edge.model_name(body.model)
    edge.check_tokens(body.tokens, "tokens")
    if len(body.tokens) <= DECODE_INLINE_TOKENS_MAX:
        return web.json_response({"prompt": edge.tokenizer.decode(body.tokens, skip_special_tokens=False)})
    return web.json_response({"prompt": await asyncio.to_thread(edge.tokenizer.decode, body.tokens, False)})


async def _tokens(edge: Edge, body: TokenizeBody) -> list[int]:
    if (body.prompt is None) == (body.messages is None):
        raise InvalidRequest("Either prompt or messages is required, and not both.", "prompt")
    if body.messages is None:
        return await edge.encode(body.prompt, body.add_special_tokens is not False)
    chat = ChatBody(
        messages=body.messages, tools=body.tools, add_generation_prompt=body.add_generation_prompt,
        continue_final_message=body.continue_final_message, chat_template_kwargs=body.chat_template_kwargs,
    )  # fmt: skip
    return await prompt_tokens(edge, chat, shown_tools(chat, edge.tool_form))
