"""Retained: how many tokens of a rendered prompt stand before a breakpoint of its conversation.

A template may write anything around a message, so the place is found by rendering: a conversation that differs behind the
breakpoint has the same text up to it.
"""

from __future__ import annotations

from collections.abc import Sequence
from os.path import commonprefix
from typing import Any

from msgspec.structs import replace

from vnext.runtime.protocol.sampling_params import InvalidRequest
from vnext.server.context.openai_types import ChatBody, ChatMessage
from vnext.server.context.retention import Breakpoint
from vnext.server.context.server_context import ServerContext
from vnext.state.params import ALL_TOKENS


async def retention_of(
    context: ServerContext,
    body: ChatBody,
    tools: list[dict[str, Any]] | None,
    prompt: tuple[str, list[int]],
    breakpoints: Sequence[Breakpoint],
    client: str,
) -> tuple[tuple[int, int], ...]:
    """(tokens, seconds) of each breakpoint: one behind the last message keeps the answer too, with which the next turn begins.
    `prompt` is the text and the tokens. Raises Overloaded."""
    text, tokens = prompt
    found = []
    for each in breakpoints:
        count = ALL_TOKENS
        if each.messages < len(body.messages):
            count = await _tokens_before(context, body, tools, (text, tokens), each.messages, client)
        found.append((count, each.seconds))
    return tuple(found)


async def _tokens_before(
    context: ServerContext,
    body: ChatBody,
    tools: list[dict[str, Any]] | None,
    prompt: tuple[str, list[int]],
    messages: int,
    client: str,
) -> int:
    text, tokens = prompt
    changed = [*body.messages[:messages], *map(_changed, body.messages[messages:])]
    try:
        other = await context.render(replace(body, messages=changed), tools, client)
        [before] = await context.encode([commonprefix([text, other])], False, client, ["messages"], "messages")
    except InvalidRequest:  # a template that refuses the changed conversation: nothing is promised
        return 0
    return len(commonprefix([tokens, before]))


def _changed(message: ChatMessage) -> ChatMessage:
    """The message with a text that begins differently."""
    text = message.content if isinstance(message.content, str) else ""
    return replace(message, content="y" if text.lstrip()[:1] == "x" else "x")
