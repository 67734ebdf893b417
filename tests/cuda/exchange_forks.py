"""Ranks as processes whose GPU is the host shim: `python exchange_forks.py LIBRARIES` prints what they saw as JSON lines.

A program of its own, because it forks: a process without threads, which has torch loaded once for all ranks.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from device_ranks import LIMITS, FileMemory, RankBackend, join, wrong_joins, wrong_sums
from host_shim import ORDERS, STRAGGLING
from rank_sums import same_bits, tree_sum, values

from vnext.kernels.cuda import backends
from vnext.kernels.cuda.exchange import SUMMED
from vnext.runtime.transport.collectives.device_group import DeviceGroup, Limits
from vnext.runtime.transport.collectives.errors import RankLost

HASTY = msgspec.structs.replace(LIMITS, timeout_ms=300)
BUSY_COUNTS = (5, 5003, 9001, 40)  # one-shot, two-shot, two pieces, one-shot

Join = Callable[..., DeviceGroup]


def run_ranks(backend: RankBackend, world_size: int, work: Callable[[int, Join], Any], kill_after_s: float = 0.0) -> list[Any]:
    """`work(rank, join)` in a fork for each rank; what each returned, or its exit status. The last may be killed, so long
    after all have joined."""
    pids, pipes, (joined_in, joined_out) = [], [os.pipe() for _ in range(world_size)], os.pipe()
    with tempfile.TemporaryDirectory() as folder:
        for rank, (_, pipe_out) in enumerate(pipes):
            if pid := os.fork():
                pids.append(pid)
                continue
            os._exit(run_rank(backend, rank, world_size, folder, work, pipe_out, joined_out))
        os.close(joined_out)
        with os.fdopen(joined_in, "rb") as joined:
            joined.read(world_size)  # fewer where one has ended before
        if kill_after_s:
            time.sleep(kill_after_s)
            os.kill(pids[-1], signal.SIGKILL)
        return [reported_by(pid, *pipe) for pid, pipe in zip(pids, pipes, strict=True)]


def run_rank(
    backend: RankBackend, rank: int, world_size: int, folder: str, work: Callable[[int, Join], Any], pipe: int, joined: int
) -> int:
    """In a fork: the exit status. Writes its work's answer to one pipe, and a byte to the other once it has joined."""
    backend.order = ORDERS[rank % len(ORDERS)] | (STRAGGLING if rank == 1 else 0)
    store = dist.FileStore(f"{folder}/rendezvous", world_size)

    def join_with(limits: Limits = LIMITS) -> DeviceGroup:
        group = join(store, rank, world_size, limits, FileMemory)
        os.write(joined, b".")
        return group

    try:
        os.write(pipe, json.dumps(work(rank, join_with)).encode())
    except BaseException:  # the fork's end: its parent sees the status
        sys.excepthook(*sys.exc_info())
        return 1
    return 0


def reported_by(pid: int, pipe_in: int, pipe_out: int) -> Any:
    os.close(pipe_out)
    with os.fdopen(pipe_in) as reported:
        said = reported.read()
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    return json.loads(said) if status == 0 else status


# ---- what ranks do -----------------------------------------------------------------------------------------------


def sums(backend: RankBackend, world_size: int) -> list[Any]:
    """Of each rank: the sums and joins with wrong bits, in two rounds."""

    def work(rank: int, join: Join) -> Any:
        group = join()
        wrong = []
        for dtypes in (SUMMED if world_size == 2 else SUMMED[:1], SUMMED[:1]):
            wrong += wrong_sums(group, rank, world_size, dtypes) + wrong_joins(group, rank, world_size)
        group.close()
        return wrong

    return run_ranks(backend, world_size, work)


def kills(backend: RankBackend, world_size: int, count: int) -> list[Any]:
    """The last rank is killed at some moment of a busy group: of each other, how many sums it had, whether all were right,
    and its error."""
    rng = random.Random(5)

    def work(rank: int, join: Join) -> Any:
        group = join()
        done, is_right = 0, True
        while True:
            length = BUSY_COUNTS[done % len(BUSY_COUNTS)]
            found = group.all_reduce(values(done, rank, length, torch.float32))
            try:
                group.require_whole()
            except RankLost as error:
                group.close()
                return [done, is_right, str(error)]
            is_right &= same_bits(found, tree_sum(done, world_size, length, torch.float32))
            done += 1

    return [run_ranks(backend, world_size, work, 0.1 + rng.uniform(0.0, 0.1)) for _ in range(count)]


def late(backend: RankBackend) -> list[Any]:
    """Rank 1 lives but comes only when rank 0 has left: what rank 0 says of it; rank 1 then finds rank 0 gone."""
    left, leave = os.pipe()

    def work(rank: int, join: Join) -> Any:
        group = join(HASTY)
        if rank == 1:
            os.read(left, 1)
        try:
            for _ in range(2):
                group.all_reduce(torch.ones(3))
                group.require_whole()
        except RankLost as error:
            group.close()
            os.write(leave, b"!")
            return str(error)

    return run_ranks(backend, 2, work)


def main(libraries: str) -> None:
    torch.set_num_threads(1)
    backend = RankBackend(Path(libraries), ("-O0",), precompile=True)
    backends.use("cpu", lambda: backend)
    for world_size in (2, 4):
        for scalar in ("float", "__nv_bfloat16", "__half")[: 3 if world_size == 2 else 1]:
            backend.build("all_reduce.cu", (("SCALAR", scalar), ("WORLD", str(world_size))))
    reported = {
        "sums2": sums(backend, 2), "sums4": sums(backend, 4), "kills": kills(backend, 2, 2) + kills(backend, 4, 2),
        "late": late(backend),
    }  # fmt: skip
    print(json.dumps(reported))


if __name__ == "__main__":
    main(sys.argv[1])
