"""The choice of collectives between GPUs: memory that they map of each other, NCCL, or both; the same on every rank.

Owns the exchange of handles at start-up. All ranks report what they can do before any of them chooses. Where GPUs have neither,
tensors go through the host's memory, which is slow; a message says so.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from importlib.util import find_spec
from typing import TYPE_CHECKING

import msgspec
import torch
import torch.distributed as dist

from vnext.kernels.cuda.exchange import RANKS_MAX, memory_bytes
from vnext.runtime.transport.collectives.cpu_collectives import Group
from vnext.runtime.transport.collectives.device_group import DeviceGroup, Limits, default_limits, describe_limits
from vnext.runtime.transport.collectives.device_memory import DeviceMemory, IpcMemory
from vnext.runtime.transport.collectives.meeting import TIMEOUT, tell_all
from vnext.runtime.transport.collectives.shared_group import SharedGroup

if TYPE_CHECKING:
    from torch.distributed import Store


from vnext.kernels.shards import joined

MEMORY_ERRORS = (RuntimeError, OSError, ImportError, ValueError)  # CUDA's errors are RuntimeErrors

MakeMemory = Callable[[int], DeviceMemory]


class HostGroup:
    """The plain implementation: through the host's memory and the CPU's collectives, which it takes over."""

    can_capture = False

    def __init__(self, host: Group) -> None:
        self._host = host

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        return self._host.all_reduce(tensor.cpu()).to(tensor.device)

    def all_gather(self, tensor: torch.Tensor, dim: int) -> torch.Tensor:
        return self._host.all_gather(tensor.cpu(), dim).to(tensor.device)

    def require_whole(self) -> None:
        """See collectives.Group."""

    def close(self) -> None:
        self._host.close()


def choose_device_group(
    store: Store, rank: int, world_size: int, device: torch.device, host: Group, limits: Limits,
    make_memory: MakeMemory = IpcMemory,
) -> Group:  # fmt: skip
    """This rank's group for tensors on `device`, the current one. Rank 0's `limits` apply to all ranks. Takes over `host`, the
    ranks' group on the CPU."""
    if rank == 0:
        store.set("limits", msgspec.json.encode(limits).decode())
    limits = msgspec.json.decode(store.get("limits"), type=Limits)
    above = _nccl_group(store, rank, world_size, device, host)
    memory, addresses, reason = _map_memory(store, rank, world_size, host, limits, make_memory)
    if memory is not None and isinstance(host, SharedGroup):
        return DeviceGroup(memory, addresses, device, rank, host, limits, above)
    if rank == 0:
        way = "NCCL alone" if above is not None else "the host's memory, which is slow"
        logging.getLogger(__name__).warning("the GPUs exchange tensors over %s: %s", way, reason)
    if above is None:
        return HostGroup(host)
    host.close()
    return above


def describe() -> str:
    """The collectives that serve several GPUs on this machine, for people."""
    if not torch.cuda.is_available():
        return "none: torch sees no GPU"
    if find_spec("cupy") is None:
        return "NCCL alone: CuPy, which maps the memory of other GPUs, is missing" if _has_nccl() else "through the host"
    return describe_limits(default_limits(2), _has_nccl())


def _has_nccl() -> bool:
    return dist.is_available() and dist.is_nccl_available()


def _nccl_group(
    store: Store, rank: int, world_size: int, device: torch.device, host: Group
) -> TorchGroup | None:
    """NCCL where every rank has it and a GPU of its own: NCCL refuses two ranks on one GPU."""
    is_possible = device.type == "cuda" and _has_nccl() and isinstance(host, SharedGroup)
    own = str(torch.cuda.get_device_properties(device).uuid) if is_possible else ""
    found = tell_all(store, "GPU", rank, world_size, own)
    if not all(found) or len(set(found)) < world_size:
        return None
    here = torch.device("cuda", torch.cuda.current_device())
    nccl_store = dist.PrefixStore("nccl", store)
    dist.init_process_group("nccl", store=nccl_store, rank=rank, world_size=world_size, timeout=TIMEOUT, device_id=here)
    return TorchGroup()


def _map_memory(
    store: Store, rank: int, world_size: int, host: Group, limits: Limits, make_memory: MakeMemory
) -> tuple[DeviceMemory | None, list[int], str]:
    """(memory, every rank's address in it, "") on every rank, or (None, [], the first reason) on every rank."""
    memory, reported = _make_memory(world_size, host, limits, make_memory)
    handles = tell_all(store, "memory", rank, world_size, reported)
    reasons = [f"rank {each}: {word[1:]}" for each, word in enumerate(handles) if word.startswith("-")]
    if memory is None or reasons:
        if memory is not None:
            memory.close()
        return None, [], reasons[0]
    addresses, reason = _open_all(memory, rank, handles)
    if reasons := list(filter(None, tell_all(store, "mapping", rank, world_size, reason))):
        memory.close()
        return None, [], reasons[0]
    return memory, addresses, ""


def _make_memory(
    world_size: int, host: Group, limits: Limits, make_memory: MakeMemory
) -> tuple[DeviceMemory | None, str]:
    """The memory and its handle in hexadecimal, or None and the reason after "-"."""
    if not isinstance(host, SharedGroup):
        return None, "-the lives of ranks cannot be watched without shared memory"
    if world_size > RANKS_MAX:
        return None, f"-{world_size} ranks, and mapped memory serves up to {RANKS_MAX}"
    try:
        memory = make_memory(memory_bytes(limits.capacity_bytes))
    except MEMORY_ERRORS as error:
        return None, f"-{error}"
    return memory, memory.handle.hex()


def _open_all(memory: DeviceMemory, rank: int, handles: list[str]) -> tuple[list[int], str]:
    """Every rank's address here and "", or the addresses that could be opened and the reason."""
    addresses: list[int] = []
    for each, handle in enumerate(handles):
        try:
            addresses.append(memory.address if each == rank else memory.open(bytes.fromhex(handle)))
        except MEMORY_ERRORS as error:
            return addresses, f"rank {rank} cannot map the memory of rank {each}: {error}"
    return addresses, ""


# ---- over torch.distributed ----------------------------------------------------------------------------------------
# Collectives over torch.distributed for large tensors: NCCL between GPUs, gloo in tests.
# Owns how such a library's operations form a sum by one tree (kernels/shards.py); the library's own sums have another order for
# each size and number of ranks. Every rank receives the parts of its share, adds them, and sends its share to all. As many
# bytes cross as in the library's own ring: twice (ranks - 1) / ranks of the tensor.


class TorchGroup:
    """One rank's collectives (see collectives.Group) over the initialised process group."""

    can_capture = True  # NCCL's launches are ordinary nodes of a graph

    def __init__(self) -> None:
        self._world_size = dist.get_world_size()
        self._side: torch.cuda.Stream | None = None

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
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
