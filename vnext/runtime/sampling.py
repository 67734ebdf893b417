"""Sampling: logits in, tokens out, a pure function.

Owns the order of duties and the reported log-probabilities. Holds no generator and no state: a row's token depends on
its own logits, parameters, seed and position, so it is the same in any batch, order, chunking, rank or process.

    logits -> bias, bans, penalties -> greedy token
                                    -> temperature, min-p, top-k, top-p -> draw

Both arrows are one compiled function on a CPU (`kernels/cpu/sampling.py`), a kernel on a GPU (`cuda/sampling.cu`) and torch
where neither was built, with the same tokens.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from vnext.kernels.cpu import native
from vnext.kernels.cpu.sampling import sample_rows
from vnext.kernels.cuda import backends, operations as cuda_operations
from vnext.runtime.logits import adjust, adjust_rows
from vnext.runtime.sampling_draw import draw_by_inversion
from vnext.runtime.sampling_inputs import (
    Banned,
    LogitBias,
    Penalties,
    RowTables,
    Sampled,
    SamplingInputs,
    check_inputs,
)
from vnext.runtime.sampling_weights import check_vocabulary, weigh

__all__ = ["Banned", "LogitBias", "Penalties", "Sampled", "SamplingInputs", "sample"]

Draw = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
Choose = Callable[[torch.Tensor, SamplingInputs], torch.Tensor]
Adjust = Callable[[torch.Tensor, RowTables, torch.Tensor, torch.Tensor], None]
REPORTED_TOGETHER = 32
"""Rows whose log-probabilities are computed at once on a device: each takes some forty bytes a token on the way."""


def sample(logits: torch.Tensor, inputs: SamplingInputs, draw: Draw | None = None) -> Sampled:
    """One token for each row of `logits` float32[S, V], which is left as it was.

    Greedy rows take the likeliest token, the lowest id among equals, and so does a row that no draw can serve (every
    token banned, or a NaN in it). A `draw` asks for the torch form with that draw. Raises ValueError where `inputs`
    breaks its contract.
    """
    check_inputs(logits, inputs)
    adjusted = adjust(logits, inputs)
    if draw is None and logits.device.type == "cpu" and native.is_built():
        tokens = choose_compiled(adjusted, inputs)
    else:
        tokens = choose(adjusted, inputs, draw or draw_by_inversion)
    return report(logits, tokens, inputs.logprobs)


def chooser(device_type: str) -> Choose:
    """The form that serves a kind of device: from adjusted logits and inputs to tokens int64[S]."""
    if device_type == "cpu" and native.is_built():
        return choose_compiled
    return choose_by_kernel if device_type == "cuda" and backends.is_usable() else choose


def adjuster(device_type: str) -> Adjust:
    """As `chooser`: the form of `adjust_rows`."""
    return adjust_by_kernel if device_type == "cuda" and backends.is_usable() else adjust_rows


def choose(logits: torch.Tensor, inputs: SamplingInputs, draw: Draw = draw_by_inversion) -> torch.Tensor:
    """int64[S] tokens of adjusted logits: the simple form, on any device."""
    tokens = logits.argmax(dim=-1)
    if not inputs.any_random:
        return tokens
    drawn = draw(weigh(logits, inputs), inputs.seed, inputs.position)
    served = (inputs.temperature > 0) & (drawn < logits.shape[1])
    return torch.where(served, drawn, tokens)


def choose_compiled(logits: torch.Tensor, inputs: SamplingInputs) -> torch.Tensor:
    """int64[S]: what `choose` gives with `draw_by_inversion`."""
    check_vocabulary(logits.shape[1])
    return sample_rows(
        logits, inputs.temperature, inputs.top_k, inputs.top_p, inputs.min_p, inputs.seed, inputs.position
    )


def choose_by_kernel(logits: torch.Tensor, inputs: SamplingInputs) -> torch.Tensor:
    """int64[S]: what `choose` gives, by one launch, whatever the parameters."""
    check_vocabulary(logits.shape[1])
    return cuda_operations.sample_rows(
        logits, inputs.temperature, inputs.top_k, inputs.top_p, inputs.min_p, inputs.seed, inputs.position
    )


def adjust_by_kernel(logits: torch.Tensor, tables: RowTables, places: torch.Tensor, positions: torch.Tensor) -> None:
    """What `adjust_rows` does, by one launch."""
    cuda_operations.adjust_rows(logits, places, positions, *tables)


def report_in_parts(logits: torch.Tensor, tokens: torch.Tensor, count: int) -> Sampled:
    """As `report` of one row or more with a count of 0 or more, in parts: the memory it takes on the way is theirs."""
    parts = zip(logits.split(REPORTED_TOGETHER), tokens.split(REPORTED_TOGETHER), strict=True)
    return Sampled(*map(torch.cat, zip(*(report(*part, count) for part in parts), strict=True)))


def report(logits: torch.Tensor, tokens: torch.Tensor, count: int) -> Sampled:
    """`tokens` with their log-probabilities and the `count` likeliest tokens of the raw logits; -1 asks for neither."""
    if count < 0:
        return Sampled(tokens)
    logprobs = logits.log_softmax(dim=-1)
    chosen = tokens[:, None]
    top = likeliest(logits, min(count, logits.shape[1]))
    return Sampled(
        tokens=tokens,
        logprob=logprobs.gather(1, chosen)[:, 0],
        rank=(logits > logits.gather(1, chosen)).sum(dim=-1),
        top_tokens=top,
        top_logprobs=logprobs.gather(1, top),
    )


def likeliest(logits: torch.Tensor, count: int) -> torch.Tensor:
    """int64[S, count] token ids by falling logit, lower id first among equals.

    `topk` promises no order among equals, so it is given unique keys: the float's bits in an order-preserving form
    above the complement of the id.
    """
    bits = (logits + 0.0).view(torch.int32).to(torch.int64)  # + 0.0: minus zero equals zero and must sort with it
    ordered = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    ids = torch.arange(logits.shape[1], device=logits.device)
    return (ordered * 2**32 + (2**32 - 1 - ids)).topk(count, dim=-1).indices
