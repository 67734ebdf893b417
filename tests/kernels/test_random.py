"""Threefry2x32: published answers, torch against numpy bit by bit, words that depend on their own counter only."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from vnext.kernels import random, random_numpy
from vnext.kernels.random_numpy import WORD_MAX, Domain

# key, counter, answer: the first three are the Random123 library's known answers
KNOWN = [
    ((0, 0), (0, 0), (0x6B200159, 0x99BA4EFE)),
    ((WORD_MAX, WORD_MAX), (WORD_MAX, WORD_MAX), (0x1CB996FC, 0xBB002BE7)),
    ((0x13198A2E, 0x03707344), (0x243F6A88, 0x85A308D3), (0xC4923A9C, 0x483DF7A0)),
]
SEEDS = [0, 1, 2**32, 2**63, 2**64 - 1, 0x0123456789ABCDEF]


def signed(seed: int) -> int:
    return seed - 2**64 if seed >= 2**63 else seed


def tensors(values: tuple[int, int]) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.tensor([values[0]]), torch.tensor([values[1]])


@pytest.mark.parametrize(("key", "counter", "answer"), KNOWN)
def test_known_answers(key: tuple[int, int], counter: tuple[int, int], answer: tuple[int, int]) -> None:
    plain = random_numpy.threefry2x32(tuple(map(np.uint32, key)), tuple(map(np.uint32, counter)))
    fast = random.threefry2x32(tensors(key), tensors(counter))
    assert tuple(int(word[0]) for word in plain) == answer
    assert tuple(int(word[0]) for word in fast) == answer


def test_torch_equals_numpy_on_every_bit() -> None:
    draws = np.random.default_rng(0).integers(0, 2**32, (4, 50_000), dtype=np.uint32)
    plain = random_numpy.threefry2x32((draws[0], draws[1]), (draws[2], draws[3]))
    wide = [torch.from_numpy(row.astype(np.int64)) for row in draws]
    fast = random.threefry2x32((wide[0], wide[1]), (wide[2], wide[3]))
    for ours, oracle in zip(fast, plain, strict=True):
        assert np.array_equal(ours.numpy(), oracle.astype(np.int64))


def test_step_words_equal_their_twin_for_any_seed_and_position() -> None:
    counters = np.arange(300, dtype=np.uint32)
    positions = [0, 1, 77, 2**31, 2**32 - 1, 5]
    seeds = torch.tensor([signed(seed) for seed in SEEDS])
    words = random.step_words(seeds, torch.tensor(positions), torch.arange(300), Domain.GUMBEL)
    for row, (seed, position) in enumerate(zip(SEEDS, positions, strict=True)):
        plain = random_numpy.step_words(seed, position, counters, Domain.GUMBEL)
        for ours, oracle in zip(words, plain, strict=True):
            assert np.array_equal(ours[row].numpy(), oracle.astype(np.int64))


def test_a_word_depends_on_its_own_counter_only() -> None:
    seed, position = torch.tensor([3, 4]), torch.tensor([10, 10])
    wide, _ = random.step_words(seed, position, torch.arange(1000), Domain.GUMBEL)
    order = torch.randperm(1000, generator=torch.Generator().manual_seed(1))
    shuffled, _ = random.step_words(seed.flip(0), position, order[:100], Domain.GUMBEL)
    assert torch.equal(shuffled.flip(0), wide[:, order[:100]])


def test_no_hidden_state_is_read_or_moved() -> None:
    torch.manual_seed(0)
    before = torch.get_rng_state()
    first, _ = random.step_words(torch.tensor([1]), torch.tensor([2]), torch.arange(10), Domain.GUMBEL)
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(1)
    again, _ = random.step_words(torch.tensor([1]), torch.tensor([2]), torch.arange(10), Domain.GUMBEL)
    assert torch.equal(first, again)


def test_uses_positions_and_seeds_share_no_word() -> None:
    """A draft and its verifier, two positions, two seeds: all words differ, as independent words of 64 bits do."""
    counters, seen = torch.arange(2000), set()
    for use in Domain:
        for seed in (0, 1, 2**32):
            for position in (0, 1, 2):
                left, right = random.step_words(torch.tensor([seed]), torch.tensor([position]), counters, use)
                seen.update(zip(left[0].tolist(), right[0].tolist(), strict=True))
    assert len(seen) == len(Domain) * 3 * 3 * 2000


def test_domains_are_distinct_and_fixed() -> None:
    assert {domain.name: int(domain) for domain in Domain} == {"POSITION": 1, "INVERSION": 3, "GUMBEL": 4, "OUTSIDE": 5}


def test_bits_are_balanced() -> None:
    """Each of 64 bits over 200,000 words is set half the time, within five standard deviations."""
    words = random.step_words(torch.tensor([5]), torch.tensor([6]), torch.arange(200_000), Domain.GUMBEL)
    bound = 5 * (200_000 / 4) ** 0.5
    for word in words:
        for bit in range(32):
            assert abs(int(((word >> bit) & 1).sum()) - 100_000) < bound
