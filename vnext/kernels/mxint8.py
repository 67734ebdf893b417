"""MXINT8: rows of 8-bit numbers that share a power of two in blocks of 32, of the Open Compute Project's Microscaling Formats
(MX) Specification v1.0.

Owns the plain implementation of the rows that an int8 cache holds. A number is code * 2^(exponent - 127 - 6): seven bits and a
sign, exact in bfloat16 and float32. A row of D numbers is D codes and the exponents behind them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from vnext.kernels.arrays import Array, is_int8

if TYPE_CHECKING:
    import torch

BLOCK = 32
"""Numbers that share an exponent."""
CODE_BITS = 6
"""Bits of a code behind the point."""
LEAST_EXPONENT = -100
"""Numbers far below 2 to this become zero."""


def packed_width(head_dim: int) -> int:
    """Bytes of a row of `head_dim` numbers."""
    return head_dim + (head_dim + BLOCK - 1) // BLOCK


def head_dim_of(cache: Array) -> int:
    """How many numbers a row [..., W] of a cache of any dtype holds."""
    width: int = cache.shape[-1]
    return width - (width + BLOCK) // (BLOCK + 1) if is_int8(cache.dtype) else width


def pack(x: torch.Tensor) -> torch.Tensor:
    """x [..., D] float -> int8 [..., packed_width(D)]: rounded to the nearest, ties to even. What is out of range is +-127, a
    NaN -127."""
    import torch  # a cache's width is asked for without

    head_dim, blocks = x.shape[-1], packed_width(x.shape[-1]) - x.shape[-1]
    padded = torch.nn.functional.pad(x.float(), (0, blocks * BLOCK - head_dim)).unflatten(-1, (blocks, BLOCK))
    largest = padded.abs().nan_to_num(nan=0.0).amax(-1)
    exponents = (torch.frexp(largest)[1] - 1).masked_fill(largest == 0, LEAST_EXPONENT).clamp(LEAST_EXPONENT, 127)
    scaled = torch.ldexp(padded, (CODE_BITS - exponents)[..., None]).nan_to_num(nan=-127.0)
    codes = scaled.clamp(-127, 127).round().to(torch.int8).flatten(-2)[..., :head_dim]
    return torch.cat((codes, (exponents + 127).to(torch.uint8).view(torch.int8)), dim=-1)


def unpack(rows: torch.Tensor, head_dim: int) -> torch.Tensor:
    """int8 [..., W] -> float32 [..., head_dim], exact."""
    import torch

    exponents = rows[..., head_dim:].contiguous().view(torch.uint8).int() - (127 + CODE_BITS)
    return torch.ldexp(rows[..., :head_dim].float(), exponents.repeat_interleave(BLOCK, dim=-1)[..., :head_dim])
