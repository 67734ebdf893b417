"""The tokenizer in a GGUF file's metadata as a checkpoint's tokenizer.json and tokenizer_config.json.

Byte-level BPE (`gpt2`) comes with its merges. SentencePiece's BPE (`llama`) comes with scores, from which its merges follow: a pair
of pieces that make a piece is joined before every pair whose piece has a lower score.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from vnext.base.spelling import close_to
from vnext.models.errors import ModelError
from vnext.models.gguf.pre_tokenizers import CUTS

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
        numbers, found = self._numbers(), []
        for piece, type_, score in zip(self.tokens, self.types, scores):
            if type_ in (CONTROL, UNKNOWN, BYTE):
                continue
            if len(piece) > CHARACTERS_MAX:
                raise ModelError(f"the file's vocabulary has a token of {len(piece)} characters; download it again")
            halves = ((piece[:cut], piece[cut:]) for cut in range(1, len(piece)))
            pairs = [pair for pair in halves if pair[0] in numbers and pair[1] in numbers]
            pairs.sort(key=lambda pair: (numbers[pair[0]], numbers[pair[1]]))
            found += [(-score, pair) for pair in pairs]
        found.sort(key=lambda each: each[0])
        return [pair for _, pair in found]

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
