"""Decoders: reads the decoder of a tokenizer.json, which turns tokens into text, into one of three types.

    ByteLevel   every token stands for bytes; the text is all bytes, decoded as UTF-8
    Pieces      every token stands for a piece of text or, as <0xE4>, for one byte; only the text's start is special
    None        anything else: only the tokenizer itself can decode it, as a whole

Owns the parsing of the decoder's specification. Holds no state of a text; `detokenizer` does.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

_PIECE_FAMILY = re.compile("(Replace ?)*(ByteFallback ?)?(Fuse ?(Strip)?)?")
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class ByteLevel(msgspec.Struct, frozen=True):
    """The byte-level alphabet of GPT-2: one printable character per byte."""

    def token_bytes(self, token: str) -> bytes:
        """The bytes of a token; one with any other character (an added token) stands for itself."""
        try:
            return bytes(_BYTE_OF_CHARACTER[character] for character in token)
        except KeyError:
            return token.encode()


class Pieces(msgspec.Struct, frozen=True, kw_only=True):
    """`replacements` apply to each token in order. The text's start loses `strip` up to `strip_count` times.

    `byte_fallback`: tokens like <0xE4> are bytes. The first token loses `first_token_drops` wherever it contains it.
    """

    replacements: tuple[tuple[str, str], ...] = ()
    byte_fallback: bool = False
    strip: str = " "
    strip_count: int = 0
    first_token_drops: str = ""

    def byte(self, token: str) -> int | None:
        """The byte that a token stands for, None for a piece of text."""
        match = _BYTE_TOKEN.fullmatch(token) if self.byte_fallback else None
        return int(match[1], 16) if match else None

    def piece(self, token: str) -> str:
        """The text of a token that is not a byte and not at the text's start."""
        for old, new in self.replacements:
            token = token.replace(old, new)
        return token

    def strip_start(self, text: str) -> str:
        """The whole text without the part that is stripped at its start."""
        count = 0
        while count < min(self.strip_count, len(text)) and text[count] == self.strip:
            count += 1
        return text[count:]


Decoder = ByteLevel | Pieces | None


def read_decoder(spec: dict[str, Any] | None) -> Decoder:
    """Parse the `decoder` of a tokenizer.json."""
    parts = [] if spec is None else spec["decoders"] if spec["type"] == "Sequence" else [spec]
    kinds = [part["type"] for part in parts]
    if kinds == ["ByteLevel"]:
        return ByteLevel()
    if kinds in (["Metaspace"], ["ByteFallback", "Metaspace"]):
        return _read_metaspace(parts[-1], byte_fallback=len(kinds) > 1)
    return _read_pieces(parts, kinds)


def _read_metaspace(part: dict[str, Any], byte_fallback: bool) -> Pieces:
    mark = part.get("replacement", "▁")
    at_start = part.get("prepend_scheme", "always") != "never"
    return Pieces(replacements=((mark, " "),), byte_fallback=byte_fallback, first_token_drops=" " if at_start else "")


def _read_pieces(parts: list[dict[str, Any]], kinds: list[str]) -> Pieces | None:
    """Parse Replace* ByteFallback? Fuse? Strip?, the sequences that conversions from sentencepiece write."""
    if not parts or not _PIECE_FAMILY.fullmatch(" ".join(kinds)):
        return None
    strip: Mapping[str, Any] = parts[-1] if kinds[-1] == "Strip" else {"content": " ", "start": 0, "stop": 0}
    patterns = [part["pattern"].get("String") for part in parts if part["type"] == "Replace"]
    if strip["stop"] or None in patterns:
        return None
    contents = [part["content"] for part in parts if part["type"] == "Replace"]
    return Pieces(
        replacements=tuple(zip(patterns, contents)),
        byte_fallback="ByteFallback" in kinds,
        strip=strip["content"],
        strip_count=strip["start"],
    )


def _byte_level_alphabet() -> dict[str, int]:
    """Printable Latin-1 characters stand for themselves; the other bytes, in order, for U+0100 and up."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others: Iterable[int] = (byte for byte in range(256) if byte not in printable)
    alphabet = {chr(byte): byte for byte in printable}
    alphabet.update((chr(0x100 + place), byte) for place, byte in enumerate(others))
    return alphabet


_BYTE_OF_CHARACTER = _byte_level_alphabet()
BYTE_LEVEL_ALPHABET = frozenset(_BYTE_OF_CHARACTER)
