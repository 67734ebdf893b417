"""Drafters: what they find, that equal texts give equal drafts, and that no scope drafts from another's answers."""

from __future__ import annotations

import random

import numpy as np
import pytest

from vnext.sampling.drafters import automaton_plain, drafter
from vnext.sampling.drafters.drafter import SEGMENTS, EarlierAnswers, NgramDrafter, SuffixDrafter
from vnext.state.config import Speculation


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


def tokens_of(text: str) -> np.ndarray:
    return np.array([ord(letter) for letter in text], dtype=np.int32)


def suffix_drafts(drafter: SuffixDrafter, text: str, most: int = 8, scope: bytes = b"") -> str:
    return "".join(map(chr, drafter.row(scope, 0).drafts(tokens_of(text), most).tolist()))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("abcdefXabc", "def"),  # as many as were matched
        ("abcYabcYabcZPabc", "Yab"),  # what followed most often
        ("abcYabcZabc", "Zab"),  # of two that followed as often, the latest
        ("pabcQ abcR pabc", "Q ab"),  # the longest match
        ("xbcYb", ""),  # one token is too few
        ("abcde", ""),
        ("a", ""),
    ],
)
def test_the_suffix_drafter_drafts_what_followed_most_often(text: str, expected: str) -> None:
    assert suffix_drafts(SuffixDrafter(Speculation()), text, 4) == expected


def counted(text: list[int], recent: list[int], most: int, factor: float, share: float) -> tuple[int, list[int]]:
    """A search through the text for each suffix, longest first, of `recent` and then of the match and its drafts."""

    def longest(context: list[int]) -> tuple[list[int], list[int]]:
        for length in range(len(context), 0, -1):
            match = context[len(context) - length :]
            after = [text[at + length] for at in range(len(text) - length) if text[at : at + length] == match]
            if after:
                return match, after
        return [], []

    context, after = longest(recent)
    matched, drafts, likelihood = len(context), [], 1.0
    while after and len(drafts) < min(most, int(factor * matched)):
        last = {token: at for at, token in enumerate(after)}
        token = max(last, key=lambda each: (after.count(each), last[each]))
        likelihood *= after.count(token) / len(after)
        if token < 0 or likelihood < share:
            break
        drafts.append(token)
        context, after = longest([*context, token])
    return matched, drafts


def random_text(rng: random.Random) -> list[int]:
    letters = rng.choice((2, 3, 8))
    return [rng.choice((-1, *range(letters))) if rng.random() < 0.1 else rng.randrange(letters) for _ in range(rng.randint(0, 60))]


@pytest.mark.parametrize("made", [automaton_plain.SuffixAutomaton, drafter.SuffixAutomaton], ids=["plain", "compiled"])
def test_the_automaton_equals_a_search_through_the_text(made: type[automaton_plain.SuffixAutomaton]) -> None:
    rng = random.Random(5)
    for _ in range(600):
        text, grown, cut = random_text(rng), made(), rng.randint(0, 60)
        for part in (text[:cut], text[cut:]):
            grown.extend(np.array(part, dtype=np.int32))
        recent = text[-rng.randint(1, 9) :] if rng.random() < 0.6 else [rng.randrange(3) for _ in range(9)]
        asked = rng.randint(0, 9), rng.choice((0.5, 1.0, 4.0)), rng.choice((0.0, 0.1, 0.6))
        matched, found = grown.drafts(np.array(recent, dtype=np.int32), *asked)
        assert (matched, np.frombuffer(found, np.int32).tolist()) == counted(text, recent, *asked), (text, recent, asked)
        assert len(grown) == len(text)


def test_the_compiled_automaton_equals_the_plain_one_on_long_texts() -> None:
    rng = random.Random(7)
    for text in ([5] * 3000, [at % 100 for at in range(3000)], [int(rng.paretovariate(0.7)) % 50_000 for _ in range(6000)]):
        plain_one, fast = automaton_plain.SuffixAutomaton(), drafter.SuffixAutomaton()
        for at in range(0, len(text), 500):
            for each in (plain_one, fast):
                each.extend(np.array(text[at : at + 500], dtype=np.int32))
            for start in range(at, at + 500, 50):
                recent = np.array(text[start : start + 24], dtype=np.int32)
                assert plain_one.drafts(recent, 16, 1.0, 0.01) == fast.drafts(recent, 16, 1.0, 0.01)


def test_a_text_that_grows_drafts_as_one_that_is_given_whole() -> None:
    text, grown = "one two three, one two four, one two three, ", SuffixDrafter(Speculation()).row(b"", 0)
    for end in range(1, len(text) + 1):
        found = "".join(map(chr, grown.drafts(tokens_of(text[:end]), 8).tolist()))
        assert found == suffix_drafts(SuffixDrafter(Speculation()), text[:end])


def test_answers_of_the_same_scope_are_drafted_and_no_others() -> None:
    drafter = SuffixDrafter(Speculation())
    drafter.row(b"mine", 6).finish(tokens_of("secret: the answer is 42"))
    drafter.row(b"mine", 6).finish(tokens_of("secret, more"))
    assert suffix_drafts(drafter, "QZ answer", scope=b"mine") == " is 42"  # and nothing of the next answer
    assert suffix_drafts(drafter, "QZ answer", scope=b"yours") == ""
    assert suffix_drafts(drafter, "QZsec", scope=b"mine") == ""  # prompts are not kept
    none = SuffixDrafter(Speculation(suffix_decoding_max_cached_requests=0))
    none.row(b"mine", 6).finish(tokens_of("secret: the answer is 42"))
    assert suffix_drafts(none, "QZ answer", scope=b"mine") == ""


@pytest.mark.parametrize(("answers_max", "tokens_max"), [(10_000, 800), (24, 2**18), (1, 2**18)])
def test_earlier_answers_are_bounded_and_the_oldest_leave(answers_max: int, tokens_max: int) -> None:
    rng, kept = random.Random(1), EarlierAnswers(answers_max, tokens_max)
    for number in range(300):
        scope = rng.choice((b"a", b"a", b"b"))
        kept.add(scope, np.array([7000] * rng.choice((1, 20, 300)) + [number, 9000 + number], dtype=np.int32))
        texts = kept.texts(b"a") + kept.texts(b"b")
        assert sum(map(len, texts)) <= tokens_max and len(texts) <= min(answers_max, 4 * SEGMENTS)
        newest = kept.texts(scope)[0].drafts(np.array([number], dtype=np.int32), 8, 8.0, 0.0)
        assert newest == (1, np.int32(9000 + number).tobytes())
    assert not any(text.drafts(np.array([0], dtype=np.int32), 8, 1.0, 0.0)[0] for text in texts)
