"""Goodness of fit of both draws: Pearson's chi-square at a million draws, and the errors that it must see."""

from __future__ import annotations

import pytest
import torch
from gumbel_draw import draw_by_gumbel, gumbel_noise, open_uniform

from vnext.sampling.sampling import SamplingInputs, draw_by_inversion, sample

SHARES = torch.tensor([0.3, 0.2, 0.12, 0.1, 0.08, 0.07, 0.05, 0.03, 0.02, 0.015, 0.01, 0.005], dtype=torch.float64)


def fit(tokens: torch.Tensor, shares: torch.Tensor) -> float:
    """Upper tail of Pearson's chi-square statistic: the chance of a worse fit."""
    counts = torch.bincount(tokens, minlength=len(shares)).double()
    expected = shares * len(tokens)
    statistic = ((counts - expected) ** 2 / expected).sum()
    return torch.special.gammaincc(torch.tensor((len(shares) - 1) / 2, dtype=torch.float64), statistic / 2).item()


def draws_of(logits: torch.Tensor, draw, seeds: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    rows, found = 125_000, []
    for start in range(0, len(seeds), rows):
        inputs = SamplingInputs(
            temperature=torch.full((rows,), 0.5),
            top_k=torch.zeros(rows, dtype=torch.int64),
            top_p=torch.ones(rows),
            min_p=torch.zeros(rows),
            seed=seeds[start : start + rows],
            position=positions[start : start + rows],
            any_filter=False,
        )
        found.append(sample(logits.expand(rows, -1), inputs, draw).tokens)
    return torch.cat(found)


@pytest.mark.parametrize(
    ("along", "draw"),
    [("positions", None), ("seeds", None), ("positions", draw_by_inversion), ("positions", draw_by_gumbel)],
)
def test_a_million_draws_fit(along: str, draw) -> None:
    count = torch.arange(1_000_000)
    fixed = torch.full_like(count, 11)
    seeds, positions = (fixed, count) if along == "positions" else (count, fixed)
    tokens = draws_of((SHARES.log() * 0.5).float(), draw, seeds, positions)
    assert 0.001 < fit(tokens, SHARES) < 0.999


def test_the_fit_sees_probabilities_fed_to_gumbel() -> None:
    count = 100_000
    noise = gumbel_noise(torch.full((count,), 11), torch.arange(count), torch.arange(len(SHARES)))
    assert fit((SHARES + noise).argmax(-1), SHARES) < 1e-9
    assert 0.001 < fit((SHARES.log() + noise).argmax(-1), SHARES) < 0.999


def test_consecutive_draws_are_independent() -> None:
    tokens = draws_of((SHARES.log() * 0.5).float(), None, torch.full((250_000,), 2), torch.arange(250_000))
    pairs = tokens[:-1:2] * len(SHARES) + tokens[1::2]
    assert 0.001 < fit(pairs, (SHARES[:, None] * SHARES).flatten()) < 0.999


def test_uniform_is_open_at_both_ends() -> None:
    """A word of all ones must not give 1, whose noise is infinite."""
    uniform = open_uniform(torch.tensor([0, 1, 2**32 - 2, 2**32 - 1]))
    assert bool(((uniform > 0) & (uniform < 1)).all()) and bool((uniform.diff() > 0).all())
    assert bool((-(-uniform.log()).log()).isfinite().all())
