"""Check the ranks' collectives on GPUs against plain sums and time them: `python -m perf.gpu_all_reduce --ranks 2`

Groups are chosen as the engine chooses them. Ranks are processes, each on the GPU of its number. With fewer GPUs several ranks
share one; they take turns, and the times are meaningless. Prints a JSON line for each finding and writes all of them to
--json FILE. Exits with status 1 if a sum is wrong or a lost rank goes undetected. With --shim the host shim of tests/cuda
replaces the GPU: a dry run of everything except the graph.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import torch
import torch.distributed as dist

from vnext.kernels.cuda.exchange import SUMMED
from vnext.runtime.transport.collectives.choose_collectives import choose_device_group
from vnext.runtime.transport.collectives.cpu_collectives import Group, choose_group
from vnext.runtime.transport.collectives.device_group import DeviceGroup, Limits, default_limits
from vnext.runtime.transport.collectives.device_memory import IpcMemory
from vnext.runtime.transport.collectives.errors import RankLost

ROOT = Path(__file__).resolve().parent.parent
PATIENCE_MS, RANKS_TIMEOUT_S = 20_000, 240
FINDINGS = "findings.jsonl"
COUNTS = (1, 7, 8, 513, 4096, 100_003, 1_500_000)
SIZES_KIB = (2, 8, 32, 128, 512, 2048, 8192)
ROUNDS, LAUNCHES = 15, 20
SHARED_ROUNDS, SHARED_LAUNCHES = 3, 5  # when ranks share one GPU, each rendezvous costs a time slice

Finding = dict[str, Any]


class Place:
    """The device of a rank: its GPU, or the shim."""

    def __init__(self, rank: int, world_size: int, shim: str) -> None:
        self.rank, self.world_size, self.is_gpu = rank, world_size, not shim
        self.is_shared = self.is_gpu and torch.cuda.device_count() < world_size
        if self.is_gpu:
            index = rank % torch.cuda.device_count()
            torch.cuda.set_device(index)
            self.device, self.make_memory = torch.device("cuda", index), IpcMemory
        else:
            self.device, self.make_memory = torch.device("cpu"), shim_memory(Path(shim))

    def match_samples(self) -> None:
        if self.is_gpu:
            torch.cuda.synchronize()

    @property
    def name(self) -> str:
        return torch.cuda.get_device_name() if self.is_gpu else "host shim"


def shim_memory(libraries: Path) -> Any:
    """Build CPU kernels with the tests' host shim, and return the memory its ranks use."""
    sys.path.insert(0, str(ROOT / "tests" / "cuda"))
    from device_ranks import FileMemory, RankBackend

    from vnext.kernels.cuda import backends

    backend = RankBackend(libraries, ("-O0",), precompile=True)
    backends.use("cpu", lambda: backend)
    return FileMemory


# ---- what a rank does --------------------------------------------------------------------------------------------


def values(case: int, rank: int, count: int, dtype: torch.dtype) -> torch.Tensor:
    """Return values of very different magnitudes, so that the order of addition affects the result."""
    generator = torch.Generator().manual_seed(1000 * case + rank)
    exponents = torch.randint(-6, 7, (count,), generator=generator)
    return (torch.randn(count, generator=generator) * 2.0**exponents).to(dtype)


def rank_order_sum(case: int, world_size: int, count: int, dtype: torch.dtype) -> torch.Tensor:
    total = values(case, 0, count, dtype).float()
    for rank in range(1, world_size):
        total += values(case, rank, count, dtype).float()
    return total.to(dtype)


def check_sums(group: Group, place: Place, counts: tuple[int, ...]) -> Finding:
    """Check every dtype and size three times, so that sets of slots are reused."""
    wrong, cases = [], [(dtype, count) for dtype in SUMMED for count in counts]
    for case, (dtype, count) in enumerate(cases):
        given, expected = values(case, place.rank, count, dtype), rank_order_sum(case, place.world_size, count, dtype)
        for _ in range(3):
            found = group.all_reduce(given.to(place.device)).cpu()
            group.require_whole()
            if not torch.equal(found.view(torch.uint8), expected.view(torch.uint8)):
                wrong.append([str(dtype), count])
    return {"what": "sums", "cases": len(cases), "wrong": wrong}


def check_joins(group: Group, place: Place) -> Finding:
    """Check the logits of some rows, and rows whose size is no multiple of 16 bytes."""
    wrong = []
    for rows, width in ((1, 16_000), (5, 4096), (3, 37)):
        parts = [values(7, rank, rows * width, torch.float32).view(rows, width) for rank in range(place.world_size)]
        found = group.all_gather(parts[place.rank].to(place.device), 1).cpu()
        group.require_whole()
        if not torch.equal(found, torch.cat(parts, 1)):
            wrong.append([rows, width])
    return {"what": "joins", "wrong": wrong}


def check_graph(group: Group, place: Place) -> Finding:
    """Capture once and replay with new values: operations are counted on the device."""
    x = torch.zeros(10_000, dtype=torch.bfloat16, device=place.device)
    group.all_reduce(x)
    place.match_samples()
    graph, wrong = torch.cuda.CUDAGraph(), []
    with torch.cuda.graph(graph):
        total = group.all_reduce(x)
    for case in range(10):
        x.copy_(values(case, place.rank, x.shape[0], x.dtype))
        graph.replay()
        found = total.cpu()
        group.require_whole()
        if not torch.equal(found, rank_order_sum(case, place.world_size, x.shape[0], x.dtype)):
            wrong.append(case)
    return {"what": "graph", "wrong": wrong}


def time_us(operation: Callable[[], Any], place: Place) -> float:
    """Return the median over rounds of the mean of back-to-back launches, in microseconds, on this rank."""
    rounds, launches = (SHARED_ROUNDS, SHARED_LAUNCHES) if place.is_shared or not place.is_gpu else (ROUNDS, LAUNCHES)
    means = []
    for _ in range(rounds + 1):
        place.match_samples()
        begin_s = time.perf_counter()
        for _ in range(launches):
            operation()
        place.match_samples()
        means.append((time.perf_counter() - begin_s) / launches * 1e6)
    return round(statistics.median(means[1:]), 2)


def sweep(group: DeviceGroup, place: Place, sizes_kib: tuple[int, ...]) -> Iterator[Finding]:
    """Time each implementation at each size, to find the crossover points."""
    usual, above = group.limits, group._above
    forms = {"one-shot": (2**60, 2**60), "two-shot": (0, 2**60)} | ({"above": (0, 0)} if above is not None else {})
    for size_kib in sizes_kib:
        x = torch.zeros(size_kib * 512, dtype=torch.bfloat16, device=place.device)
        for form, (one_shot, ipc) in forms.items():
            group.limits = msgspec.structs.replace(usual, one_shot_bytes_max=one_shot, ipc_bytes_max=ipc)
            median = time_us(partial(group.all_reduce, x), place)
            group.require_whole()
            yield {"what": "time", "size_kib": size_kib, "form": form, "median_us": median, "turns": place.is_shared}
    group.limits = usual


def check_lost(group: Group, place: Place) -> Finding:
    """End the last rank without notice; report the others' error and its delay."""
    if place.rank == place.world_size - 1:
        os._exit(0)
    begin_s, said = time.monotonic(), "nothing"
    try:
        group.all_reduce(torch.ones(1000, device=place.device))
        place.match_samples()
        group.require_whole()
    except RankLost as error:
        said = str(error)
    wrong = [] if f"rank {place.world_size - 1} has ended" in said else [said]
    return {"what": "lost", "said": said, "seconds": round(time.monotonic() - begin_s, 3), "wrong": wrong}


def findings(group: Group, place: Place) -> Iterator[Finding]:
    is_mapped = isinstance(group, DeviceGroup)
    yield {
        "what": "group", "chosen": type(group).__name__, "device": place.name, "ranks": place.world_size,
        "turns": place.is_shared, "says": group.describe() if is_mapped else "", "wrong": [] if is_mapped else ["no mapped memory"],
    }  # fmt: skip
    yield check_sums(group, place, COUNTS if place.is_gpu else COUNTS[:5])
    yield check_joins(group, place)
    if place.is_gpu:
        yield check_graph(group, place)
    if is_mapped:
        yield from sweep(group, place, SIZES_KIB if place.is_gpu else SIZES_KIB[:2])
    if is_mapped:
        yield check_lost(group, place)


def rank_main(rank: int, world_size: int, folder: str, shim: str) -> int:
    """Run one rank. Rank 0 prints the findings of all ranks at once, as does a rank that found a wrong sum."""
    torch.set_num_threads(1)
    place = Place(rank, world_size, shim)
    store = dist.FileStore(f"{folder}/rendezvous", world_size)
    store.set_timeout(timedelta(seconds=60))
    limits: Limits = msgspec.structs.replace(default_limits(world_size), timeout_ms=PATIENCE_MS)
    host = choose_group(store, rank, world_size, lambda: store)
    group = choose_device_group(store, rank, world_size, place.device, host, limits, place.make_memory)
    is_right = True
    for finding in findings(group, place):
        is_right &= not finding.get("wrong")
        if rank == 0 or finding.get("wrong"):
            line = json.dumps(finding | {"rank": rank})
            print(line, flush=True)
            with Path(folder, FINDINGS).open("a") as reported:
                reported.write(line + "\n")
    os._exit(0 if is_right else 1)  # the last rank is gone, so no orderly shutdown is possible


# ---- all of them -------------------------------------------------------------------------------------------------


def main(rank_count: int, json_path: str = "", shim: str = "") -> int:
    """Run `rank_count` ranks (`shim`: a folder for its libraries, "" for GPUs). Returns 0 if all checks passed."""
    command = [sys.executable, "-m", "perf.gpu_all_reduce", "--ranks", str(rank_count)]
    with tempfile.TemporaryDirectory() as folder:
        if shim:
            build(Path(shim), rank_count)
        ranks = [
            subprocess.Popen([*command, "--rank", str(rank), "--folder", folder, "--shim", shim], cwd=ROOT)
            for rank in range(rank_count)
        ]
        end_s = time.monotonic() + RANKS_TIMEOUT_S
        statuses = [status_of(rank, end_s - time.monotonic()) for rank in ranks]
        reported = Path(folder, FINDINGS)
        if json_path:
            found = [json.loads(line) for line in reported.read_text().splitlines()] if reported.is_file() else []
            Path(json_path).write_text(json.dumps(found, indent=2) + "\n")
    print(f"all-reduce over {rank_count} ranks: {'right' if not any(statuses) else f'WRONG, statuses {statuses}'}")
    return int(any(statuses))


def build(libraries: Path, rank_count: int) -> None:
    """Build the shim's libraries once, before the ranks start."""
    shim_memory(libraries)
    from vnext.kernels.cuda import backends

    for scalar in ("float", "__nv_bfloat16", "__half"):
        defines = (("SCALAR", scalar), ("WORLD", str(rank_count)))
        backends.kernel_for(torch.device("cpu"), "all_reduce.cu", "sum_one_shot", defines)


def status_of(rank: subprocess.Popen[bytes], timeout_s: float) -> int:
    try:
        return rank.wait(max(timeout_s, 1.0))
    except subprocess.TimeoutExpired:
        rank.kill()
        rank.wait()
        return 124


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--json", default="", help="where all findings go")
    parser.add_argument("--shim", default="", help="a folder for libraries: run on the host shim, without a GPU")
    parser.add_argument("--rank", type=int, default=None, help=argparse.SUPPRESS)
    parser.add_argument("--folder", default="", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank is None:
        sys.exit(main(options.ranks, options.json, options.shim))
    sys.exit(rank_main(options.rank, options.ranks, options.folder, options.shim))
