"""Contracts: the shape, dtype and layout that every implementation of an operation may rely on.

Owns the checks at the door, one per operation; `table.choose` puts them in front of every implementation, so that a
kernel never sees an argument it was not written for. Checks read metadata only: no device is touched or waited for.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    import numpy as np

    from vnext.kernels.paged_attention import AttentionMetadata

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
INDICES = (torch.int64,)


class ContractError(ValueError):
    """An operation was called with an argument that its contract excludes."""


def expect(
    name: str,
    tensor: torch.Tensor,
    shape: Sequence[int | None],
    dtypes: Sequence[torch.dtype],
    *,
    contiguous: bool = False,
) -> None:
    """Raise ContractError unless the tensor has the shape (None: any size), one of the dtypes and the layout.

    The last dimension must always be dense; `contiguous` asks it of all.
    """
    if tensor.dtype not in dtypes:
        wanted = " or ".join(str(dtype) for dtype in dtypes)
        raise ContractError(f"{name} must be {wanted} but is {tensor.dtype}")
    if tensor.dim() != len(shape) or any(want not in (None, have) for want, have in zip(shape, tensor.shape)):
        wanted = ", ".join("any" if size is None else str(size) for size in shape)
        raise ContractError(f"{name} must have the shape [{wanted}] but has {list(tensor.shape)}")
    if contiguous and not tensor.is_contiguous():
        raise ContractError(f"{name} must be contiguous but has the strides {tensor.stride()}")
    if tensor.dim() and tensor.shape[-1] > 1 and tensor.stride(-1) != 1:
        raise ContractError(f"the last dimension of {name} must be dense but has the stride {tensor.stride(-1)}")


def expect_together(first: torch.Tensor, **others: torch.Tensor) -> None:
    """Raise ContractError unless all tensors live on one device."""
    for name, tensor in others.items():
        if tensor.device != first.device:
            raise ContractError(f"{name} is on {tensor.device} but the other arguments are on {first.device}")


def check_rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> None:
    """x [T, H] float, weight [H] of the same dtype, eps > 0."""
    expect("x", x, (None, None), FLOATS)
    expect("weight", weight, (x.shape[1],), (x.dtype,))
    expect_together(x, weight=weight)
    if not eps > 0:
        raise ContractError(f"eps must be above 0 but is {eps}")


def check_add_rms_norm(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float) -> None:
    """As rms_norm, with residual [T, H] of the same dtype."""
    check_rms_norm(x, weight, eps)
    expect("residual", residual, x.shape, (x.dtype,))
    expect_together(x, residual=residual)


def check_silu_and_mul(x: torch.Tensor) -> None:
    """x [T, 2 * I] float: gate, then up."""
    expect("x", x, (None, None), FLOATS)
    if x.shape[1] % 2:
        raise ContractError(f"x must hold gate and up side by side, an even width, but is {x.shape[1]} wide")


def check_rotary(query: torch.Tensor, key: torch.Tensor, cosine: torch.Tensor, sine: torch.Tensor) -> None:
    """query [T, heads, D], key [T, kv_heads, D] of one float dtype; cosine and sine float32 [T, D / 2]."""
    expect("query", query, (None, None, None), FLOATS)
    tokens, _, head_dim = query.shape
    if head_dim % 2:
        raise ContractError(f"rotary embedding needs an even head size but it is {head_dim}")
    expect("key", key, (tokens, None, head_dim), (query.dtype,))
    expect("cosine", cosine, (tokens, head_dim // 2), (torch.float32,))
    expect("sine", sine, (tokens, head_dim // 2), (torch.float32,))
    expect_together(query, key=key, cosine=cosine, sine=sine)


def check_caches(key_cache: torch.Tensor, value_cache: torch.Tensor) -> None:
    """Both [block_count, kv_heads, block_size, D], contiguous, of one float dtype."""
    expect("key_cache", key_cache, (None, None, None, None), FLOATS, contiguous=True)
    expect("value_cache", value_cache, key_cache.shape, (key_cache.dtype,), contiguous=True)


def check_kv_write(
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slots: torch.Tensor,
) -> None:
    """key and value [T, kv_heads, D] float, slots int64 [T], caches as in `check_caches`."""
    check_caches(key_cache, value_cache)
    _, kv_heads, _, head_dim = key_cache.shape
    expect("key", key, (None, kv_heads, head_dim), FLOATS)
    expect("value", value, key.shape, (key.dtype,))
    expect("slots", slots, (key.shape[0],), INDICES)
    expect_together(key_cache, key=key, value=value, value_cache=value_cache, slots=slots)


def check_attention_metadata(
    query_starts: np.ndarray,
    context_lengths: np.ndarray,
    block_table: torch.Tensor,
    block_size: int,
    kv_head_count: int,
) -> None:
    """Host arrays query_starts [R + 1] and context_lengths [R]; block_table int32 [R, W] wide enough for them."""
    rows = context_lengths.shape[0]
    expect("block_table", block_table, (rows, None), (torch.int32,))
    if query_starts.shape != (rows + 1,):
        raise ContractError(f"query_starts must have {rows + 1} entries but has the shape {query_starts.shape}")
    if block_size < 1 or kv_head_count < 1:
        raise ContractError(f"block size {block_size} and key-value heads {kv_head_count} must be at least 1")
    query_lengths = query_starts[1:] - query_starts[:-1]
    if rows and (query_lengths < 0).any():
        raise ContractError("query_starts must not fall")
    if rows and (context_lengths < query_lengths).any():
        raise ContractError("context_lengths must count the tokens of this step too")
    longest = int(context_lengths.max(initial=0))
    if longest > block_table.shape[1] * block_size:
        raise ContractError(
            f"a context of {longest} tokens needs more than the {block_table.shape[1]} blocks of {block_size} "
            "that block_table holds a row"
        )


def check_paged_attention(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    metadata: AttentionMetadata,
    scale: float,
) -> None:
    """query [T, heads, D] with heads a multiple of kv_heads; metadata made for the same caches."""
    check_caches(key_cache, value_cache)
    _, kv_heads, block_size, head_dim = key_cache.shape
    expect("query", query, (None, None, head_dim), FLOATS)
    expect_together(query, key_cache=key_cache, value_cache=value_cache)
    if query.shape[1] % kv_heads:
        raise ContractError(f"{query.shape[1]} query heads cannot share {kv_heads} key-value heads evenly")
    if (metadata.block_size, metadata.kv_head_count) != (block_size, kv_heads):
        raise ContractError(
            f"metadata was made for blocks of {metadata.block_size} and {metadata.kv_head_count} key-value heads but "
            f"the cache has blocks of {block_size} and {kv_heads} heads"
        )
    if not scale > 0:
        raise ContractError(f"scale must be above 0 but is {scale}")
