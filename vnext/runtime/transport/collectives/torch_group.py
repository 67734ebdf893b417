"""Collectives over torch.distributed for large tensors: NCCL between GPUs, gloo in tests.

Owns how such a library's operations form a sum by one tree (kernels/shards.py); the library's own sums have another order for
each size and number of ranks. Every rank receives the parts of its share, adds them, and sends its share to all. As many bytes
cross as in the library's own ring: twice (ranks - 1) / ranks of the tensor.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist

from vnext.kernels.shards import joined


class TorchGroup:
    """One rank's collectives (see collectives.Group) over the initialised process group."""

    can_capture = True  # NCCL's launches are ordinary nodes of a graph

    def __init__(self) -> None:
        self._world_size = dist.get_world_size()
        self._side: torch.cuda.Stream | None = None

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        """See collectives.Group."""
        flat = tensor.contiguous().view(-1)
        share = -(-flat.shape[0] // self._world_size)
        padded = torch.nn.functional.pad(flat, (0, share * self._world_size - flat.shape[0]))
        parts = torch.empty_like(padded)
        dist.all_to_all_single(parts, padded)
        total = joined([part.float() for part in parts.view(self._world_size, share)])
        whole = torch.empty_like(padded)
        dist.all_gather_into_tensor(whole, total.to(tensor.dtype))
        return whole[: flat.shape[0]].view(tensor.shape)

    def begin_all_reduce(self, tensor: torch.Tensor) -> Callable[[], torch.Tensor]:
        """See sharding.Parallel; on a stream of its own if the tensor is a GPU's."""
        if tensor.device.type != "cuda":
            total = self.all_reduce(tensor)
            return lambda: total
        if self._side is None:
            self._side = torch.cuda.Stream(tensor.device)
        here, side = torch.cuda.current_stream(tensor.device), self._side
        side.wait_stream(here)
        with torch.cuda.stream(side):
            total = self.all_reduce(tensor)
        tensor.record_stream(side)
        done = side.record_event()

        def end() -> torch.Tensor:
            here.wait_event(done)
            total.record_stream(here)
            return total

        return end

    def all_gather(self, tensor: torch.Tensor, dim: int) -> torch.Tensor:
        """See collectives.Group."""
        dim = dim % tensor.dim()
        parts = tensor.new_empty((self._world_size * tensor.numel(),))
        dist.all_gather_into_tensor(parts, tensor.contiguous().view(-1))
        return parts.view(self._world_size, *tensor.shape).movedim(0, dim).flatten(dim, dim + 1)

    def require_whole(self) -> None:
        """Does nothing: errors are raised where they happen; the library reports a lost rank when its own timeout ends."""

    def close(self) -> None:
        """Leave the group. Idempotent."""
        if dist.is_initialized():
            dist.destroy_process_group()
