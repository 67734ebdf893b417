"""Recurrence: layers that keep a state in the place of keys and values, in plain torch, and their contracts.

The order is the recurrence's own: a row's tokens one after the other. So a token's result depends on the tokens before it and on
nothing else, bit for bit, however they are cut into steps. The oracle of the compiled forms; arithmetic is float32 inside.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch.nn.functional import softplus

from vnext.kernels.calls import WIDTHS, ConvolutionCall, RecurrenceCall, StateRows
from vnext.kernels.contracts import FLOATS, ContractError, expect, expect_together


def check_rows(rows: StateRows, pool: torch.Tensor, tokens: int) -> None:
    """starts int32 [R + 1], pages int32 [R], fresh bool [R], trail int32 [T] or None, where the pool is. What they hold is not
    looked at."""
    expect("starts", rows.starts, (rows.pages.shape[0] + 1,), (torch.int32,))
    expect("pages", rows.pages, (None,), (torch.int32,))
    expect("fresh", rows.fresh, rows.pages.shape, (torch.bool,))
    expect_together(pool, starts=rows.starts, pages=rows.pages, fresh=rows.fresh)
    if rows.trail is not None:
        expect("trail", rows.trail, (tokens,), (torch.int32,))


def check_short_convolution(x: torch.Tensor, call: ConvolutionCall) -> None:
    """x [T, C] float, gated [T, 3 * C]; weight [C, W], bias [C] or None, pool [pages, W - 1, C], of x's dtype and together."""
    channels, width = call.weight.shape
    expect("x", x, (None, channels * (3 if call.gated else 1)), FLOATS)
    expect("weight", call.weight, (None, None), (x.dtype,), contiguous=True)
    if width not in WIDTHS:
        raise ContractError(f"a convolution sees {WIDTHS.start} to {WIDTHS.stop - 1} inputs, not {width}")
    if call.bias is not None:
        expect("bias", call.bias, (channels,), (x.dtype,))
    expect("pool", call.pool, (None, width - 1, channels), (x.dtype,))
    expect_together(x, weight=call.weight, pool=call.pool)
    check_rows(call.rows, call.pool, x.shape[0])
    if call.activation not in ("", "silu"):
        raise ContractError(f"activation {call.activation!r} is not known; there are: silu and none")


def check_recur(x: torch.Tensor, call: RecurrenceCall) -> None:
    """As RecurrenceCall says; x, steps, strengths and gates of one float dtype. Value heads share key heads evenly."""
    _, heads, keys, width = call.pool.shape
    tokens, by_number = x.shape[0], call.decay_logs.dim() == 3
    if call.key_heads < 1 or heads % call.key_heads:
        raise ContractError(f"{heads} heads of values cannot share {call.key_heads} heads of keys evenly")
    if call.bound and (call.strengths is None or call.steps is None):
        raise ContractError("decays with a bound are a delta's, and have steps")
    if call.by_head and call.key_heads != heads:
        raise ContractError("heads side by side have a key each")
    expect("x", x, (None, 2 * call.key_heads * keys + heads * width), FLOATS)
    expect("pool", call.pool, (None, None, None, None), (torch.float32,))
    paces = heads * width if by_number else heads
    if call.steps is None or call.step_bias is None:
        if by_number or call.step_bias is not call.steps:
            raise ContractError("steps and their bias come together, and always with a decay for each number")
    else:
        by_key = call.strengths is not None and call.steps.shape[1] != heads
        expect("steps", call.steps, (tokens, heads * keys if by_key else paces), (x.dtype,))
        expect("step_bias", call.step_bias, (call.steps.shape[1],), (torch.float32,))
    if by_number and call.strengths is not None:
        raise ContractError("a delta decays by heads or by keys, not by numbers")
    expect("decay_logs", call.decay_logs, (heads, keys, width) if by_number else (heads,), (torch.float32,), contiguous=True)
    if call.strengths is not None:
        expect("strengths", call.strengths, (tokens, heads), (x.dtype,))
    if call.gates is not None:
        expect("gates", call.gates, (tokens, heads * width), (x.dtype,))
    for name, weight, size in (("norm", call.norm, width), ("skips", call.skips, paces)):
        if weight is not None:
            expect(name, weight, (size,), (torch.float32,))
    expect_together(x, pool=call.pool, decay_logs=call.decay_logs)
    check_rows(call.rows, call.pool, tokens)


def spans(rows: StateRows) -> Iterator[tuple[int, slice, bool]]:
    """(page, tokens, whether it starts from zeros) of each row that has tokens. Waits for the device."""
    starts, pages, fresh = (part.tolist() for part in rows[:3])
    for row, page in enumerate(pages):
        if starts[row] < starts[row + 1]:
            yield page, slice(starts[row], starts[row + 1]), fresh[row]


def kept_on_the_way(rows: StateRows, tokens: slice) -> list[tuple[int, int]]:
    """(token, page) of those of a row's tokens whose states are left in pages of their own."""
    pages = [] if rows.trail is None else rows.trail[tokens].tolist()
    return [(at, page) for at, page in enumerate(pages, tokens.start) if page >= 0]


def short_convolution(x: torch.Tensor, call: ConvolutionCall) -> torch.Tensor:
    """Each channel's own convolution over its last W inputs -> [T, C] of x's dtype; the pool then holds the last inputs.

    An output is the sum from the oldest input to the newest. Gated, an input is rounded to x's dtype after its gate.
    """
    channels, width = call.weight.shape
    before, behind, given = x.split(channels, 1) if call.gated else (None, None, x)
    inputs = given if before is None else before * given
    weight, result = call.weight.float(), torch.zeros_like(inputs)
    for page, tokens, is_fresh in spans(call.rows):
        past = call.pool[page]
        seen = torch.cat((torch.zeros_like(past) if is_fresh else past, inputs[tokens]))
        wide, count = seen.float(), tokens.stop - tokens.start
        total = wide[:count] * weight[:, 0]
        for place in range(1, width):
            total = total + wide[place : place + count] * weight[:, place]
        if call.bias is not None:
            total = total + call.bias.float()
        result[tokens] = activated(total, call.activation).to(x.dtype)
        past.copy_(seen[count:])
        for at, page in kept_on_the_way(call.rows, tokens):
            call.pool[page] = seen[at + 1 - tokens.start :][: width - 1]
    return result if behind is None else result * behind


def activated(x: torch.Tensor, activation: str) -> torch.Tensor:
    """silu of float32, spelled out as in `references.silu_and_mul`, or x itself."""
    return x / x.neg().exp_().add_(1.0) if activation else x


def recur(x: torch.Tensor, call: RecurrenceCall) -> torch.Tensor:
    """What the heads give of x [T, ...] -> [T, H * V] of x's dtype; the pool then holds the states behind the rows' last tokens."""
    _, heads, keys, width = call.pool.shape
    is_delta, tokens, shared = call.strengths is not None, x.shape[0], call.key_heads * keys
    wide = activated(x.float(), "silu" if call.activates else "")
    sizes = (shared, shared, heads * width) if is_delta else (heads * width, shared, shared)
    if call.by_head:
        query, key, value = (part.flatten(1) for part in wide.unflatten(1, (heads, -1)).split((keys, keys, width), 2))
    else:
        first, key, last = wide.split(sizes, 1)
        query, value = (first, last) if is_delta else (last, first)
    query, key = (each.view(tokens, call.key_heads, keys).repeat_interleave(heads // call.key_heads, 1) for each in (query, key))
    value = value.view(tokens, heads, width)
    time, rate = times(call, tokens), call.decay_logs.exp().view(heads, *call.decay_logs.shape[1:] or (1, 1))
    strength = time[:, :, 0]
    if call.strengths is not None:
        query, key = unit(query) * keys**-0.5, unit(key)
        strength = call.strengths.float().sigmoid()[:, :, None] * call.strength_scale
    result = torch.zeros_like(value)
    for page, span, is_fresh in spans(call.rows):
        kept = dict(kept_on_the_way(call.rows, span))
        state = torch.zeros_like(call.pool[page]) if is_fresh else call.pool[page].clone()
        for at in range(span.start, span.stop):
            pace = rate * time[at]
            state = state * (call.bound * pace.sigmoid() if call.bound else -pace).exp()
            change = value[at] - (state * key[at, :, :, None]).sum(1) if is_delta else value[at]
            state = state + key[at, :, :, None] * (change * strength[at])[:, None, :]
            result[at] = (state * query[at, :, :, None]).sum(1)
            if at in kept:
                call.pool[kept[at]] = state
        call.pool[page].copy_(state)
    return finished(result, value, call).flatten(1).to(x.dtype)


def times(call: RecurrenceCall, tokens: int) -> torch.Tensor:
    """What rates multiply, [T, H, 1, 1], or with an axis for the keys or for the values of a head."""
    if call.steps is None:
        return call.decay_logs.new_ones(tokens, call.decay_logs.shape[0], 1, 1)
    assert call.step_bias is not None
    found = call.steps.float() + call.step_bias
    found = found if call.bound else softplus(found, threshold=88.0)
    found = found.view(tokens, call.decay_logs.shape[0], -1)
    return found[:, :, None] if call.strengths is None else found[:, :, :, None]


def unit(x: torch.Tensor) -> torch.Tensor:
    """x divided by its length over the last axis."""
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)


def finished(x: torch.Tensor, value: torch.Tensor, call: RecurrenceCall) -> torch.Tensor:
    """What heads give, float32 [T, H, V], after norm, skips and gates."""
    if call.norm is not None:
        x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + call.eps) * call.norm
    if call.skips is not None:
        x = x + call.skips.view(x.shape[1], -1) * value
    if call.gates is None:
        return x
    gates = call.gates.float().view_as(x)
    return x * (gates.sigmoid() if call.gate == "sigmoid" else activated(gates, "silu"))
