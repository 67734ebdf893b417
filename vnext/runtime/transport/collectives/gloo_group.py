"""Collectives over gloo: the plain implementation, for ranks without shared memory, also on several hosts."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from vnext.kernels.shards import joined
from vnext.runtime.transport.collectives.errors import RankLost
from vnext.runtime.transport.collectives.meeting import TIMEOUT

if TYPE_CHECKING:
    from torch.distributed import Store


class GlooGroup:
    """Gathers everything over sockets and sums here; see cpu_collectives.Group."""

    can_capture = False
    beside_bytes_min = sys.maxsize  # only what was measured (split_products.py) goes beside the work

    def __init__(self, store: Store, rank: int, world_size: int, address: str = "127.0.0.1") -> None:
        """`address`: where the other ranks reach this one."""
        gloo: Any = dist.ProcessGroupGloo  # torch publishes no types of what a group is made with
        options = gloo._Options()
        options._timeout = TIMEOUT
        options._devices = [gloo.create_device(hostname=address)]
        self._world_size = world_size
        self._group: Any = gloo(store, rank, world_size, options)

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        """See Group. Raises RankLost."""
        return self.begin_all_reduce(tensor)()

    def begin_all_reduce(self, tensor: torch.Tensor) -> Callable[[], torch.Tensor]:
        """See sharding.Parallel: gloo's own threads send and receive until the end, which adds the parts. Raises RankLost."""
        received = self._begin(tensor)
        return lambda: joined([part.float() for part in received()]).to(tensor.dtype)

    def all_gather(self, tensor: torch.Tensor, dim: int) -> torch.Tensor:
        """See Group. Raises RankLost."""
        return torch.cat(self._begin(tensor)(), dim=dim)

    def require_whole(self) -> None:
        """Does nothing: the collectives themselves have raised any error."""

    def close(self) -> None:
        self._group = None

    def _begin(self, tensor: torch.Tensor) -> Callable[[], list[torch.Tensor]]:
        """Begin to gather every rank's tensor. The end gives copies of them, contiguous, in rank order."""
        parts = [torch.empty_like(tensor, memory_format=torch.contiguous_format) for _ in range(self._world_size)]
        with _naming_the_lost():
            work = self._group.allgather([parts], [tensor.contiguous()])

        def end() -> list[torch.Tensor]:
            with _naming_the_lost():
                work.wait()
            return parts

        return end


@contextmanager
def _naming_the_lost() -> Iterator[None]:
    """gloo's errors as RankLost."""
    try:
        yield
    except RuntimeError as error:
        raise RankLost(f"another rank has ended or cannot be reached ({str(error).partition('. ')[0]})") from error


def store_of_hosts(store: str, rank: int, world_size: int) -> Store:
    """Where the ranks of several hosts meet: rank 0 serves it at `store`, as address:port. Raises RankLost."""
    host, _, port = store.rpartition(":")
    try:
        return dist.TCPStore(host, int(port), world_size, rank == 0, timeout=TIMEOUT, wait_for_workers=False)
    except RuntimeError as error:  # torch's DistNetworkError is one
        raise RankLost(f"the ranks did not meet at {store} ({str(error).partition('. ')[0]})") from error


def group_of_hosts(store: str, address: str, rank: int, world_size: int) -> GlooGroup:
    """The ranks of several hosts; they meet at rank 0's `store`, as address:port. Raises RankLost."""
    met = store_of_hosts(store, rank, world_size)
    try:
        return GlooGroup(dist.PrefixStore("gloo", met), rank, world_size, address)
    except RuntimeError as error:
        raise RankLost(f"the ranks did not meet at {store} ({str(error).partition('. ')[0]})") from error
