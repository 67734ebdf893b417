"""The ranks of bench_collectives.py: groups of one form that meet at a file, and processes that take part in each case."""

from __future__ import annotations

import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from vnext.runtime import collectives, futex
from vnext.runtime.collectives import GlooGroup, Group
from vnext.runtime.exchange_memory import Exchange, ExchangeFile
from vnext.runtime.shared_group import CAPACITY_BYTES_DEFAULT, SharedGroup

TIMEOUT = timedelta(seconds=60)
ONE_SHOT_BYTES_MAX = {"one-shot": 2**60, "two-shot": 0, "plain": 2**14}


class GlooAllReduce(GlooGroup):
    """What vnext used before it had shared memory: gloo's own sum, in float32."""

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        total = tensor.float() if tensor.dtype in (torch.bfloat16, torch.float16) else tensor
        dist.all_reduce(total)
        return total.to(tensor.dtype)


def join(form: str, rendezvous: Path, rank: int, world_size: int) -> Group:
    store = dist.FileStore(str(rendezvous), world_size)
    store.set_timeout(TIMEOUT)
    if form.startswith("gloo"):
        return (GlooGroup if form == "gloo" else GlooAllReduce)(store, rank, world_size)
    if form == "chosen":
        return collectives.choose_group(store, rank, world_size)
    file = ExchangeFile(world_size, CAPACITY_BYTES_DEFAULT, ONE_SHOT_BYTES_MAX[form]) if rank == 0 else None
    if file is not None:
        store.set("name", file.name)
    waits = futex.choose_wait_method() if form == "plain" else None
    exchange = Exchange(store.get("name").decode(), rank, waits)
    if store.add("mapped", 1) == world_size:
        store.set("all", "mapped")
    store.wait(["all"])
    if file is not None:
        file.unlink()
    return SharedGroup(exchange, rank)


def take_part(rank: int) -> None:
    """A line on stdin is a case: form, rendezvous, world size, operation, how often, dtype, shape. Until stdin ends."""
    torch.set_num_threads(1)
    for line in sys.stdin:
        form, rendezvous, world_size, operation, count, dtype, *shape = line.split()
        group = join(form, Path(rendezvous), rank, int(world_size))
        tensor = torch.zeros([int(length) for length in shape], dtype=getattr(torch, dtype))
        for _ in range(int(count)):
            group.all_reduce(tensor) if operation == "all_reduce" else group.all_gather(tensor, 1)
        group.close()
        print("done", flush=True)


if __name__ == "__main__":
    take_part(int(sys.argv[1]))
