"""The choice of the ranks' collectives: shared memory if every rank has it, else gloo; both give the same bits,
and so does what stands for NCCL (TorchGroup), run here over gloo."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from vnext.runtime.transport.collectives import group
from vnext.runtime.transport.collectives.choose_collectives import TorchGroup

ROOT = Path(__file__).parents[3]
RANKS = """
import json, os, signal, sys, torch
from pathlib import Path
torch.set_num_threads(1)
from vnext.runtime.transport.collectives import cpu_collectives, group, shared_group
from vnext.runtime.transport.collectives.choose_collectives import TorchGroup

DTYPES, WORLD_SIZE = (torch.float32, torch.bfloat16, torch.float16), 3

def break_one(trouble, rank):
    if trouble == "no room" and rank == 0:
        def reserve(handle, size_bytes): raise OSError(28, "No space left on device")
        shared_group.shared_file.reserve = reserve
    if trouble == "one cannot" and rank == 1:
        class Exchange:
            def __init__(self, name, rank): raise ValueError("not on this machine")
        cpu_collectives.Exchange = Exchange

def values(rank):
    generator = torch.Generator().manual_seed(rank)
    return [(torch.randn(1001, generator=generator) * 10 ** (rank - 1)).to(dtype) for dtype in DTYPES]

def check_spread(rank, sums, joined, store):
    torch.distributed.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=WORLD_SIZE)
    spread = TorchGroup()
    for given, expected in zip(values(rank), sums):
        found = spread.all_reduce(given.view(7, 143))
        assert found.shape == (7, 143) and found.flatten().double().tolist() == expected
        assert torch.equal(spread.begin_all_reduce(given.view(7, 143))(), found)
    assert torch.equal(spread.all_gather(torch.full((2, 3), float(rank)), -1), joined)
    assert spread.all_gather(torch.full((3,), rank), 0).tolist() == [0] * 3 + [1] * 3 + [2] * 3

def work(rank, folder, trouble):
    sys.stderr = open(folder / f"complaint {rank}", "w")
    break_one(trouble, rank)
    parallel = group.join_group(rank, WORLD_SIZE, folder / "rendezvous")
    sums = [parallel.all_reduce(given).double().tolist() for given in values(rank)]
    joined = parallel.all_gather(torch.full((2, 3), float(rank)), 1)
    if trouble != "none":
        check_spread(rank, sums, joined, folder / "spread")
    told = [type(group._joined[0]).__name__, sums, joined.tolist()]
    group.leave_group()
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    sys.stderr.flush()
    (folder / f"told {rank}").write_text(json.dumps(told))

def run_forked(rank):
    try:
        work(rank, folder, sys.argv[2])
    except BaseException:
        sys.excepthook(*sys.exc_info())
        sys.stderr.flush()
        os._exit(1)
    os._exit(0)

folder = Path(sys.argv[1])
ranks = [os.fork() or run_forked(rank) for rank in range(WORLD_SIZE)]
while ranks:
    ended, status = os.wait()
    ranks.remove(ended)
    if status:  # the others would wait for it
        for left in ranks:
            os.kill(left, signal.SIGKILL)
"""
WORLD_SIZE = 3


def start(folder: Path, trouble: str) -> list[tuple[str, list[Any], list[Any], str]]:
    """(group, sums, joined, stderr) of each rank; they are forks of one process, which has torch loaded once."""
    folder.mkdir()
    environment = os.environ | {"PYTHONPATH": str(ROOT), "GLOO_SOCKET_IFNAME": "lo"}
    subprocess.run([sys.executable, "-c", RANKS, str(folder), trouble], env=environment, timeout=120, check=True)
    complaints = [(folder / f"complaint {rank}").read_text() for rank in range(WORLD_SIZE)]
    missing = [rank for rank in range(WORLD_SIZE) if not (folder / f"told {rank}").exists()]
    assert not missing, complaints
    return [(*json.loads((folder / f"told {rank}").read_text()), complaints[rank]) for rank in range(WORLD_SIZE)]


def test_all_ranks_choose_the_same_and_sum_the_same(tmp_path: Path) -> None:
    """Where everybody has shared memory, where there is no room for it, and where one rank cannot map it."""
    shared = start(tmp_path / "shared", "none")
    assert {group for group, *_ in shared} == {"SharedGroup"}
    for trouble, reason in (("no room", "No space left"), ("one cannot", "rank 1: not on this machine")):
        gloo = start(tmp_path / trouble, trouble)
        assert {group for group, *_ in gloo} == {"GlooGroup"}
        assert all(sums == shared[0][1] for _, sums, *_ in (*shared, *gloo))
        assert all(joined == [[0, 0, 0, 1, 1, 1, 2, 2, 2]] * 2 for *_, joined, _ in (*shared, *gloo))
        assert reason in gloo[0][3] and "over gloo" in gloo[0][3]


def test_one_rank_needs_nothing(tmp_path: Path) -> None:
    parallel = group.join_group(0, 1, tmp_path / "rendezvous")
    assert parallel.world_size == 1 and not (tmp_path / "rendezvous").exists()
    group.leave_group()


def test_a_sum_beside_the_work_waits_for_its_part_and_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """The order on two streams, by stand-ins that write down what they are asked: there is no GPU here."""
    asked: list[str] = []

    class Recorded:
        def __init__(self, name: str) -> None:
            self.name, self.device = name, SimpleNamespace(type="cuda")

        def __getattr__(self, call: str) -> Callable[..., Recorded]:
            def record(*others: Recorded) -> Recorded:
                asked.append(" ".join((self.name, call, *(other.name for other in others))))
                return Recorded(f"{self.name}'s mark")

            return record

    class Spread(TorchGroup):
        def __init__(self) -> None:
            self._side = None

        def all_reduce(self, tensor: Recorded) -> Recorded:
            asked.append(f"sum {tensor.name}")
            return Recorded("total")

    monkeypatch.setattr(torch.cuda, "Stream", lambda device: Recorded("side"))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: Recorded("work"))
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext(asked.append(f"on {stream.name}")))
    end = Spread().begin_all_reduce(Recorded("part"))
    begun = ["side wait_stream work", "on side", "sum part", "part record_stream side", "side record_event"]
    assert asked == begun
    assert end().name == "total"
    assert asked[len(begun) :] == ["work wait_event side's mark", "total record_stream work"]
