"""Sampling on arrays without torch gives every token and every bit of the torch forms, the oracle, whatever requests ask for together."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from vnext.runtime.batch.tensors import tensors_of_sampling
from vnext.sampling import host
from vnext.sampling.inputs import Allowed, Banned, LogitBias, Penalties, Sampled, SamplingInputs
from vnext.sampling.logits import adjust
from vnext.sampling.sampling import choose, draw_by_inversion, report_plain

sys.path.append(str(Path(__file__).resolve().parents[1] / "kernels"))
from cpu_levels import needs_native

pytestmark = needs_native
ALTERNATIVES = (-1, 0, 3, 20)


def some_inputs(rng: np.random.Generator, rows: int, vocabulary: int) -> SamplingInputs:
    """Rows with every parameter on and off by turns."""
    few = rng.permutation(rows)[: rng.integers(1, rows + 1)]
    pairs = np.unique(rng.integers(0, (rows, vocabulary), (rng.integers(1, 40), 2)), axis=0)
    rates = (rng.choice([[1.0], [1.3], [0.7]], len(few)), *rng.choice([0.0, 0.5, -1.5], (2, len(few), 1)))
    words = rng.integers(0, 2**32, (rows, -(-vocabulary // 32)), np.uint32) | rng.integers(0, 2**32, (rows, 1), np.uint32)
    firsts = rng.integers(1, vocabulary + 2, len(few)) if rng.integers(2) else None
    parts = {
        "penalties": Penalties(
            few,
            *(rate[:, 0].astype(np.float32) for rate in rates),
            prompt_mask=tuple(rng.random((len(few), vocabulary)) < 0.05),
            output_counts=tuple(rng.poisson(0.05, (len(few), vocabulary)).astype(np.int32)),
        ),
        "bias": LogitBias(pairs[:, 0], pairs[:, 1], rng.uniform(-8, 8, len(pairs)).astype(np.float32)),
        "banned": Banned(pairs[::2, 0], pairs[::2, 1]),
        "allowed": Allowed(few, rng.permutation(rows)[: len(few)], words.view(np.int32), firsts=firsts),
    }
    return SamplingInputs(
        temperature=rng.choice([0.0, 0.7, 1.0, 1.5], rows).astype(np.float32),
        top_k=rng.choice([0, 1, 40], rows),
        top_p=rng.choice([1.0, 0.9, 0.3], rows).astype(np.float32),
        min_p=rng.choice([0.0, 0.05], rows).astype(np.float32),
        top_n_sigma=rng.choice([0.0, 1.5], rows).astype(np.float32),
        seed=rng.integers(-(2**63), 2**63 - 1, rows),
        position=rng.integers(0, 2**31, rows),
        logprobs=int(rng.choice(ALTERNATIVES)),
        **{name: part for name, part in parts.items() if rng.random() < 0.5},
    )


def by_torch(logits: np.ndarray, inputs: SamplingInputs) -> Sampled:
    given, values = tensors_of_sampling(inputs), torch.from_numpy(logits)
    adjusted = adjust(values, given)
    tokens = choose(adjusted, given, draw_by_inversion)
    if inputs.allowed is not None and inputs.allowed.firsts is not None:
        judged = {row for row, first in zip(inputs.allowed.rows.tolist(), inputs.allowed.firsts.tolist()) if first != values.shape[1]}
        values = torch.stack([adjusted[row] if row in judged else values[row] for row in range(len(values))])
    return Sampled(tokens) if inputs.logprobs < 0 else report_plain(values, tokens, inputs.logprobs)


@pytest.mark.parametrize("seed", range(60))
def test_tokens_and_log_probabilities_are_those_of_torch(seed: int) -> None:
    rng = np.random.default_rng(seed)
    rows, vocabulary = int(rng.integers(1, 12)), int(rng.choice([5, 130, 3072, 5003]))
    wide = rng.normal(0, rng.choice([0.1, 2.0, 20.0]), (rows, vocabulary + 7)).astype(np.float32)
    if seed % 3 == 0:  # as a model in bfloat16 has them after a cap, many are equal
        wide = (wide.view(np.uint32) & 0xFFFF0000).view(np.float32)
    logits = wide[:, :vocabulary]
    inputs = some_inputs(rng, rows, vocabulary)
    expected = by_torch(np.ascontiguousarray(logits), inputs)
    found = host.sample(logits, inputs)
    for name, ours, theirs in zip(expected._fields, found, expected, strict=True):
        assert (ours is None) == (theirs is None), name
        if ours is not None:
            assert ours.dtype == theirs.numpy().dtype and ours.tobytes() == theirs.numpy().tobytes(), name


def test_raw_logits_are_kept_for_those_who_ask_for_them() -> None:
    rng = np.random.default_rng(1)
    logits = rng.normal(0, 2, (4, 300)).astype(np.float32)
    given, inputs = logits.copy(), some_inputs(rng, 4, 300)
    bias = LogitBias(np.arange(4), np.arange(4), np.full(4, 50, np.float32))
    inputs = inputs._replace(bias=bias, banned=None, allowed=None, temperature=np.zeros(4, np.float32))
    found = host.sample(given, inputs._replace(logprobs=2))
    assert np.array_equal(given, logits) and found.logprob.max() < -1
    host.sample(given, inputs._replace(logprobs=-1))
    assert not np.array_equal(given, logits)


def test_a_vocabulary_beyond_exact_sums_is_refused() -> None:
    inputs = some_inputs(np.random.default_rng(0), 1, 40)
    with pytest.raises(ValueError, match="weights would overflow"):
        host.choose(np.zeros((1, 2**22 + 1), np.float32), inputs)
