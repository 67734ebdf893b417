"""Log-probabilities in the two shapes of OpenAI's API, and expert ids in that of SGLang. JSON has no infinity: LOWEST stands for
an impossible token.
"""

from __future__ import annotations

import base64
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from vnext.runtime.protocol.messages import PromptResult, TokenLogprobs
from vnext.text.answer import Answer, Delta
from vnext.text.parts import Words
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
        None if entry is None else _ranked(tokenizer, token, entry, count)
        for token, entry in zip(prompt, prompt_logprobs(parts, len(prompt)))
    ]


def _ranked(tokenizer: Tokenizer, token: int, entry: TokenLogprobs, count: int) -> dict[str, dict[str, Any]]:
    ranked = [(other, logprob, rank) for rank, (other, logprob) in enumerate(entry.top[:count], 1)]
    return {
        str(other): {"logprob": _finite(logprob), "rank": rank, "decoded_token": tokenizer.token_text(other).text}
        for other, logprob, rank in (*ranked, (token, entry.logprob, entry.rank + 1))
    }


class ChatLogprobs:
    """For chats: one object per token, with `count` alternatives in each. Those of an answer that is parsed are its words' tokens
    alone, and of a token that words share with a mark or a thought, the words' part."""

    def __init__(self, tokenizer: Tokenizer, spell: Spell, count: int, is_parsed: bool) -> None:
        self._tokenizer, self._spell, self._count = tokenizer, spell, count
        self._is_parsed = is_parsed
        self._tokens: deque[tuple[int, int, TokenLogprobs]] = deque()  # the characters before each token, and the token
        self._length = 0
        self._part = ""  # of the first token, in words so far

    def push(self, delta: Delta) -> list[dict[str, Any]]:
        """Take in a delta; returns the entries of an answer that is not parsed."""
        if not self._is_parsed:
            return [self._object(token, logprobs) for token, logprobs in zip(delta.tokens, delta.logprobs)]
        self._tokens += zip(delta.offsets, delta.tokens, delta.logprobs)
        self._length = delta.length
        return []

    def of(self, words: Words) -> list[dict[str, Any]]:
        """The entries of the tokens that end within the words of an answer that is parsed. Words come in order."""
        found, stop = [], words.start + len(words.text)
        while self._tokens and (start := self._tokens[0][0]) < min(self._length, stop):
            end = next((offset for offset, _, _ in self._tokens if offset > start), self._length)
            self._part += words.text[max(0, start - words.start) : max(0, end - words.start)]
            if end > stop:
                break
            found += self._first(start, end)
        return found

    def rest(self) -> list[dict[str, Any]]:
        """The entry of a token of which words took a part at last."""
        return self._first(self._tokens[0][0], self._length) if self._part else []

    def _first(self, start: int, end: int) -> list[dict[str, Any]]:
        """The entries of the first character's tokens, if they are in words."""
        part, self._part, found = self._part, "", []
        while self._tokens and self._tokens[0][0] == start:
            _, token, logprobs = self._tokens.popleft()
            found.append(self._object(token, logprobs))
        if part and len(part) < end - start:
            found[-1] |= {"token": part, "bytes": list(part.encode())}
        return found if part else []

    def _object(self, token: int, logprobs: TokenLogprobs) -> dict[str, Any]:
        top = [logprob_entry(self._tokenizer, self._spell, other, logprob) for other, logprob in logprobs.top[: self._count]]
        return logprob_entry(self._tokenizer, self._spell, token, logprobs.logprob) | {"top_logprobs": top}


def _alternatives(spell: Spell, text: str, logprobs: TokenLogprobs, count: int) -> dict[str, float]:
    """The `count` likeliest tokens and always the sampled one. Of several tokens with the same text, it shows the likeliest."""
    found: dict[str, float] = {}
    for token, logprob in logprobs.top[:count]:
        found.setdefault(spell(token), _finite(logprob))
    found.setdefault(text, _finite(logprobs.logprob))
    return found


def logprob_entry(tokenizer: Tokenizer, spell: Spell, token: int, logprob: float) -> dict[str, Any]:
    return {"token": spell(token), "logprob": _finite(logprob), "bytes": list(tokenizer.token_text(token).data)}


def _finite(logprob: float) -> float:
    return logprob if logprob > LOWEST else LOWEST


def experts_member(answer: Answer, prompt_length: int) -> dict[str, Any]:
    """The member `routed_experts` of a choice: int32 [prompt + answer - 1, layers, experts of a token] in base64, as SGLang
    sends them."""
    from vnext.text.prompt_arrays import routed_experts

    found = routed_experts(answer.prompt, prompt_length + answer.token_count - 1)
    return {"routed_experts": None if found is None else base64.b64encode(found.astype("<i4").tobytes()).decode()}
