"""Detokenizers: turn tokens into text as they come, without half characters, and in the end exactly as a whole decoding.

Own the text that one answer still holds back. Emitted text never changes later: all pieces, joined with the result of
`finish`, equal `decode(context + tokens)` without `decode(context)`. A byte-level text holds back an unfinished UTF-8
character (at most three bytes). A text of pieces holds back a run of byte tokens until it ends, because one invalid byte
turns the whole run into replacement marks. The one exception: a run longer than BYTE_RUN_MAX emits its complete characters.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol

import msgspec

_PIECE_FAMILY = re.compile("(Replace ?)*(ByteFallback ?)?(Fuse ?(Strip)?)?")
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
BYTE_RUN_MAX = 64
CONTEXT_TOKEN_COUNT = 8  # a UTF-8 character of at most four bytes never begins further back

REPLACEMENT = "\ufffd"

_Utf8Decoder = codecs.getincrementaldecoder("utf-8")
Spell = Callable[[int], str | None]  # a token as the vocabulary spells it; None: unknown


# ---- what a tokenizer.json says of it ------------------------------------------------------------------------------
# Decoders: the decoder of a tokenizer.json, which turns tokens into text, as one of three types.
#
#     ByteLevel   every token stands for bytes; the text is all bytes, decoded as UTF-8
#     Pieces      every token stands for a piece of text or, as <0xE4>, for one byte; only the text's start is special
#     None        anything else: only the tokenizer itself can decode it, as a whole


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


# ---- one answer's text --------------------------------------------------------------------------------------------


class Detokenizer(Protocol):
    """One answer's text, in pieces."""

    def push(self, token: int) -> str:
        """Text that is certain now that this token has come; may be empty."""

    def finish(self) -> str:
        """The rest of the text; the answer ends here."""


class ByteTokens(dict[int, tuple[bytes, str | None]]):
    """Token -> its bytes, and its text where these are whole characters; nothing for those `hidden`. Filled as tokens come; bounded
    by the vocabulary."""

    def __init__(self, byte_level: ByteLevel, spell: Spell, hidden: Iterable[int]) -> None:
        super().__init__(dict.fromkeys(hidden, (b"", "")))
        self._byte_level, self._spell = byte_level, spell

    def __missing__(self, token: int) -> tuple[bytes, str | None]:
        spelt = self._spell(token)
        data = b"" if spelt is None else self._byte_level.token_bytes(spelt)
        found: tuple[bytes, str | None]
        try:
            found = data, data.decode()
        except UnicodeDecodeError:
            found = data, None
        self[token] = found
        return found


class ByteLevelDetokenizer:
    """Feeds each token's bytes to an incremental UTF-8 decoder; a token of whole characters bypasses it."""

    def __init__(self, tokens: ByteTokens, context: Sequence[int] = ()) -> None:
        self._tokens = tokens
        self._decoder = _Utf8Decoder("replace")
        self._decoder.decode(b"".join([tokens[token][0] for token in context[-CONTEXT_TOKEN_COUNT:]]))
        self._is_open = self._decoder.getstate()[0] != b""

    def push(self, token: int) -> str:
        data, text = self._tokens[token]
        if text is not None and not self._is_open:
            return text
        text = self._decoder.decode(data)
        self._is_open = self._decoder.getstate()[0] != b""
        return text

    def finish(self) -> str:
        return self._decoder.decode(b"", final=True)


class PieceTokens(dict[int, str | int | None]):
    """Token -> its piece of text, its byte, or None for nothing, as for those `hidden`. Filled as tokens come."""

    def __init__(self, pieces: Pieces, spell: Spell, hidden: Iterable[int]) -> None:
        super().__init__(dict.fromkeys(hidden))
        self.pieces = pieces
        self._spell = spell

    def __missing__(self, token: int) -> str | int | None:
        found: str | int | None = None
        if (spelt := self._spell(token)) is not None:
            byte = self.pieces.byte(spelt)
            found = self.pieces.piece(spelt) if byte is None else byte
        self[token] = found
        return found


class PieceDetokenizer:
    """Pieces of text and runs of byte tokens."""

    def __init__(self, tokens: PieceTokens, context: Sequence[int] = ()) -> None:
        self._tokens = tokens
        self._pieces = pieces = tokens.pieces
        self._run = bytearray()
        self._start = ""
        self._at_start = pieces.strip_count > 0 or pieces.first_token_drops != ""
        self._read_context(context)

    def push(self, token: int) -> str:
        found = self._tokens[token]
        if found is None:
            return ""
        if isinstance(found, str):
            return self._end_run() + self._from_start(found)
        self._run.append(found)
        return self._shorten_run() if len(self._run) > BYTE_RUN_MAX else ""

    def finish(self) -> str:
        return self._end_run()

    def _read_context(self, context: Sequence[int]) -> None:
        for found in map(self._tokens.__getitem__, context):
            if not self._at_start:
                break  # after a token or two
            if found is not None:
                self._from_start(found if isinstance(found, str) else chr(found))
        for found in map(self._tokens.__getitem__, context[-CONTEXT_TOKEN_COUNT:]):
            if found is not None:
                self._run = bytearray() if isinstance(found, str) else self._run + bytes([found])
        self._run = _unfinished(self._run)

    def _from_start(self, text: str) -> str:
        """The text without the part that is stripped at the start of the whole text."""
        if not self._at_start:
            return text
        if self._pieces.first_token_drops:
            self._at_start = False
            return text.replace(self._pieces.first_token_drops, "")
        self._start += text
        kept = self._pieces.strip_start(self._start)
        self._at_start = not kept and len(self._start) < self._pieces.strip_count
        return kept

    def _end_run(self) -> str:
        if not self._run:
            return ""
        run, self._run = self._run, bytearray()
        if self._pieces.first_token_drops:
            self._at_start = False  # which spells a space otherwise than a byte
        try:
            return self._from_start(run.decode())
        except UnicodeDecodeError:
            return self._from_start(REPLACEMENT * len(run))

    def _shorten_run(self) -> str:
        rest = _unfinished(self._run)
        complete, self._run = self._run[: len(self._run) - len(rest)], rest
        return self._from_start(complete.decode(errors="replace"))


class WholeDetokenizer:
    """The simple implementation, for any decoder: it decodes everything again with each token, at quadratic cost."""

    def __init__(self, decode: Callable[[list[int]], str], context: Sequence[int] = ()) -> None:
        self._decode = decode
        self._tokens = list(context)
        self._given = decode(self._tokens)

    def push(self, token: int) -> str:
        self._tokens.append(token)
        return self._give(self._decode(self._tokens).rstrip(REPLACEMENT))

    def finish(self) -> str:
        return self._give(self._decode(self._tokens))

    def _give(self, text: str) -> str:
        """What follows the text that has been given, which stays even where more tokens have made another one of it."""
        if len(text) <= len(self._given):
            return ""
        given, self._given = self._given, text
        return text[len(given) :]


def _unfinished(run: bytearray) -> bytearray:
    """The bytes at the end that begin a UTF-8 character without completing it; at most three."""
    decoder = _Utf8Decoder("replace")
    decoder.decode(bytes(run))
    return bytearray(decoder.getstate()[0])
