"""The tokenizer in a GGUF file's metadata as a checkpoint's tokenizer.json and tokenizer_config.json.

Byte-level BPE (`gpt2`) comes with its merges. SentencePiece's BPE (`llama`) comes with scores, from which its merges follow: a pair
of pieces that make a piece is joined before every pair whose piece has a lower score.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from vnext.base.spelling import close_to
from vnext.models.errors import ModelError

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, BYTE = 1, 2, 3, 4, 6  # of tokenizer.ggml.token_type
SPACE = "\u2581"
TEMPLATE = "tokenizer.chat_template"
CHARACTERS_MAX = 1024
"""Of a token whose halves are looked up: those of models have 128 at most."""
NAMED = ("bos", "eos", "unk", "pad")
KEYS = {"unk": "unknown", "pad": "padding"}


class Vocabulary:
    """What the metadata say of tokens. Raises ModelError where they do not fit together."""

    def __init__(self, metadata: dict[str, object]) -> None:
        self._metadata = metadata
        self.tokens: list[str] = self._get("tokens", [])
        self.types: Sequence[int] = self._get("token_type", (NORMAL,) * len(self.tokens))
        self.model: str = self._get("model", "")
        if not self.tokens or len(set(self.tokens)) != len(self.tokens) or len(self.types) != len(self.tokens):
            raise ModelError("the file's vocabulary is empty, names a token twice or has types of other tokens; download it again")

    def settings(self) -> dict[str, object]:
        """tokenizer_config.json."""
        named = {f"{name}_token": self.tokens[number] for name in NAMED if (number := self.number(name)) is not None}
        templates = {key.removeprefix(TEMPLATE).lstrip(".") or "default": text for key, text in self._metadata.items()
                     if key.startswith(TEMPLATE) and isinstance(text, str)}
        listed = [{"name": name, "template": text} for name, text in templates.items()]
        return named | ({"chat_template": listed} if listed else {})

    def number(self, name: str) -> int | None:
        """The number of the token that begins or ends texts, say; None where the file names none."""
        found = self._get(f"{KEYS.get(name, name)}_token_id", None)
        return int(found) if found is not None and 0 <= int(found) < len(self.tokens) else None

    def ends(self) -> list[int]:
        """The tokens that end an answer."""
        found = (self.number(name) for name in ("eos", "eot", "eom"))
        return list(dict.fromkeys(number for number in found if number is not None))

    def json(self) -> dict[str, object]:
        """tokenizer.json."""
        if self.model not in ("gpt2", "llama"):
            raise ModelError(f"the file's tokenizer is of the kind {self.model!r}; kinds gpt2 and llama are read")
        whole = self._byte_level() if self.model == "gpt2" else self._pieces()
        added = [number for number, type_ in enumerate(self.types) if type_ in (CONTROL, USER_DEFINED, UNKNOWN)]
        return {"version": "1.0", "added_tokens": [self._added(number) for number in added], **whole}

    def _byte_level(self) -> dict[str, object]:
        name = self._get("pre", "")
        if name not in CUTS:
            meant = close_to(name, CUTS)
            raise ModelError(
                f"the file's pre-tokenizer {name!r} is not known{f', did you mean {meant}' if meant else ''}; known are "
                f"{', '.join(CUTS)}: take the model's safetensors checkpoint"
            )
        cut = CUTS[name]
        merges = [merge.partition(" ")[::2] for merge in self._get("merges", [])]
        model = {"type": "BPE", "vocab": self._numbers(), "merges": merges, "ignore_merges": cut.takes_whole_words}
        level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
        return {
            "normalizer": {"type": "NFC"} if cut.composes else None,
            "pre_tokenizer": cut.steps(),
            "post_processor": self._beginning(usual=False) or level,
            "decoder": level | {"trim_offsets": True, "use_regex": True},
            "model": model,
        }

    def _pieces(self) -> dict[str, object]:
        begins_with_space = bool(self._get("add_space_prefix", True))
        replaced = {"type": "Replace", "pattern": {"String": " "}, "content": SPACE}
        back = {"type": "Replace", "pattern": {"String": SPACE}, "content": " "}
        unknown = self.number("unk")
        strip = [{"type": "Strip", "content": " ", "start": 1, "stop": 0}] if begins_with_space else []
        return {
            "normalizer": {
                "type": "Sequence",
                "normalizers": [*([{"type": "Prepend", "prepend": SPACE}] if begins_with_space else []), replaced],
            },
            "pre_tokenizer": None,
            "post_processor": self._beginning(usual=True),
            "decoder": {"type": "Sequence", "decoders": [back, {"type": "ByteFallback"}, {"type": "Fuse"}, *strip]},
            "model": {
                "type": "BPE", "vocab": self._numbers(), "merges": self._merges_by_score(), "byte_fallback": True,
                "fuse_unk": True, "unk_token": None if unknown is None else self.tokens[unknown],
            },
        }  # fmt: skip

    def _merges_by_score(self) -> list[tuple[str, str]]:
        scores: Sequence[float] = self._get("scores", ())
        if len(scores) != len(self.tokens):
            raise ModelError("the file's vocabulary has no score for each token, which its merges follow from; download it again")
        tokens, types, numbers = self.tokens, self.types, self._numbers()
        found: list[tuple[str, str]] = []
        for number in sorted(range(len(tokens)), key=scores.__getitem__, reverse=True):
            piece = tokens[number]
            if types[number] in (CONTROL, UNKNOWN, BYTE):
                continue
            if len(piece) > CHARACTERS_MAX:
                raise ModelError(f"the file's vocabulary has a token of {len(piece)} characters; download it again")
            halves = ((piece[:cut], piece[cut:]) for cut in range(1, len(piece)))
            pairs = sorted((numbers[one], numbers[two]) for one, two in halves if one in numbers and two in numbers)
            found += [(tokens[first], tokens[second]) for first, second in pairs]
        return found

    def _beginning(self, usual: bool) -> dict[str, object] | None:
        """What puts the token that begins texts before one; None where the model has none there."""
        number = self.number("bos")
        if number is None or not self._get("add_bos_token", usual):
            return None
        text = self.tokens[number]
        first, second = ({"Sequence": {"id": name, "type_id": 0}} for name in "AB")
        begin = {"SpecialToken": {"id": text, "type_id": 0}}
        return {
            "type": "TemplateProcessing", "single": [begin, first], "pair": [begin, first, begin, second],
            "special_tokens": {text: {"id": text, "ids": [number], "tokens": [text]}},
        }  # fmt: skip

    def _added(self, number: int) -> dict[str, object]:
        flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
        return {"id": number, "content": self.tokens[number], **flags, "special": self.types[number] != USER_DEFINED}

    def _numbers(self) -> dict[str, int]:
        return {token: number for number, token in enumerate(self.tokens)}

    def _get(self, name: str, usual: Any) -> Any:
        return self._metadata.get(f"tokenizer.ggml.{name}", usual)


# ---- pre-tokenizers ------------------------------------------------------------------------------------------------
# Pre-tokenizers: how the byte-level vocabularies that GGUF files name cut a text into words, in the terms of a tokenizer.json.
# A name stands for the regular expressions of llama.cpp's src/llama-vocab.cpp, which are those of the models' authors.

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
