"""Logits, adjusted: bias, bans and penalties of the rows that have them.

Owns every change of logits before a token is chosen. A row's bits never depend on the parameters of other rows. Order:
bias, bans, repetition, frequency and presence, constraints, times. `adjust` takes the inputs of a step and never writes to
the caller's tensor. `adjust_rows` takes the tables that a device keeps and has one shape whatever the rows request.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from vnext.sampling.inputs import NO_DRAFTS, Allowed, BehindDrafts, Penalties, RowTables, SamplingInputs
from vnext.state.params import IN_PROMPT

Keep = Callable[[torch.Tensor, Allowed], None]


def keep_allowed(logits: torch.Tensor, allowed: Allowed) -> None:
    """Set logits float32[S, V] to minus infinity, in place, where a row's mask has a 0."""
    bits = allowed.masks_of_rows()[:, :, None] >> torch.arange(32, dtype=torch.int32, device=logits.device) & 1
    may_come = bits.flatten(1)[:, : logits.shape[1]] == 1
    logits[allowed.rows] = logits[allowed.rows].masked_fill_(~may_come, float("-inf"))


def adjust(logits: torch.Tensor, inputs: SamplingInputs, keep: Keep = keep_allowed) -> torch.Tensor:
    """float32[S, V] logits with bias, bans, penalties and constraints; `logits` itself where there are none.

    `keep` does what `keep_allowed` does.
    """
    if all(each is None for each in (inputs.bias, inputs.banned, inputs.penalties, inputs.allowed)):
        return logits
    adjusted = logits.clone()
    if inputs.bias is not None:
        adjusted.index_put_((inputs.bias.rows, inputs.bias.tokens), inputs.bias.values, accumulate=True)
    if inputs.banned is not None:
        adjusted.index_put_((inputs.banned.rows, inputs.banned.tokens), adjusted.new_full((), float("-inf")))
    if inputs.penalties is not None:
        assert isinstance(inputs.penalties, Penalties), "counted penalties sample nothing"
        adjusted[inputs.penalties.rows] = penalise(adjusted[inputs.penalties.rows], inputs.penalties)
    if inputs.allowed is not None:
        keep(adjusted, inputs.allowed)
        prefer_times(adjusted, inputs.allowed)
    return adjusted


def prefer_times(logits: torch.Tensor, allowed: Allowed) -> None:
    """Set texts to minus infinity, in place, in rows of logits float32[S, V] whose times together are likelier than the likeliest
    text. Waits for no device if `allowed.rows` is on the host. Source: ApplyTimestampRules of Whisper's decoding.py."""
    if allowed.firsts is None:
        return
    for at, first in enumerate(allowed.firsts.tolist()):
        row = logits[int(allowed.rows[at])]
        weight = (row[first:].double() - row[:first].max()).exp().sum()
        row[:first].masked_fill_(weight > 1, float("-inf"))


def penalise(logits: torch.Tensor, penalties: Penalties) -> torch.Tensor:
    """float32[P, V] logits after penalties.

    Repetition (Keskar et al., CTRL, 2019) divides positive and multiplies negative logits of tokens in prompt or output.
    Frequency and presence subtract for tokens in the output only, as the OpenAI API defines them.
    """
    counts, rates = penalties.output_counts, (penalties.repetition, penalties.presence, penalties.frequency)
    return penalise_seen(logits, penalties.prompt_mask | (counts > 0), counts, *rates)


def penalise_seen(
    logits: torch.Tensor,
    seen: torch.Tensor,
    counts: torch.Tensor,
    repetition: torch.Tensor,
    presence: torch.Tensor,
    frequency: torch.Tensor,
) -> torch.Tensor:
    """The same as `penalise`: `seen` bool[P, V], `counts` int32[P, V], the rates float32[P]."""
    repetition = repetition[:, None]
    repeated = torch.where(logits > 0, logits / repetition, logits * repetition)
    penalised = torch.where(seen, repeated, logits)
    penalised = penalised - frequency[:, None] * counts
    return penalised - presence[:, None] * (counts > 0)


def adjust_rows(
    logits: torch.Tensor, tables: RowTables, places: torch.Tensor, positions: torch.Tensor, drafts: BehindDrafts = NO_DRAFTS
) -> None:
    """Apply bias, bans and penalties to logits float32[S, V] in place, with the same bits as `adjust`.

    The logits belong to batch rows `places` int64[S]; their next tokens are at `positions` int64[S]. Penalties count `drafts`
    as sampled. Waits for no device.
    """
    until, bias_count = tables.marks.index_select(1, places).unbind(0)
    tokens = tables.bias_tokens.index_select(0, places)
    values = tables.bias_values.index_select(0, places).masked_fill((bias_count == 0)[:, None], -0.0)  # adding -0.0 changes nothing
    logits.scatter_(1, tokens, logits.gather(1, tokens) + values)
    stops = tables.stop_tokens.index_select(0, places)
    found = logits.gather(1, stops)
    logits.scatter_(1, stops, found.masked_fill((positions < until)[:, None], float("-inf")))
    history = tables.history.index_select(0, places)
    if drafts.fed is not None:
        history.scatter_add_(1, drafts.fed.expand(len(places), -1), drafts.before().int())
    rates = tables.rates.index_select(1, places).unbind(0)
    logits.copy_(penalise_seen(logits, history != 0, history & (IN_PROMPT - 1), *rates))
