"""Collectives: how the ranks of one engine add and join their tensors.

Owns this rank's group and the choice between two forms, the same on every rank: shared memory (shared_group.py), and
gloo where any rank cannot have that. A sum is taken in rank order in float32 and rounded once: the same bits on every
rank and in both forms, because every rank decides by itself what it sampled. Knows no models.
"""

from __future__ import annotations

import logging
from datetime import timedelta
from pathlib import Path
from typing import Protocol

import torch
import torch.distributed as dist

from vnext.models.sharding import Parallel, alone
from vnext.runtime import exchange_memory
from vnext.runtime.exchange_memory import Exchange, ExchangeFile
from vnext.runtime.shared_group import CAPACITY_BYTES_DEFAULT, SharedGroup, default_one_shot_bytes_max

TIMEOUT = timedelta(minutes=5)


class Group(Protocol):
    """One rank's collectives; every rank calls the same ones in the same order with equal shapes."""

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        """The sum over ranks, in the tensor's dtype; the argument may be changed in place."""

    def all_gather(self, tensor: torch.Tensor, dim: int) -> torch.Tensor:
        """The ranks' tensors joined along `dim` in rank order."""

    def close(self) -> None:
        """Leave the group. Idempotent."""


class GlooGroup:
    """The plain form: everything is gathered over loopback sockets, sums are taken here."""

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

    def close(self) -> None:
        """See Group."""
        if dist.is_initialized():
            dist.destroy_process_group()


_joined: list[Group] = []  # this process's group, as torch.distributed has one


def join_group(rank: int, world_size: int, rendezvous: Path) -> Parallel:
    """Meet the other ranks at the file `rendezvous` (fresh for each start) and return this rank's collectives."""
    if world_size == 1:
        return alone()
    store = dist.FileStore(str(rendezvous), world_size)
    store.set_timeout(TIMEOUT)
    group = choose_group(store, rank, world_size)
    _joined.append(group)
    return Parallel(rank=rank, world_size=world_size, all_reduce=group.all_reduce, all_gather=group.all_gather)


def leave_group() -> None:
    """End this process's group, if it joined one."""
    while _joined:
        _joined.pop().close()


def choose_group(store: dist.Store, rank: int, world_size: int) -> Group:
    """Shared memory if every rank has it, else gloo: all ranks tell each other before any of them chooses."""
    file, name = _make_file(world_size) if rank == 0 else (None, "")
    if rank == 0:
        store.set("exchange", name)
    exchange, reason = _map_exchange(store.get("exchange").decode(), rank)
    store.set(f"exchange of rank {rank}", reason)
    reasons = [store.get(f"exchange of rank {each}").decode() for each in range(world_size)]
    if file is not None:
        file.unlink()  # everybody has it mapped, or nobody will
    if not any(reasons):
        return SharedGroup(exchange, rank)
    if exchange is not None:
        exchange.close()
    if rank == 0:
        logging.getLogger(__name__).warning("the ranks exchange tensors over gloo: %s", next(filter(None, reasons)))
    return GlooGroup(dist.PrefixStore("gloo", store), rank, world_size)


def describe() -> str:
    """What serves several ranks on this machine, for people."""
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
