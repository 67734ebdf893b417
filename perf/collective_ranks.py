"""The ranks of bench_collectives.py: groups of one implementation that meet at a file, and processes that run each case."""

from __future__ import annotations

import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from vnext.runtime.processes import futex
from vnext.runtime.transport.collectives import cpu_collectives
from vnext.runtime.transport.collectives.cpu_collectives import Group
from vnext.runtime.transport.collectives.exchange_memory import Exchange, ExchangeFile
from vnext.runtime.transport.collectives.gloo_group import GlooGroup
from vnext.runtime.transport.collectives.shared_group import CAPACITY_BYTES_DEFAULT, SharedGroup

TIMEOUT = timedelta(seconds=60)
ONE_SHOT_BYTES_MAX = {"one-shot": 2**60, "two-shot": 0, "plain": 2**14}


class GlooAllReduce(GlooGroup):
    """gloo's own sum in float32, which vnext used before it had shared memory."""

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        total = tensor.float() if tensor.dtype in (torch.bfloat16, torch.float16) else tensor
        self._group.allreduce([total]).wait()
        return total.to(tensor.dtype)


def join(form: str, rendezvous: Path, rank: int, world_size: int) -> Group:
    store = dist.FileStore(str(rendezvous), world_size)
    store.set_timeout(TIMEOUT)
    if form.startswith("gloo"):
        return (GlooGroup if form == "gloo" else GlooAllReduce)(store, rank, world_size)
    if form == "chosen":
        return cpu_collectives.choose_group(store, rank, world_size, lambda: store)
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
    """Run the cases on stdin, one per line: form, rendezvous, world size, operation, repeats, dtype, shape. Ends with stdin."""
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
