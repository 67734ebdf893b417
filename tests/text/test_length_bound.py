"""How many characters a token can stand for: no text has fewer tokens than its length over that, whatever the tokenizer."""

from __future__ import annotations

import sys
import unicodedata
from functools import cache

import pytest
import tokenizers
from hypothesis import given, settings, strategies as st
from tokenizers import models, normalizers, pre_tokenizers
from toy_tokenizers import FAMILIES, byte_fallback, byte_level_backend, word_piece

from vnext.text.tokenizer import GENEROUS, PROBE_CHARACTERS_PER_TOKEN, Tokenizer, TooManyTokens

COMPOSED = ("\u03b9\u0308\u0301", "\u1100\u1161\u11a8", "\u03b1\u0313\u0300\u0345", "e\u0301", "\ufb03", "\u00bd")
TEXTS = st.lists(
    st.one_of(st.text(max_size=20), st.sampled_from([*COMPOSED, "hell", " " * 9, "\n", "▁▁", "he", "<|eos|>", "\U0001f600"])), max_size=30
).map("".join)


def bound_of(backend: tokenizers.Tokenizer) -> int:
    return Tokenizer(backend).characters_per_token


def composing(kind: str) -> tokenizers.Tokenizer:
    backend = byte_level_backend()
    backend.normalizer = getattr(normalizers, kind)()
    return backend


SOUND = {
    "byte_level": byte_level_backend(),
    "byte_fallback": byte_fallback()._backend,
    **{kind: composing(kind) for kind in ("NFC", "NFKC", "NFD", "NFKD", "Lowercase")},
}


@pytest.mark.parametrize("name", SOUND)
@given(text=TEXTS)
@settings(max_examples=200, deadline=None)
def test_no_text_has_fewer_tokens(name: str, text: str) -> None:
    backend = SOUND[name]
    assert bound_of(backend) < 50
    assert len(text) <= bound_of(backend) * len(backend.encode(text, add_special_tokens=False).ids)


def test_no_character_decomposes_into_more_than_the_bound_assumes() -> None:
    longest = max(len(unicodedata.normalize("NFD", chr(code))) for code in range(sys.maxunicode + 1))
    for kind in ("NFC", "NFKC"):
        assert bound_of(composing(kind)) == longest * bound_of(byte_level_backend())


def loose(change: str) -> tokenizers.Tokenizer:
    """A tokenizer of which some text of any length has one token, or none."""
    backend = byte_level_backend()
    match change:
        case "joins spaces":
            backend.normalizer = normalizers.Replace(tokenizers.Regex(" +"), " ")
        case "drops a letter":
            backend.normalizer = normalizers.Sequence([normalizers.NFC(), normalizers.Replace("x", "")])
        case "drops spaces":
            backend.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), backend.pre_tokenizer])
        case "splits spaces away":
            backend.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Split(" ", "removed"), backend.pre_tokenizer])
        case "a token takes spaces":
            backend.add_special_tokens([tokenizers.AddedToken("<|bos|>", rstrip=True)])
        case "knows few bytes":
            backend.model = models.BPE(vocab={"a": 0, "b": 1}, merges=[])
        case "has one unknown":
            backend = word_piece()._backend
        case "strips":
            backend.normalizer = normalizers.Strip()
    return backend


LOOSE = {
    "joins spaces": " ", "drops a letter": "x", "drops spaces": " ", "splits spaces away": " ", "a token takes spaces": " ",
    "knows few bytes": "c", "has one unknown": "q", "strips": " ",
}  # fmt: skip


@pytest.mark.parametrize("change", LOOSE)
def test_where_no_bound_is_sound_it_is_generous(change: str) -> None:
    backend, text = loose(change), "<|bos|>" + LOOSE[change] * 2000
    assert bound_of(backend) == GENEROUS
    assert len(backend.encode(text, add_special_tokens=False).ids) < 20


@pytest.mark.parametrize("family", FAMILIES)
@given(text=TEXTS)
@settings(max_examples=100, deadline=None)
def test_the_call_that_lets_others_run_gives_the_same_tokens_and_texts(family: str, text: str) -> None:
    tokenizer = of_family(family)
    for special in (True, False):
        tokens = tokenizer._backend.encode(text, add_special_tokens=special).ids
        assert tokenizer.encode(text, special) == tokens
        assert tokenizer.decode(tokens, not special) == tokenizer._backend.decode(tokens, skip_special_tokens=not special)


@cache
def of_family(name: str) -> Tokenizer:
    return FAMILIES[name]()


def test_a_text_that_is_far_too_long_is_judged_by_its_beginning(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer, read = Tokenizer(byte_level_backend()), []
    encoding = tokenizer._encoding
    monkeypatch.setattr(tokenizer, "_encoding", lambda text, special: read.append(len(text)) or encoding(text, special))
    with pytest.raises(TooManyTokens) as caught:
        tokenizer.encode("x" * 10_000, count_max=10)
    assert read == [10 * PROBE_CHARACTERS_PER_TOKEN] and caught.value.count == 120
    assert len(tokenizer.encode("x" * 10, count_max=10)) == 10
    with pytest.raises(TooManyTokens):
        tokenizer.encode("x" * 11, count_max=10)
    assert len(tokenizer.encode("hell" * 100, count_max=100)) == 100
