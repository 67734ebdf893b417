"""Collectives: how the ranks of one engine add and join their tensors.

Owns what a group is and the choice between the forms, the same on every rank; group.py joins one. On a CPU: shared memory
(shared_group.py), gloo where any rank cannot have that. On GPUs: memory that they map of each other (device_group.py) and
NCCL (spread_group.py), of which device_choice.py takes what there is. A sum is taken in rank order in float32 and rounded
once: the same bits on every rank and in every form, because every rank decides by itself what it sampled. Knows no models.
"""

from __future__ import annotations

import logging
from datetime import timedelta
from typing import Protocol

import torch
import torch.distributed as dist

from vnext.runtime import exchange_memory
from vnext.runtime.exchange_memory import Exchange, ExchangeFile
from vnext.runtime.shared_group import CAPACITY_BYTES_DEFAULT, SharedGroup, default_one_shot_bytes_max

TIMEOUT = timedelta(minutes=5)


class Group(Protocol):
    """One rank's collectives; every rank calls the same ones in the same order with equal shapes."""

    can_capture: bool
    """Whether they may be part of a device's graph: they ask the host for nothing, and a replay meets the others' replays."""

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        """The sum over ranks, in the tensor's dtype; the argument may be changed in place."""

    def all_gather(self, tensor: torch.Tensor, dim: int) -> torch.Tensor:
        """The ranks' tensors joined along `dim` in rank order."""

    def require_whole(self) -> None:
        """Raise RankLost or ValueError where a rank did not come to what was asked for so far, whose results then mean
        nothing. To be called once a device has done its work; on a CPU the collectives themselves have raised."""

    def close(self) -> None:
        """Leave the group. Idempotent."""


class GlooGroup:
    """The plain form: everything is gathered over loopback sockets, sums are taken here."""

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


def choose_group(store: dist.Store, rank: int, world_size: int) -> Group:
    """Shared memory if every rank has it, else gloo: all ranks tell each other before any of them chooses."""
    file, name = _make_file(world_size) if rank == 0 else (None, "")
    if rank == 0:
        store.set("exchange", name)
    exchange, reason = _map_exchange(store.get("exchange").decode(), rank)
    reasons = tell_all(store, "exchange", rank, world_size, reason)
    if file is not None:
        file.unlink()  # everybody has it mapped, or nobody will
    if not any(reasons):
        return SharedGroup(exchange, rank)
    if exchange is not None:
        exchange.close()
    if rank == 0:
        logging.getLogger(__name__).warning("the ranks exchange tensors over gloo: %s", next(filter(None, reasons)))
    return GlooGroup(dist.PrefixStore("gloo", store), rank, world_size)


def tell_all(store: dist.Store, topic: str, rank: int, world_size: int, word: str) -> list[str]:
    """What every rank says of a topic, in rank order, once all of them have said it."""
    store.set(f"{topic} of rank {rank}", word)
    return [store.get(f"{topic} of rank {each}").decode() for each in range(world_size)]


def describe() -> str:
    """What serves several ranks on this machine's CPU, for people; device_choice.describe says it of GPUs."""
    form = exchange_memory.implementation()
    sizes = f"one-shot to {default_one_shot_bytes_max(2) // 1024} KiB, two-shot above"
    return f"shared memory, {form}: {sizes}; sums in rank order in float32; gloo where it cannot be had"


def _make_file(world_size: int) -> tuple[ExchangeFile | None, str]:
    """The file and its name; a reason after "-" for none."""
    try:
        file = ExchangeFile(world_size, CAPACITY_BYTES_DEFAULT, default_one_shot_bytes_max(world_size))
    except (OSError, ValueError) as error:
        return None, f"-{error}"
    return file, file.name


def _map_exchange(name: str, rank: int) -> tuple[Exchange | None, str]:
    """The mapping and "", or None and the reason."""
    if name.startswith("-"):
        return None, name[1:]
    try:
        return Exchange(name, rank), ""
    except (OSError, ValueError) as error:
        return None, f"rank {rank}: {error}"


def _gathered(tensor: torch.Tensor) -> list[torch.Tensor]:
    """Copies of every rank's tensor, contiguous, in rank order."""
    parts = [torch.empty_like(tensor, memory_format=torch.contiguous_format) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, tensor.contiguous())
    return parts
