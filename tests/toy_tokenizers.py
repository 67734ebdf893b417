"""Small tokenizers built for tests, one for each family: byte-level BPE, pieces and byte tokens, Metaspace, WordPiece."""

from __future__ import annotations

from pathlib import Path

import pytest
import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers

from vnext.text.tokenizer import Tokenizer

STORIES = Path(__file__).parents[1].parent / "shared" / "models" / "stories260k"

CHAT_TEMPLATE = """\
{{ bos_token }}{% for message in messages %}
{% if message.role == 'assistant' and loop.first %}{{ raise_exception('an assistant cannot begin') }}{% endif %}
<|{{ message.role }}|>{{ message.content }}{{ eos_token }}
{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"""

SPECIAL = ["<|bos|>", "<|eos|>"]


def byte_level_backend() -> tokenizers.Tokenizer:
    """GPT-2's family: 2 special tokens, 256 bytes, and some merges that cut multi-byte characters apart."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [("h", "e"), ("l", "l"), ("he", "ll"), ("Ġ", "w"), ("ð", "Ł"), ("ä", "¸")]
    words = SPECIAL + alphabet + ["".join(pair) for pair in merges]
    backend = tokenizers.Tokenizer(models.BPE(vocab={word: place for place, word in enumerate(words)}, merges=merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(SPECIAL)
    return backend


def byte_level(chat_template: str | None = CHAT_TEMPLATE) -> Tokenizer:
    config = {"bos_token": SPECIAL[0], "eos_token": {"content": SPECIAL[1]}, "add_bos_token": True}
    return Tokenizer(byte_level_backend(), config, chat_template)


def byte_fallback() -> Tokenizer:
    """Llama 2's family: a text begins with a space that falls away again, unknown characters become byte tokens."""
    words = SPECIAL + ["<unk>"] + [f"<0x{byte:02X}>" for byte in range(256)] + list("▁abcdefghé中")
    vocab = {word: place for place, word in enumerate(words)}
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<unk>", byte_fallback=True))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.add_special_tokens(SPECIAL)
    return Tokenizer(backend)


def metaspace() -> Tokenizer:
    words = SPECIAL + list("▁abcdefgh") + ["▁▁", "▁a"]
    backend = tokenizers.Tokenizer(models.BPE(vocab={word: place for place, word in enumerate(words)}, merges=[]))
    backend.decoder = decoders.Metaspace()
    backend.add_special_tokens(SPECIAL)
    return Tokenizer(backend)


def byte_metaspace() -> Tokenizer:
    """Byte tokens and Metaspace, as converters of sentencepiece models wrote for a time."""
    words = SPECIAL + ["<unk>"] + [f"<0x{byte:02X}>" for byte in range(256)] + list("▁abcdefgh") + ["▁a"]
    vocab = {word: place for place, word in enumerate(words)}
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[("▁", "a")], unk_token="<unk>", byte_fallback=True))
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()])
    backend.add_special_tokens(SPECIAL)
    return Tokenizer(backend)


def byte_regex() -> Tokenizer:
    """Byte tokens with a decoder that the edge does not know."""
    tokenizer = byte_metaspace()
    backend = tokenizers.Tokenizer.from_str(tokenizer.to_json())
    backend.decoder = decoders.Sequence([decoders.Replace(tokenizers.Regex("▁"), " "), decoders.ByteFallback(), decoders.Fuse()])
    return Tokenizer(backend)


def word_piece() -> Tokenizer:
    """A decoder that the edge does not know, so that every text goes through the tokenizer as a whole."""
    words = SPECIAL + ["[UNK]", "hel", "##lo", "world", "##s", "wide"]
    backend = tokenizers.Tokenizer(models.WordPiece(vocab={word: place for place, word in enumerate(words)}))
    backend.decoder = decoders.WordPiece(cleanup=False)
    backend.add_special_tokens(SPECIAL)
    return Tokenizer(backend)


def stories() -> Tokenizer:
    if not STORIES.is_dir():
        pytest.skip(f"no checkpoint at {STORIES}")
    return Tokenizer.load(STORIES)


FAMILIES = {
    "byte_level": byte_level,
    "byte_fallback": byte_fallback,
    "metaspace": metaspace,
    "byte_metaspace": byte_metaspace,
    "word_piece": word_piece,
    "stories": stories,
}
