"""Weights: the integer weight of each token of a row after temperature and filters.

Owns temperature, top-n-sigma, min-p, top-k and top-p. Weights are fixed point (the likeliest token has 2**40), so every
sum over the vocabulary is exact: order of addition, batch size, padding and device cannot move a threshold or a token.
A filter is a lower bound on the weight, so equal weights at the edge are all kept or all dropped. The power uses single
rounded operations of IEEE 754 (no library's exp), so that devices agree with `kernels/cpu/src/sampling/sampling.cpp`,
whose reference this is.

Cost: about twenty passes for weights. A filter adds one partial selection for each row on a CPU (128 wide, wider only
for the rows that need it) and one sort on a device, where testing for a sufficient width would mean a wait.
"""

from __future__ import annotations

import torch

from vnext.sampling.inputs import SamplingInputs, check_vocabulary

WEIGHT_BITS = 40
WEIGHT_ONE = 2**WEIGHT_BITS
STEP_BITS = 20  # so that the squares of VOCABULARY_MAX steps have a sum below 2**63
HEAD_WIDTH = 128
HEAD_GROWTH = 16

LOG2_E = 1.4426950408889634
FLOAT_MAX = 3.4028234663852886e38
LEAST_EXPONENT = -64.0
FLOAT_BIAS, FRACTION_BITS = 127, 23
DOUBLE_BIAS, DOUBLE_FRACTION_BITS = 1023, 52
EXP2_SERIES = tuple(
    float.fromhex(digits)
    for digits in ("0x1.5bba14p-10", "0x1.3cea88p-7", "0x1.c6b752p-5", "0x1.ebf9bcp-3", "0x1.62e42ap-1", "0x1p0")
)
"""2**f for f in [-1/2, 1/2] by falling powers of f: least relative error with 1 at 0, coefficients of 24 bits."""


def fixed_point_weights(logits: torch.Tensor, inputs: SamplingInputs) -> torch.Tensor:
    """int64[S, V] weights proportional to softmax(logits / temperature) after top-n-sigma, min-p, top-k and top-p, in order.

    `logits` float32[S, V]. A row at temperature 0 is treated as at 1 (its weights are not used). A row without any
    possible token (all -inf, or a NaN) has zero weights. Tokens less likely than 2**-40 of the likeliest have weight
    zero. Raises ValueError if the vocabulary is too large for exact sums.
    """
    check_vocabulary(logits.shape[1])
    weights = fixed_point(exponents(logits, inputs.temperature))
    if not inputs.any_filter:
        return weights
    least = least_weight(inputs.min_p).maximum(sigma_weight(logits, inputs.temperature, inputs.top_n_sigma))
    weights.masked_fill_(weights < least[:, None], 0)
    width = first_width(weights)
    return weights.masked_fill_(weights < weight_thresholds(weights, inputs.top_k, inputs.top_p, width)[:, None], 0)


def exponents(logits: torch.Tensor, temperature: torch.Tensor) -> torch.Tensor:
    """float32[S, V]: log2 of each token's probability over the likeliest one's, from LEAST_EXPONENT to 0.

    The maximum is subtracted first, so that no temperature overflows. If the result is not a number (the row is all
    -inf, or holds a NaN or +inf), no token is possible, and the value is LEAST_EXPONENT, which gives weight zero.
    """
    divisor = torch.where(temperature > 0, temperature, 1.0).to(torch.float64)
    scale = (LOG2_E / divisor).clamp_(max=FLOAT_MAX).to(torch.float32)
    relative = (logits - logits.amax(dim=-1, keepdim=True)).mul_(scale[:, None])
    return relative.nan_to_num_(nan=LEAST_EXPONENT).clamp_(min=LEAST_EXPONENT)


def fixed_point(exponent: torch.Tensor) -> torch.Tensor:
    """int64[S, V]: 2**(exponent + WEIGHT_BITS) without its fraction. Overwrites `exponent` (float32).

    The relative error is below 2e-7, about that of an exponent's own rounding. Each product and each sum is rounded
    once; addcmul or any other fused form would give different bits.
    """
    whole = exponent.round()
    part = exponent.sub_(whole)
    power = part * EXP2_SERIES[0]
    for term in EXP2_SERIES[1:-1]:
        power.add_(term).mul_(part)
    power.add_(EXP2_SERIES[-1])
    bits = (whole.to(torch.int32) + (FLOAT_BIAS + WEIGHT_BITS)) << FRACTION_BITS
    return power.mul_(bits.view(torch.float32)).to(torch.int64)


def least_weight(min_p: torch.Tensor) -> torch.Tensor:
    """int64[S]: the smallest weight that min-p keeps."""
    return torch.mul(min_p, WEIGHT_ONE).to(torch.int64)


def sigma_weight(logits: torch.Tensor, temperature: torch.Tensor, top_n_sigma: torch.Tensor | None) -> torch.Tensor:
    """int64[S]: the smallest weight that top-n-sigma keeps, that of the logit at its edge; 0 if it is off."""
    if top_n_sigma is None:
        return torch.zeros_like(temperature, dtype=torch.int64)
    peak = logits.amax(dim=-1)
    edge = (peak.to(torch.float64) - top_n_sigma.to(torch.float64) * deviation(logits, peak)).to(torch.float32)
    edge.masked_fill_(~((top_n_sigma > 0) & peak.isfinite()), float("-inf"))
    return fixed_point(exponents(torch.stack((peak, edge), dim=1), temperature))[:, 1]


def deviation(logits: torch.Tensor, peak: torch.Tensor) -> torch.Tensor:
    """float64[S]: the standard deviation of a row's logits, except those of -inf; undefined if `peak` is not finite.

    Each logit counts as its distance from the peak in whole steps; the row's range has 2**19 to 2**20 steps. Both sums
    are therefore exact in any order. The rest are single rounded operations, as in sampling.cpp and sampling.cu.
    """
    is_possible = logits > float("-inf")
    distance = (peak.to(torch.float64)[:, None] - logits.to(torch.float64)).masked_fill_(~is_possible, 0)
    distance.masked_fill_(~peak.isfinite()[:, None], 0)
    _, exponent = torch.frexp(distance.amax(dim=-1))
    scale = ((STEP_BITS - exponent.to(torch.int64) + DOUBLE_BIAS) << DOUBLE_FRACTION_BITS).view(torch.float64)
    steps = (distance * scale[:, None]).to(torch.int64)
    count = is_possible.sum(dim=-1).to(torch.float64)
    mean = steps.sum(dim=-1).to(torch.float64) / count
    variance = (steps * steps).sum(dim=-1).to(torch.float64) / count - mean * mean
    return variance.clamp(min=0).sqrt() / scale


def first_width(weights: torch.Tensor) -> int:
    """The number of top tokens of a row to try first."""
    vocabulary = weights.shape[1]
    return min(HEAD_WIDTH, vocabulary) if weights.device.type == "cpu" else vocabulary


def weight_thresholds(weights: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor, width: int) -> torch.Tensor:
    """int64[S]: the smallest weight that top-k, then top-p keep; 0 if both are off.

    `width` is the number of tokens that are ranked; rows for which it is too small are computed again with a larger one.
    The threshold is the same for every sufficient width, because sums of integers are exact.
    """
    vocabulary = weights.shape[1]
    head = top_weights(weights, width)
    place = torch.where(top_k > 0, top_k.clamp(max=vocabulary), 0) - 1
    kth = head.gather(1, place.clamp(0, width - 1)[:, None]).masked_fill_((place < 0)[:, None], 0)
    mass = head.cumsum(dim=-1)  # the needed mass is reached before the first token that top-k drops
    need = needed_mass(weights.masked_fill(weights < kth, 0).sum(dim=-1), top_p)
    edge = torch.searchsorted(mass, need[:, None]).clamp_(max=width - 1)
    floor = torch.where(top_p < 1, head.gather(1, edge)[:, 0], kth[:, 0])
    if width == vocabulary:
        return floor
    lacking = ((place >= width) | (mass[:, -1] < need)).nonzero()[:, 0]
    if lacking.numel() > 0:
        wider = min(width * HEAD_GROWTH, vocabulary)
        floor[lacking] = weight_thresholds(weights[lacking], top_k[lacking], top_p[lacking], wider)
    return floor


def top_weights(weights: torch.Tensor, width: int) -> torch.Tensor:
    """int64[S, width] largest weights of each row, descending."""
    if width == weights.shape[1]:
        return weights.sort(dim=-1, descending=True).values
    return weights.topk(width, dim=-1).values


def needed_mass(total: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
    """int64[S]: the mass that the top tokens must reach; 0 if top-p is off or the row has zero weights."""
    share = (top_p.to(torch.float64) * total.to(torch.float64)).ceil_().to(torch.int64)
    return torch.where(top_p < 1, share.minimum(total), 0)
