"""Random answers: texts drawn token by token from what a grammar allows, as a model without knowledge would write them."""

from __future__ import annotations

import random

import numpy as np
from llguidance import LLMatcher

from vnext.text.structured.grammar import LIMITS, vocabulary
from vnext.text.tokenizer import Tokenizer


class RandomWriter:
    """Draws from the allowed tokens. Now and then it draws only from those that end something, so that it finishes."""

    def __init__(self, tokenizer: Tokenizer, seed: int = 0) -> None:
        self._tokens = vocabulary(tokenizer)
        self._bytes = [tokenizer.token_text(token).data for token in range(self._tokens.vocab_size)]
        self._enders = np.array([data[:1] in (b'"', b"}", b"]", b",", b":") for data in self._bytes])
        self._rng = random.Random(seed)

    def answer(self, grammar: str, length_max: int = 400) -> str | None:
        """A complete answer, None where there are too many tokens before its end. Raises ValueError where fuel runs out."""
        matcher = LLMatcher(self._tokens, grammar, limits=LIMITS, log_level=0)
        data = b""
        for place in range(length_max):
            if matcher.is_stopped() or (matcher.is_accepting() and self._rng.random() < 0.3):
                break
            token = self._token(matcher, 0.2 + place / length_max)
            if token is None:
                break
            matcher.consume_token(token)
            data += self._bytes[token]
        if matcher.is_error():
            raise ValueError(matcher.get_error())
        return data.decode() if matcher.is_accepting() else None

    def _token(self, matcher: LLMatcher, haste: float) -> int | None:
        bits = np.frombuffer(matcher.compute_bitmask(), dtype=np.uint8)
        allowed = np.unpackbits(bits, bitorder="little")[: len(self._bytes)].astype(bool)
        allowed[self._tokens.eos_token] = False
        ending = allowed & self._enders
        choices = np.flatnonzero(ending if self._rng.random() < haste and ending.any() else allowed)
        return int(self._rng.choice(choices.tolist())) if len(choices) else None
