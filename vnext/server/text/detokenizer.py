"""Detokenizers: text from tokens as they come; never half a character, and at the end exactly the decoding of the
whole.

Owns what one answer still holds back. What is given out never changes later: all pieces, joined with what `finish`
returns, are `decode(context + tokens)` without `decode(context)`. A byte-level text holds back an unfinished UTF-8
character (three bytes at most). A text of pieces holds back a run of byte tokens until it ends, because one invalid
byte turns the whole run into replacement marks; a run over BYTE_RUN_MAX gives out its complete characters, the one
place where text wins over that rule.
"""

from __future__ import annotations

import codecs
from collections.abc import Callable, Sequence
from typing import Protocol

from vnext.server.text.decoders import ByteLevel, Pieces

BYTE_RUN_MAX = 64
CONTEXT_TOKEN_COUNT = 8  # a UTF-8 character of at most four bytes never begins further back

REPLACEMENT = "\ufffd"

Spell = Callable[[int], str | None]  # a token as the vocabulary spells it; None: it is unknown or to be skipped


class Detokenizer(Protocol):
    """One answer's text, in pieces."""

    def push(self, token: int) -> str:
        """Text that is certain now that this token has come; may be empty."""

    def finish(self) -> str:
        """The rest. The answer ends here."""


class ByteLevelDetokenizer:
    """The bytes of each token through an incremental UTF-8 decoder."""

    def __init__(self, byte_level: ByteLevel, spell: Spell, context: Sequence[int] = ()) -> None:
        self._byte_level = byte_level
        self._spell = spell
        self._decoder = _utf8_decoder()
        for token in context[-CONTEXT_TOKEN_COUNT:]:
            self.push(token)

    def push(self, token: int) -> str:
        spelt = self._spell(token)
        return "" if spelt is None else self._decoder.decode(self._byte_level.token_bytes(spelt))

    def finish(self) -> str:
        return self._decoder.decode(b"", final=True)


class PieceDetokenizer:
    """Pieces of text and runs of byte tokens."""

    def __init__(self, pieces: Pieces, spell: Spell, context: Sequence[int] = ()) -> None:
        self._pieces = pieces
        self._spell = spell
        self._run = bytearray()
        self._start = ""
        self._at_start = pieces.strip_count > 0 or pieces.first_token_drops != ""
        self._read_context(context)

    def push(self, token: int) -> str:
        spelt = self._spell(token)
        if spelt is None:
            return ""
        byte = self._pieces.byte(spelt)
        if byte is None:
            return self._end_run() + self._from_start(self._pieces.piece(spelt))
        self._run.append(byte)
        return self._shorten_run() if len(self._run) > BYTE_RUN_MAX else ""

    def finish(self) -> str:
        return self._end_run()

    def _read_context(self, context: Sequence[int]) -> None:
        for spelt in filter(None, map(self._spell, context)):
            if not self._at_start:
                break  # after a token or two
            byte = self._pieces.byte(spelt)
            self._from_start(self._pieces.piece(spelt) if byte is None else chr(byte))
        for spelt in filter(None, map(self._spell, context[-CONTEXT_TOKEN_COUNT:])):
            byte = self._pieces.byte(spelt)
            self._run = bytearray() if byte is None else self._run + bytes([byte])
        self._run = _unfinished(self._run)

    def _from_start(self, text: str) -> str:
        """Without what falls away at the start of the whole text."""
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
        try:
            return self._from_start(run.decode())
        except UnicodeDecodeError:
            return self._from_start(REPLACEMENT * len(run))

    def _shorten_run(self) -> str:
        rest = _unfinished(self._run)
        complete, self._run = self._run[: len(self._run) - len(rest)], rest
        return self._from_start(complete.decode(errors="replace"))


class WholeDetokenizer:
    """The simple twin, for any decoder at all: it decodes all again with each token, so its cost is quadratic."""

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
        if not text.startswith(self._given):
            return ""
        given, self._given = self._given, text
        return text[len(given) :]


def _unfinished(run: bytearray) -> bytearray:
    """The bytes at the end that begin a UTF-8 character without completing it; at most three."""
    decoder = _utf8_decoder()
    decoder.decode(bytes(run))
    return bytearray(decoder.getstate()[0])


def _utf8_decoder() -> codecs.IncrementalDecoder:
    return codecs.getincrementaldecoder("utf-8")("replace")
