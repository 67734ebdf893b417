"""Infill: a prompt before and a suffix behind the answer, as models that were trained to fill a gap take them.

    <|fim_prefix|>PROMPT<|fim_suffix|>SUFFIX<|fim_middle|>      Qwen 2.5 Coder, CodeGemma; StarCoder, Granite Code without the bars
    <｜fim▁begin｜>PROMPT<｜fim▁hole｜>SUFFIX<｜fim▁end｜>        DeepSeek Coder
    <|code_prefix|>PROMPT<|code_suffix|>SUFFIX<|code_middle|>   CodeGeeX 4
    [SUFFIX]SUFFIX[PREFIX]PROMPT                                Codestral

A model is recognised by its tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

_PROMPT_FIRST = (
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),
    ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),
    ("<|code_prefix|>", "<|code_suffix|>", "<|code_middle|>"),
)
_SUFFIX_FIRST = (("[PREFIX]", "[SUFFIX]"),)


class Infill(NamedTuple):
    """The tokens before the prompt and before the suffix, and those behind both. Of `middle` () the suffix comes first."""

    prompt: int
    suffix: int
    middle: tuple[int, ...]

    def joined(self, begin: Sequence[int], prompt: Sequence[int], suffix: Sequence[int]) -> list[int]:
        """The whole prompt; `begin` are the tokens with which any text of the model begins."""
        if self.middle:
            return [*begin, self.prompt, *prompt, self.suffix, *suffix, *self.middle]
        return [*begin, self.suffix, *suffix, self.prompt, *prompt]


def infill_of(token_id: Callable[[str], int | None]) -> Infill | None:
    """The model's own tokens for a gap; None where it has none. `token_id` gives the id of an added token."""
    for names in (*_PROMPT_FIRST, *_SUFFIX_FIRST):
        prompt, suffix, *middle = map(token_id, names)
        if prompt is not None and suffix is not None and None not in middle:
            return Infill(prompt, suffix, tuple(each for each in middle if each is not None))
    return None
