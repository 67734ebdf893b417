"""Row-wise operations: norms, gates, rotary embedding with the write to the caches, rows of a table.

Each rounds where its plain form in `references` rounds. All take float32 or bfloat16, rows dense, and give new tensors. A
norm's weight may be float32 beside bfloat16: it is applied before the rounding then.
"""

from __future__ import annotations

import torch

from vnext.kernels.calls import RotaryWrite
from vnext.kernels.cpu.native import ACTIVATIONS, CACHE_KINDS, KINDS, Kind, kernels
from vnext.kernels.mxint8 import head_dim_of


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, weight_offset: float = 0.0) -> torch.Tensor:
    """x [T, H] divided by its root mean square over H, times weight [H] (plus an offset: weights stored less one)."""
    rows, width = x.shape
    normed = torch.empty((rows, width), dtype=x.dtype)
    kernels.rms_norm(
        kind_of(x, weight), x.data_ptr(), x.stride(0), None, 0, weight.data_ptr(), weight_offset, eps, rows, width,
        normed.data_ptr(), None,
    )  # fmt: skip
    return normed


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, weight_offset: float = 0.0
) -> tuple[torch.Tensor, torch.Tensor]:
    """(rms_norm(x + residual), x + residual), each [T, H]."""
    rows, width = x.shape
    normed, total = torch.empty((rows, width), dtype=x.dtype), torch.empty((rows, width), dtype=x.dtype)
    kernels.rms_norm(
        kind_of(x, weight), x.data_ptr(), x.stride(0), residual.data_ptr(), residual.stride(0), weight.data_ptr(),
        weight_offset, eps, rows, width, normed.data_ptr(), total.data_ptr(),
    )  # fmt: skip
    return normed, total


def layer_norm(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, eps: float) -> torch.Tensor:
    """x [T, H] less its mean, divided by its deviation, times weight, plus bias, both float32 [H]."""
    rows, width = x.shape
    normed = torch.empty((rows, width), dtype=x.dtype)
    kernels.layer_norm(
        KINDS[x.dtype], x.data_ptr(), x.stride(0), weight.data_ptr(), bias.data_ptr(), eps, rows, width, normed.data_ptr()
    )
    return normed


def activate(x: torch.Tensor, above: torch.Tensor | None, below: torch.Tensor | None, activation: str) -> torch.Tensor:
    """As references.activate, of x [T, I], but for those that halve it."""
    rows, width = x.shape
    result, slopes = torch.empty((rows, width), dtype=x.dtype), (address(above), address(below))
    given = x.data_ptr(), x.stride(0), rows, width, ACTIVATIONS[activation]
    kernels.activate(KINDS[x.dtype], *given, *slopes, result.data_ptr())
    return result


def gate_by(x: torch.Tensor, gates: torch.Tensor) -> torch.Tensor:
    """x [T, I] times the sigmoid of gates [T, I] or [T, 1]."""
    rows, width = x.shape
    result = torch.empty((rows, width), dtype=x.dtype)
    given = x.data_ptr(), x.stride(0), gates.data_ptr(), gates.stride(0)
    kernels.gate_by(KINDS[x.dtype], *given, rows, width, gates.shape[1] < width, result.data_ptr())
    return result


def gate_and_mul(x: torch.Tensor, gate: str) -> torch.Tensor:
    """x [T, 2 * I] -> act(x[:, :I]) * x[:, I:], [T, I], with an activation of a gate, or "gelu"."""
    rows, width = x.shape[0], x.shape[1] // 2
    result = torch.empty((rows, width), dtype=x.dtype)
    kernels.gate_and_mul(KINDS[x.dtype], x.data_ptr(), x.stride(0), rows, width, ACTIVATIONS[gate], result.data_ptr())
    return result


def silu_and_mul(x: torch.Tensor) -> torch.Tensor:
    """x [T, 2 * I] -> silu(x[:, :I]) * x[:, I:], [T, I]."""
    return gate_and_mul(x, "silu")


def gelu_tanh_and_mul(x: torch.Tensor) -> torch.Tensor:
    """x [T, 2 * I] -> gelu(x[:, :I]) * x[:, I:], [T, I], by the tanh form."""
    return gate_and_mul(x, "gelu_tanh")


def rotary_kv_write(joined: torch.Tensor, write: RotaryWrite, weight_offset: float = 0.0) -> torch.Tensor:
    """Split joined [T, (heads + 2 * kv_heads) * D] into query, key, value; norm, turn, write -> query [T, heads, D].

    Norm weights are both of one dtype, or None; cosine and sine dense. Halves form pairs. Key and value go to caches of the same
    dtype or of int8 (kernels/mxint8.py), without scales, with dense blocks at equal distances, in place; slots must be distinct.
    """
    query_norm, key_norm, eps, cosine, sine, key_cache, value_cache, slots, *_ = write
    _, kv_heads, block_size, _ = key_cache.shape
    head_dim = head_dim_of(key_cache)
    tokens = joined.shape[0]
    heads = joined.shape[1] // head_dim - 2 * kv_heads
    query = torch.empty((tokens, heads, head_dim), dtype=joined.dtype)
    kernels.rotary_kv_write(
        kind_of(joined, query_norm), joined.data_ptr(), joined.stride(0), tokens, address(query_norm), address(key_norm),
        weight_offset, eps, address(cosine), address(sine), 0 if cosine is None else 2 * cosine.shape[1],
        key_cache.data_ptr(), value_cache.data_ptr(), slots.data_ptr(), heads, kv_heads, head_dim, block_size,
        key_cache.stride(0), CACHE_KINDS[key_cache.dtype], query.data_ptr(),
    )  # fmt: skip
    return query


def table_rows(table: torch.Tensor, ids: torch.Tensor, first: int = 0) -> torch.Tensor:
    """[N, H]: rows `ids` int64 [N], counted from `first`, of table [V, H], dense, of any dtype; zeros outside it."""
    result = torch.empty((ids.shape[0], table.shape[1]), dtype=table.dtype)
    row_bytes = table.shape[1] * table.element_size()
    kernels.gather_rows(
        table.data_ptr(), row_bytes, table.shape[0], ids.data_ptr(), ids.shape[0], first, result.data_ptr()
    )
    return result


def kind_of(x: torch.Tensor, weight: torch.Tensor | None) -> Kind:
    """How the module learns the activations' dtype and of the norm's beside it."""
    return KINDS[x.dtype] if weight is None or weight.dtype is x.dtype else Kind.BFLOAT16_WIDE_NORM


def address(tensor: torch.Tensor | None) -> int | None:
    """Where a tensor's elements lie; None for none."""
    return None if tensor is None else tensor.data_ptr()
