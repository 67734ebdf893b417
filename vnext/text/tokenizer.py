"""Tokenizer: turns text into token ids and back, by the files of a checkpoint folder.

Owns tokenizer.json as the `tokenizers` library reads it, with the special tokens that other files name (tokenizer_files.py); holds
the source of the chat template (files.py). Renders no template and keeps no text.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

import msgspec
import tokenizers
from tokenizers import models

from vnext.base.tokenizer_files import named_tokens, tokenizer_json, vocabulary
from vnext.runtime.protocol.sampling_params import InvalidRequest
from vnext.text.detokenizer import (
    BYTE_LEVEL_ALPHABET,
    ByteLevel,
    ByteLevelDetokenizer,
    ByteTokens,
    Decoder,
    Detokenizer,
    PieceDetokenizer,
    Pieces,
    PieceTokens,
    WholeDetokenizer,
    read_decoder,
)
from vnext.text.files import DEFAULT, WITH_TOOLS, CheckpointUnreadable, chat_templates, tokenizer_config

PROBE_CHARACTERS_PER_TOKEN = 12  # prose has 3 to 5
TEXTS_KEPT = 2**14  # of single tokens: 20 alternatives of a token cost as much as its step


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
        self._decoder: Decoder = read_decoder(_part(backend.decoder))
        self._special = {id_ for id_, token in backend.get_added_tokens_decoder().items() if token.special}
        self.added_tokens = {token.content: id_ for id_, token in backend.get_added_tokens_decoder().items()}
        self.special_ids = {text: id_ for text, id_ in self.added_tokens.items() if id_ in self._special}
        self._tokens = {skip: self._token_table(skip) for skip in (False, True)}
        self.token_text: Callable[[int], TokenText] = lru_cache(TEXTS_KEPT)(self._token_text)
        self.vocab_size = backend.get_vocab_size(with_added_tokens=True)
        self.special_tokens = named_tokens(config or {})
        self.chat_template, self.tool_template = chat_template, tool_template

    @classmethod
    def load(cls, model_path: str | Path, has_bound: bool = False) -> Tokenizer:
        """Read a checkpoint folder. With `has_bound` `characters_per_token` is found at once, from the vocabulary in the file: the
        library takes three times as long to say it. Raises CheckpointUnreadable."""
        folder = Path(model_path)
        path = folder / "tokenizer.json"
        if not path.is_file():
            raise CheckpointUnreadable(
                f"{folder} has no tokenizer.json: convert the model's tokenizer with transformers' save_pretrained."
            )
        settings = tokenizer_config(folder)
        try:
            backend = tokenizers.Tokenizer.from_buffer(data := tokenizer_json(folder))
        except Exception as error:  # the library raises bare Exceptions for broken files
            raise CheckpointUnreadable(f"{path} cannot be read as a tokenizer: {error}.") from error
        templates = chat_templates(folder, settings)
        found = cls(backend, settings, templates.get(DEFAULT), templates.get(WITH_TOOLS, ""))
        if has_bound:
            found.characters_per_token = characters_per_token(backend, vocabulary(data))
        return found

    @cached_property
    def characters_per_token(self) -> int:
        """The most characters that a token may stand for. The first call reads the whole vocabulary."""
        return characters_per_token(self._backend, self._backend.get_vocab(with_added_tokens=False))

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

    def encode_pair(self, one: str, other: str) -> list[int]:
        """Token ids of two texts as the model reads them together. Raises InvalidRequest where the first holds the token that
        separates it from the second: the model could not tell them apart."""
        found = self._encoding((one, other), True)
        texts = found.sequence_ids
        if texts[-1:] == [None] and found.ids[-1] in (token for token, text in zip(found.ids, texts) if text == 0):
            raise InvalidRequest(f"The first text holds {found.tokens[-1]}, which ends it: leave it out.")
        return found.ids

    def decode(self, tokens: Sequence[int], skip_special_tokens: bool = True) -> str:
        """The text of all tokens at once. Lets other threads run."""
        return self._backend.decode_batch([tokens], skip_special_tokens=skip_special_tokens)[0]

    def to_json(self) -> str:
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
        spell, hidden = self._backend.id_to_token, self._special if skip_special_tokens else ()
        match self._decoder:
            case ByteLevel():
                return ByteTokens(self._decoder, spell, hidden)
            case Pieces():
                return PieceTokens(self._decoder, spell, hidden)
            case None:
                return None

    def _token_text(self, token: int) -> TokenText:
        """`token_text`: one token by itself, special or not, as answers report it beside log-probabilities."""
        spelt = self._backend.id_to_token(token)
        if spelt is None:
            return TokenText("", b"")
        data = self._token_bytes(spelt)
        return TokenText(data.decode(errors="replace"), data)

    def _encoding(self, text: str | tuple[str, str], add_special_tokens: bool) -> tokenizers.Encoding:
        """Encode one text or a pair. The library's `encode` gives the same ids, but lets no other thread run."""
        try:
            return self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0]
        except Exception as error:  # the library raises bare Exceptions for words that a vocabulary of whole words lacks
            raise InvalidRequest("The model's vocabulary has no tokens for this text: send token ids.", "prompt") from error

    def _token_bytes(self, spelt: str) -> bytes:
        match self._decoder:
            case ByteLevel():
                return self._decoder.token_bytes(spelt)
            case Pieces():
                byte = self._decoder.byte(spelt)
                return self._decoder.piece(spelt).encode() if byte is None else bytes([byte])
            case None:
                return spelt.encode()


# ---- the most characters that one token can stand for ------------------------------------------------------------
# Length bound: the most characters that one token can stand for, so that a text can be refused by its length alone.
#
# The bound is sound where the tokens keep every character of a text: the longest token, times the factor by which the normaliser
# may shorten a text. Other tokenizers drop or join spaces, or give one unknown token for a word of any length; for those the bound
# is GENEROUS, far more than any language needs.


GENEROUS = 1_000
_COMPOSED_MAX = 4  # characters that NFC and NFKC may join to one: Unicode's longest decomposition
_KEEPING = ("ByteLevel", "Metaspace", "Digits", "UnicodeScripts", "FixedLength")
_BYTE_TOKENS = frozenset(f"<0x{byte:02X}>" for byte in range(256))


def characters_per_token(backend: tokenizers.Tokenizer, vocab: Mapping[str, int]) -> int:
    """The bound for a tokenizer whose model has this vocabulary. At least 1."""
    added = backend.get_added_tokens_decoder().values()
    longest = max(max(map(len, vocab), default=1), *(len(token.content) for token in added), 1)
    normalizers = _parts(_part(backend.normalizer), "normalizers")
    cuts = _parts(_part(backend.pre_tokenizer), "pretokenizers")
    if not (_reads_everything(backend.model, vocab, [*normalizers, *cuts]) and all(map(_keeps, cuts))):
        return max(longest, GENEROUS)
    if any(token.lstrip or token.rstrip for token in added):
        return max(longest, GENEROUS)  # such tokens take in any number of adjacent spaces
    shrinks = [_shrink(part) for part in normalizers]
    bounds = [shrink for shrink in shrinks if shrink is not None]
    return max(longest, GENEROUS) if len(bounds) < len(shrinks) else longest * math.prod(bounds)


def _reads_everything(model: models.Model, vocab: Mapping[str, int], steps: Sequence[dict[str, Any]]) -> bool:
    """Whether no character is unknown: characters fall back to bytes, and every byte has a token."""
    if getattr(model, "byte_fallback", False) and vocab.keys() >= _BYTE_TOKENS:
        return isinstance(model, (models.BPE, models.Unigram))
    has_bytes = any(step["type"] == "ByteLevel" for step in steps) and vocab.keys() >= BYTE_LEVEL_ALPHABET
    return has_bytes and isinstance(model, models.BPE)


def _part(part: Any) -> dict[str, Any] | None:
    """A part of a tokenizer as tokenizer.json has it: its state. To write all of that takes as long as to read it."""
    return None if part is None else msgspec.json.decode(part.__getstate__())


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


# ---- words that an answer must not have --------------------------------------------------------------------------
# Bad words: the token sequences that must not be completed, so that an answer does not write a text.
#
# Owns the tokenization, as vLLM defines it: a word counts as it begins an answer and as it follows a space, where the space
# makes it another token.


def banned_sequences(words: Sequence[str], tokenizer: Tokenizer) -> tuple[tuple[int, ...], ...]:
    """The sequences of `words`, without repeats, in order."""
    found: dict[tuple[int, ...], None] = {}
    for word in words:
        plain, spaced = (tuple(tokenizer.encode(space + word.lstrip(), add_special_tokens=False)) for space in ("", " "))
        found[plain] = None
        if len(spaced) == len(plain) and spaced[:1] != plain[:1]:
            found[spaced] = None
    return tuple(sequence for sequence in found if sequence)
