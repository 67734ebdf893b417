"""Codes of few bits stand for their numbers exactly, and their product is near that of the numbers."""

from __future__ import annotations

import numpy as np
import pytest

from vnext.kernels.codes import INPUTS, LARGEST, Codes, Scales, round_rows, sums

OUT, IN = 6, 256


def symmetric(bits: int, group: int) -> Codes:
    random = np.random.default_rng(bits)
    scales = Scales(random.uniform(-0.1, 0.1, (OUT, IN // group)).astype(np.float32))
    return Codes(random.integers(0, 2**bits, (OUT, IN), np.uint8), bits, scales, zero=2 ** (bits - 1))


def with_lows(group: int) -> Codes:
    random = np.random.default_rng(group)
    parts = [random.integers(0, 64, (OUT, IN // group), np.uint8) for _ in range(2)]
    spans = [random.uniform(0, 0.01, (OUT, 1)).astype(np.float32) for _ in range(2)]
    return Codes(random.integers(0, 16, (OUT, IN), np.uint8), 4, Scales(parts[0], spans[0]), lows=Scales(parts[1], spans[1]))


WEIGHTS = {"8 bits": symmetric(8, 32), "6 bits": symmetric(6, 16), "4 bits": symmetric(4, 128), "lows": with_lows(32), "3": with_lows(16)}


@pytest.mark.parametrize("name", WEIGHTS)
def test_a_product_is_near_that_of_the_numbers(name: str) -> None:
    weight, x = WEIGHTS[name], np.random.default_rng(1).standard_normal((5, IN)).astype(np.float32)
    rounded = round_rows(x)
    same = rounded.codes.astype(np.float64) * np.repeat(rounded.scales, INPUTS, 1)
    wide = weight.floats().astype(np.float64)
    bound = 2e-6 * (np.abs(same) @ (np.abs(wide) + np.repeat(np.abs(weight.low()), weight.group, 1)).T)
    assert (np.abs(sums(x, weight) - same @ wide.T) <= bound).all()


def test_activations_round_to_the_nearest_code() -> None:
    x = np.random.default_rng(2).standard_normal((3, IN)).astype(np.float32)
    rounded = round_rows(x)
    steps = np.repeat(rounded.scales, INPUTS, 1)
    assert (np.abs(rounded.codes * steps - x) <= steps * 0.500001).all()
    assert (np.abs(rounded.codes).reshape(3, -1, INPUTS).max(-1) == LARGEST).all()


def test_a_group_of_zeros_or_of_next_to_nothing_is_zeros() -> None:
    x = np.zeros((1, 2 * INPUTS), np.float32)
    x[0, INPUTS:] = 1e-38
    rounded = round_rows(x)
    assert not rounded.codes.any() and not rounded.scales.any()
