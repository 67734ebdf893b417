"""Log-probabilities in the two shapes of OpenAI's API. JSON has no infinity: LOWEST stands for an impossible token."""

from __future__ import annotations

from typing import Any

from vnext.runtime.messages import TokenLogprobs
from vnext.text.answer import Delta
from vnext.text.tokenizer import Tokenizer

LOWEST = -9999.0


def completion_logprobs(tokenizer: Tokenizer, delta: Delta, count: int, prefix_length: int) -> dict[str, list[Any]]:
    """For /v1/completions: parallel lists with `count` alternatives per token; `prefix_length` characters precede the answer."""
    shown: dict[str, list[Any]] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
    for token, offset, logprobs in zip(delta.tokens, delta.offsets, delta.logprobs):
        text = tokenizer.token_text(token).text
        shown["tokens"].append(text)
        shown["token_logprobs"].append(_finite(logprobs.logprob))
        shown["top_logprobs"].append(_alternatives(tokenizer, text, logprobs, count))
        shown["text_offset"].append(prefix_length + offset)
    return shown


def chat_logprobs(tokenizer: Tokenizer, delta: Delta, count: int) -> list[dict[str, Any]]:
    """For /v1/chat/completions: one object per token, with `count` alternatives in each."""
    return [
        _entry(tokenizer, token, logprobs.logprob)
        | {"top_logprobs": [_entry(tokenizer, other, logprob) for other, logprob in logprobs.top[:count]]}
        for token, logprobs in zip(delta.tokens, delta.logprobs)
    ]


def _alternatives(tokenizer: Tokenizer, text: str, logprobs: TokenLogprobs, count: int) -> dict[str, float]:
    """The `count` likeliest tokens and always the sampled one. Of several tokens with the same text, it shows the likeliest."""
    found: dict[str, float] = {}
    for token, logprob in logprobs.top[:count]:
        found.setdefault(tokenizer.token_text(token).text, _finite(logprob))
    found.setdefault(text, _finite(logprobs.logprob))
    return found


def _entry(tokenizer: Tokenizer, token: int, logprob: float) -> dict[str, Any]:
    spelt = tokenizer.token_text(token)
    return {"token": spelt.text, "logprob": _finite(logprob), "bytes": list(spelt.data)}


def _finite(logprob: float) -> float:
    return logprob if logprob > LOWEST else LOWEST
