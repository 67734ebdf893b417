"""Detokenizers: pieces joined are the decoding of the whole, and nothing given out is ever half a character."""

from __future__ import annotations

import functools
from collections.abc import Callable

import pytest
from hypothesis import given, settings, strategies as st
from toy_tokenizers import FAMILIES, byte_fallback, byte_level, byte_metaspace, byte_regex

from vnext.text.detokenizer import BYTE_RUN_MAX
from vnext.text.tokenizer import Tokenizer

TORTURE = [
    "plain words",
    "héllo wörld",
    "中文字符 日本語 한국어",
    "👩‍👩‍👧‍👦 🇩🇪 👍🏽",
    "e\u0301 a\u0308\u0323 Z\u0351\u036b\u0343",
    "\u202eright to left\u202c",
    "  two  spaces  ",
    "\n\t\r\0",
    "a\ufffdb",
    "\U0010ffff\u0800\x7f\x80",
]


@functools.cache
def family(name: str) -> Tokenizer:
    return FAMILIES[name]()


def pieces_of(tokenizer: Tokenizer, tokens: list[int], context: list[int], skip: bool = True) -> list[str]:
    detokenizer = tokenizer.detokenizer(context, skip)
    return [detokenizer.push(token) for token in tokens] + [detokenizer.finish()]


@pytest.mark.parametrize("name", ["byte_level", "byte_fallback", "stories"])
@pytest.mark.parametrize("text", TORTURE)
def test_encoded_texts_come_back(name: str, text: str) -> None:
    tokenizer = family(name)
    tokens = tokenizer.encode(text, add_special_tokens=False)
    pieces = pieces_of(tokenizer, tokens, [])
    assert "".join(pieces) == text == tokenizer.decode(tokens)
    assert all("\ufffd" not in piece for piece in pieces) or "\ufffd" in text


@pytest.mark.parametrize("name", FAMILIES)
@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_any_tokens_are_decoded_as_the_whole(name: str, data: st.DataObject) -> None:
    """Invalid bytes, special tokens, unknown ids, byte tokens in any order."""
    tokenizer = family(name)
    tokens = data.draw(st.lists(st.integers(0, tokenizer.vocab_size + 3), max_size=24))
    skip = data.draw(st.booleans())
    pieces = pieces_of(tokenizer, tokens, [], skip)
    assert "".join(pieces) == tokenizer.decode(tokens, skip)


@pytest.mark.parametrize("name", ["byte_level", "byte_fallback", "metaspace", "byte_metaspace", "stories"])
@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_a_context_is_continued(name: str, data: st.DataObject) -> None:
    """The answer is what the whole has more than the context, whose last token here ends in a whole character."""
    tokenizer = family(name)
    ids = st.lists(st.integers(0, tokenizer.vocab_size - 1), max_size=12)
    plain = tokenizer.encode("ab", add_special_tokens=False)[-1]
    context, tokens = [*data.draw(ids), plain], data.draw(ids)
    whole, before = tokenizer.decode(context + tokens), tokenizer.decode(context)
    assert whole.startswith(before)
    assert "".join(pieces_of(tokenizer, tokens, context)) == whole[len(before) :]


@pytest.mark.parametrize("name", ["byte_fallback", "stories"])
def test_the_space_at_the_start_falls_away_only_there(name: str) -> None:
    tokenizer = family(name)
    tokens = tokenizer.encode(" a b", add_special_tokens=False)
    assert "".join(pieces_of(tokenizer, tokens, [])) == " a b"
    assert "".join(pieces_of(tokenizer, tokens, tokens)) == "  a b"
    assert "".join(pieces_of(tokenizer, tokens, tokenizer.encode("")[:1])) == " a b"


def test_half_a_character_waits_for_its_other_half() -> None:
    tokenizer = byte_level()
    tokens = tokenizer.encode("a😀b", add_special_tokens=False)
    pieces = pieces_of(tokenizer, tokens, [])
    assert [piece for piece in pieces if piece] == ["a", "😀", "b"]
    cut = pieces_of(tokenizer, tokens[:-2], [])
    assert "".join(cut) == "a\ufffd" and cut[-1] == "\ufffd"


@pytest.mark.parametrize("tokenizer", [byte_level(), byte_fallback()])
def test_a_character_that_the_context_began_is_completed(tokenizer: Tokenizer) -> None:
    tokens = tokenizer.encode("é😀", add_special_tokens=False)
    assert "".join(pieces_of(tokenizer, tokens[-1:], tokens[:-1])) == "😀"


def test_a_run_of_bytes_waits_until_it_ends_or_is_long() -> None:
    tokenizer = byte_fallback()
    tokens = tokenizer.encode("a😀ab", add_special_tokens=False)
    assert [piece for piece in pieces_of(tokenizer, tokens, []) if piece] == ["a", "😀a", "b"]
    long_run = tokenizer.encode("😀" * 40, add_special_tokens=False)
    pieces = pieces_of(tokenizer, long_run, [])
    assert "".join(pieces) == "😀" * 40
    first = next(place for place, piece in enumerate(pieces) if piece)
    assert first <= BYTE_RUN_MAX + 4


def test_special_tokens_are_shown_when_asked_for() -> None:
    tokenizer = byte_level()
    tokens = [0, *tokenizer.encode("hello", add_special_tokens=False), 1]
    assert "".join(pieces_of(tokenizer, tokens, [], skip=True)) == "hello"
    assert "".join(pieces_of(tokenizer, tokens, [], skip=False)) == "<|bos|>hello<|eos|>"


def test_one_token_by_itself() -> None:
    tokenizer = byte_level()
    tokens = tokenizer.encode("中", add_special_tokens=False)
    assert b"".join(tokenizer.token_text(token).data for token in tokens) == "中".encode()
    assert tokenizer.token_text(tokens[0]).text == "\ufffd"
    assert tokenizer.token_text(1).text == "<|eos|>"
    assert tokenizer.token_text(1) is tokenizer.token_text(1), "alternatives are spelt again and again"
    assert tokenizer.token_text(10**6).data == b""
    fallback = byte_fallback()
    assert fallback.token_text(3 + 0xE4).data == b"\xe4"
    assert fallback.token_text(fallback.encode("a", add_special_tokens=False)[0]).text == " "


def test_the_byte_zero_is_a_byte_like_the_others() -> None:
    tokenizer = byte_fallback()
    zero, space, a = tokenizer._backend.token_to_id("<0x00>"), *tokenizer.encode(" a")[-2:]
    for context in ([zero], [space, zero], [zero, a]):
        whole, before = tokenizer.decode([*context, space, a]), tokenizer.decode(context)
        assert "".join(pieces_of(tokenizer, [space, a], context)) == whole[len(before) :]


@pytest.mark.parametrize("make", [byte_metaspace, byte_regex])
def test_nothing_is_lost_behind_bytes_that_are_no_text(make: Callable[[], Tokenizer]) -> None:
    tokenizer = make()
    ids = [tokenizer.encode("abc", False)[-1], *(3 + byte for byte in b"A\xff\xfe"), *tokenizer.encode("bcd", False)[-3:]]
    found = "".join(pieces_of(tokenizer, ids, []))
    assert found.startswith("c") and found.endswith("bcd"), found
    if make is byte_metaspace:
        assert found == tokenizer.decode(ids)
