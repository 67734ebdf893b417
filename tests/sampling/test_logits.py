"""Bias, bans and penalties against a plain numpy form, row by row and token by token."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from vnext.sampling.logits import adjust
from vnext.sampling.sampling import Banned, LogitBias, Penalties, SamplingInputs, sample

ROWS, VOCABULARY = 5, 40


def greedy(rows: int, **fields: object) -> SamplingInputs:
    return SamplingInputs(
        temperature=torch.zeros(rows),
        top_k=torch.zeros(rows, dtype=torch.int64),
        top_p=torch.ones(rows),
        min_p=torch.zeros(rows),
        seed=torch.zeros(rows, dtype=torch.int64),
        position=torch.zeros(rows, dtype=torch.int64),
        any_random=False,
        any_filter=False,
        **fields,
    )


def naive_token(logit: float, seen: bool, count: int, repetition: float, presence: float, frequency: float) -> float:
    value = logit
    if seen or count > 0:
        value = value / repetition if value > 0 else value * repetition
    value -= frequency * count
    return value - presence if count > 0 else value


@pytest.mark.parametrize("case", range(8))
def test_all_adjustments_follow_the_plain_form(case: int) -> None:
    draw = np.random.default_rng(case)
    logits = torch.from_numpy(draw.normal(0, 3, (ROWS, VOCABULARY)).astype(np.float32))
    rows = draw.permutation(ROWS)[:3]
    strength = {
        "repetition": draw.uniform(0.5, 2, 3).astype(np.float32),
        "presence": draw.uniform(-2, 2, 3).astype(np.float32),
        "frequency": draw.uniform(-2, 2, 3).astype(np.float32),
    }
    prompt, counts = draw.random((3, VOCABULARY)) < 0.3, draw.poisson(0.5, (3, VOCABULARY)).astype(np.int32)
    bias = {(int(draw.integers(ROWS)), int(draw.integers(VOCABULARY))): float(draw.uniform(-5, 5)) for _ in range(12)}
    banned = {(int(draw.integers(ROWS)), int(draw.integers(VOCABULARY))) for _ in range(6)}
    inputs = greedy(
        ROWS,
        penalties=Penalties(
            rows=torch.from_numpy(rows),
            prompt_mask=torch.from_numpy(prompt),
            output_counts=torch.from_numpy(counts),
            **{name: torch.from_numpy(values) for name, values in strength.items()},
        ),
        bias=LogitBias(
            torch.tensor([row for row, _ in bias]),
            torch.tensor([token for _, token in bias]),
            torch.tensor(list(bias.values())),
        ),
        banned=Banned(torch.tensor([row for row, _ in banned]), torch.tensor([token for _, token in banned])),
    )
    expected = logits.numpy().astype(np.float64)
    for (row, token), value in bias.items():
        expected[row, token] += value
    for row, token in banned:
        expected[row, token] = -np.inf
    for place, row in enumerate(rows):
        for token in range(VOCABULARY):
            expected[row, token] = naive_token(
                expected[row, token],
                bool(prompt[place, token]),
                int(counts[place, token]),
                *(float(strength[name][place]) for name in ("repetition", "presence", "frequency")),
            )
    adjusted = adjust(logits, inputs)
    np.testing.assert_allclose(adjusted.numpy(), expected, rtol=1e-5, atol=1e-5)
    assert sample(logits, inputs).tokens.tolist() == expected.argmax(axis=1).tolist()


def test_untouched_rows_keep_every_bit_and_the_argument_stays() -> None:
    logits = torch.randn(ROWS, VOCABULARY, generator=torch.Generator().manual_seed(0))
    kept = logits.clone()
    inputs = greedy(
        ROWS,
        penalties=Penalties(
            rows=torch.tensor([2]),
            repetition=torch.tensor([1.3]),
            presence=torch.tensor([0.5]),
            frequency=torch.tensor([0.5]),
            prompt_mask=torch.ones(1, VOCABULARY, dtype=torch.bool),
            output_counts=torch.ones(1, VOCABULARY, dtype=torch.int32),
        ),
        banned=Banned(torch.tensor([4]), torch.tensor([0])),
    )
    adjusted = adjust(logits, inputs)
    assert torch.equal(logits, kept)
    assert torch.equal(adjusted[[0, 1, 3]], kept[[0, 1, 3]])
    assert bool((adjusted[2] != kept[2]).all())


def test_neutral_penalties_change_no_bit() -> None:
    logits = torch.randn(2, VOCABULARY, generator=torch.Generator().manual_seed(1))
    neutral = Penalties(
        rows=torch.tensor([0, 1]),
        repetition=torch.ones(2),
        presence=torch.zeros(2),
        frequency=torch.zeros(2),
        prompt_mask=torch.ones(2, VOCABULARY, dtype=torch.bool),
        output_counts=torch.full((2, VOCABULARY), 3, dtype=torch.int32),
    )
    assert torch.equal(adjust(logits, greedy(2, penalties=neutral)), logits)


def test_a_banned_token_stays_banned_whatever_bias_and_penalties_say() -> None:
    logits = torch.zeros(1, 4)
    inputs = greedy(
        1,
        bias=LogitBias(torch.tensor([0]), torch.tensor([2]), torch.tensor([100.0])),
        banned=Banned(torch.tensor([0]), torch.tensor([2])),
        penalties=Penalties(
            rows=torch.tensor([0]),
            repetition=torch.tensor([0.1]),
            presence=torch.tensor([-2.0]),
            frequency=torch.tensor([-2.0]),
            prompt_mask=torch.tensor([[False, False, True, False]]),
            output_counts=torch.tensor([[0, 0, 5, 0]], dtype=torch.int32),
        ),
    )
    assert adjust(logits, inputs)[0, 2].item() == float("-inf")
    assert sample(logits, inputs).tokens.tolist() == [0]
