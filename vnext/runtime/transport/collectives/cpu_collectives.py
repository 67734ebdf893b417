"""Collectives: how the ranks of one engine sum and join their tensors.

Owns the interface of a group and the choice of its implementation, the same on every rank; group.py joins a group. On a CPU:
shared memory (shared_group.py), or gloo (gloo_group.py) if any rank cannot have that. On GPUs: memory that they map of each other
(device_group.py) and NCCL (TorchGroup); choose_collectives.py takes what is available. A sum is taken by one tree
(kernels/shards.py) in float32 and rounded once: the same bits on every rank and in every implementation, since each rank samples
by itself.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

from vnext.base.spelling import reason
from vnext.runtime.transport.collectives import shared_group
from vnext.runtime.transport.collectives.meeting import Words, tell_all
from vnext.runtime.transport.collectives.shared_group import (
    CAPACITY_BYTES_DEFAULT,
    Exchange,
    ExchangeFile,
    SharedGroup,
    default_one_shot_bytes_max,
)

if TYPE_CHECKING:
    from types import ModuleType

    import torch
    from torch.distributed import Store


class Group(Protocol):
    """One rank's collectives; every rank calls the same ones in the same order with equal shapes."""

    can_capture: bool
    """Whether a device graph may contain them: they ask the host for nothing, and a replay meets the other ranks' replays."""

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        """The sum over ranks, in the tensor's dtype; the argument may be changed in place."""

    def all_gather(self, tensor: torch.Tensor, dim: int) -> torch.Tensor:
        """The ranks' tensors joined along `dim` in rank order."""

    def require_whole(self) -> None:
        """Raise RankLost or ValueError if a rank missed one of the operations requested so far; their results are then
        meaningless. Call it once a device has done its work; on a CPU the collectives themselves raise."""

    def close(self) -> None:
        """Leave the group. Idempotent."""


def choose_group(words: Words, rank: int, world_size: int, open_store: Callable[[], Store]) -> Group:
    """Shared memory if every rank has it, else gloo, for which `open_store` is called. All ranks report to each other before any of
    them chooses."""
    file, name = _make_file(world_size) if rank == 0 else (None, "")
    if rank == 0:
        words.set("exchange", name)
    exchange, reason = _map_exchange(words.get("exchange").decode(), rank)
    reasons = tell_all(words, "exchange", rank, world_size, reason)
    if file is not None:
        file.unlink()  # every rank has mapped it, or none will
    if exchange is not None and not any(reasons):
        return SharedGroup(exchange, rank)
    if exchange is not None:
        exchange.close()
    if rank == 0:
        logging.getLogger(__name__).warning("the ranks exchange tensors over gloo: %s", next(filter(None, reasons)))
    group: Group = _gloo().GlooGroup(open_store(), rank, world_size)
    return group


def group_of_hosts(store: str, address: str, rank: int, world_size: int) -> Group:
    """The group of ranks on several hosts, which meet at `store`; this one is reached at `address`. Raises RankLost."""
    group: Group = _gloo().group_of_hosts(store, address, rank, world_size)
    return group


def _gloo() -> ModuleType:
    from vnext.runtime.transport.collectives import gloo_group  # torch, which shared memory does without

    return gloo_group


def describe() -> str:
    """The collectives that serve several ranks on this machine's CPU, for people; choose_collectives.describe covers GPUs."""
    form = shared_group.implementation()
    sizes = f"one-shot to {default_one_shot_bytes_max(2) // 1024} KiB, two-shot above"
    split = "products split beside their sums where a start measures that it pays"
    return f"shared memory, {form}: {sizes}; sums by one tree in float32; gloo without shared memory, {split}"


def _make_file(world_size: int) -> tuple[ExchangeFile | None, str]:
    """The file and its name; None and a reason after "-" if it cannot be made."""
    try:
        file = ExchangeFile(world_size, CAPACITY_BYTES_DEFAULT, default_one_shot_bytes_max(world_size))
    except (OSError, ValueError) as error:
        return None, f"-{reason(error)}"
    return file, file.name


def _map_exchange(name: str, rank: int) -> tuple[Exchange | None, str]:
    """The mapping and "", or None and the reason."""
    if name.startswith("-"):
        return None, name[1:]
    try:
        return Exchange(name, rank), ""
    except (OSError, ValueError) as error:
        return None, f"rank {rank}: {reason(error)}"
