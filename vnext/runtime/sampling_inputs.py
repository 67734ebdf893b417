"""What sampling takes and gives: tensors of one step, built by the persistent batch.

Owns the shapes and the check at the door. Knows no requests: a row is a row. Python bools stand beside the tensors so
that nothing has to be read back from a device to choose a path.
"""

from __future__ import annotations

from typing import NamedTuple

import torch


class Penalties(NamedTuple):
    """Penalties of P of the S rows over a vocabulary of V; 1, 0, 0 change nothing.

    `rows` int64[P] without repeats; `repetition`, `presence`, `frequency` float32[P]; `prompt_mask` bool[P, V]: token
    is in the prompt; `output_counts` int32[P, V]: how often the token was sampled so far.
    """

    rows: torch.Tensor
    repetition: torch.Tensor
    presence: torch.Tensor
    frequency: torch.Tensor
    prompt_mask: torch.Tensor
    output_counts: torch.Tensor


class LogitBias(NamedTuple):
    """`values` float32[B] added to the logits at (`rows`, `tokens`) int64[B]; a pair appears once."""

    rows: torch.Tensor
    tokens: torch.Tensor
    values: torch.Tensor


class Banned(NamedTuple):
    """Pairs (`rows`, `tokens`) int64[B] that may not be sampled now: ends of a request that is still too short."""

    rows: torch.Tensor
    tokens: torch.Tensor


class SamplingInputs(NamedTuple):
    """Parameters of S rows, all tensors on one device.

    `temperature` float32[S], 0 is greedy; `top_k` int64[S], 0 off; `top_p` float32[S], 1 off; `min_p` float32[S],
    0 off; `seed` int64[S], bit pattern of the uint64 root key; `position` int64[S], place of the token to be sampled
    in prompt + output, counted from 0. `logprobs`: largest number of alternatives asked for in this batch, -1 for none.
    `any_random`: a row has a temperature above 0. `any_filter`: such a row has top_k, top_p or min_p on. Both may be
    true without need (slower, same tokens), never false against the rows.
    """

    temperature: torch.Tensor
    top_k: torch.Tensor
    top_p: torch.Tensor
    min_p: torch.Tensor
    seed: torch.Tensor
    position: torch.Tensor
    penalties: Penalties | None = None
    bias: LogitBias | None = None
    banned: Banned | None = None
    logprobs: int = -1
    any_random: bool = True
    any_filter: bool = True


IN_PROMPT = 2**30
"""Beside the count in an entry of RowTables.history: the token is in the prompt."""


class RowTables(NamedTuple):
    """What a device keeps of each of B batch rows, by which `adjust_rows` changes their logits. V: the vocabulary.

    `rates` float32[3, B]: repetition, presence and frequency penalty; 1, 0, 0 change nothing, whatever `history` holds.
    `marks` int64[2, B]: the place of a token in prompt + output from which on `stop_tokens` may be sampled, 0 always; and how
    many entries of `bias_tokens` count. `history` int32[B, V]: how often each token was sampled, IN_PROMPT more if it is in
    the prompt. `bias_tokens` int64[B, X] and `bias_values` float32[B, X] (added to logits), `stop_tokens` int64[B, Y]: a row
    that has fewer repeats its first.
    """

    rates: torch.Tensor
    marks: torch.Tensor
    history: torch.Tensor
    bias_tokens: torch.Tensor
    bias_values: torch.Tensor
    stop_tokens: torch.Tensor


class Sampled(NamedTuple):
    """One token a row. The rest is None unless logprobs were asked for, and always of the raw logits.

    `tokens` int64[S]; `logprob` float32[S] of that token; `rank` int64[S], how many tokens were likelier (0: none);
    `top_tokens` int64[S, K] likeliest first, lower id first among equals, with `top_logprobs` float32[S, K].
    """

    tokens: torch.Tensor
    logprob: torch.Tensor | None = None
    rank: torch.Tensor | None = None
    top_tokens: torch.Tensor | None = None
    top_logprobs: torch.Tensor | None = None


def is_plain(inputs: SamplingInputs) -> bool:
    """Whether tokens are all that is asked for, and are drawn from the logits as the model gives them."""
    return inputs.logprobs < 0 and inputs.bias is None and inputs.banned is None and inputs.penalties is None


ROW_DTYPES = {
    "temperature": torch.float32,
    "top_k": torch.int64,
    "top_p": torch.float32,
    "min_p": torch.float32,
    "seed": torch.int64,
    "position": torch.int64,
}


def check_inputs(logits: torch.Tensor, inputs: SamplingInputs) -> None:
    """Raise ValueError where shapes, dtypes or devices break the contract. Reads no values, so no device waits."""
    if logits.dim() != 2 or logits.dtype != torch.float32:
        raise ValueError(f"logits must be float32[S, V], got {logits.dtype}{list(logits.shape)}; convert them first")
    for name, dtype in ROW_DTYPES.items():
        column = getattr(inputs, name)
        if column.dtype != dtype or column.shape != logits.shape[:1] or column.device != logits.device:
            raise ValueError(
                f"{name} must be {dtype}[{logits.shape[0]}] on {logits.device}, "
                f"got {column.dtype}{list(column.shape)} on {column.device}; give one value a row"
            )
    if inputs.penalties is not None:
        check_penalties(logits, inputs.penalties)


def check_penalties(logits: torch.Tensor, penalties: Penalties) -> None:
    """Raise ValueError unless the tables of `penalties` span the vocabulary of `logits`."""
    expected = (penalties.rows.shape[0], logits.shape[1])
    for name in ("prompt_mask", "output_counts"):
        if tuple(getattr(penalties, name).shape) != expected:
            raise ValueError(
                f"penalties.{name} must have shape {expected}, got {tuple(getattr(penalties, name).shape)}; "
                "give one row a penalised row, as wide as the logits"
            )
