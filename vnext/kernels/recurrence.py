"""Recurrence: layers that keep a state in the place of keys and values, in plain torch, and their contracts.

The order is the recurrence's own: a row's tokens one after the other. So a token's result depends on the tokens before it and on
nothing else, bit for bit, however they are cut into steps. The oracle of the compiled forms; arithmetic is float32 inside.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from vnext.kernels.calls import ConvolutionCall, StateRows
from vnext.kernels.contracts import FLOATS, ContractError, expect, expect_together

WIDTHS = range(2, 9)
"""Inputs that a convolution sees."""


def check_rows(rows: StateRows, pool: torch.Tensor, tokens: int) -> None:
    """starts int32 [R + 1], pages int32 [R], fresh bool [R], where the pool is. What they hold is not looked at."""
    expect("starts", rows.starts, (rows.pages.shape[0] + 1,), (torch.int32,))
    expect("pages", rows.pages, (None,), (torch.int32,))
    expect("fresh", rows.fresh, rows.pages.shape, (torch.bool,))
    expect_together(pool, starts=rows.starts, pages=rows.pages, fresh=rows.fresh)


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


def spans(rows: StateRows) -> Iterator[tuple[int, slice, bool]]:
    """(page, tokens, whether it starts from zeros) of each row that has tokens. Waits for the device."""
    starts, pages, fresh = (part.tolist() for part in rows)
    for row, page in enumerate(pages):
        if starts[row] < starts[row + 1]:
            yield page, slice(starts[row], starts[row + 1]), fresh[row]


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
    return result if behind is None else result * behind


def activated(x: torch.Tensor, activation: str) -> torch.Tensor:
    """silu of float32, spelled out as in `references.silu_and_mul`, or x itself."""
    return x / x.neg().exp_().add_(1.0) if activation else x
