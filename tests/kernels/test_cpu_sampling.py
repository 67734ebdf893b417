"""Compiled sampling gives the token of its torch form, the oracle, for every row; and the power both are made of."""

from __future__ import annotations

import pytest
import torch
from cpu_levels import LEVELS, needs_native, using
from sampling_values import values_of

from vnext.kernels.cpu.native import Level
from vnext.kernels.cpu.sampling import penalise_rows, sample_rows
from vnext.sampling.inputs import Allowed, SamplingInputs
from vnext.sampling.logits import keep_allowed, penalise_seen
from vnext.sampling.sampling import (
    choose,
    choose_compiled,
    draw_by_inversion,
    keep_allowed_compiled,
    report,
    report_plain,
    token_logprobs,
)
from vnext.sampling.weights import LEAST_EXPONENT, WEIGHT_BITS, WEIGHT_ONE, fixed_point
from vnext.state.params import CHOOSING

levels = pytest.mark.parametrize("level", LEVELS)
INFINITY, NAN = float("inf"), float("nan")

SPREADS = (0.0, 0.01, 0.5, 1.0, 3.0, 10.0, 100.0)


class Draws:
    """Seeded random rows and parameters."""

    def __init__(self, seed: int) -> None:
        self._generator = torch.Generator().manual_seed(seed)

    def pick(self, values: tuple[float, ...], count: int) -> torch.Tensor:
        return torch.tensor(values)[torch.randint(0, len(values), (count,), generator=self._generator)]

    def rng(self, share: float) -> bool:
        return float(torch.rand(1, generator=self._generator)) < share

    def integers(self, low: int, high: int, count: int) -> torch.Tensor:
        return torch.randint(low, high, (count,), generator=self._generator)

    def inputs(self, rows: int) -> SamplingInputs:
        return SamplingInputs(
            **{name: self.pick(values_of(name), rows) for name in CHOOSING},
            seed=self.integers(-(2**63), 2**63 - 1, rows),
            position=self.integers(0, 2**32, rows),
        )

    def logits(self, rows: int, vocabulary: int) -> torch.Tensor:
        spread = self.pick(SPREADS, rows)[:, None]
        logits = torch.randn(rows, vocabulary, generator=self._generator) * spread + self.pick((0.0, 5.0, -3e3), 1)
        if self.rng(0.3):
            logits = logits.round()
        if self.rng(0.3):
            logits[torch.rand(rows, vocabulary, generator=self._generator) < 0.7] = -INFINITY
        if self.rng(0.4):
            column = int(self.integers(0, vocabulary, 1))
            logits[0, column] = float(self.pick((NAN, INFINITY, -INFINITY, 0.0, -0.0), 1))
        if self.rng(0.1):
            logits[-1] = float(self.pick((NAN, INFINITY, -INFINITY, 0.0), 1))
        return logits


def assert_same_tokens(logits: torch.Tensor, inputs: SamplingInputs) -> int:
    expected, found = choose(logits, inputs, draw_by_inversion), choose_compiled(logits, inputs)
    for row in (found != expected).nonzero()[:, 0].tolist():
        raise AssertionError(f"row {row}: {found[row]} for {expected[row]} with {[part[row] for part in inputs.columns()]}")
    return int(((inputs.temperature > 0) & (found != logits.argmax(-1))).sum())


@needs_native
@levels
def test_the_token_is_that_of_the_torch_form(level: Level) -> None:
    """Thousands of rows, everything switched on by turns: the extremes of each parameter, equals, holes, NaN."""
    draws, drawn = Draws(level), 0
    sizes = [(64, 7), (64, 128), (64, 129), (33, 1000), (17, 5003)] * 4 + [(9, 32_000), (3, 49_152), (2, 151_936)]
    for turn, (rows, vocabulary) in enumerate(sizes):
        with using(level, threads=1 + turn % 3):
            drawn += assert_same_tokens(draws.logits(rows, vocabulary), draws.inputs(rows))
    assert drawn > 200


@needs_native
@levels
@pytest.mark.parametrize("vocabulary", [1, 16, 5003, 151_936])
def test_one_row_shared_among_threads(vocabulary: int, level: Level) -> None:
    draws = Draws(vocabulary)
    for _ in range(8):
        logits, inputs = draws.logits(1, vocabulary), draws.inputs(1)
        for threads in (1, 2, 3):
            with using(level, threads):
                assert_same_tokens(logits, inputs)


@needs_native
@levels
def test_many_tokens_within_a_digit_of_the_edge(level: Level) -> None:
    """The search for a floor goes digit by digit of the weights: here thousands share the first ones, or all."""
    draws, rows, vocabulary = Draws(5), 12, 20_000
    spread = draws.pick((1e-7, 1e-6, 1e-4, 1e-2), rows)[:, None]
    near = draws.logits(rows, vocabulary).nan_to_num(0, 0, 0).clamp(-5, 5) * spread
    heavy = near + 12 * (torch.arange(vocabulary) % 100 == 0)
    inputs = draws.inputs(rows)._replace(temperature=torch.ones(rows))
    with using(level):
        for logits in (near, heavy, near * 0):
            for top_k in (0, 65, 1000, 19_999):
                assert_same_tokens(logits, inputs._replace(top_k=torch.full((rows,), top_k)))


@needs_native
@levels
@pytest.mark.parametrize("vocabulary", [1, 31, 32, 33, 50, 3072, 49_157])
def test_masks_give_the_same_logits(level: Level, vocabulary: int) -> None:
    """Random words, words of ones and of zeros, in rows apart in memory; NaN and infinity stay where they may come."""
    draws, rows = Draws(vocabulary), 6
    masks = draws.integers(-(2**31), 2**31, rows * (words := (vocabulary + 31) // 32)).to(torch.int32).view(rows, words)
    masks[draws.integers(0, 3, rows * words).view(rows, words) == 0] = -1
    masks[draws.integers(0, 5, rows * words).view(rows, words) == 0] = 0
    allowed = Allowed(torch.tensor([4, 1, 3]), torch.tensor([0, 5, 2]), masks)
    logits = draws.logits(2 * rows, vocabulary)[::2]
    expected = logits.clone()
    keep_allowed(expected, allowed)
    with using(level):
        keep_allowed_compiled(logits, allowed)
    assert torch.equal(logits.nan_to_num(7.5), expected.nan_to_num(7.5))


@needs_native
def test_rows_apart_in_memory() -> None:
    draws = Draws(9)
    wide, inputs = draws.logits(20, 700), draws.inputs(10)
    for logits in (wide[::2, 100:], wide[:10].T.contiguous().T, wide[:1].expand(10, -1)):
        assert_same_tokens(logits, inputs)
    assert sample_rows(wide[:0], [column[:0] for column in inputs.columns()]).tolist() == []


@needs_native
@levels
def test_reports_are_those_of_the_torch_form(level: Level) -> None:
    """To the bit: holes, equals, both zeros, NaN and infinity; more alternatives than blocks of tokens, and than tokens."""
    draws, seen = Draws(level + 40), 0
    sizes = [(64, 1), (64, 7), (33, 129), (64, 1000), (17, 5003)] * 4 + [(9, 32_000), (3, 49_152), (2, 151_936)]
    for turn, (rows, vocabulary) in enumerate(sizes):
        logits, count = draws.logits(rows, vocabulary), (20, 0, 1, 300)[turn % 4]
        tokens = draws.integers(0, vocabulary, rows)
        with using(level, threads=1 + turn % 3):
            found = report(logits, tokens, count)
        expected = report_plain(logits, tokens, count)
        assert found.top_tokens.shape == (rows, min(count, vocabulary))
        for name, ours, theirs in zip(expected._fields, found, expected):
            bits = (ours.view(torch.int32), theirs.view(torch.int32)) if ours.is_floating_point() else (ours, theirs)
            both_nan = torch.isnan(ours) & torch.isnan(theirs)
            assert bool(((bits[0] == bits[1]) | both_nan).all()), (name, rows, vocabulary)
        seen += int(expected.logprob.isfinite().sum())
    assert seen > 400


@needs_native
def test_a_row_shared_among_threads_is_reported_alike() -> None:
    draws = Draws(77)
    for vocabulary in (1, 5003, 151_936):
        logits, tokens = draws.logits(1, vocabulary), draws.integers(0, vocabulary, 1)
        expected = [each.nan_to_num(7.5).tolist() for each in report_plain(logits, tokens, 5)]
        for threads in (1, 2, 3):
            with using(max(LEVELS), threads):
                assert [each.nan_to_num(7.5).tolist() for each in report(logits, tokens, 5)] == expected


def test_a_log_probability_is_that_of_float64_rounded_once() -> None:
    """Flat rows and peaked ones; the sum over a vocabulary loses less than 4e-7 to whole numbers."""
    draws = Draws(3)
    for spread, vocabulary in ((0.0, 1), (0.0, 151_936), (0.01, 5003), (2.0, 49_152), (10.0, 32_000), (100.0, 1000)):
        logits = torch.randn(8, vocabulary, generator=torch.Generator().manual_seed(vocabulary)) * spread
        tokens = draws.integers(0, vocabulary, 8)[:, None]
        exact = logits.double().log_softmax(-1).gather(1, tokens)
        error = (token_logprobs(logits, tokens).double() - exact).abs()
        assert float((error - exact.abs() * 2**-24).max()) < 4e-7, (spread, vocabulary)


@needs_native
@pytest.mark.parametrize("vocabulary", [1, 15, 16, 33, 5003])
def test_penalties_give_the_same_logits(vocabulary: int) -> None:
    """In rows apart in memory, with tokens in the prompt, sampled, both or neither."""
    draws, rows = Draws(vocabulary + 9), 5
    logits = draws.logits(2 * rows, vocabulary)[::2]
    counts = draws.integers(0, 4, 3 * vocabulary).view(3, -1).to(torch.int32) * (draws.integers(0, 9, 3 * vocabulary) == 0).view(3, -1)
    in_prompt = (draws.integers(0, 9, 3 * vocabulary) == 0).view(3, -1)
    rates = draws.pick((1.0, 1.3, 0.7), 3), draws.pick((0.0, 0.5, -2.0), 3), draws.pick((0.0, 0.25, -1.5), 3)
    at = torch.tensor([4, 1, 3])
    expected = logits.clone()
    expected[at] = penalise_seen(expected[at], in_prompt | (counts > 0), counts, *rates)
    penalise_rows(logits, at, in_prompt, counts.int(), rates)
    assert torch.equal(logits.nan_to_num(7.5), expected.nan_to_num(7.5))


def test_the_power_is_right_and_none_is_above_the_likeliest() -> None:
    """Every float32 from -2 to -1/4 and samples of the rest: relative error below 2e-7, and no weight above 2**40."""
    first, last = (torch.tensor(bound).view(torch.int32).item() for bound in (-0.25, -2.0))
    for start in range(first, last, 2**22):
        check_power(torch.arange(start, min(start + 2**22, last), dtype=torch.int32).view(torch.float32))
    check_power(-torch.logspace(-45, 1.2, 2**20, base=10))
    check_power(torch.tensor([0.0, -0.0, -0.5, -1.0, -17.0]))


def check_power(exponent: torch.Tensor) -> None:
    exact = torch.exp2(exponent.double() + WEIGHT_BITS)
    weights = fixed_point(exponent.clone())
    assert int(weights.max()) <= WEIGHT_ONE
    assert bool(((weights - exact).abs() <= exact * 2e-7 + 1).all())


def test_what_is_too_unlikely_weighs_nothing() -> None:
    assert fixed_point(torch.tensor([LEAST_EXPONENT, -40.5, -40.0, 0.0])).tolist() == [0, 0, 1, WEIGHT_ONE]
