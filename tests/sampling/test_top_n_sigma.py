"""Top-n-sigma keeps the tokens that llama.cpp's formula keeps, in any order of the tokens, and before any temperature."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from vnext.kernels.cpu import native
from vnext.sampling.inputs import SamplingInputs
from vnext.sampling.sampling import choose, choose_compiled, draw_by_inversion
from vnext.sampling.weights import WEIGHT_ONE, deviation, fixed_point_weights

INFINITY = float("inf")
NEAR = 1e-5
"""Of the range of a row's logits: so near to the edge rounding may decide."""


def asked(rows: int, top_n_sigma: float | torch.Tensor, **more: float) -> SamplingInputs:
    values = {"temperature": 1.0, "top_p": 1.0, "min_p": 0.0} | more
    columns = {name: torch.full((rows,), value) for name, value in values.items() if name != "top_k"}
    top_k = torch.full((rows,), int(values.get("top_k", 0)))
    sigma = top_n_sigma if isinstance(top_n_sigma, torch.Tensor) else torch.full((rows,), top_n_sigma)
    places = torch.arange(rows)
    return SamplingInputs(**columns, top_k=top_k, seed=places * 77 - 5, position=places * 3, top_n_sigma=sigma)


def edge_of(logits: np.ndarray, n: float) -> float:
    """llama.cpp, llama_sampler_top_n_sigma_apply: the lowest logit that stays, from those that are not minus infinity."""
    valid = logits[logits != -np.inf].astype(np.float64)
    return valid.max() - n * np.sqrt(np.mean((valid - valid.mean()) ** 2))


def rows_of(seed: int, vocabulary: int = 501) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    spread = torch.tensor([0.01, 0.7, 2.0, 3.0, 5.0, 8.0])[:, None]
    logits = torch.randn(6, vocabulary, generator=generator) * spread - 7
    logits[3, ::3] = -INFINITY  # banned
    logits[4, 7] = -3e38  # as good as banned, but a number, as llama.cpp counts it
    return logits


def test_by_hand() -> None:
    """Logits 0, -2, -4, -6: the mean is -3, the variance (9 + 1 + 1 + 9) / 4 = 5, and a banned token does not count."""
    logits = torch.tensor([[0.0, -2.0, -4.0, -6.0, -INFINITY]])
    assert deviation(logits, logits.amax(-1)).item() == pytest.approx(5**0.5, rel=1e-12)
    for n, kept in ((0.5, 1), (0.89, 1), (0.9, 2), (1.78, 2), (1.79, 3), (2.68, 3), (2.69, 4), (100.0, 4), (0.0, 4)):
        assert int((fixed_point_weights(logits, asked(1, n)) > 0).sum()) == kept, n
    equal = torch.full((1, 9), -3.5)
    assert (fixed_point_weights(equal, asked(1, 0.1)) == WEIGHT_ONE).all()


@pytest.mark.parametrize("n", [0.1, 0.5, 1.0, 1.7, 3.0])
def test_it_keeps_what_llama_cpp_keeps(n: float) -> None:
    logits = rows_of(1)
    weights = fixed_point_weights(logits, asked(6, n, temperature=1.3))
    for row, weight in zip(logits.numpy(), weights.numpy()):
        edge, finite = edge_of(row, np.float32(n)), row[row != -np.inf].astype(np.float64)
        near = np.abs(row - edge) <= NEAR * (finite.max() - finite.min())
        heavy = (row - row.max()) / 1.3 > -27  # what is less likely weighs nothing anyway
        assert ((weight > 0) == (row >= edge))[~near & heavy].all() and (weight[row < edge][~near[row < edge]] == 0).all()


def test_the_temperature_does_not_change_what_is_kept() -> None:
    """Where all weigh something."""
    logits = rows_of(2)[:3]
    kept = [fixed_point_weights(logits, asked(3, 1.5, temperature=share)) > 0 for share in (0.8, 1.0, 1.7, 5.0)]
    assert all(torch.equal(each, kept[0]) for each in kept) and 3 < int(kept[0].sum()) < 900


def test_sums_are_exact_in_any_order_and_beside_any_row() -> None:
    logits = rows_of(3, 4099)
    order = torch.randperm(4099, generator=torch.Generator().manual_seed(1))
    inputs = asked(6, 1.0)
    weights, shuffled = fixed_point_weights(logits, inputs), fixed_point_weights(logits[:, order].contiguous(), inputs)
    assert torch.equal(weights[:, order], shuffled)
    alone = torch.cat([fixed_point_weights(row[None], asked(1, 1.0)) for row in logits])
    assert torch.equal(weights, alone)


def test_the_others_see_what_it_leaves() -> None:
    """Top-p is a share of the mass that is left, top-k counts on."""
    logits = rows_of(4)[1:2]
    left = fixed_point_weights(logits, asked(1, 1.0))
    alone = logits.masked_fill(left == 0, -INFINITY)
    for more in ({"top_p": 0.6}, {"top_k": 4}, {"min_p": 0.2}, {"top_p": 0.9, "top_k": 7, "min_p": 0.01}):
        assert torch.equal(
            fixed_point_weights(logits, asked(1, 1.0, **more)), fixed_point_weights(alone, asked(1, 0.0, **more))
        )


@pytest.mark.skipif(not native.is_built(), reason="the CPU kernels were not compiled")
def test_the_compiled_form_draws_the_same_tokens_at_any_level_and_number_of_threads() -> None:
    logits = torch.cat([rows_of(seed, 70_001) for seed in (5, 6)])
    logits[0, 3], logits[1, 4] = float("nan"), INFINITY
    sigma = torch.tensor([1.0, 0.5, -1.0, 2.0, 0.01, 40.0, 0.0, 1.5, 1e-9, 3.0, 1.0, 0.3])
    usual = native.level()
    try:
        for more in ({}, {"top_p": 0.8}, {"top_k": 5, "min_p": 0.01}):
            inputs = asked(12, sigma, **more)
            expected = choose(logits, inputs, draw_by_inversion)
            assert (expected != logits.argmax(-1)).any()
            for level in native.levels():
                native.set_level(level)
                for threads in (1, 3):
                    native.start(threads, 0)
                    assert choose_compiled(logits, inputs).tolist() == expected.tolist(), (level, threads)
                    alone = asked(1, sigma[4:5], **more)._replace(seed=inputs.seed[4:5], position=inputs.position[4:5])
                    assert choose_compiled(logits[4:5], alone).item() == expected[4]  # its blocks are shared by the threads
    finally:
        native.set_level(usual)
        native.start(1, 0)
