"""Shards: the parts of one size into which the inputs of a product may be cut, and the tree that adds the parts' sums.

How many shards a weight has is a matter of its model, never of the ranks (models/layers/sharding.py). A rank computes some
neighbouring ones and adds them by its lower part of the tree; the collectives add the ranks' sums by the upper part.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from vnext.kernels.arrays import Array

if TYPE_CHECKING:
    import torch

SHARDS_MAX = 8
"""Of a weight, as kernels.h has it."""


def joined(sums: Sequence[Array]) -> Array:
    """The total of at least one array of float32, all of one shape: by halves while their number is even, then in order.

    For 2^n arrays that is a binary tree; 2^m ranks that add by it what each has added of 2^(n - m) give the same bits.
    """
    count = len(sums)
    if count % 2 == 0:
        return joined(sums[: count // 2]) + joined(sums[count // 2 :])
    total = sums[0]
    for each in sums[1:]:
        total = total + each
    return total


def joined_along(x: torch.Tensor) -> torch.Tensor:
    """`joined` of the last dimension of x float32 [..., n] -> [...], with few operations."""
    odd = x.shape[-1]
    while odd % 2 == 0:
        odd //= 2
    first, *others = x.unflatten(-1, (-1, odd)).unbind(-1)
    for each in others:
        first = first + each
    while first.shape[-1] > 1:
        first = first[..., ::2] + first[..., 1::2]
    found: torch.Tensor = first[..., 0]
    return found


def largest(gates: torch.Tensor, cutoff: float, ranks: int, sums: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """What gates [T, I_local] have above a place, `cutoff` standard deviations of the gates of all ranks above their mean."""
    count, exact = gates.shape[1] * ranks, gates.float()
    mean = sums(joined_along(exact)[:, None]) / count
    variance = sums(joined_along((exact - mean).square())[:, None]) / count
    return (exact - mean - variance.sqrt() * cutoff).relu_().to(gates.dtype)


def shards_of(weight: Any) -> int:
    """Into how many shards a weight was packed."""
    return getattr(weight, "shards", 1)
