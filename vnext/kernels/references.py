"""References: every small operation in plain torch, on any device. The oracle of each faster form.

All arithmetic is float32 inside, whatever the dtype outside. A row's result depends on that row alone, bit for bit:
only reductions over the last dimension and elementwise steps whose vectorised and leftover parts agree are used.
Paged attention has its own file. Arguments are checked by the table, not here.
"""

from __future__ import annotations

import torch


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x [T, H] divided by its root mean square over H, times weight [H]. Same dtype as x."""
    wide = x.float()
    scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (wide * scale).to(x.dtype) * weight


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """(rms_norm(x + residual), x + residual), each [T, H]."""
    total = x + residual
    return rms_norm(total, weight, eps), total


def silu_and_mul(x: torch.Tensor) -> torch.Tensor:
    """x [T, 2 * I] -> silu(x[:, :I]) * x[:, I:], [T, I].

    The sigmoid is spelled out because torch's fused silu rounds the leftover lanes of a vector otherwise than the full
    ones, so a value would depend on its place.
    """
    gate, up = x.float().chunk(2, dim=-1)
    return (gate / gate.neg().exp_().add_(1.0) * up).to(x.dtype)


def rotary(
    query: torch.Tensor, key: torch.Tensor, cosine: torch.Tensor, sine: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Turn query [T, heads, D] and key [T, kv_heads, D] by angles whose cosine and sine are float32 [T, D / 2].

    Halves, not neighbours, form a pair: (x[i], x[i + D / 2]), the order of Hugging Face checkpoints.
    """
    cosine, sine = cosine.unsqueeze(1), sine.unsqueeze(1)
    return turn(query, cosine, sine), turn(key, cosine, sine)


def turn(x: torch.Tensor, cosine: torch.Tensor, sine: torch.Tensor) -> torch.Tensor:
    """Rotate the pairs of x [T, heads, D] by [T, 1, D / 2] cosines and sines."""
    first, second = x.float().chunk(2, dim=-1)
    turned = torch.cat((first * cosine - second * sine, second * cosine + first * sine), dim=-1)
    return turned.to(x.dtype)


def kv_write(
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slots: torch.Tensor,
) -> None:
    """Put key and value [T, kv_heads, D] at slots int64 [T] of both [block_count, kv_heads, block_size, D] caches.

    A slot is block * block_size + offset. In place; slots must be distinct.
    """
    block_size = key_cache.shape[2]
    blocks = torch.div(slots, block_size, rounding_mode="floor")
    offsets = slots - blocks * block_size
    key_cache[blocks, :, offsets] = key.to(key_cache.dtype)
    value_cache[blocks, :, offsets] = value.to(value_cache.dtype)
