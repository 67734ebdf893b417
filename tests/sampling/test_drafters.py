"""Drafters are pure functions of tokens: what they find, and that they never draft what is not in the text."""

from __future__ import annotations

import random

import numpy as np
import pytest

from vnext.sampling.drafters.ngram import NgramDrafter


def drafts(text: str, most: int = 4, shortest: int = 2, longest: int = 4) -> str:
    tokens = np.array([ord(letter) for letter in text], dtype=np.int32)
    found = NgramDrafter(shortest, longest).drafts(tokens, most)
    assert found.dtype == np.int32
    return "".join(map(chr, found.tolist()))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("abcdXab", "cdXa"),  # the last two tokens stood there before
        ("abcYabdZab", "dZab"),  # the latest of two matches
        ("xabcYabcZbc", "Zbc" + "Z"),  # the latest again, and a match near the end continues with its repetition
        ("pabcQ abcR pabc", "Q ab"),  # the longest match, though another is later
        ("ababab", "abab"),  # a match that overlaps the end
        ("aaaa", "aaaa"),
        ("abcde", ""),
        ("a", ""),
        ("xbcYb", ""),  # one token is too few
    ],
)
def test_what_followed_last_time_is_drafted(text: str, expected: str) -> None:
    assert drafts(text) == expected


def test_no_more_than_asked_for() -> None:
    assert drafts("abcdefgXab", most=1) == "c" and drafts("abcdefgXab", most=64)[:8] == "cdefgXab"


def plain(tokens: list[int], most: int, shortest: int, longest: int) -> list[int]:
    """Every length, longest first, every earlier place, latest first."""
    count = len(tokens)
    for length in range(min(longest, count - 1), shortest - 1, -1):
        for end in range(count - 1, length - 1, -1):
            if tokens[end - length : end] == tokens[count - length :]:
                period = count - end
                return [tokens[end + place % period] for place in range(most)]
    return []


def test_the_drafter_equals_the_plain_search() -> None:
    rng = random.Random(3)
    for _ in range(3000):
        tokens = [rng.randrange(rng.choice((2, 3, 8))) for _ in range(rng.randint(1, 40))]
        shortest = rng.randint(1, 3)
        longest, most = rng.randint(shortest, 5), rng.randint(1, 9)
        found = NgramDrafter(shortest, longest).drafts(np.array(tokens, dtype=np.int32), most)
        assert found.tolist() == plain(tokens, most, shortest, longest), tokens
