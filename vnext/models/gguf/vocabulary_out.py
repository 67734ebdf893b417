"""A checkpoint's tokenizer as the metadata of a GGUF file: what tokenizer.py reads, written.

A byte-level tokenizer is written with the name of the pre-tokenizer that cuts PROBE as it does; pieces with scores, the first merge
that makes a piece before the others. Then the one that the file gives must make the same tokens of PROBE, or the model is refused.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import msgspec
from tokenizers import Tokenizer

from vnext.base.tokenizer_files import named_tokens, tokenizer_json, tokenizer_settings
from vnext.models.errors import ModelError
from vnext.models.gguf.tokenizer import (
    BYTE,
    CONTROL,
    CUTS,
    KEYS,
    NORMAL,
    TEMPLATE,
    UNKNOWN,
    USER_DEFINED,
    Cut,
    Vocabulary,
)

UNUSED = 5
NEVER = 10**6
"""The rank of what no merge makes."""
BYTE_TOKEN = re.compile("<0x[0-9A-F]{2}>")
REMEDY = "take --scheme w4a16, w8a16 or fp8"
DEFAULT = "default"
PROBE = (
    "I'll SAY 'I'LL' we've, They'Re don'ya HelloWorld's XMLHttp naïve Ångström éß ﬁ ǅ e\u0301x क्षि ไทย ខ្មែរ\n"
    "1 12 123 1234 1234567 3.14 ١٢٣ Ⅷ ½ 12a v2x 0x1F (12) 1,234,567 ١٢٣٤ １２\n"
    "\t\tx\ty  z   a    b     c       d                 e\r\n\r\n\n \n  \n\n   end \n"
    "def f(x):\n    return x+1  # $a<=b^c>~`d|e != \\n /path/to.txt,\n\n\"q\"/\n//\n;\n\nok...…。，、 !!!\n"
    "中文字，日本語テキスト カタカナ 한국어 가나ㄱ ㄅㄆ！：；— 你好2中x Ｆｕｌｌ 🙂👩‍👩‍👧 IMGIMGABZ <sentinel:3> <0x41>\n"
    "a\u00a0b\u3000c _snake_case__ #tag @x ''s it'sx  12 's\nÉcole élan\x7f\x00 "
)
"""All that pre-tokenizers cut otherwise than one another."""


class Ends(NamedTuple):
    """Of a model: how many tokens it knows, the one that begins texts, None for none, and those that end answers."""

    vocab_size: int
    begin: int | None
    ends: tuple[int, ...]


def vocabulary_members(folder: Path, known: Ends, templates: Mapping[str, str]) -> dict[str, object]:
    """The metadata of the tokenizer in a checkpoint's folder, and of its chat templates by their names. Raises ModelError."""
    try:
        data, settings = tokenizer_json(folder), tokenizer_settings(folder)
        own, spec = Tokenizer.from_str(data.decode()), _spec_decoder.decode(data)
    except Exception as error:  # the library raises nothing narrower
        raise ModelError(f"{folder / 'tokenizer.json'} cannot be read ({error}); download it again") from error
    found = _Writer(spec, own, known).members(named_tokens(settings))
    written = Tokenizer.from_str(json.dumps(Vocabulary(found).json()))
    if any(_ids(own, text) != _ids(written, text) for text in (PROBE, *PROBE.split("\n"), "a", "")):
        raise ModelError(f"the tokenizer in {folder} has steps that no GGUF file can state; {REMEDY}")
    return found | {TEMPLATE + (f".{name}" if name != DEFAULT else ""): text for name, text in templates.items()}


def cut_name(tokenizer: Tokenizer, takes_whole_words: bool) -> str:
    """The name of the pre-tokenizer that cuts texts as this byte-level tokenizer does. Raises ModelError."""
    words = _words(tokenizer)
    for cut in dict.fromkeys(CUTS.values()):
        if cut.takes_whole_words == takes_whole_words and _words(_of_cut(cut)) == words:
            return next(name for name, each in CUTS.items() if each == cut)
    raise ModelError(f"the tokenizer cuts texts as none does that llama.cpp has a name for; {REMEDY}")


def _of_cut(cut: Cut) -> Tokenizer:
    steps = {"normalizer": {"type": "NFC"} if cut.composes else None, "pre_tokenizer": cut.steps()}
    return Tokenizer.from_str(json.dumps({"version": "1.0", "model": {"type": "BPE", "vocab": {}, "merges": []}, **steps}))


def _words(tokenizer: Tokenizer) -> list[str]:
    text = tokenizer.normalizer.normalize_str(PROBE) if tokenizer.normalizer else PROBE
    return [word for word, _ in tokenizer.pre_tokenizer.pre_tokenize_str(text)]


def _ids(tokenizer: Tokenizer, text: str) -> list[int]:
    ids: list[int] = tokenizer.encode(text).ids
    return ids


class _Model(msgspec.Struct):
    type: str = "BPE"
    vocab: dict[str, int] | list[object] = {}
    merges: list[str | tuple[str, str]] = []
    unk_token: str | None = None
    byte_fallback: bool = False
    ignore_merges: bool = False


class _Added(msgspec.Struct):
    id: int
    content: str
    special: bool = False


class _Spec(msgspec.Struct):
    """What is read of tokenizer.json."""

    model: _Model
    added_tokens: list[_Added] = []


_spec_decoder = msgspec.json.Decoder(_Spec)


class _Writer:
    """Of a tokenizer.json, which the library reads as `tokenizer`. Raises ModelError for a kind that is not written."""

    def __init__(self, spec: _Spec, tokenizer: Tokenizer, known: Ends) -> None:
        self._model, self._tokenizer, self._known = spec.model, tokenizer, known
        if spec.model.type != "BPE" or not isinstance(vocab := spec.model.vocab, dict):
            raise ModelError(f"the tokenizer is of the kind {spec.model.type}, and only BPE is written as GGUF; {REMEDY}")
        self._added = {each.content: each for each in spec.added_tokens}
        numbers = vocab | {text: each.id for text, each in self._added.items()}
        names = {number: text for text, number in numbers.items()}
        self._tokens = [names.get(number, f"[PAD{number}]") for number in range(known.vocab_size)]
        self._types = [self._type(text) if number in names else UNUSED for number, text in enumerate(self._tokens)]

    def members(self, named: Mapping[str, str]) -> dict[str, object]:
        """The metadata. `named`: the tokens of roles, eos_token and others."""
        numbers = dict(zip(self._tokens, range(len(self._tokens))))
        roles = {role: numbers[text] for role in ("eos", "unk", "pad") if (text := named.get(f"{role}_token")) in numbers}
        usual = roles.get("eos")
        roles |= dict(zip(("eos", "eot", "eom"), sorted(self._known.ends, key=lambda number: number != usual)))
        begin = self._known.begin
        roles |= {} if begin is None else {"bos": begin}
        found: dict[str, object] = {"tokens": self._tokens, "token_type": self._types, "add_eos_token": False}
        found["add_bos_token"] = begin is not None and _ids(self._tokenizer, "a")[:1] == [begin]
        found |= {f"{KEYS.get(role, role)}_token_id": number for role, number in roles.items()}
        return {f"tokenizer.ggml.{key}": value for key, value in (found | self._steps()).items()}

    def _type(self, text: str) -> int:
        if self._model.unk_token == text:
            return UNKNOWN
        if (each := self._added.get(text)) is not None:
            return CONTROL if each.special else USER_DEFINED
        return BYTE if self._model.byte_fallback and BYTE_TOKEN.fullmatch(text) else NORMAL

    def _steps(self) -> dict[str, object]:
        """How a text becomes pieces."""
        merges = [tuple(each.split(" ", 1)) if isinstance(each, str) else each for each in self._model.merges]
        if not self._model.byte_fallback:
            name = cut_name(self._tokenizer, self._model.ignore_merges)
            return {"model": "gpt2", "pre": name, "merges": [" ".join(pair) for pair in merges]}
        places: dict[str, int] = {}
        for place, pair in enumerate(merges):
            places.setdefault("".join(pair), place)
        scores = [-float(places.get(text, NEVER)) for text in self._tokens]
        begins = self._tokenizer.encode("a", add_special_tokens=False).tokens[:1] != ["a"]
        return {"model": "llama", "pre": "default", "scores": scores, "add_space_prefix": begins}
