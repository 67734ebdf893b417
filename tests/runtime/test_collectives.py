"""The choice of the ranks' collectives: shared memory if every rank has it, else gloo; both give the same bits."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from vnext.runtime import collectives

ROOT = Path(__file__).parents[2]
RANK = """
import json, sys, torch
from pathlib import Path
torch.set_num_threads(1)
from vnext.runtime import collectives, exchange_memory
rank, world_size, folder, trouble = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4]
if trouble == "no room" and rank == 0:
    def reserve(handle, size_bytes): raise OSError(28, "No space left on device")
    exchange_memory.shared_file.reserve = reserve
if trouble == "one cannot" and rank == 1:
    class Exchange:
        def __init__(self, name, rank): raise ValueError("not on this machine")
    collectives.Exchange = Exchange
parallel = collectives.join_group(rank, world_size, Path(folder) / "rendezvous")
generator = torch.Generator().manual_seed(rank)
sums = [
    parallel.all_reduce((torch.randn(1001, generator=generator) * 10 ** (rank - 1)).to(dtype)).double().tolist()
    for dtype in (torch.float32, torch.bfloat16, torch.float16)
]
joined = parallel.all_gather(torch.full((2, 3), float(rank)), 1)
print(json.dumps([type(collectives._joined[0]).__name__, sums, joined.tolist()]))
collectives.leave_group()
"""


def start(folder: Path, world_size: int, trouble: str) -> list[tuple[str, list[Any], list[Any], str]]:
    """(group, sums, joined, stderr) of each rank."""
    folder.mkdir()
    environment = os.environ | {"PYTHONPATH": str(ROOT), "GLOO_SOCKET_IFNAME": "lo"}
    command = [sys.executable, "-c", RANK]
    ranks = [
        subprocess.Popen(
            [*command, str(rank), str(world_size), str(folder), trouble],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment,
        )
        for rank in range(world_size)
    ]  # fmt: skip
    told = [rank.communicate(timeout=120) for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0] * world_size, told
    return [(*json.loads(said), complaint) for said, complaint in told]


@pytest.mark.parametrize(("trouble", "reason"), [("no room", "No space left"), ("one cannot", "rank 1: not on this machine")])
def test_all_ranks_choose_the_same_and_sum_the_same(tmp_path: Path, trouble: str, reason: str) -> None:
    shared, gloo = start(tmp_path / "shared", 3, "none"), start(tmp_path / "gloo", 3, trouble)
    assert {group for group, *_ in shared} == {"SharedGroup"}
    assert {group for group, *_ in gloo} == {"GlooGroup"}
    assert all(sums == shared[0][1] for _, sums, *_ in (*shared, *gloo))
    assert all(joined == [[0, 0, 0, 1, 1, 1, 2, 2, 2]] * 2 for *_, joined, _ in (*shared, *gloo))
    assert reason in gloo[0][3] and "over gloo" in gloo[0][3]


def test_one_rank_needs_nothing(tmp_path: Path) -> None:
    parallel = collectives.join_group(0, 1, tmp_path / "rendezvous")
    assert parallel.world_size == 1 and not (tmp_path / "rendezvous").exists()
    collectives.leave_group()
