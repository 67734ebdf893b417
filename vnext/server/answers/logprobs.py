"""Log-probabilities in the two shapes of OpenAI's API. JSON has no infinity: LOWEST stands for an impossible token."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from vnext.runtime.messages import PromptResult, TokenLogprobs
from vnext.text.answer import Delta
from vnext.text.prompt_results import prompt_logprobs
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


def echoed_logprobs(
    tokenizer: Tokenizer, spell: Spell, prompt: Sequence[int], parts: Sequence[PromptResult], count: int
) -> dict[str, list[Any]]:
    """As completion_logprobs, of an echoed prompt: the first token follows nothing and has none."""
    detokenizer, length, offsets = tokenizer.detokenizer(), 0, []
    for token in prompt:
        offsets.append(length)
        length += len(detokenizer.push(token))
    texts, entries = list(map(spell, prompt)), prompt_logprobs(parts, len(prompt))
    return {
        "tokens": texts,
        "token_logprobs": [entry and _finite(entry.logprob) for entry in entries],
        "top_logprobs": [entry and _alternatives(spell, text, entry, count) for text, entry in zip(texts, entries)],
        "text_offset": offsets,
    }


def named_prompt_logprobs(
    tokenizer: Tokenizer, prompt: Sequence[int], parts: Sequence[PromptResult], count: int
) -> list[dict[str, dict[str, Any]] | None]:
    """vLLM's `prompt_logprobs`: an object by token id for each token of the prompt, null for the first."""
    return [
        entry and _ranked(tokenizer, token, entry, count)
        for token, entry in zip(prompt, prompt_logprobs(parts, len(prompt)))
    ]


def prompt_member(tokenizer: Tokenizer, prompt: Sequence[int], parts: Sequence[PromptResult], count: int | None) -> dict[str, Any]:
    """The member `prompt_logprobs` of a response or a choice; {} where it was not asked for."""
    return {} if count is None else {"prompt_logprobs": named_prompt_logprobs(tokenizer, prompt, parts, count)}


def _ranked(tokenizer: Tokenizer, token: int, entry: TokenLogprobs, count: int) -> dict[str, dict[str, Any]]:
    ranked = [(other, logprob, rank) for rank, (other, logprob) in enumerate(entry.top[:count], 1)]
    return {
        str(other): {"logprob": _finite(logprob), "rank": rank, "decoded_token": tokenizer.token_text(other).text}
        for other, logprob, rank in (*ranked, (token, entry.logprob, entry.rank + 1))
    }


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
