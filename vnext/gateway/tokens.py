"""Tokens: the prompt of a request as the servers' engines will see it, for exact views of their caches.

The router has no tokenizer: one of the servers converts the text. A prompt whose tokens are not known stands for itself by its
text: 16 numbers for each piece of it, which are equal where texts are, so that what is on its way counts all the same.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import NamedTuple

import aiohttp
import msgspec

from vnext.gateway.asked import Asked
from vnext.routing.prompts import Prompt
from vnext.state.events import pack_tokens, unpack_tokens

TIMEOUT_S = 0.5
TEXT_BYTES_MIN = 256
"""A shorter prompt has no prefix worth knowing."""
FIELDS = {
    "/v1/chat/completions": (
        "model", "messages", "tools", "add_generation_prompt", "continue_final_message", "chat_template_kwargs",
    ),
    "/v1/completions": ("model", "prompt", "add_special_tokens"),
}  # fmt: skip
"""Path -> the members of its body that /tokenize takes."""


class Known(NamedTuple):
    """A request's prompt, and whether its tokens are the engine's, not those that stand for its text."""

    prompt: Prompt
    by_tokens: bool


NOTHING = Known(Prompt(b""), False)
"""Enough where no view is exact."""


def text_prompt(asked: Asked) -> Prompt:
    """The request's prompt by its text."""
    return Prompt(b"".join(each.to_bytes(8, "little") * 8 for each in asked.hashes), asked.salt)


async def token_prompt(
    session: aiohttp.ClientSession, url: str, path: str, asked: Asked, headers: Iterable[tuple[str, str]]
) -> Prompt | None:
    """The request's prompt by its tokens, which the server at `url` is asked for; None where it does not say."""
    try:
        members = msgspec.json.decode(asked.body, type=dict[str, msgspec.Raw])
        if path == "/v1/completions" and bytes(members["prompt"]).startswith(b"["):
            return Prompt(pack_tokens(msgspec.json.decode(members["prompt"], type=list[int])), asked.salt)
        body = msgspec.json.encode({name: members[name] for name in FIELDS[path] if name in members})
        async with asyncio.timeout(TIMEOUT_S), session.post(f"{url}/tokenize", data=body, headers=headers) as response:
            if response.status != 200:
                return None
            answer = msgspec.json.decode(await response.read(), type=_Answer)
            return Prompt(pack_tokens(answer.tokens), asked.salt)
    except (aiohttp.ClientError, OSError, TimeoutError, msgspec.DecodeError, LookupError, OverflowError):
        return None


async def ticket_from(
    session: aiohttp.ClientSession, url: str, asked: Asked, prompt: Prompt, headers: Iterable[tuple[str, str]]
) -> str:
    """What the server at `url` says when it has computed a prompt for another one; "" where it has not."""
    body = {"tokens": unpack_tokens(prompt.tokens).tolist(), "cache_salt": asked.salt}
    data = msgspec.json.encode(body | ({"model": asked.model} if asked.model else {}))
    try:
        async with session.post(f"{url}/handover", data=data, headers=headers) as response:
            return msgspec.json.decode(await response.read(), type=_Ticket).ticket if response.status == 200 else ""
    except (aiohttp.ClientError, OSError, TimeoutError, msgspec.DecodeError):
        return ""


class _Answer(msgspec.Struct):
    tokens: list[int]


class _Ticket(msgspec.Struct):
    ticket: str
