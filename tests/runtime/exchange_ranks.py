"""Ranks of a shared group as forks of one process, and what they saw.

A program of its own (forking_program.py), because it forks: a process without threads, which has torch loaded once.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from forking_program import serve
from rank_sums import same_bits, tree_sum, values

from vnext.runtime.processes import futex
from vnext.runtime.transport.collectives import shared_group
from vnext.runtime.transport.collectives.errors import RankLost
from vnext.runtime.transport.collectives.shared_group import Exchange, ExchangeFile, SharedGroup

CAPACITY_BYTES = 4096
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
COUNTS = (1, 3, 31, 512, 513, 1023, 1024, 2048, 2049, 5000)  # 5,000: three to five pieces
ROUNDS = 12
SHOTS = {"one": 2**60, "two": 0, "both": 1024}
# A form for each rank: both twins, and one beside the other.
FORMS = {"compiled": (False, False), "plain": (True, True), "mixed": (False, True)}


Join = Callable[..., SharedGroup]
Work = Callable[[int, Join], Any]


def waits_of(form: str, rank: int) -> futex.WaitMethod | None:
    return futex.choose_wait_method() if FORMS[form][rank % 2] else None


def run_ranks(world_size: int, form: str, work: Work, shots: str = "both") -> list[Any]:
    """`work(rank, join)` in a fork for each rank; what each returned, or its exit status."""
    file, start = ExchangeFile(world_size, CAPACITY_BYTES, SHOTS[shots]), Start(world_size)
    pipes, pids = [os.pipe() for _ in range(world_size)], []
    for rank, (_, pipe_out) in enumerate(pipes):
        if pid := os.fork():
            pids.append(pid)
            continue
        try:
            os.write(pipe_out, json.dumps(work(rank, partial(start.join, file.name, rank, form))).encode())
            os._exit(0)
        except BaseException:
            sys.excepthook(*sys.exc_info())
            raise
        finally:
            os._exit(1)
    start.give()
    results = []
    for pid, (pipe_in, pipe_out) in zip(pids, pipes):
        os.close(pipe_out)
        with os.fdopen(pipe_in) as reported:
            said = reported.read()
        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        results.append(json.loads(said) if status == 0 else status)
    file.unlink()
    return results


class Start:
    """Where forks wait until all of them have mapped the memory, as start-up has it. Made before they are forked."""

    def __init__(self, world_size: int) -> None:
        self._world_size = world_size
        self._ready, self._go = os.pipe(), os.pipe()

    def join(self, name: str, rank: int, form: str, spin_us: float | None = None) -> SharedGroup:
        """This rank's group."""
        exchange = Exchange(name, rank, waits_of(form, rank))
        os.write(self._ready[1], b"r")
        os.read(self._go[0], 1)
        return SharedGroup(exchange, rank, spin_us)

    def give(self) -> None:
        """In the parent: wait for everybody, then let them go."""
        for _ in range(self._world_size):
            os.read(self._ready[0], 1)
        os.write(self._go[1], b"g" * self._world_size)
        for pipe in (*self._ready, *self._go):
            os.close(pipe)


def cases() -> list[tuple[int, torch.dtype, int]]:
    pairs = [(dtype, count) for dtype in DTYPES for count in COUNTS]
    return [(number, *pair) for number, pair in enumerate(pairs * ROUNDS)]


# ---- modes -------------------------------------------------------------------------------------------------------


def sums(world_size: int, form: str, shots: str, spin_us: float) -> list[Any]:
    """Of each rank: the cases whose sum has other bits than the sum in rank order, and a digest of all sums."""

    def work(rank: int, join: Join) -> dict[str, Any]:
        group = join(spin_us)
        wrong, digest = [], hashlib.sha256()
        for case, dtype, count in cases():
            if case % 7 == rank:
                time.sleep(0.001)  # ranks that come late, each at its own cases
            found = group.all_reduce(values(case, rank, count, dtype))
            digest.update(found.view(torch.uint8).numpy().tobytes())
            if not same_bits(found, tree_sum(case, world_size, count, dtype)):
                wrong.append([case, str(dtype), count])
        group.close()
        return {"wrong": wrong, "digest": digest.hexdigest(), "served": type(group._memory).__name__}

    return run_ranks(world_size, form, work, shots)


def gathers(world_size: int, form: str, spin_us: float) -> list[Any]:
    """Of each rank: the shapes and dimensions that were joined otherwise than torch.cat would."""
    shapes = [((7,), 0), ((3, 5), 0), ((3, 5), 1), ((3, 5), -1), ((2, 700), 1), ((700, 3), 1), ((2, 3, 4), 1), ((0, 3), 0)]

    def work(rank: int, join: Join) -> dict[str, Any]:
        group = join(spin_us)
        wrong = []
        for case, (shape, dim) in enumerate(shapes * 3):
            for dtype in (*DTYPES, torch.int64, torch.uint8):
                parts = [(100 * values(case, each, 4200, torch.float32)).abs().to(dtype) for each in range(world_size)]
                parts = [part[: torch.Size(shape).numel()].view(shape) for part in parts]
                if not torch.equal(group.all_gather(parts[rank], dim), torch.cat(parts, dim)):
                    wrong.append([shape, dim, str(dtype)])
        strided = group.all_gather(torch.full((3, 4), rank).t(), 1)
        group.close()
        return {"wrong": wrong, "strided": strided.tolist()}

    return run_ranks(world_size, form, work)


def leaves(world_size: int, form: str, how: str) -> list[Any]:
    """The last rank leaves after 5 operations; of each other: how many it had, and its error."""

    def work(rank: int, join: Join) -> Any:
        group = join()
        count = 0
        try:
            while count < 50:
                if rank == world_size - 1 and count == 5:
                    if how == "killed":
                        os.kill(os.getpid(), signal.SIGKILL)
                    group.close()
                    return "left"
                group.all_reduce(torch.ones(3))
                count += 1
        except RankLost as error:
            return [count, str(error)]

    return run_ranks(world_size, form, work)


def late(form: str) -> list[Any]:
    """Rank 1 lives but comes too late: what rank 0 says of it; rank 1 then finds rank 0 gone."""
    given_up_in, given_up_out = os.pipe()

    def work(rank: int, join: Join) -> Any:
        shared_group.TIMEOUT_S = 300.0 if rank else 0.3
        group = join()
        if rank:
            os.read(given_up_in, 1)
        try:
            group.all_reduce(torch.ones(3))
            group.all_reduce(torch.ones(3))
        except RankLost as error:
            os.write(given_up_out, b".")
            return str(error)

    return run_ranks(2, form, work)


def out_of_step(form: str) -> list[Any]:
    """The ranks come with tensors of different sizes, types, or to different collectives: what each says of it."""

    def work(rank: int, join: Join) -> Any:
        group, errors = join(), []
        pairs = [
            (lambda: group.all_reduce(torch.ones(3)), lambda: group.all_reduce(torch.ones(4))),
            (lambda: group.all_reduce(torch.ones(3).half()), lambda: group.all_reduce(torch.ones(3).bfloat16())),
            (lambda: group.all_reduce(torch.ones(3)), lambda: group.all_gather(torch.ones(3), 0)),
        ]
        for pair in pairs:
            try:
                pair[rank]()
                errors.append("")
            except ValueError as error:
                errors.append(str(error))
        errors.append(group.all_reduce(torch.ones(2)).tolist())
        return errors

    return run_ranks(2, form, work)


if __name__ == "__main__":
    torch.set_num_threads(1)
    serve({mode.__name__: mode for mode in (sums, gathers, leaves, late, out_of_step)})
