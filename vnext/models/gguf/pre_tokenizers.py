"""Pre-tokenizers: how the byte-level vocabularies that GGUF files name cut a text into words, in the terms of a tokenizer.json.

A name stands for the regular expressions of llama.cpp's src/llama-vocab.cpp, which are those of the models' authors.
"""

from __future__ import annotations

from typing import NamedTuple

ENDINGS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
REST = r"\s*[\r\n]+|\s+(?!\S)|\s+"
UPPER, LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)"
SENTENCES = r" ?[^(\s|.,!?…。，、।۔،)]+"
MARK = r"[^\r\n\p{L}\p{N}]?"


def _words(digits: str) -> str:
    return rf"{ENDINGS}|{MARK}\p{{L}}+|{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{REST}"


def _cased(ending: str, digits: str) -> str:
    return (
        rf"{MARK}{UPPER}*{LOWER}+{ending}|{MARK}{UPPER}+{LOWER}*{ending}|{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{REST}"
    )


class Cut(NamedTuple):
    """Each of `patterns` cuts what those before it have left, at both ends of its matches; then GPT-2's, if `as_gpt2`.
    `takes_whole_words`: a word that the vocabulary has is not put together by merges. `composes`: characters are composed first
    (NFC)."""

    patterns: tuple[str, ...] = ()
    as_gpt2: bool = False
    takes_whole_words: bool = False
    composes: bool = False

    def steps(self) -> dict[str, object]:
        """The pre_tokenizer of a tokenizer.json."""
        cuts = [{"type": "Split", "pattern": {"Regex": each}, "behavior": "Isolated", "invert": False} for each in self.patterns]
        level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": self.as_gpt2}
        return {"type": "Sequence", "pretokenizers": [*cuts, level]}


THREES, ONES, CASED = _words(r"\p{N}{1,3}"), _words(r"\p{N}"), _cased(f"{ENDINGS}?", r"\p{N}{1,3}")
CHINESE = (
    r"\p{N}{1,3}", "[一-龥\u3040-ゟ゠-ヿ]+",
    r"[!-/:-@\[-`{-~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|" + REST,
)  # fmt: skip
WHOLE = Cut((THREES,), takes_whole_words=True)
CUTS = {
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3", "falcon3", "pixtral", "smaug-bpe", "glm4", "chatglm-bpe"), WHOLE),
    "dbrx": Cut((THREES,)),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen"), Cut((ONES,), composes=True)),
    **dict.fromkeys(("stablelm2", "hunyuan"), Cut((ONES,))),
    **dict.fromkeys(("gpt-2", "phi-2", "mpt", "olmo", "jais", "trillion", "exaone4", "granite-docling"), Cut(as_gpt2=True)),
    **dict.fromkeys(
        ("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b"), Cut((r"\p{N}",), as_gpt2=True)
    ),
    "tekken": Cut((_cased("", r"\p{N}"),), takes_whole_words=True),
    **dict.fromkeys(("gpt-4o", "llama4", "minimax-m2"), Cut((CASED,))),
    **dict.fromkeys(("deepseek-v3", "hunyuan-dense"), Cut(CHINESE)),
    "deepseek-coder": Cut((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[一-龥ࠀ-一가-\ud7ff]+", r"\p{N}")),
    "seed-coder": Cut((rf"{ENDINGS}|{MARK}\p{{L}}+|\p{{N}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|{REST}",)),
    "falcon": Cut((r"[\p{P}$+<=>^~|`]+", GPT2, r"[0-9][0-9][0-9]")),
    **dict.fromkeys(("bloom", "poro-chat", "gpt3-finnish"), Cut((SENTENCES,))),
    "viking": Cut((SENTENCES, r"\p{N}")),
}
"""By the name in tokenizer.ggml.pre."""
