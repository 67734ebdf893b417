"""Recurrent layers by the compiled module: short convolutions, and heads that keep a state. Both take float32 or bfloat16.

A row's tokens are taken one after the other; threads share rows, and channels or heads: neither cut nor threads show in a bit.
"""

from __future__ import annotations

import torch

from vnext.kernels.calls import ConvolutionCall, RecurrenceCall, StateRows
from vnext.kernels.cpu.native import KINDS, kernels
from vnext.kernels.cpu.rows import address


def short_convolution(x: torch.Tensor, call: ConvolutionCall) -> torch.Tensor:
    """As recurrence.short_convolution."""
    channels, width = call.weight.shape
    result = x.new_zeros(x.shape[0], channels)
    kernels.short_convolution(
        KINDS[x.dtype], x.data_ptr(), x.stride(0), call.weight.data_ptr(), address(call.bias), call.pool.data_ptr(),
        call.pool.stride(0), channels, width, call.activation == "silu", call.gated, *_addresses(call.rows), x.shape[0],
        result.data_ptr(),
    )  # fmt: skip
    return result


def recur(x: torch.Tensor, call: RecurrenceCall) -> torch.Tensor:
    """As recurrence.recur, with dense states."""
    _, heads, keys, width = call.pool.shape
    result, shared = x.new_zeros(x.shape[0], heads * width), call.key_heads * keys
    steps_a_head = 1 if call.steps is None else call.steps.shape[1] // heads
    queries_at, keys_at, values_at = (0, shared, 2 * shared)
    if call.strengths is None:
        queries_at, keys_at, values_at = (heads * width + shared, heads * width, 0)
    if call.by_head:
        queries_at, keys_at, values_at = (0, keys, 2 * keys)
    kernels.recur(
        KINDS[x.dtype], x.data_ptr(), x.stride(0), queries_at, keys_at, values_at, address(call.steps), address(call.strengths),
        stride(call.steps), stride(call.strengths), address(call.gates), stride(call.gates), call.decay_logs.data_ptr(),
        address(call.step_bias), address(call.norm), address(call.skips), call.eps, call.pool.data_ptr(), call.pool.stride(0),
        call.key_heads, keys, heads, width, steps_a_head, call.decay_logs.dim() == 3, call.gate == "sigmoid",
        call.by_head, call.activates, call.bound, call.strength_scale,
        *_addresses(call.rows), x.shape[0], result.data_ptr(),
    )  # fmt: skip
    return result


def stride(x: torch.Tensor | None) -> int:
    """From one token to the next."""
    return 0 if x is None else x.stride(0)


def _addresses(rows: StateRows) -> tuple[int, int, int, int | None, int]:
    starts, pages, fresh, trail = rows
    return starts.data_ptr(), pages.data_ptr(), fresh.data_ptr(), address(trail), pages.shape[0]
