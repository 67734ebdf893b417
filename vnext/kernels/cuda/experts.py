"""Experts without the host: one product of each kind for all of them, whose parts the device counts itself.

Owns what torch's grouped product serves, and its call. Nothing waits for the device, so steps of such models can be captured.
What it does not serve is the reference's, which cuts the products on the host.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional

from vnext.kernels import products

SERVED = torch.bfloat16
ALIGNED_COUNT = 8
"""Elements of 16 bytes, of which rows are made."""
MAJORS = (9, 10)
"""Of the compute capability. On all others torch cuts the product on the host, which a capture cannot hold."""


def serves(dtype: torch.dtype, hidden: int, wide: int) -> bool:
    """Whether experts of these sizes (their inputs and inner outputs on this rank) are multiplied without the host."""
    aligned = hidden % ALIGNED_COUNT == 0 and wide % ALIGNED_COUNT == 0 and hasattr(functional, "grouped_mm")
    return aligned and dtype is SERVED and (not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] in MAJORS)


def experts(
    gate: Callable[[torch.Tensor, str], torch.Tensor],
    x: torch.Tensor,
    shares: torch.Tensor,
    ids: torch.Tensor,
    gate_up: Any,
    down: Any,
    activation: str,
    join: products.Change | None = None,
) -> torch.Tensor:
    """As products.experts; `gate` [N, 2 * I] -> [N, I] by an activation."""
    plain = isinstance(gate_up, torch.Tensor) and isinstance(down, torch.Tensor) and join is None
    if not plain or not serves(x.dtype, x.shape[1], down.shape[2]) or not x.shape[0]:
        return products.experts(x, shares, ids, gate_up, down, activation, join)
    sorted_ids, order = ids.reshape(-1).sort(stable=True)
    numbers = torch.arange(gate_up.shape[0], device=x.device)
    ends = torch.searchsorted(sorted_ids, numbers, right=True).int()  # of each expert's rows
    sorted_x = x.index_select(0, torch.div(order, ids.shape[1], rounding_mode="floor"))
    widened = functional.grouped_mm(sorted_x, gate_up.transpose(1, 2), offs=ends)
    multiplied = functional.grouped_mm(gate(widened, activation), down.transpose(1, 2), offs=ends)
    return products.sum_of_shares(multiplied, order, shares, x.dtype)
