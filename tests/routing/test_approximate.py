"""The approximate prefix tree beside a plain search for the longest common beginning."""

from __future__ import annotations

import random

import pytest

from vnext.routing.approximate import PIECE_BYTES, PrefixTree, piece_hashes


def conversation(rng: random.Random, known: list[bytes]) -> bytes:
    """A text that begins as one of those before it, or none."""
    beginning = rng.choice([b"", *known])
    return beginning[: rng.randrange(len(beginning) + 1)] + rng.randbytes(rng.randrange(6 * PIECE_BYTES))


def shared_pieces(text: bytes, other: bytes) -> int:
    count = 0
    while (end := (count + 1) * PIECE_BYTES) <= min(len(text), len(other)) and text[:end] == other[:end]:
        count += 1
    return count


def test_it_finds_the_longest_common_beginning() -> None:
    rng, tree, known = random.Random(0), PrefixTree(), []
    for _ in range(300):
        text = conversation(rng, known)
        assert tree.matched(piece_hashes(text, b"m")) == max((shared_pieces(text, each) for each in known), default=0)
        tree.insert(piece_hashes(text, b"m"))
        known.append(text)


def test_other_models_and_salts_share_nothing() -> None:
    tree, text = PrefixTree(), bytes(1000)
    tree.insert(piece_hashes(text, b"model\0salt"))
    assert tree.matched(piece_hashes(text, b"model\0salt")) == 1000 // PIECE_BYTES
    assert tree.matched(piece_hashes(text, b"model\0")) == tree.matched(piece_hashes(text, b"other\0salt")) == 0


@pytest.mark.parametrize("size", [1, 7, 50])
def test_it_is_bounded_and_drops_ends_before_beginnings(size: int) -> None:
    rng, tree, known = random.Random(size), PrefixTree(size), []
    texts: list[list[int]] = []
    for _ in range(400):
        text = conversation(rng, known[-20:])
        known.append(text)
        texts.append(piece_hashes(text, b""))
        tree.insert(texts[-1])
        assert len(tree) <= size
        assert tree.matched(texts[-1]) == min(size, len(texts[-1])), "what came last is there"
        for each in texts[-20:]:
            found = [hash_ in tree._pieces for hash_ in each]
            assert found == sorted(found, reverse=True), "each piece follows another that is there"


def test_what_was_used_least_recently_goes_first() -> None:
    first, second, third = (piece_hashes(bytes([n]) * PIECE_BYTES, b"") for n in range(3))
    tree = PrefixTree(2)
    for each in (first, second, first, third):
        tree.insert(each)
    assert [tree.matched(each) for each in (first, second, third)] == [1, 0, 1]
    tree.clear()
    assert len(tree) == 0
