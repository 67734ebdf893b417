"""Tokenizer: the files of a checkpoint folder that turn text into token ids and back.

Owns tokenizer.json (read by the `tokenizers` library) and the special tokens of tokenizer_config.json; carries the source
of the chat template (files.py). Renders no template and keeps nothing of a text.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import tokenizers

from vnext.server.text.decoders import ByteLevel, Decoder, Pieces, read_decoder
from vnext.server.text.detokenizer import (
    ByteLevelDetokenizer,
    Detokenizer,
    PieceDetokenizer,
    WholeDetokenizer,
)
from vnext.server.text.files import CheckpointUnreadable, chat_template, tokenizer_config


class TokenText(msgspec.Struct, frozen=True):
    """One token by itself: its text (broken characters replaced) and its bytes."""

    text: str
    data: bytes


class Tokenizer:
    """Text <-> token ids. Immutable after loading, safe to use from several threads."""

    def __init__(
        self, backend: tokenizers.Tokenizer, config: dict[str, Any] | None = None, chat_template: str | None = None
    ) -> None:
        backend.no_truncation()  # a tokenizer.json may say how its training cut texts; a server must not
        backend.no_padding()
        self._backend = backend
        self._decoder: Decoder = read_decoder(msgspec.json.decode(backend.to_str())["decoder"])
        self._special = {id_ for id_, token in backend.get_added_tokens_decoder().items() if token.special}
        self.vocab_size = backend.get_vocab_size(with_added_tokens=True)
        self.special_tokens = _special_tokens(config or {})
        self.chat_template = chat_template

    @classmethod
    def load(cls, model_path: str | Path) -> Tokenizer:
        """Read a checkpoint folder. Raises CheckpointUnreadable."""
        folder = Path(model_path)
        path = folder / "tokenizer.json"
        if not path.is_file():
            raise CheckpointUnreadable(
                f"{folder} has no tokenizer.json: convert the model's tokenizer with transformers' save_pretrained."
            )
        try:
            backend = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises bare Exceptions for broken files
            raise CheckpointUnreadable(f"{path} cannot be read as a tokenizer: {error}.") from error
        config = tokenizer_config(folder)
        return cls(backend, config, chat_template(folder, config))

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids; `add_special_tokens` puts a beginning-of-text token where the model wants one."""
        return self._backend.encode(text, add_special_tokens=add_special_tokens).ids

    def decode(self, tokens: Sequence[int], skip_special_tokens: bool = True) -> str:
        """The text of all tokens at once."""
        return self._backend.decode(list(tokens), skip_special_tokens=skip_special_tokens)

    def detokenizer(self, context: Sequence[int] = (), skip_special_tokens: bool = True) -> Detokenizer:
        """For one answer to the tokens `context`, whose text its own continues."""
        spell = self._spell_text if skip_special_tokens else self._backend.id_to_token
        match self._decoder:
            case ByteLevel():
                return ByteLevelDetokenizer(self._decoder, spell, context)
            case Pieces():
                return PieceDetokenizer(self._decoder, spell, context)
            case None:
                return WholeDetokenizer(lambda tokens: self.decode(tokens, skip_special_tokens), context)

    def token_text(self, token: int) -> TokenText:
        """One token by itself, special or not, as reported beside log-probabilities."""
        spelt = self._backend.id_to_token(token)
        if spelt is None:
            return TokenText("", b"")
        data = self._token_bytes(spelt)
        return TokenText(data.decode(errors="replace"), data)

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


def _special_tokens(config: dict[str, Any]) -> dict[str, str]:
    """bos_token, eos_token and their like, as text; each is written as a string or as an object with `content`."""
    found: dict[str, str] = {}
    for name, value in config.items():
        content = value.get("content") if isinstance(value, dict) else value
        if name.endswith("_token") and isinstance(content, str):
            found[name] = content
    return found
