"""Length bound: the most characters that one token can stand for, so that a text can be refused by its length alone.

Computed from tokenizer.json. The bound is sound where the tokens keep every character of a text: the longest token, times the
factor by which the normaliser may shorten a text. Other tokenizers drop or join spaces, or give one unknown token for a word
of any length; for those the bound is GENEROUS, far more than any language needs.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

from vnext.text.decoders import BYTE_LEVEL_ALPHABET

GENEROUS = 1_000
_COMPOSED_MAX = 4  # characters that NFC and NFKC may join to one: Unicode's longest decomposition
_KEEPING = ("ByteLevel", "Metaspace", "Digits", "UnicodeScripts", "FixedLength")
_BYTE_TOKENS = frozenset(f"<0x{byte:02X}>" for byte in range(256))


def characters_per_token(spec: Mapping[str, Any]) -> int:
    """The bound for the contents of a tokenizer.json. At least 1."""
    tokens = [*_vocabulary(spec["model"]), *(added["content"] for added in spec["added_tokens"])]
    longest = max(map(len, tokens), default=1)
    if not (_reads_everything(spec) and all(map(_keeps, _parts(spec["pre_tokenizer"], "pretokenizers")))):
        return max(longest, GENEROUS)
    if any(added.get("lstrip") or added.get("rstrip") for added in spec["added_tokens"]):
        return max(longest, GENEROUS)  # such tokens take in any number of adjacent spaces
    shrinks = [_shrink(part) for part in _parts(spec["normalizer"], "normalizers")]
    return max(longest, GENEROUS) if None in shrinks else longest * math.prod(shrinks)


def _vocabulary(model: dict[str, Any]) -> Iterator[str]:
    vocab = model["vocab"]
    yield from vocab if isinstance(vocab, dict) else (piece for piece, _ in vocab)


def _reads_everything(spec: Mapping[str, Any]) -> bool:
    """Whether no character is unknown: characters fall back to bytes, and every byte has a token."""
    model, vocab = spec["model"], frozenset(_vocabulary(spec["model"]))
    if model.get("byte_fallback") and _BYTE_TOKENS <= vocab:
        return model["type"] in ("BPE", "Unigram")
    steps = [*_parts(spec["normalizer"], "normalizers"), *_parts(spec["pre_tokenizer"], "pretokenizers")]
    has_bytes = any(step["type"] == "ByteLevel" for step in steps) and BYTE_LEVEL_ALPHABET <= vocab
    return has_bytes and model["type"] == "BPE"


def _parts(step: dict[str, Any] | None, name: str) -> list[dict[str, Any]]:
    if step is None:
        return []
    return [each for part in step[name] for each in _parts(part, name)] if step["type"] == "Sequence" else [step]


def _keeps(part: dict[str, Any]) -> bool:
    return part["type"] in _KEEPING or part.get("behavior", "Removed") != "Removed"


def _shrink(part: dict[str, Any]) -> int | None:
    """The largest factor by which a normaliser may shorten a text; None: no bound."""
    match part["type"]:
        case "NFD" | "NFKD" | "Lowercase" | "Prepend" | "ByteLevel":
            return 1
        case "NFC" | "NFKC":
            return _COMPOSED_MAX
        case "Replace" if "String" in part["pattern"] and part["content"]:
            return math.ceil(len(part["pattern"]["String"]) / len(part["content"])) or 1
        case _:
            return None
