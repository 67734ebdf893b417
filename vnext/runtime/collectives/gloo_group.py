"""Collectives over gloo: the plain implementation, for ranks without shared memory."""

from __future__ import annotations

import torch
import torch.distributed as dist

from vnext.runtime.collectives.meeting import TIMEOUT


class GlooGroup:
    """Gathers everything over loopback sockets and sums here; see cpu_collectives.Group."""

    can_capture = False

    def __init__(self, store: dist.Store, rank: int, world_size: int) -> None:
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=TIMEOUT)

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        """See Group."""
        first, *others = _gathered(tensor)
        total = first.float()
        for part in others:
            total += part
        return total.to(tensor.dtype)

    def all_gather(self, tensor: torch.Tensor, dim: int) -> torch.Tensor:
        """See Group."""
        return torch.cat(_gathered(tensor), dim=dim)

    def require_whole(self) -> None:
        """See Group."""

    def close(self) -> None:
        """See Group."""
        if dist.is_initialized():
            dist.destroy_process_group()


def _gathered(tensor: torch.Tensor) -> list[torch.Tensor]:
    """Copies of every rank's tensor, contiguous, in rank order."""
    parts = [torch.empty_like(tensor, memory_format=torch.contiguous_format) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, tensor.contiguous())
    return parts
