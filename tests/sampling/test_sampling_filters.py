"""Temperature, min-p, top-k and top-p against a plain numpy form; equals, edges, and floors that no width moves."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from vnext.sampling.inputs import SamplingInputs
from vnext.sampling.weights import WEIGHT_ONE, fixed_point_weights, weight_thresholds

Filter = tuple[float, int, float, float]  # temperature, top_k, top_p, min_p


def inputs_of(filters: list[Filter]) -> SamplingInputs:
    rows = len(filters)
    return SamplingInputs(
        temperature=torch.tensor([row[0] for row in filters]),
        top_k=torch.tensor([row[1] for row in filters]),
        top_p=torch.tensor([row[2] for row in filters]),
        min_p=torch.tensor([row[3] for row in filters]),
        seed=torch.zeros(rows, dtype=torch.int64),
        position=torch.zeros(rows, dtype=torch.int64),
    )


def naive_keep(logits: np.ndarray, row: Filter) -> tuple[set[int], float]:
    """Kept ids of one row, and how near the top-p decision was to its edge, as a share of the mass."""
    temperature, top_k, top_p, min_p = row
    scaled = logits.astype(np.float64) / temperature
    share = np.exp(scaled - scaled.max())
    kept = {token for token in range(len(share)) if share[token] >= min_p}
    if top_k:
        kept = {token for token in kept if sum(share[other] > share[token] for other in kept) < top_k}
    if top_p >= 1:
        return kept, 1.0
    total = sum(share[token] for token in kept)
    above = {token: sum(share[other] for other in kept if share[other] > share[token]) / total for token in kept}
    nearest = min(abs(mass - top_p) for mass in above.values())
    return {token for token in kept if above[token] < top_p} or {int(share.argmax())}, nearest


def kept_by(weights: torch.Tensor) -> list[set[int]]:
    return [set(row.nonzero()[:, 0].tolist()) for row in weights]


@pytest.mark.parametrize("levels", [0, 6], ids=["distinct", "equals"])
def test_filters_follow_the_plain_form(levels: int) -> None:
    draw, compared = np.random.default_rng(levels), 0
    for _ in range(25):
        size = int(draw.integers(1, 60))
        logits = draw.normal(0, 2, (8, size)).astype(np.float32)
        if levels:
            logits = draw.integers(0, levels, (8, size)).astype(np.float32)
        filters = [
            (
                float(np.float32(draw.uniform(0.5, 2))),
                int(draw.integers(0, size + 3)) * int(draw.integers(2)),
                float(np.float32(draw.choice([1.0, draw.uniform(0.01, 1)]))),
                float(np.float32(draw.choice([0.0, draw.uniform(0, 0.7)]))),
            )
            for _ in range(8)
        ]
        found = kept_by(fixed_point_weights(torch.from_numpy(logits), inputs_of(filters)))
        for row, parameters in enumerate(filters):
            expected, edge = naive_keep(logits[row], parameters)
            if edge > 1e-5:
                compared += 1
                assert found[row] == expected, parameters
    assert compared > 150


def test_weights_are_the_softmax() -> None:
    logits = torch.randn(6, 500, generator=torch.Generator().manual_seed(2)) * 4
    temperature = torch.tensor([0.3, 0.7, 1.0, 1.5, 3.0, 100.0])
    inputs = inputs_of([(float(value), 0, 1.0, 0.0) for value in temperature])
    weights = fixed_point_weights(logits, inputs).double()
    expected = (logits.double() / temperature.double()[:, None]).softmax(-1)
    torch.testing.assert_close(weights / weights.sum(-1, keepdim=True), expected, rtol=1e-5, atol=1e-10)
    assert weights.amax(-1).tolist() == [WEIGHT_ONE] * 6


def test_a_floor_is_the_same_for_every_width_of_the_head() -> None:
    """The narrow selection of a CPU and the full sort of a device must agree on every bit."""
    generator = torch.Generator().manual_seed(3)
    flat, peaked = torch.randn(6, 5000, generator=generator) * 0.1, torch.randn(6, 5000, generator=generator) * 6
    equals = torch.randint(0, 4, (6, 5000), generator=generator).float()
    logits = torch.cat([flat, peaked, equals])
    top_k, top_p = (0, 3, 200, 4999, 9999, 130), (0.9, 0.5, 1.0)
    inputs = inputs_of([(1.0, top_k[row % 6], top_p[row // 2 % 3], 0.0) for row in range(18)])
    weights = fixed_point_weights(logits, inputs._replace(any_filter=False))
    full = weight_thresholds(weights, inputs.top_k, inputs.top_p, 5000)
    for width in (1, 2, 128, 1000, 4999):
        assert torch.equal(weight_thresholds(weights, inputs.top_k, inputs.top_p, width), full)


def test_filters_off_change_no_weight_though_a_mate_has_them_on() -> None:
    logits = torch.randn(2, 3000, generator=torch.Generator().manual_seed(4)) * 3
    mixed = fixed_point_weights(logits, inputs_of([(0.8, 0, 1.0, 0.0), (1.2, 7, 0.5, 0.2)]))
    alone = fixed_point_weights(logits[:1], inputs_of([(0.8, 0, 1.0, 0.0)])._replace(any_filter=False))
    assert torch.equal(mixed[:1], alone)
    assert int((mixed[1] > 0).sum()) <= 7


def test_equals_at_the_edge_of_top_k_are_all_kept() -> None:
    logits = torch.tensor([[1.0, 3.0, 2.0, 3.0, 2.0, 0.0]])
    for top_k, expected in ((1, {1, 3}), (2, {1, 3}), (3, {1, 2, 3, 4}), (6, {0, 1, 2, 3, 4, 5}), (99, set(range(6)))):
        assert kept_by(fixed_point_weights(logits, inputs_of([(1.0, top_k, 1.0, 0.0)]))) == [expected]


def test_top_p_edges() -> None:
    logits = torch.tensor([[0.5, 0.25, 0.125, 0.125]]).log()
    edges = [(0.0, {0}), (1e-9, {0}), (0.49, {0}), (0.51, {0, 1}), (0.76, {0, 1, 2, 3}), (1.0, {0, 1, 2, 3})]
    for top_p, expected in edges:
        assert kept_by(fixed_point_weights(logits, inputs_of([(1.0, 0, top_p, 0.0)]))) == [expected]


def test_top_p_counts_what_min_p_and_top_k_left() -> None:
    logits = torch.tensor([[0.4, 0.3, 0.2, 0.1]]).log()
    assert kept_by(fixed_point_weights(logits, inputs_of([(1.0, 2, 0.56, 0.0)]))) == [{0}]  # 0.4 / 0.7 reaches 0.56
    assert kept_by(fixed_point_weights(logits, inputs_of([(1.0, 0, 0.43, 0.45)]))) == [{0}]  # 0.4 / 0.9 reaches 0.43
    assert kept_by(fixed_point_weights(logits, inputs_of([(1.0, 0, 0.43, 0.0)]))) == [{0, 1}]


def test_min_p_keeps_the_likeliest_even_at_one() -> None:
    logits = torch.tensor([[2.0, 1.0, 2.0]])
    assert kept_by(fixed_point_weights(logits, inputs_of([(0.7, 0, 1.0, 1.0)]))) == [{0, 2}]


def test_rows_without_a_possible_token_weigh_nothing() -> None:
    logits = torch.tensor([[float("-inf")] * 3, [0.0, float("nan"), 1.0], [float("-inf"), 0.0, float("-inf")]])
    weights = fixed_point_weights(logits, inputs_of([(1.0, 2, 0.5, 0.1)] * 3))
    assert weights.tolist() == [[0, 0, 0], [0, 0, 0], [0, WEIGHT_ONE, 0]]


def test_a_vocabulary_that_could_overflow_is_refused() -> None:
    with pytest.raises(ValueError, match="would overflow"):
        fixed_point_weights(torch.empty(1, 1, device="meta").expand(1, 2**22 + 1), inputs_of([(1.0, 0, 1.0, 0.0)]))
