"""Collectives of GPUs: memory that they map of each other for small tensors, another group for large ones.

Owns the choice by size, which is the same on every rank, and the watch over the ranks. Kernels wait for each other on the GPU,
where no exception can be raised; so a thread cancels their waiting when a rank has ended, and `require_whole` raises the error
afterwards. The kernels are in cuda/all_reduce.cu; a sum in rank order has the same bits in every form, here as on a CPU.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Protocol

import msgspec
import torch

from vnext.kernels.cuda import operations
from vnext.kernels.cuda.exchange import SUMMED
from vnext.runtime.transport.collectives.device_memory import DeviceMemory, Watch
from vnext.runtime.transport.collectives.errors import RankLost
from vnext.runtime.transport.collectives.shared_group import LIVENESS_POLL_S, TIMEOUT_S, SharedGroup

CAPACITY_BYTES = 2 * 2**20
IPC_BYTES_MAX = 2 * 2**20  # not measured yet: above this another group takes over, if there is one
ONE_SHOT_BYTES_MAX = {2: 512 * 1024, 4: 256 * 1024, 8: 128 * 1024}  # not measured yet


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """Sizes in bytes at which one form gives way to the next. Rank 0's apply to all ranks."""

    capacity_bytes: int = CAPACITY_BYTES
    one_shot_bytes_max: int
    ipc_bytes_max: int = IPC_BYTES_MAX
    timeout_ms: int = int(TIMEOUT_S * 1000)


def default_limits(world_size: int, ipc_bytes_max: int | None = None) -> Limits:
    """Starting values that have not been measured on a GPU yet."""
    fitting = [size for ranks, size in ONE_SHOT_BYTES_MAX.items() if world_size <= ranks]
    most = IPC_BYTES_MAX if ipc_bytes_max is None else ipc_bytes_max
    return Limits(one_shot_bytes_max=fitting[0] if fitting else 0, ipc_bytes_max=most)


class Above(Protocol):
    """Takes tensors that are too large for mapped memory."""

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor: ...

    def begin_all_reduce(self, tensor: torch.Tensor) -> Callable[[], torch.Tensor]: ...

    def all_gather(self, tensor: torch.Tensor, dim: int) -> torch.Tensor: ...

    def close(self) -> None: ...


class DeviceGroup:
    """One rank's collectives (see collectives.Group) over mapped memory; without `above`, large tensors go in pieces.

    All of them run on one stream of the device. A result means nothing before a later `require_whole` has passed.
    """

    can_capture = True  # the device's memory counts operations, so a replayed graph keeps counting

    def __init__(
        self, memory: DeviceMemory, addresses: Sequence[int], device: torch.device, rank: int, host: SharedGroup,
        limits: Limits, above: Above | None = None,
    ) -> None:  # fmt: skip
        """`addresses` of every rank's memory for this device, in rank order. Takes over memory, host and above."""
        self._memory, self._host, self._above = memory, host, above
        self._watch = Watch(memory.watch_address)
        self._memories = torch.tensor([*addresses, memory.watch_address], dtype=torch.int64, device=device)
        self._rank = rank
        self.limits = limits  # change it only between operations and on every rank alike, as measurements of the forms do
        self._life_watch = LifeWatch(host.ended, self._watch.call_off)

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        """See collectives.Group; float32, bfloat16, float16."""
        if tensor.dtype not in SUMMED:
            raise TypeError(f"{tensor.dtype} is not added over ranks; there are: {', '.join(map(str, SUMMED))}")
        if self._above is not None and tensor.nbytes > self.limits.ipc_bytes_max:
            return self._above.all_reduce(tensor)
        limits = self.limits
        sizes = (limits.capacity_bytes, limits.one_shot_bytes_max, limits.timeout_ms)
        return operations.sum_over_ranks(tensor, self._memories, self._rank, *sizes)

    @property
    def begin_all_reduce(self) -> Callable[[torch.Tensor], Callable[[], torch.Tensor]] | None:
        """See sharding.Parallel. Mapped memory stays on one stream, so this covers only the other group's tensors."""
        return None if self._above is None else self._above.begin_all_reduce

    @property
    def beside_bytes_min(self) -> int:
        """See sharding.Parallel."""
        return self.limits.ipc_bytes_max + 1

    def all_gather(self, tensor: torch.Tensor, dim: int) -> torch.Tensor:
        if self._above is not None and tensor.nbytes > self.limits.ipc_bytes_max:
            return self._above.all_gather(tensor, dim)
        sizes = (self.limits.capacity_bytes, self.limits.timeout_ms)
        return operations.join_over_ranks(tensor, dim % tensor.dim(), self._memories, self._rank, *sizes)

    def require_whole(self) -> None:
        """See collectives.Group; call it after the device has done the work."""
        if differing := self._watch.differing():
            raise ValueError(f"the ranks are out of step: rank {differing[0]} came for another operation than rank {self._rank}")
        if missing := self._watch.missing():
            if ended := self._host.ended():  # may include ranks that gave up only because of another one
                whose = f"rank {ended[0]} has" if len(ended) == 1 else f"ranks {', '.join(map(str, ended))} have"
                raise RankLost(f"{whose} ended or left the group before all ranks had met")
            raise RankLost(f"rank {missing[0]} did not come within {self.limits.timeout_ms / 1e3:g} s; is it stuck?")

    def describe(self) -> str:
        """Forms and sizes, for people."""
        return describe_limits(self.limits, self._above is not None)

    def close(self) -> None:
        """Leave the group, together with the other ranks unless one is lost: they may still read this rank's memory."""
        if self._memory.address:
            self._life_watch.stop()
            self._memory.settle()
            if not self._watch.missing() and not self._watch.differing():
                self._part()
            self._memory.close()
        self._host.close()
        if self._above is not None:
            self._above.close()

    def _part(self) -> None:
        try:
            self._host.all_reduce(torch.zeros(1))
        except RankLost:  # that rank has ended, so it reads nothing any more
            return


class LifeWatch:
    """A thread that cancels the waiting once a rank has ended."""

    def __init__(self, ended: Callable[[], list[int]], call_off: Callable[[], None]) -> None:
        self._ended, self._call_off = ended, call_off
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="lives of ranks", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Stop looking: from now on ranks may end."""
        self._is_over.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._is_over.wait(LIVENESS_POLL_S):
            if self._ended():
                return self._call_off()


def describe_limits(limits: Limits, has_above: bool) -> str:
    """Forms and sizes, for people."""
    one, most = limits.one_shot_bytes_max // 1024, limits.ipc_bytes_max // 1024
    last = f"to {most} KiB, NCCL above" if has_above else "above, in pieces"
    return f"mapped memory, one-shot to {one} KiB, two-shot {last}; sums by one tree in float32; sizes not measured"
