"""One rank of `vnext-bench allreduce`: `python -m vnext.commands.bench.all_reduce_ranks RANK RANKS DEVICE FOLDER ROUNDS KIB...`

Ranks meet in the folder, join a group for each form and run the same cases in the same order. Rank 0 prints, for each size, the
seconds of one operation by form as a line of JSON. Forms take turns within a round, so that what disturbs one disturbs all.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from statistics import median

import msgspec
import torch
import torch.distributed as dist
from msgspec.structs import replace

from vnext.commands.bench.all_reduce import KIB, LIBRARY, ONE_SHOT, TWO_SHOT
from vnext.runtime.transport.collectives.choose_collectives import MakeMemory, choose_device_group
from vnext.runtime.transport.collectives.cpu_collectives import choose_group
from vnext.runtime.transport.collectives.device_group import DeviceGroup, default_limits
from vnext.runtime.transport.collectives.device_memory import IpcMemory
from vnext.runtime.transport.collectives.gloo_group import GlooGroup
from vnext.runtime.transport.collectives.meeting import Meeting, tell_all
from vnext.runtime.transport.collectives.shared_group import CAPACITY_BYTES_DEFAULT, Exchange, ExchangeFile, SharedGroup

NO_BOUND = 2**60
BYTES_A_ROUND = 2**21
"""Small tensors are added several times a round."""
LAUNCHES_MAX, WARM_UPS = 100, 2
Sum = Callable[[torch.Tensor], torch.Tensor]


def main() -> None:
    """Take part in every case."""
    rank, ranks, device, folder, rounds, *sizes = sys.argv[1:]
    torch.set_num_threads(1)
    meeting, place = Meeting(Path(folder)), torch.device(device)
    if place.type == "cuda":
        place = torch.device("cuda", int(rank))
        torch.cuda.set_device(place)
        forms = device_forms(meeting, int(rank), int(ranks), place)
    else:
        forms = host_forms(meeting, int(rank), int(ranks))
    for kib in map(int, sizes):
        tensor = torch.ones(kib * KIB // 2, dtype=torch.bfloat16, device=place)
        for name, add in forms.items():
            if not bool((add(tensor.clone()) == int(ranks)).all()):
                raise ArithmeticError(f"{name} adds {kib} KiB of {ranks} ranks wrongly")
        seconds = measured(forms, tensor.zero_(), int(rounds))
        if rank == "0":
            print(msgspec.json.encode({"kib": kib} | seconds).decode(), flush=True)


def measured(forms: Mapping[str, Sum], tensor: torch.Tensor, rounds: int) -> dict[str, float]:
    """The median seconds of an operation by form."""
    launches = max(1, min(LAUNCHES_MAX, BYTES_A_ROUND // tensor.nbytes))
    spent: dict[str, list[float]] = {name: [] for name in forms}
    for _ in range(WARM_UPS + rounds):
        for name, add in forms.items():
            settle(tensor)
            begin_s = time.perf_counter()
            for _ in range(launches):
                add(tensor)
            settle(tensor)
            spent[name].append((time.perf_counter() - begin_s) / launches)
    return {name: median(each[WARM_UPS:]) for name, each in spent.items()}


def settle(tensor: torch.Tensor) -> None:
    """Wait until a GPU has done its work."""
    if tensor.is_cuda:
        torch.cuda.synchronize()


# ---- on a CPU ------------------------------------------------------------------------------------------------------


class GlooSum(GlooGroup):
    """gloo's own sum, in float32 as ours."""

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        """As Group's."""
        total = tensor.float()
        self._group.allreduce([total]).wait()
        return total.to(tensor.dtype)


def host_forms(meeting: Meeting, rank: int, ranks: int) -> dict[str, Sum]:
    """gloo, and the shared memory of this machine."""
    return {
        LIBRARY: GlooSum(meeting.torch_store("library", ranks), rank, ranks).all_reduce,
        ONE_SHOT: shared(meeting, ONE_SHOT, rank, ranks, CAPACITY_BYTES_DEFAULT).all_reduce,
        TWO_SHOT: shared(meeting, TWO_SHOT, rank, ranks, 0).all_reduce,
    }


def shared(meeting: Meeting, name: str, rank: int, ranks: int, one_shot_bytes_max: int) -> SharedGroup:
    """A group of its own memory, one-shot up to so many bytes."""
    file = ExchangeFile(ranks, CAPACITY_BYTES_DEFAULT, one_shot_bytes_max) if rank == 0 else None
    if file is not None:
        meeting.set(name, file.name)
    exchange = Exchange(meeting.get(name).decode(), rank)
    tell_all(meeting, f"{name} mapped", rank, ranks, "")
    if file is not None:
        file.unlink()
    return SharedGroup(exchange, rank)


# ---- between GPUs --------------------------------------------------------------------------------------------------


def device_forms(
    meeting: Meeting, rank: int, ranks: int, device: torch.device, make_memory: MakeMemory = IpcMemory
) -> dict[str, Sum]:
    """NCCL where there is one, and the kernels over mapped memory. Raises RuntimeError where GPUs map none of each other's."""
    store, limits = meeting.torch_store("device", ranks), default_limits(ranks)
    host = choose_group(store, rank, ranks, lambda: store)
    group = choose_device_group(store, rank, ranks, device, host, limits, make_memory)
    if not isinstance(group, DeviceGroup):
        raise RuntimeError("these GPUs do not map each other's memory: there is no one-shot to compare")

    device_group = group

    def bounded(one_shot_bytes_max: int, tensor: torch.Tensor) -> torch.Tensor:
        device_group.limits = replace(limits, one_shot_bytes_max=one_shot_bytes_max, ipc_bytes_max=NO_BOUND)
        total = device_group.all_reduce(tensor)
        settle(tensor)
        device_group.require_whole()
        return total

    def library(tensor: torch.Tensor) -> torch.Tensor:
        dist.all_reduce(tensor)
        settle(tensor)
        return tensor

    forms: dict[str, Sum] = {LIBRARY: library} if dist.is_initialized() else {}
    return forms | {ONE_SHOT: partial(bounded, NO_BOUND), TWO_SHOT: partial(bounded, 0)}


if __name__ == "__main__":
    main()
