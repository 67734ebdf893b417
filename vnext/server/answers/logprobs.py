"""Log-probabilities in the two shapes of OpenAI's API. JSON has no infinity: LOWEST stands for an impossible token."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from vnext.runtime.messages import TokenLogprobs
from vnext.text.answer import Delta
from vnext.text.tokenizer import Tokenizer

LOWEST = -9999.0


Spell = Callable[[int], str]


def speller(tokenizer: Tokenizer, as_token_ids: bool | None) -> Spell:
    """How log-probabilities name a token: by its text, or as `token_id:5`, which tells apart tokens with the same text."""
    return "token_id:{}".format if as_token_ids else lambda token: tokenizer.token_text(token).text


def completion_logprobs(spell: Spell, delta: Delta, count: int, prefix_length: int) -> dict[str, list[Any]]:
    """For /v1/completions: parallel lists with `count` alternatives per token; `prefix_length` characters precede the answer."""
    shown: dict[str, list[Any]] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
    for token, offset, logprobs in zip(delta.tokens, delta.offsets, delta.logprobs):
        text = spell(token)
        shown["tokens"].append(text)
        shown["token_logprobs"].append(_finite(logprobs.logprob))
        shown["top_logprobs"].append(_alternatives(spell, text, logprobs, count))
        shown["text_offset"].append(prefix_length + offset)
    return shown


def chat_logprobs(tokenizer: Tokenizer, spell: Spell, delta: Delta, count: int) -> list[dict[str, Any]]:
    """For /v1/chat/completions: one object per token, with `count` alternatives in each."""
    return [
        _entry(tokenizer, spell, token, logprobs.logprob)
        | {"top_logprobs": [_entry(tokenizer, spell, other, logprob) for other, logprob in logprobs.top[:count]]}
        for token, logprobs in zip(delta.tokens, delta.logprobs)
    ]


def _alternatives(spell: Spell, text: str, logprobs: TokenLogprobs, count: int) -> dict[str, float]:
    """The `count` likeliest tokens and always the sampled one. Of several tokens with the same text, it shows the likeliest."""
    found: dict[str, float] = {}
    for token, logprob in logprobs.top[:count]:
        found.setdefault(spell(token), _finite(logprob))
    found.setdefault(text, _finite(logprobs.logprob))
    return found


def _entry(tokenizer: Tokenizer, spell: Spell, token: int, logprob: float) -> dict[str, Any]:
    return {"token": spell(token), "logprob": _finite(logprob), "bytes": list(tokenizer.token_text(token).data)}


def _finite(logprob: float) -> float:
    return logprob if logprob > LOWEST else LOWEST
