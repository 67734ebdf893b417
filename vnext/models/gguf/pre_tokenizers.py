"""Pre-tokenizers: how the byte-level vocabularies that GGUF files name cut a text into words, in the terms of a tokenizer.json.

A name stands for the regular expressions of llama.cpp's src/llama-vocab.cpp, which are those of the models' authors.
"""

from __future__ import annotations

from typing import NamedTuple

ENDINGS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
REST = r"\s*[\r\n]+|\s+(?!\S)|\s+"
UPPER, LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
MARK = r"[^\r\n\p{L}\p{N}]?"


def _words(digits: str) -> str:
    return rf"{ENDINGS}|{MARK}\p{{L}}+|{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{REST}"


def _cased(ending: str, digits: str) -> str:
    return (
        rf"{MARK}{UPPER}*{LOWER}+{ending}|{MARK}{UPPER}+{LOWER}*{ending}|{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{REST}"
    )


class Cut(NamedTuple):
    """The expression whose matches are words, "" for GPT-2's. `digits`: each digit is a word before. `takes_whole_words`: a word
    that the vocabulary has is not put together by merges. `composes`: characters are composed first (NFC)."""

    pattern: str = ""
    digits: bool = False
    takes_whole_words: bool = False
    composes: bool = False

    def steps(self) -> dict[str, object]:
        """The pre_tokenizer of a tokenizer.json."""
        split = {"type": "Split", "pattern": {"Regex": self.pattern}, "behavior": "Isolated", "invert": False}
        level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": not self.pattern}
        first = [{"type": "Digits", "individual_digits": True}] if self.digits else [split] if self.pattern else []
        return {"type": "Sequence", "pretokenizers": [*first, level]}


THREES = Cut(_words(r"\p{N}{1,3}"), takes_whole_words=True)
CUTS = {
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3", "falcon3", "pixtral", "smaug-bpe", "glm4"), THREES),
    "dbrx": Cut(_words(r"\p{N}{1,3}")),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen"), Cut(_words(r"\p{N}"), composes=True)),
    **dict.fromkeys(("gpt-2", "phi-2", "mpt", "olmo"), Cut()),
    **dict.fromkeys(("smollm", "starcoder", "refact", "command-r", "codeshell"), Cut(digits=True)),
    "tekken": Cut(_cased("", r"\p{N}"), takes_whole_words=True),
    **dict.fromkeys(("gpt-4o", "llama4"), Cut(_cased(f"{ENDINGS}?", r"\p{N}{1,3}"))),
}
"""By the name in tokenizer.ggml.pre."""
