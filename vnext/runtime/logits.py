"""Logits, adjusted: bias, bans and penalties of the rows that have them.

Owns the change of logits before a token is chosen. Never writes to the caller's tensor, and touches no other row, so
a batch mate's parameters cannot change a row by one bit. Order: bias, bans, repetition, then frequency and presence.
"""

from __future__ import annotations

import torch

from vnext.runtime.sampling_inputs import Penalties, SamplingInputs


def adjust(logits: torch.Tensor, inputs: SamplingInputs) -> torch.Tensor:
    """float32[S, V] logits with bias, bans and penalties; `logits` itself where there are none."""
    if inputs.bias is None and inputs.banned is None and inputs.penalties is None:
        return logits
    adjusted = logits.clone()
    if inputs.bias is not None:
        adjusted.index_put_((inputs.bias.rows, inputs.bias.tokens), inputs.bias.values, accumulate=True)
    if inputs.banned is not None:
        adjusted.index_put_((inputs.banned.rows, inputs.banned.tokens), adjusted.new_full((), float("-inf")))
    if inputs.penalties is not None:
        adjusted[inputs.penalties.rows] = penalise(adjusted[inputs.penalties.rows], inputs.penalties)
    return adjusted


def penalise(logits: torch.Tensor, penalties: Penalties) -> torch.Tensor:
    """float32[P, V] logits after penalties.

    Repetition (Keskar et al., CTRL, 2019) divides positive and multiplies negative logits of tokens in prompt or
    output; frequency and presence subtract for tokens in the output only, as the OpenAI API defines them.
    """
    counts = penalties.output_counts
    seen = penalties.prompt_mask | (counts > 0)
    repetition = penalties.repetition[:, None]
    repeated = torch.where(logits > 0, logits / repetition, logits * repetition)
    penalised = torch.where(seen, repeated, logits)
    penalised = penalised - penalties.frequency[:, None] * counts
    return penalised - penalties.presence[:, None] * (counts > 0)
