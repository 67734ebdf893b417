"""Missed: what an answer's usage says of a prompt that the prefix cache had less of than it could have had, and of which message.

The template has written the messages into the prompt, mostly as they are: a message begins where its first words are found behind
the message before it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from vnext.runtime.protocol.cache_misses import CacheMiss
from vnext.server.call import Call
from vnext.server.context.conversation import content_of
from vnext.server.context.openai_types import ChatBody
from vnext.text.tokenizer import Tokenizer

WORDS = 200
"""Characters of a message that are looked for."""
SETTING = "template"
"""What stands before the first message: tools, and the template's own words."""
NEVER = "\0"
"""Stands for images, whose tokens are no text."""


def missed_usage(call: Call, prompts: Sequence[Sequence[int]], misses: Sequence[CacheMiss | None]) -> dict[str, Any]:
    """`cache_miss` of the prompt of `call` that lost most; nothing where none lost a block."""
    place, miss = max(enumerate(misses), key=lambda each: each[1].lost_tokens if each[1] else 0, default=(0, None))
    if miss is None:
        return {}
    found: dict[str, Any] = {"reason": miss.reason, "at_token": miss.at_token, "lost_tokens": miss.lost_tokens}
    if isinstance(call.asked, ChatBody):
        found["in"] = message_at(call.asked, call.context.tokenizer, prompts[place], miss.at_token)
    return {"cache_miss": found}


def message_at(body: ChatBody, tokenizer: Tokenizer, prompt: Sequence[int], token: int) -> str:
    """The message that a prompt's token (counted from 0) belongs to, as messages[2]; SETTING for one before all."""
    text = tokenizer.decode(prompt, skip_special_tokens=False)
    offset = len(tokenizer.decode(prompt[:token], skip_special_tokens=False))
    end, found = 0, SETTING
    for number, message in enumerate(body.messages):
        words = max(content_of(message, "", NEVER).split(NEVER), key=len).strip()
        begin = text.find(words[:WORDS], end) if words else -1
        if begin > offset:
            break
        if begin >= 0:
            end, found = begin + len(words), f"messages[{number}]"
    return found
