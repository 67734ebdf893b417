"""References: every small operation in plain torch, on any device. The oracle of each faster form.

All arithmetic is float32 inside, whatever the dtype outside. A row's result depends on that row alone, bit for bit:
only reductions over the last dimension and elementwise steps whose vectorised and leftover parts agree are used.
Products with weights and paged attention have their own files. Arguments are checked by the table, not here.
"""

from __future__ import annotations

import math

import torch

from vnext.kernels import mxint8
from vnext.kernels.calls import RotaryWrite
from vnext.kernels.contracts import FP8
from vnext.kernels.format import PlainWeight

GELU_SCALE = 2.0 * math.sqrt(2.0 / math.pi)
GELU_CUBIC = 0.044715
SWIGLU_SLOPE, SWIGLU_LIMIT = 1.702, 7.0
SILU_LIMIT = 10.0
XIELU_BETA, XIELU_EPS = 0.5, -1e-6
WIDE_NUMBERS = 1 << 14
"""In float64, of an activation at once."""
FP8_MAX = 448.0
"""The largest number of float8_e4m3fn; torch makes a NaN of more, a GPU this."""


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x [..., H] divided by its root mean square over H, times weight [H]. Same dtype as x.

    A weight of x's dtype is applied after rounding to it, a float32 weight before: models were trained with either.
    """
    wide = x.float()
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return normed.to(weight.dtype).mul_(weight).to(x.dtype)


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """(rms_norm(x + residual), x + residual), each [T, H]."""
    total = x + residual
    return rms_norm(total, weight, eps), total


def layer_norm(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, eps: float) -> torch.Tensor:
    """x [T, H] less its mean over H, divided by its deviation, times weight [H], plus bias [H]. Same dtype as x."""
    wide = x.float()
    centred = wide - wide.mean(-1, keepdim=True)
    scale = torch.rsqrt(centred.square().mean(-1, keepdim=True) + eps)
    return centred.mul_(scale).mul_(weight.float()).add_(bias.float()).to(x.dtype)


def silu_and_mul(x: torch.Tensor) -> torch.Tensor:
    """x [T, 2 * I] -> silu(x[:, :I]) * x[:, I:], [T, I].

    The sigmoid is spelled out because torch's fused silu rounds the leftover lanes of a vector otherwise than the full
    ones, so a value would depend on its place.
    """
    gate, up = x.float().chunk(2, dim=-1)
    return (gate / gate.neg().exp_().add_(1.0) * up).to(x.dtype)


def swiglu_clamped(x: torch.Tensor) -> torch.Tensor:
    """x [T, 2 * I] -> g * sigmoid(SWIGLU_SLOPE * g) * (u + 1), [T, I], of gate g, at most SWIGLU_LIMIT, and up u, at most as far
    from 0 (gpt-oss, arXiv 2508.10925)."""
    gate, up = x.float().chunk(2, dim=-1)
    gate, up = gate.clamp(max=SWIGLU_LIMIT), up.clamp(-SWIGLU_LIMIT, SWIGLU_LIMIT)
    return (gate / (gate * -SWIGLU_SLOPE).exp_().add_(1.0) * (up + 1)).to(x.dtype)


def silu_limited(x: torch.Tensor) -> torch.Tensor:
    """As `silu_and_mul`, of gates at most SILU_LIMIT and ups at most as far from 0 (DeepSeek V4, HY V4)."""
    gate, up = x.float().chunk(2, dim=-1)
    return silu_and_mul(torch.cat((gate.clamp(max=SILU_LIMIT), up.clamp(-SILU_LIMIT, SILU_LIMIT)), -1)).to(x.dtype)


def gelu_tanh_and_mul(x: torch.Tensor) -> torch.Tensor:
    """x [T, 2 * I] -> gelu_tanh(x[:, :I]) * x[:, I:], [T, I]."""
    gate, up = x.float().chunk(2, dim=-1)
    return (wide_gelu(gate) * up).to(x.dtype)


def activate(x: torch.Tensor, above: torch.Tensor | None, below: torch.Tensor | None, activation: str) -> torch.Tensor:
    """The activation of x [T, I], [T, I]: "gelu_tanh" (Hendrycks and Gimpel, arXiv 1606.08415, also called gelu_new), "gelu",
    "relu2", "xielu" (arXiv 2411.13010) with slopes of float32 [1] above 0 and below; of "gated_gelu" [T, I / 2].

    Powers are made in float64 and rounded once, for the reason that models/layers/rope.py gives.
    """
    if activation == "relu2":
        return x.relu().square()
    if activation == "gelu":
        return gelu(x)
    if activation == "gated_gelu":
        widened, gate = x.chunk(2, dim=1)
        return gelu(widened) * gate
    if activation == "gelu_tanh":
        return wide_gelu(x.float()).to(x.dtype)
    assert above is not None and below is not None
    above, below = (slope.double().exp().log1p() for slope in (above, below))
    wide = x.double()
    curved = (wide.clamp(max=XIELU_EPS).expm1() - wide) * (below + XIELU_BETA)
    return (curved.where(wide <= 0, wide.square() * above) + wide * XIELU_BETA).to(x.dtype)


def gelu(x: torch.Tensor) -> torch.Tensor:
    """x [T, I] times the share of a normal distribution below it, of a few rows at a time, which stay in a cache."""
    found, count = x.new_empty(x.shape), max(1, WIDE_NUMBERS // x.shape[1])
    for rows, target in zip(x.split(count), found.split(count)):
        wide = rows.double()
        target.copy_((wide * 0.5**0.5).erf_().add_(1).mul_(wide).div_(2))
    return found


def gate_by(x: torch.Tensor, gates: torch.Tensor) -> torch.Tensor:
    """x [T, I] times the sigmoid of gates [T, I] or [T, 1], spelled out for the reason given at `silu_and_mul`."""
    return (x.float() / gates.float().neg_().exp_().add_(1.0)).to(x.dtype)


def soft_cap(x: torch.Tensor, cap: float) -> torch.Tensor:
    """cap * tanh(x / cap) of x [S, V] float32, which is used up where the device can."""
    return x.div(cap).tanh_().mul_(cap)


def wide_gelu(x: torch.Tensor) -> torch.Tensor:
    """x * (1 + tanh(y / 2)) / 2 with y = GELU_SCALE * (x + GELU_CUBIC * x^3), as x * sigmoid(y), which it equals.

    Spelled out for the reason given at `silu_and_mul`.
    """
    inner = (x * x * x).mul_(GELU_CUBIC).add_(x).mul_(GELU_SCALE)
    return x / inner.neg_().exp_().add_(1.0)


def rotary_kv_write(qkv: torch.Tensor, write: RotaryWrite) -> torch.Tensor:
    """Split qkv [T, (heads + 2 * kv_heads) * D], norm and turn queries and keys, store keys and values.

    Returns the query [T, heads, D] in qkv's dtype, which may be a view of qkv or of new memory; qkv itself may be
    changed and is not to be used after. The caches give the number of heads; scales are as in `kv_write`.
    """
    kv_heads, head_dim = write.key_cache.shape[1], mxint8.head_dim_of(write.key_cache)
    heads = qkv.shape[1] // head_dim - 2 * kv_heads
    split: tuple[torch.Tensor, ...] = qkv.view(-1, heads + 2 * kv_heads, head_dim).split((heads, kv_heads, kv_heads), dim=1)
    query, key, value = split
    if write.q_norm is not None:
        query = rms_norm(query, write.q_norm, write.eps)
    if write.k_norm is not None:
        key = rms_norm(key, write.k_norm, write.eps)
    if write.cosine is not None and write.sine is not None:
        query, key = rotary(query, key, write.cosine, write.sine)
    kv_write(key, value, write.key_cache, write.value_cache, write.slots, write.key_scale, write.value_scale)
    return query


def rotary(
    query: torch.Tensor, key: torch.Tensor, cosine: torch.Tensor, sine: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Turn query [T, heads, D] and key [T, kv_heads, D] by angles whose cosine and sine are float32 [T, R / 2].

    Halves, not neighbours, form a pair: (x[i], x[i + R / 2]), the order of Hugging Face checkpoints. Channels from R
    on stay as they are.
    """
    cosine, sine = cosine.unsqueeze(1), sine.unsqueeze(1)
    return turn(query, cosine, sine), turn(key, cosine, sine)


def turn(x: torch.Tensor, cosine: torch.Tensor, sine: torch.Tensor) -> torch.Tensor:
    """Rotate the pairs of x [T, heads, D] by [T, 1, R / 2] cosines and sines."""
    width = 2 * cosine.shape[-1]
    first, second = x[..., :width].float().chunk(2, dim=-1)
    turned = torch.cat((first * cosine - second * sine, second * cosine + first * sine), dim=-1).to(x.dtype)
    return turned if width == x.shape[-1] else torch.cat((turned, x[..., width:]), dim=-1)


def kv_write(
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slots: torch.Tensor,
    key_scale: float = 1.0,
    value_scale: float = 1.0,
) -> None:
    """Put key and value [T, kv_heads, D] at slots int64 [T] of both [page_count, kv_heads, block_size, D] caches.

    A slot is block * block_size + offset. In place; slots must be distinct. Caches of float8_e4m3fn keep keys and values
    divided by the scales, what is then too large as their largest number; caches of int8 keep them as mxint8.py has them.
    """
    block_size = key_cache.shape[2]
    blocks = torch.div(slots, block_size, rounding_mode="floor")
    offsets = slots - blocks * block_size
    for cache, given, scale in ((key_cache, key, key_scale), (value_cache, value, value_scale)):
        if cache.dtype is FP8:
            narrow = (given.float() / scale).clamp(-FP8_MAX, FP8_MAX).to(FP8)
            cache.view(torch.uint8)[blocks, :, offsets] = narrow.view(torch.uint8)
        else:
            cache[blocks, :, offsets] = mxint8.pack(given) if cache.dtype is torch.int8 else given.to(cache.dtype)


def rows(table: PlainWeight | torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Rows `ids` int64 [N] of a table [V, H] -> [N, H] of its dtype."""
    return table.index_select(0, ids) if isinstance(table, torch.Tensor) else table.rows(ids)


def embedding_rows(table: PlainWeight | torch.Tensor, ids: torch.Tensor, first: int) -> torch.Tensor:
    """[N, H]: rows `ids` int64 [N], counted from `first`, of a table [V, H]; zeros for ids outside it."""
    local = ids - first
    outside = (local < 0) | (local >= table.shape[0])
    return rows(table, local.masked_fill(outside, 0)).masked_fill_(outside[:, None], 0.0)
