"""Collectives: how the ranks of one engine add and join their tensors.

Owns the process group of this rank. The sum is taken in float32 and has the same bits on every rank, because every rank
decides by itself what it sampled. Knows no models.
"""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from vnext.models.sharding import Parallel, alone

TIMEOUT = timedelta(minutes=5)


def join_group(rank: int, world_size: int, rendezvous: Path) -> Parallel:
    """Meet the other ranks at the file `rendezvous` (fresh for each start) and return this rank's collectives (gloo)."""
    if world_size == 1:
        return alone()
    store = dist.FileStore(str(rendezvous), world_size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=TIMEOUT)
    return Parallel(rank=rank, world_size=world_size, all_reduce=all_reduce, all_gather=all_gather)


def all_reduce(tensor: torch.Tensor) -> torch.Tensor:
    """The sum over ranks, in the tensor's dtype."""
    total = tensor.float() if tensor.dtype in (torch.bfloat16, torch.float16) else tensor.contiguous()
    dist.all_reduce(total)
    return total.to(tensor.dtype)


def all_gather(tensor: torch.Tensor, dim: int) -> torch.Tensor:
    """The ranks' tensors (equal shapes) joined along `dim` in rank order."""
    parts = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, tensor.contiguous())
    return torch.cat(parts, dim=dim)


def leave_group() -> None:
    """End the process group, if one was joined."""
    if dist.is_initialized():
        dist.destroy_process_group()
