"""Weights: what each token of a row may win, as integers, after temperature and filters.

Owns temperature, min-p, top-k and top-p. Weights are fixed point (the likeliest token has 2**40), so every sum over
the vocabulary is exact: no order of addition, batch size, padding or device can move a threshold or a token.
A filter is a floor on the weight: equals at the edge are all kept or all dropped, whatever their order.

Budget: one pass for weights; a filter adds one partial selection a row on CPU (128 wide, wider only for the rows
that need it) and one sort on a device, where asking "is it enough?" would cost a wait.
"""

from __future__ import annotations

import torch

from vnext.runtime.sampling_inputs import SamplingInputs

WEIGHT_ONE = 2**40
VOCABULARY_MAX = 2**22  # so that a row's sum stays below 2**62, see `sampling_draw.scale`
HEAD_WIDTH = 128
HEAD_GROWTH = 16


def weigh(logits: torch.Tensor, inputs: SamplingInputs) -> torch.Tensor:
    """int64[S, V] weights proportional to softmax(logits / temperature) after min-p, then top-k, then top-p.

    `logits` float32[S, V]. A row at temperature 0 is weighed as at 1 (its weights are not used). A row without any
    possible token (all -inf, or a NaN) weighs zero. Tokens less likely than 2**-40 of the likeliest weigh zero.
    """
    if logits.shape[1] > VOCABULARY_MAX:
        raise ValueError(f"a vocabulary of {logits.shape[1]} is over {VOCABULARY_MAX}: weights would overflow")
    relative = relative_probabilities(logits, inputs.temperature)
    if not inputs.any_filter:
        return fixed_point(relative)
    weights = fixed_point(relative.masked_fill_(relative < inputs.min_p[:, None], 0.0))
    width = first_width(weights)
    return weights.masked_fill_(weights < floors(weights, inputs.top_k, inputs.top_p, width)[:, None], 0)


def relative_probabilities(logits: torch.Tensor, temperature: torch.Tensor) -> torch.Tensor:
    """float32[S, V] in [0, 1]: each token's probability over the likeliest one's.

    The maximum is taken off before the division, so that no temperature overflows.
    """
    divisor = torch.where(temperature > 0, temperature, 1.0)[:, None]
    return (logits - logits.amax(dim=-1, keepdim=True)).div_(divisor).exp_()


def fixed_point(relative: torch.Tensor) -> torch.Tensor:
    """int64 of the same shape, in place of `relative`; a NaN (its row is all -inf or holds one) weighs nothing."""
    return relative.mul_(WEIGHT_ONE).nan_to_num_(nan=0.0).to(torch.int64)


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
