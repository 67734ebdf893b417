"""Bad words: the token sequences that must not be completed, so that an answer does not write a text.

Owns the tokenization, as vLLM defines it: a word counts as it begins an answer and as it follows a space, where the space
makes it another token.
"""

from __future__ import annotations

from collections.abc import Sequence

from vnext.text.tokenizer import Tokenizer


def banned_sequences(words: Sequence[str], tokenizer: Tokenizer) -> tuple[tuple[int, ...], ...]:
    """The sequences of `words`, without repeats, in order."""
    found: dict[tuple[int, ...], None] = {}
    for word in words:
        plain, spaced = (tuple(tokenizer.encode(space + word.lstrip(), add_special_tokens=False)) for space in ("", " "))
        found[plain] = None
        if len(spaced) == len(plain) and spaced[:1] != plain[:1]:
            found[spaced] = None
    return tuple(sequence for sequence in found if sequence)
