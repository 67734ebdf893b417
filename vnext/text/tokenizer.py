"""Tokenizer: turns text into token ids and back, by the files of a checkpoint folder.

Owns tokenizer.json as the `tokenizers` library reads it, with the special tokens that other files name (tokenizer_files.py); holds
the source of the chat template (files.py). Renders no template and keeps no text.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, TypedDict

import msgspec
import tokenizers

from vnext.base.tokenizer_files import named_tokens, tokenizer_json
from vnext.text.decoders import ByteLevel, Decoder, Pieces, read_decoder
from vnext.text.detokenizer import (
    ByteLevelDetokenizer,
    ByteTokens,
    Detokenizer,
    PieceDetokenizer,
    PieceTokens,
    WholeDetokenizer,
)
from vnext.text.files import DEFAULT, WITH_TOOLS, CheckpointUnreadable, chat_templates, tokenizer_config
from vnext.text.length_bound import characters_per_token

PROBE_CHARACTERS_PER_TOKEN = 12  # prose has 3 to 5


class _Model(TypedDict, total=False):
    """What is read of the `model` of a tokenizer.json; its merges are half of the file, and a list each."""

    type: Any
    vocab: Any
    byte_fallback: Any


class _Spec(TypedDict):
    """What the length bound reads of a tokenizer.json."""

    model: _Model
    added_tokens: list[dict[str, Any]]
    normalizer: Any
    pre_tokenizer: Any


class TokenText(msgspec.Struct, frozen=True):
    """One token by itself: its text (broken characters replaced) and its bytes."""

    text: str
    data: bytes


class TooManyTokens(Exception):
    """A text has too many tokens: `count`, or at least that many."""

    def __init__(self, count: int) -> None:
        super().__init__(f"{count} tokens")
        self.count = count


class Tokenizer:
    """Text <-> token ids. Immutable after loading and safe to use from several threads: all fill the tables with equal values."""

    def __init__(
        self, backend: tokenizers.Tokenizer, config: dict[str, Any] | None = None, chat_template: str | None = None,
        tool_template: str = "",
    ) -> None:  # fmt: skip
        backend.no_truncation()  # a tokenizer.json may contain the truncation of its training; a server must not truncate
        backend.no_padding()
        self._backend = backend
        decoder = backend.decoder  # its state is the part of a tokenizer.json; to write all of that takes as long as to read it
        self._decoder: Decoder = read_decoder(None if decoder is None else msgspec.json.decode(decoder.__getstate__()))
        self._special = {id_ for id_, token in backend.get_added_tokens_decoder().items() if token.special}
        self.added_tokens = {token.content: id_ for id_, token in backend.get_added_tokens_decoder().items()}
        self.special_ids = {text: id_ for text, id_ in self.added_tokens.items() if id_ in self._special}
        self._tokens = {skip: self._token_table(skip) for skip in (False, True)}
        self.vocab_size = backend.get_vocab_size(with_added_tokens=True)
        self.special_tokens = named_tokens(config or {})
        self.chat_template, self.tool_template = chat_template, tool_template

    @classmethod
    def load(cls, model_path: str | Path) -> Tokenizer:
        """Read a checkpoint folder. Raises CheckpointUnreadable."""
        folder = Path(model_path)
        path = folder / "tokenizer.json"
        if not path.is_file():
            raise CheckpointUnreadable(
                f"{folder} has no tokenizer.json: convert the model's tokenizer with transformers' save_pretrained."
            )
        settings = tokenizer_config(folder)
        try:
            backend = tokenizers.Tokenizer.from_buffer(tokenizer_json(folder))
        except Exception as error:  # the library raises bare Exceptions for broken files
            raise CheckpointUnreadable(f"{path} cannot be read as a tokenizer: {error}.") from error
        templates = chat_templates(folder, settings)
        return cls(backend, settings, templates.get(DEFAULT), templates.get(WITH_TOOLS, ""))

    @cached_property
    def characters_per_token(self) -> int:
        """The most characters that a token stands for (length_bound.py). The first call reads the whole vocabulary."""
        return characters_per_token(msgspec.json.decode(self._backend.to_str(), type=_Spec))

    def encode(self, text: str, add_special_tokens: bool = True, count_max: int | None = None) -> list[int]:
        """Token ids; `add_special_tokens` adds a beginning-of-text token where the model needs one. Lets other threads run.

        Raises TooManyTokens beyond `count_max`. For a text much longer than `count_max` tokens usually are, it encodes the
        beginning first, and skips the rest if that has twice as many tokens.
        """
        if count_max is not None and len(text) > 2 * (size := count_max * PROBE_CHARACTERS_PER_TOKEN):
            if (count := len(self._encoding(text[:size], False))) > 2 * count_max:
                raise TooManyTokens(count)
        encoding = self._encoding(text, add_special_tokens)
        if count_max is not None and len(encoding) > count_max:
            raise TooManyTokens(len(encoding))
        return encoding.ids

    def decode(self, tokens: Sequence[int], skip_special_tokens: bool = True) -> str:
        """The text of all tokens at once. Lets other threads run."""
        return self._backend.decode_batch([tokens], skip_special_tokens=skip_special_tokens)[0]

    def to_json(self) -> str:
        """The text of the tokenizer's file, tokenizer.json."""
        return self._backend.to_str()

    def special_id(self, text: str) -> int | None:
        """The special token that `text` is, None where it is none."""
        id_ = self._backend.token_to_id(text)
        return id_ if id_ in self._special else None

    def detokenizer(self, context: Sequence[int] = (), skip_special_tokens: bool = True) -> Detokenizer:
        """A detokenizer for one answer, whose text continues that of the tokens `context`."""
        match self._tokens[skip_special_tokens]:
            case ByteTokens() as tokens:
                return ByteLevelDetokenizer(tokens, context)
            case PieceTokens() as tokens:
                return PieceDetokenizer(tokens, context)
            case None:
                return WholeDetokenizer(lambda tokens: self.decode(tokens, skip_special_tokens), context)

    def _token_table(self, skip_special_tokens: bool) -> ByteTokens | PieceTokens | None:
        spell = self._spell_text if skip_special_tokens else self._backend.id_to_token
        match self._decoder:
            case ByteLevel():
                return ByteTokens(self._decoder, spell)
            case Pieces():
                return PieceTokens(self._decoder, spell)
            case None:
                return None

    def token_text(self, token: int) -> TokenText:
        """One token by itself, special or not, as answers report it beside log-probabilities."""
        spelt = self._backend.id_to_token(token)
        if spelt is None:
            return TokenText("", b"")
        data = self._token_bytes(spelt)
        return TokenText(data.decode(errors="replace"), data)

    def _encoding(self, text: str, add_special_tokens: bool) -> tokenizers.Encoding:
        """Encode one text. The library's `encode` gives the same ids, but lets no other thread run."""
        return self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0]

    def _token_bytes(self, spelt: str) -> bytes:
        match self._decoder:
            case ByteLevel():
                return self._decoder.token_bytes(spelt)
            case Pieces():
                byte = self._decoder.byte(spelt)
                return self._decoder.piece(spelt).encode() if byte is None else bytes([byte])
            case None:
                return spelt.encode()

    def _spell_text(self, token: int) -> str | None:
        return None if token in self._special else self._backend.id_to_token(token)
