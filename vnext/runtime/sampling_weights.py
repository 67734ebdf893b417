"""Weights: what each token of a row may win, as integers, after temperature and filters.

Owns temperature, min-p, top-k and top-p. Weights are fixed point (the likeliest token has 2**40), so every sum over
the vocabulary is exact: no order of addition, batch size, padding or device can move a threshold or a token. A filter
is a floor on the weight: equals at the edge are all kept or all dropped. The power itself is made of single rounded
operations of IEEE 754 (no library's exp), so devices and `kernels/cpu/sampling.cpp`, whose oracle this is, agree.

Budget: about twenty passes for weights; a filter adds one partial selection a row on CPU (128 wide, wider only for
the rows that need it) and one sort on a device, where asking "is it enough?" would cost a wait.
"""

from __future__ import annotations

import torch

from vnext.runtime.sampling_inputs import SamplingInputs

WEIGHT_BITS = 40
WEIGHT_ONE = 2**WEIGHT_BITS
VOCABULARY_MAX = 2**22  # so that a row's sum stays below 2**62, see `sampling_draw.scale`
HEAD_WIDTH = 128
HEAD_GROWTH = 16

LOG2_E = 1.4426950408889634
FLOAT_MAX = 3.4028234663852886e38
LEAST_EXPONENT = -64.0
FLOAT_BIAS, FRACTION_BITS = 127, 23
EXP2_SERIES = tuple(
    float.fromhex(digits)
    for digits in ("0x1.5bba14p-10", "0x1.3cea88p-7", "0x1.c6b752p-5", "0x1.ebf9bcp-3", "0x1.62e42ap-1", "0x1p0")
)
"""2**f for f in [-1/2, 1/2] by falling powers of f: least relative error with 1 at 0, coefficients of 24 bits."""


def weigh(logits: torch.Tensor, inputs: SamplingInputs) -> torch.Tensor:
    """int64[S, V] weights proportional to softmax(logits / temperature) after min-p, then top-k, then top-p.

    `logits` float32[S, V]. A row at temperature 0 is weighed as at 1 (its weights are not used). A row without any
    possible token (all -inf, or a NaN) weighs zero. Tokens less likely than 2**-40 of the likeliest weigh zero.
    Raises ValueError where the vocabulary is too large for exact sums.
    """
    check_vocabulary(logits.shape[1])
    weights = fixed_point(exponents(logits, inputs.temperature))
    if not inputs.any_filter:
        return weights
    weights.masked_fill_(weights < least_weight(inputs.min_p)[:, None], 0)
    width = first_width(weights)
    return weights.masked_fill_(weights < floors(weights, inputs.top_k, inputs.top_p, width)[:, None], 0)


def check_vocabulary(size: int) -> None:
    """Raise ValueError unless the weights of `size` tokens are sure to have a sum that fits."""
    if size > VOCABULARY_MAX:
        raise ValueError(f"a vocabulary of {size} is over {VOCABULARY_MAX}: weights would overflow")


def exponents(logits: torch.Tensor, temperature: torch.Tensor) -> torch.Tensor:
    """float32[S, V]: log2 of each token's probability over the likeliest one's, from LEAST_EXPONENT to 0.

    The maximum is taken off first, so that no temperature overflows. Where that leaves no number (the row is all -inf,
    or holds a NaN or +inf) no token is possible: LEAST_EXPONENT, which weighs nothing.
    """
    divisor = torch.where(temperature > 0, temperature, 1.0).to(torch.float64)
    scale = (LOG2_E / divisor).clamp_(max=FLOAT_MAX).to(torch.float32)
    relative = (logits - logits.amax(dim=-1, keepdim=True)).mul_(scale[:, None])
    return relative.nan_to_num_(nan=LEAST_EXPONENT).clamp_(min=LEAST_EXPONENT)


def fixed_point(exponent: torch.Tensor) -> torch.Tensor:
    """int64[S, V]: 2**(exponent + WEIGHT_BITS) without its fraction; `exponent` float32 is used up.

    The relative error is below 2e-7, as that of an exponent's own rounding. Each product and each sum is rounded once:
    addcmul, or any fused form, would give other bits.
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
    """int64[S]: the lightest weight that min-p lets a row keep."""
    return (min_p * WEIGHT_ONE).to(torch.int64)


def first_width(weights: torch.Tensor) -> int:
    """How many of the heaviest tokens of a row to look at first."""
    vocabulary = weights.shape[1]
    return min(HEAD_WIDTH, vocabulary) if weights.device.type == "cpu" else vocabulary


def floors(weights: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor, width: int) -> torch.Tensor:
    """int64[S]: the lightest weight that top-k, then top-p let a row keep; 0 where both are off.

    `width` bounds how many tokens are ranked; rows for which it is too small are asked again with more of them.
    The floor is the same for every sufficient width, because sums of integers are exact.
    """
    vocabulary = weights.shape[1]
    head = heaviest(weights, width)
    place = torch.where(top_k > 0, top_k.clamp(max=vocabulary), 0) - 1
    kth = head.gather(1, place.clamp(0, width - 1)[:, None]).masked_fill_((place < 0)[:, None], 0)
    mass = head.cumsum(dim=-1)  # what is needed is reached before the first token that top-k drops
    need = needed_mass(weights.masked_fill(weights < kth, 0).sum(dim=-1), top_p)
    edge = torch.searchsorted(mass, need[:, None]).clamp_(max=width - 1)
    floor = torch.where(top_p < 1, head.gather(1, edge)[:, 0], kth[:, 0])
    if width == vocabulary:
        return floor
    lacking = ((place >= width) | (mass[:, -1] < need)).nonzero()[:, 0]
    if lacking.numel() > 0:
        wider = min(width * HEAD_GROWTH, vocabulary)
        floor[lacking] = floors(weights[lacking], top_k[lacking], top_p[lacking], wider)
    return floor


def heaviest(weights: torch.Tensor, width: int) -> torch.Tensor:
    """int64[S, width] heaviest weights of each row, descending."""
    if width == weights.shape[1]:
        return weights.sort(dim=-1, descending=True).values
    return weights.topk(width, dim=-1).values


def needed_mass(total: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
    """int64[S]: the mass that the heaviest tokens must reach; 0 where top-p is off or the row weighs nothing."""
    share = (top_p.to(torch.float64) * total.to(torch.float64)).ceil_().to(torch.int64)
    return torch.where(top_p < 1, share.minimum(total), 0)
