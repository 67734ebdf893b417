"""Log-probabilities of tokens. The plain form, on any device; the reference of `kernels/cpu/src/sampling/report.cpp`.

The sum over the vocabulary is that of the integer weights of weights.py at temperature 1. It is exact, so a log-probability has the
same bits in any order of summation, on any instruction set, and for any number of threads or ranks. The sum's logarithm is a series
of single rounded operations in float64 (no library's log); the difference to the logit is rounded once, to float32.
"""

from __future__ import annotations

import torch

from vnext.sampling.weights import WEIGHT_BITS, exponents, fixed_point

LN_2 = float.fromhex("0x1.62e42fefa39efp-1")
ROOT_OF_HALF = float.fromhex("0x1.6a09e667f3bcdp-1")
LOG_SERIES = tuple(1.0 / odd for odd in range(15, 0, -2))
"""ln((1 + r) / (1 - r)) / 2r by falling powers of r * r: the logarithm of a number between the roots of 1/2 and 2, to 1e-13."""


def token_logprobs(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """float32[S, K]: those of `tokens` int64[S, K] by raw `logits` float32[S, V]. NaN where a row's largest logit is not finite."""
    peak = logits.amax(dim=-1, keepdim=True).to(torch.float64)
    distances = logits.gather(1, tokens).to(torch.float64) - peak
    return (distances - log_mass(logits)[:, None]).to(torch.float32)


def log_mass(logits: torch.Tensor) -> torch.Tensor:
    """float64[S]: the logarithm of the sum of e^(logit - the largest one); NaN where that one is not finite."""
    total = fixed_point(exponents(logits, logits.new_ones(logits.shape[0]))).sum(dim=-1)
    return torch.where(total > 0, log_weight(total), float("nan"))


def log_weight(total: torch.Tensor) -> torch.Tensor:
    """float64[S]: the logarithm of total / 2**WEIGHT_BITS, for int64 totals."""
    fraction, exponent = torch.frexp(total.to(torch.float64))
    is_low = fraction < ROOT_OF_HALF
    fraction = torch.where(is_low, fraction * 2, fraction)
    ratio = (fraction - 1) / (fraction + 1)
    square = ratio * ratio
    series = square * LOG_SERIES[0] + LOG_SERIES[1]
    for term in LOG_SERIES[2:]:
        series = series * square + term
    whole = (exponent - WEIGHT_BITS - is_low.to(exponent.dtype)).to(torch.float64)
    return whole * LN_2 + ratio * 2 * series
