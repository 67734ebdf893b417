"""Kills one rank of a shared group at a chosen step; what the others saw, as JSON lines: `python exchange_killing.py MODE`.

A program of its own, because it forks. A step is an opcode of the group's Python code, a change of the shared memory
while single machine instructions are stepped through, or a random moment.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from exchange_ranks import CAPACITY_BYTES, SHOTS, Join, Start, rank_order_sum, same_bits, values, waits_of
from ring_killing import Stepper, die_at, finished, fork

from vnext.runtime import shared_group
from vnext.runtime.exchange_memory import Exchange, ExchangeFile
from vnext.runtime.shared_group import RankLost, SharedGroup

COUNTS = (5, 600, 1500, 40)  # one-shot, two-shot, two pieces, one-shot
TRACED = {"compiled": "/vnext/runtime/shared_group.py", "plain": "/vnext/runtime/"}
VICTIM, WORLD = 1, 3
BUSY_OPERATIONS = 10**6

Account = dict[str, Any]
shared_group.LIVES_POLL_S = 0.001  # thousands of kills: the same code, asked more often


def operate(group: SharedGroup, rank: int, number: int) -> bool:
    """Operation `number` of a load without end; whether the result is right."""
    count = COUNTS[number % len(COUNTS)]
    found = group.all_reduce(values(number, rank, count, torch.bfloat16))
    return same_bits(found, rank_order_sum(number, WORLD, count, torch.bfloat16))


def survive(join: Join, rank: int, report: int, operations: int) -> None:
    """Reports a line: how many results came, whether all were right, and the error at the end, if any."""
    group, count, is_right, end = join(), 0, True, "finished"
    try:
        while count < operations:
            is_right &= operate(group, rank, count)
            count += 1
    except RankLost as error:
        end = str(error)
    os.write(report, (json.dumps([count, is_right, end]) + "\n").encode())
    group.close()


def kill(form: str, victim: Callable[[Join], None], operations: int, chance: random.Random | None = None) -> Account:
    """Two survivors and a victim, each a process; with `chance` the victim is killed from outside, soon."""
    file, (pipe_in, pipe_out), start = ExchangeFile(WORLD, CAPACITY_BYTES, SHOTS["both"]), os.pipe(), Start(WORLD)
    joins = [partial(start.join, file.name, rank, form) for rank in range(WORLD)]
    ranks = [rank for rank in range(WORLD) if rank != VICTIM]
    survivors = [fork(partial(survive, joins[rank], rank, pipe_out, operations)) for rank in ranks]
    pid = fork(partial(victim, joins[VICTIM]))
    start.give()
    if chance is not None:
        time.sleep(chance.uniform(0.0, 0.03))
        os.kill(pid, signal.SIGKILL)
    is_finished = finished(pid)
    are_orderly = [finished(survivor) for survivor in survivors]
    file.unlink()
    os.close(pipe_out)
    with os.fdopen(pipe_in) as lines:
        ends = [json.loads(line) for line in lines]
    return {"finished": is_finished, "orderly": are_orderly, "ends": ends}


# ---- modes -------------------------------------------------------------------------------------------------------


def opcodes(form: str, stride: int) -> Iterator[Account]:
    """Killed before every `stride`-th opcode of four operations, until it comes to their end."""
    step, is_finished = 1, False
    while not is_finished:

        def victim(join: Join, step: int = step) -> None:
            group = join()
            inputs = [values(number, VICTIM, count, torch.bfloat16) for number, count in enumerate(COUNTS)]
            die_at(step, TRACED[form])
            for tensor in inputs:
                group.all_reduce(tensor)
            group.close()

        account = kill(form, victim, len(COUNTS))
        is_finished = account["finished"]
        yield account | {"step": step}
        step += stride


def busy(form: str, seconds: float) -> Iterator[Account]:
    """Killed at random moments of a busy group."""
    chance, end_s = random.Random(7), time.monotonic() + seconds

    def victim(join: Join) -> None:
        group = join()
        for number in range(BUSY_OPERATIONS):
            operate(group, VICTIM, number)

    while time.monotonic() < end_s:
        yield kill(form, victim, BUSY_OPERATIONS, chance)


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
        account = Stepper().kill_at(change, victim, lambda: victim.all_reduce(tensors[1].clone()), mine._mapping)
        now = mine._mapping[:]
        touched = [at for at in range(size) if now[at] != own[at]]
        theirs.close()
        group._operation = group._ticks = 1
        found = tensors[0].clone()
        try:
            group._meet(1, found.nbytes)
            mine.memory.add(1, 1, 0, found.numel(), found.data_ptr())
            end = "right" if same_bits(found, rank_order_sum(1, 2, 12, torch.bfloat16)) else "wrong"
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
    mode, *words = sys.argv[1:]
    for told in globals()[mode](words[0], *(float(word) if "." in word else int(word) for word in words[1:])):
        print(json.dumps(told), flush=True)
