"""Sampling on arrays of the host, by the compiled kernels and without torch: the tokens and log-probabilities of `sampling.py`.

Owns the order of operations there, which `sampling.sample` defines. Needs a CPU's kernels; torch's forms are the oracle.
"""

from __future__ import annotations

import numpy as np

from vnext.kernels.cpu import native
from vnext.kernels.cpu.sampling import mask_rows, penalise_rows, report_rows, require_columns, sample_rows
from vnext.sampling.inputs import Penalties, Sampled, SamplingInputs, check_vocabulary
from vnext.state.params import ROW_DTYPES

if native.is_built():
    require_columns(ROW_DTYPES)


def sample(logits: np.ndarray, inputs: SamplingInputs) -> Sampled:
    """As `sampling.sample`, of `logits` float32[S, V] with dense rows, which are overwritten."""
    adjusted = adjust(logits, inputs)
    tokens = choose(adjusted, inputs)
    if inputs.logprobs >= 0 and inputs.allowed is not None and (judged := inputs.allowed.judged(logits.shape[1])):
        logits[judged] = adjusted[judged]
    return Sampled(tokens) if inputs.logprobs < 0 else report(logits, tokens, inputs.logprobs)


def adjust(logits: np.ndarray, inputs: SamplingInputs) -> np.ndarray:
    """`logits` with bias, bans, penalties and constraints; a copy of them where the raw ones are needed, too."""
    bias, banned, penalties, allowed = inputs.bias, inputs.banned, inputs.penalties, inputs.allowed
    if all(each is None for each in (bias, banned, penalties, allowed)):
        return logits
    adjusted = logits if inputs.logprobs < 0 else logits.copy()
    if bias is not None:
        adjusted[bias.rows, bias.tokens] += bias.values
    if banned is not None:
        adjusted[banned.rows, banned.tokens] = -np.inf
    if penalties is not None:
        assert isinstance(penalties, Penalties), "counted penalties sample nothing"
        penalise_rows(adjusted, penalties.rows, penalties.prompt_mask, penalties.output_counts, penalties.rates)
    if allowed is not None:
        allowed.wait()
        mask_rows(adjusted, allowed.addresses(len(adjusted)))
        if allowed.firsts is not None:
            prefer_times(adjusted, allowed.rows.tolist(), allowed.firsts.tolist())
    return adjusted


def prefer_times(logits: np.ndarray, rows: list[int], firsts: list[int]) -> None:
    """As logits.prefer_times."""
    for at, first in zip(rows, firsts):
        with np.errstate(invalid="ignore", over="ignore"):  # where no text may come
            weight = np.exp(logits[at, first:].astype(np.float64) - logits[at, :first].max()).sum()
        if weight > 1:
            logits[at, :first] = -np.inf


def choose(logits: np.ndarray, inputs: SamplingInputs) -> np.ndarray:
    """int64[S] tokens of adjusted logits. Raises ValueError if the vocabulary is too large for exact sums."""
    check_vocabulary(logits.shape[1])
    return sample_rows(logits, inputs.columns())


def report(logits: np.ndarray, tokens: np.ndarray, count: int) -> Sampled:
    """`tokens` with their log-probabilities and the `count` likeliest tokens of the logits."""
    return Sampled(tokens, *report_rows(logits, tokens, min(count, logits.shape[1])))
