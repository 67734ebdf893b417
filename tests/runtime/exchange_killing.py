"""Kills one rank of a shared group at a chosen step, and what the others saw.

A program of its own (forking_program.py), because it forks. A step is an opcode of the group's Python code, a change
of the shared memory
while single machine instructions are stepped through, or a random moment.
"""

from __future__ import annotations

import json
import os
import random
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from exchange_ranks import CAPACITY_BYTES, SHOTS, Join, Start, waits_of
from forking_program import serve
from rank_sums import same_bits, tree_sum, values
from ring_killing import Stepper, die_at, finished, fork

from vnext.runtime.transport.collectives import shared_group
from vnext.runtime.transport.collectives.errors import RankLost
from vnext.runtime.transport.collectives.shared_group import Exchange, ExchangeFile, SharedGroup

COUNTS = (5, 600, 1500, 40)  # one-shot, two-shot, two pieces, one-shot
TRACED = {"compiled": shared_group.__file__, "plain": "/vnext/runtime/"}
VICTIM, WORLD = 1, 3
BUSY_OPERATIONS = 10**6

Account = dict[str, Any]
shared_group.LIVENESS_POLL_S = 0.001  # thousands of kills: the same code, asked more often


def operate(group: SharedGroup, rank: int, number: int) -> bool:
    """Operation `number` of a load without end; whether the result is right."""
    count = COUNTS[number % len(COUNTS)]
    found = group.all_reduce(values(number, rank, count, torch.bfloat16))
    return same_bits(found, tree_sum(number, WORLD, count, torch.bfloat16))


class Survivor:
    """A rank that lives: one fork, which plays one group after the other, since a fork with torch costs more than a game."""

    def __init__(self, form: str, rank: int) -> None:
        (orders_in, self._orders), (self._reported, told_out) = os.pipe(), os.pipe()
        self._pid = fork(partial(self._live, form, rank, orders_in, told_out))
        os.close(orders_in)
        os.close(told_out)
        self._answers = os.fdopen(self._reported)

    def join(self, name: str, operations: int) -> None:
        """Returns once it has mapped the memory; it begins with `go`."""
        self._order([name, operations])
        assert self._answers.readline() == "ready\n"

    def go(self) -> None:
        self._order("go")

    def reported(self) -> list[Any]:
        """How many results came, whether all were right, and the error at the end, if any."""
        return json.loads(self._answers.readline())

    def end(self) -> bool:
        self._order("end")
        return finished(self._pid)

    def _order(self, what: object) -> None:
        os.write(self._orders, (json.dumps(what) + "\n").encode())

    def _live(self, form: str, rank: int, orders_in: int, told_out: int) -> None:
        with os.fdopen(orders_in) as orders, os.fdopen(told_out, "w", buffering=1) as answers:
            for order in map(json.loads, iter(orders.readline, '"end"\n')):
                name, operations = order
                exchange = Exchange(name, rank, waits_of(form, rank))
                print("ready", file=answers)
                orders.readline()
                print(json.dumps(play(SharedGroup(exchange, rank), rank, operations)), file=answers)


def play(group: SharedGroup, rank: int, operations: int) -> list[Any]:
    count, is_right, end = 0, True, "finished"
    try:
        while count < operations:
            is_right &= operate(group, rank, count)
            count += 1
    except RankLost as error:
        end = str(error)
    group.close()
    return [count, is_right, end]


@contextmanager
def surviving(form: str) -> Iterator[list[Survivor]]:
    """The two that live."""
    survivors = [Survivor(form, rank) for rank in range(WORLD) if rank != VICTIM]
    yield survivors
    assert all(survivor.end() for survivor in survivors)


def kill(
    form: str, survivors: list[Survivor], victim: Callable[[Join], None], operations: int, rng: random.Random | None = None
) -> Account:
    """Two survivors and a victim, each a process; with `rng` the victim is killed from outside, soon."""
    file, start = ExchangeFile(WORLD, CAPACITY_BYTES, SHOTS["both"]), Start(1)
    pid = fork(partial(victim, partial(start.join, file.name, VICTIM, form)))
    for survivor in survivors:
        survivor.join(file.name, operations)
    start.give()
    for survivor in survivors:
        survivor.go()
    if rng is not None:
        time.sleep(rng.uniform(0.0, 0.03))
        os.kill(pid, signal.SIGKILL)
    is_finished = finished(pid)
    file.unlink()
    return {"finished": is_finished, "ends": [survivor.reported() for survivor in survivors]}


# ---- modes -------------------------------------------------------------------------------------------------------


def opcodes(form: str, stride: int) -> Iterator[Account]:
    """Killed before every `stride`-th opcode of four operations, until it comes to their end."""
    step, is_finished = 1, False

    def victim(step: int, join: Join) -> None:
        group = join()
        inputs = [values(number, VICTIM, count, torch.bfloat16) for number, count in enumerate(COUNTS)]
        die_at(step, TRACED[form])
        for tensor in inputs:
            group.all_reduce(tensor)
        group.close()

    with surviving(form) as survivors:
        while not is_finished:
            account = kill(form, survivors, partial(victim, step), len(COUNTS))
            is_finished = account["finished"]
            yield account | {"step": step}
            step += stride


def busy(form: str, count: int) -> Iterator[Account]:
    """Killed at random moments of a busy group."""
    rng = random.Random(7)

    def victim(join: Join) -> None:
        group = join()
        for number in range(BUSY_OPERATIONS):
            operate(group, VICTIM, number)

    with surviving(form) as survivors:
        for _ in range(count):
            yield kill(form, survivors, victim, BUSY_OPERATIONS, rng)


def stepped(form: str) -> Iterator[Account]:
    """Killed after each change of the memory that the compiled operations make in a one-shot sum of 24 bytes; rank 0, in
    this process, has entered before."""
    change, is_finished = 1, False
    tensors = [values(1, rank, 12, torch.bfloat16) for rank in (0, 1)]
    while not is_finished:
        file = ExchangeFile(2, 64, 64)
        mine = Exchange(file.name, 0, waits_of(form, 0))
        theirs = Exchange(file.name, 1, waits_of(form, 1))
        file.unlink()
        group, victim = SharedGroup(mine, 0), SharedGroup(theirs, 1)
        mine.memory.enter(1, 1, 1, tensors[0].data_ptr(), tensors[0].nbytes)
        own, size = bytes(mine._mapping), len(mine._mapping)
        account = Stepper().kill_at(change, victim, lambda victim=victim: victim.all_reduce(tensors[1].clone()), mine._mapping)
        now = mine._mapping[:]
        touched = [at for at in range(size) if now[at] != own[at]]
        theirs.close()
        group._operation = group._ticks = 1
        found = tensors[0].clone()
        try:
            group._meet(1, found.nbytes)
            mine.memory.add(1, 1, 0, found.numel(), found.data_ptr())
            end = "right" if same_bits(found, tree_sum(1, 2, 12, torch.bfloat16)) else "wrong"
        except RankLost as error:
            end = str(error)
        group.close()
        is_finished = account["finished"]
        yield {"finished": is_finished, "end": end, "has_ticked": mine_line(1) in touched, "touched": len(touched)}
        change += 1


def mine_line(rank: int) -> int:
    """Where the ticks of a rank stand."""
    return 128 * (1 + 2 * rank)


if __name__ == "__main__":
    torch.set_num_threads(1)
    serve({mode.__name__: mode for mode in (opcodes, busy, stepped)})
