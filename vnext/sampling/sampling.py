"""Sampling: logits in, tokens out, a pure function.

Owns the order of operations and the reported log-probabilities. Holds no generator and no state: a row's token depends
only on its own logits, parameters, seed and position, so it is the same in any batch, order, chunking, rank or process.

    logits -> bias, bans, penalties -> greedy token
                                    -> temperature, top-n-sigma, min-p, top-k, top-p -> draw

Both arrows are one compiled function on a CPU (`kernels/cpu/sampling.py`), a kernel on a GPU (`cuda/sampling.cu`), and
torch if neither was built, with the same tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import numpy as np
import torch

from vnext.kernels.arrays import as_array, as_tensor
from vnext.kernels.backends import backend_for
from vnext.kernels.cpu.sampling import mask_rows
from vnext.kernels.cuda import operations as cuda_operations
from vnext.kernels.random import step_words
from vnext.kernels.random_numpy import Domain
from vnext.sampling import host
from vnext.sampling.inputs import (
    NO_DRAFTS,
    REPORTED_TOGETHER,
    Allowed,
    Banned,
    BehindDrafts,
    LogitBias,
    Penalties,
    RowTables,
    Sampled,
    SamplingInputs,
    check_inputs,
    check_vocabulary,
)
from vnext.sampling.logits import Keep, adjust, adjust_rows, keep_allowed
from vnext.sampling.weights import WEIGHT_BITS, exponents, fixed_point, fixed_point_weights

__all__ = ["Banned", "LogitBias", "Penalties", "Sampled", "SamplingInputs", "sample"]

# ---- the draw ----------------------------------------------------------------------------------------------------
# The draw: one token for each row from integer weights, by inverting the distribution function.
#
# Owns the use of random words for tokens. A draw reads only the (seed, position) of its own row.
# It takes two words for each row whatever the vocabulary size, and its integer arithmetic is exact, so the token is the
# same in any batch, order and padding, and on any device with equal weights.


HALF_BITS = 31
HALF_MAX = 2**HALF_BITS - 1


def draw_by_inversion(weights: torch.Tensor, seed: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
    """int64[S] tokens, each with probability weight / sum of weights (62 random bits).

    `weights` int64[S, V] with row sums below 2**62; `seed` and `position` int64[S]. A row of zero weights gives V,
    which is not a token.
    """
    mass = weights.cumsum(dim=-1)
    words = step_words(seed, position, torch.zeros(1, dtype=torch.int64, device=seed.device), Domain.INVERSION)
    target = scale(words[0], words[1], mass[:, -1:])
    return torch.searchsorted(mass, target, right=True)[:, 0]


def scale(first: torch.Tensor, second: torch.Tensor, total: torch.Tensor) -> torch.Tensor:
    """floor(u * total / 2**62), where u is the upper 31 bits of `first`, then those of `second`; all int64, total < 2**62.

    Computed in halves of 31 bits, so that every product and sum fits int64.
    """
    high, low = first >> 1, second >> 1
    total_high, total_low = total >> HALF_BITS, total & HALF_MAX
    middle = high * total_low + low * total_high + ((low * total_low) >> HALF_BITS)
    scaled: torch.Tensor = high * total_high + (middle >> HALF_BITS)
    return scaled


# ---- sampling -----------------------------------------------------------------------------------------------------

Draw = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
Adjust = Callable[[torch.Tensor, RowTables, torch.Tensor, torch.Tensor, BehindDrafts], None]


class Choose(Protocol):
    """From adjusted logits float32[S, V] and inputs to tokens int64[S]. Into `spoilt` bool[S], where it is given, goes which rows
    hold a NaN: their tokens are the ids of the first one."""

    def __call__(self, logits: torch.Tensor, inputs: SamplingInputs, *, spoilt: torch.Tensor | None = None) -> torch.Tensor: ...


def sample(
    logits: torch.Tensor, inputs: SamplingInputs, draw: Draw | None = None, own: Choose | None = None
) -> Sampled:
    """One token for each row of `logits` float32[S, V], which is not changed.

    Greedy rows take the likeliest token, the lowest id among equals. So does a row that has nothing to draw from: every
    token is banned, or a logit is NaN. With a `draw`, the torch form runs with that draw; `own` chooses in its
    place. Raises ValueError if `inputs` breaks its contract.
    """
    check_inputs(logits, inputs)
    adjusted = adjust(logits, inputs, masking_for(logits.device.type) if draw is None else keep_allowed)
    if own is not None:
        tokens = own(adjusted, inputs)
    elif draw is None and backend_for(logits.device.type).name == "compiled":
        tokens = choose_compiled(adjusted, inputs)
    else:
        tokens = choose(adjusted, inputs, draw or draw_by_inversion)
    if inputs.logprobs >= 0 and inputs.allowed is not None and (judged := inputs.allowed.judged(logits.shape[1])):
        logits = logits.clone()
        logits[judged] = adjusted[judged]
    return report(logits, tokens, inputs.logprobs)


def sampler_for(device_type: str) -> Choose:
    """The implementation for a kind of device."""
    return {"compiled": choose_compiled, "cuda": choose_by_kernel}.get(backend_for(device_type).name, choose)


def logits_processor_for(device_type: str) -> Adjust:
    """The implementation of `adjust_rows` for a kind of device."""
    return {"cuda": adjust_by_kernel}.get(backend_for(device_type).name, adjust_rows)


def masking_for(device_type: str) -> Keep:
    """The implementation of `keep_allowed` for a kind of device."""
    return {"compiled": keep_allowed_compiled, "cuda": keep_allowed_by_kernel}.get(backend_for(device_type).name, keep_allowed)


def choose(
    logits: torch.Tensor, inputs: SamplingInputs, draw: Draw = draw_by_inversion, *, spoilt: torch.Tensor | None = None
) -> torch.Tensor:
    """The plain form of `Choose`, on any device."""
    tokens = _note_spoilt(logits, logits.argmax(dim=-1), spoilt)
    if not inputs.any_random:
        return tokens
    drawn = draw(fixed_point_weights(logits, inputs), inputs.seed, inputs.position)
    served = (inputs.temperature > 0) & (drawn < logits.shape[1])
    return torch.where(served, drawn, tokens)


def _note_spoilt(logits: torch.Tensor, tokens: torch.Tensor, spoilt: torch.Tensor | None) -> torch.Tensor:
    """`tokens` int64[S], which are those of the first NaN in rows that have one."""
    if spoilt is not None:
        spoilt.copy_(logits.gather(1, tokens[:, None])[:, 0].isnan())
    return tokens


def choose_compiled(logits: torch.Tensor, inputs: SamplingInputs, *, spoilt: torch.Tensor | None = None) -> torch.Tensor:
    """The same as `choose` with `draw_by_inversion`."""
    found: torch.Tensor = as_tensor(host.choose(_dense(logits), inputs))
    return _note_spoilt(logits, found, spoilt)


def keep_allowed_compiled(logits: torch.Tensor, allowed: Allowed) -> None:
    allowed.wait()
    mask_rows(logits, allowed.addresses(logits.shape[0]))


def choose_by_kernel(logits: torch.Tensor, inputs: SamplingInputs, *, spoilt: torch.Tensor | None = None) -> torch.Tensor:
    """The same as `choose`, in one launch whatever the parameters."""
    check_vocabulary(logits.shape[1])
    return cuda_operations.sample_rows(logits, inputs.columns(), spoilt)


def keep_allowed_by_kernel(logits: torch.Tensor, allowed: Allowed) -> None:
    """The same as `logits.keep_allowed`, in one launch."""
    cuda_operations.mask_rows(logits, allowed.rows, allowed.masks_of_rows())


def adjust_by_kernel(
    logits: torch.Tensor, tables: RowTables, places: torch.Tensor, positions: torch.Tensor, drafts: BehindDrafts = NO_DRAFTS
) -> None:
    """`adjust_rows` in one launch."""
    cuda_operations.adjust_rows(logits, places, positions, tables, drafts)


def report_in_parts(logits: torch.Tensor, tokens: torch.Tensor, count: int) -> Sampled:
    """The same as `report_plain`, for at least one row, in parts to limit a device's temporary memory."""
    parts = zip(torch.split(logits, REPORTED_TOGETHER), torch.split(tokens, REPORTED_TOGETHER), strict=True)
    return Sampled(*map(torch.cat, zip(*(report_plain(*part, count) for part in parts), strict=True)))


def report(logits: torch.Tensor, tokens: torch.Tensor, count: int) -> Sampled:
    """`tokens` with their log-probabilities and the `count` likeliest tokens of the logits; -1 requests neither."""
    if count < 0:
        return Sampled(tokens)
    if backend_for(logits.device.type).name == "compiled":
        found = host.report(_dense(logits), as_array(tokens.contiguous()), count)
        return Sampled(tokens, *map(as_tensor, found[1:]))
    return report_plain(logits, tokens, count)


def report_plain(logits: torch.Tensor, tokens: torch.Tensor, count: int) -> Sampled:
    """The same as `report`, for a count of at least 0: the plain form, on any device."""
    chosen = tokens[:, None]
    top = likeliest(logits, min(count, logits.shape[1]))
    logprobs = token_logprobs(logits, torch.cat((chosen, top), dim=1))
    rank = (logits > logits.gather(1, chosen)).sum(dim=-1)
    return Sampled(tokens, logprob=logprobs[:, 0], rank=rank, top_tokens=top, top_logprobs=logprobs[:, 1:])


def _dense(logits: torch.Tensor) -> np.ndarray:
    """The array of logits on the host, copied where the elements of a row do not lie side by side."""
    return as_array((logits if logits.stride(1) == 1 else logits.contiguous()).detach())


def likeliest(logits: torch.Tensor, count: int) -> torch.Tensor:
    """int64[S, count] token ids by descending logit, lower id first among equals.

    `topk` promises no order among equals, so it gets unique keys: the float's bits in an order-preserving form above the
    complement of the id.
    """
    bits = (logits + 0.0).view(torch.int32).to(torch.int64)  # + 0.0: minus zero equals zero and must sort with it
    ordered = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    ids = torch.arange(logits.shape[1], device=logits.device)
    return (ordered * 2**32 + (2**32 - 1 - ids)).topk(count, dim=-1).indices


# ---- logprobs ------------------------------------------------------------------------------------------------------
# Log-probabilities of tokens. The plain form, on any device; the reference of `kernels/cpu/src/sampling/report.cpp`.
# The sum over the vocabulary is that of the integer weights of weights.py at temperature 1. It is exact, so a log-probability
# has the same bits in any order of summation, on any instruction set, and for any number of threads or ranks. The sum's
# logarithm is a series of single rounded operations in float64 (no library's log); the difference to the logit is rounded once,
# to float32.

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
