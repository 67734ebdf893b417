"""Row-wise operations: norms, gates, rotary embedding with the write to the caches, rows of a table.

Each rounds where its plain form in `references` rounds, and gives new tensors. Rows are dense; float32, bfloat16 and
float16. Arguments are checked by the contracts, not here.
"""

from __future__ import annotations

import numpy as np
import torch

from vnext.kernels.calls import RotaryWrite
from vnext.kernels.cuda.backends import kernel_for
from vnext.kernels.cuda.interface import SCALARS, Defines
from vnext.kernels.mxint8 import head_dim_of

SOURCE = "rows.cu"
ROW_THREADS = 256
TOKEN_THREADS = 128
WARP = 32
CHUNK_BYTES = 16
GATES = {"silu": 0, "gelu_tanh": 1}
"""As rows.cu numbers them."""


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """As references.rms_norm, x [T, H]."""
    return norm(x, None, weight, eps)[0]


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """As references.add_rms_norm."""
    return norm(x, residual, weight, eps)


def norm(
    x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """(norm of x + residual, x + residual); without a residual the second is x itself."""
    rows, width = x.shape
    normed = torch.empty((rows, width), dtype=x.dtype, device=x.device)
    total = None if residual is None else torch.empty_like(normed)
    if rows:
        parts = [tensor for tensor in (x, residual, normed, total) if tensor is not None]
        arguments = (
            normed, total, x, residual, weight, np.float32(eps), np.int32(width), np.int64(x.stride(0)),
            np.int64(0 if residual is None else residual.stride(0)), whole(width, *parts),
        )  # fmt: skip
        kernel = kernel_for(x.device, SOURCE, "rms_norm", macros(x, weight=weight))
        kernel((rows,), (ROW_THREADS,), arguments, shared_mem=ROW_THREADS // WARP * 4)
    return normed, x if total is None else total


def gate_and_mul(x: torch.Tensor, gate: str) -> torch.Tensor:
    """x [T, 2 * I] -> act(x[:, :I]) * x[:, I:], [T, I], with "silu" or "gelu_tanh"."""
    rows, width = x.shape[0], x.shape[1] // 2
    result = torch.empty((rows, width), dtype=x.dtype, device=x.device)
    blocks = -(-width * x.element_size() // (ROW_THREADS * CHUNK_BYTES))
    if rows and width:
        kernel = kernel_for(x.device, SOURCE, "gate_and_mul", macros(x))
        kernel(
            (rows, blocks),
            (ROW_THREADS,),
            (result, x, np.int32(width), np.int64(x.stride(0)), np.int32(GATES[gate]), whole(width, x, result)),
        )
    return result


def rotary_kv_write(qkv: torch.Tensor, write: RotaryWrite) -> torch.Tensor:
    """As references.rotary_kv_write; caches may also be float8_e4m3fn, holding keys and values divided by the scales, or int8."""
    q_norm, k_norm, eps, cosine, sine, key_cache, value_cache, slots, key_scale, value_scale = write
    _, kv_heads, block_size, _ = key_cache.shape
    tokens, head_dim = qkv.shape[0], head_dim_of(key_cache)
    heads = qkv.shape[1] // head_dim - 2 * kv_heads
    query = torch.empty((tokens, heads, head_dim), dtype=qkv.dtype, device=qkv.device)
    if not tokens:
        return query
    cosine, sine = (None if angles is None else angles.contiguous() for angles in (cosine, sine))
    sizes = (heads, kv_heads, head_dim, block_size, 0 if cosine is None else cosine.shape[1])
    wide = (weight is not None and weight.dtype is torch.float32 for weight in (q_norm, k_norm))
    kernel = kernel_for(qkv.device, SOURCE, "rotary_kv_write", macros(qkv, cache=key_cache))
    kernel(
        (tokens, -(-(heads + 2 * kv_heads) // (TOKEN_THREADS // WARP))),
        (TOKEN_THREADS,),
        (
            query, key_cache, value_cache, qkv, q_norm, k_norm, cosine, sine, slots, np.float32(eps),
            np.float32(key_scale), np.float32(value_scale), np.int64(qkv.stride(0)), *map(np.int32, sizes),
            *map(np.int32, wide),
        ),
        shared_mem=TOKEN_THREADS // WARP * head_dim * 4,
    )  # fmt: skip
    return query


def embedding_rows(table: torch.Tensor, ids: torch.Tensor, first: int) -> torch.Tensor:
    """As references.embedding_rows."""
    table = table.contiguous()
    result = torch.empty((ids.shape[0], table.shape[1]), dtype=table.dtype, device=table.device)
    row_bytes = table.shape[1] * table.element_size()
    if not result.numel():
        return result
    addresses = row_bytes | table.data_ptr() | result.data_ptr()
    unit = next(size for size in (16, 4, 2, 1) if addresses % size == 0)
    kernel = kernel_for(table.device, SOURCE, "gather_rows", macros(table))
    kernel(
        (ids.shape[0],),
        (ROW_THREADS,),
        (
            result, table, ids.contiguous(), np.int64(first), np.int64(table.shape[0]), np.int32(row_bytes // unit),
            np.int32(unit),
        ),
    )  # fmt: skip
    return result


def macros(x: torch.Tensor, weight: torch.Tensor | None = None, cache: torch.Tensor | None = None) -> Defines:
    """All macros of the source, so that a model of one type needs one module: others are of the activations' type."""
    return defines(*(x.dtype if each is None else each.dtype for each in (x, weight, cache)))


def defines(scalar: torch.dtype, weight: torch.dtype, cache: torch.dtype) -> Defines:
    return (("SCALAR", SCALARS[scalar]), ("WEIGHT", SCALARS[weight]), ("CACHE", SCALARS[cache]))


def whole(width: int, *tensors: torch.Tensor) -> np.int32:
    """Whether every row of all of them is made of aligned chunks of 16 bytes."""
    chunk = CHUNK_BYTES // tensors[0].element_size()
    aligned = all(tensor.data_ptr() % CHUNK_BYTES == 0 and tensor.stride(0) % chunk == 0 for tensor in tensors)
    return np.int32(aligned and width % chunk == 0)
