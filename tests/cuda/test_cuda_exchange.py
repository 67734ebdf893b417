"""Sums and joins over ranks by cuda/all_reduce.cu: the bits of rank order, across processes too; who is lost is named.

The ranks' GPUs are the host shim; exchange_forks.py runs them as processes, device_ranks.py as threads of this one.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
import torch.distributed as dist
from device_ranks import LIMITS, HeapMemory, RankBackend, join, run_threads, wrong_joins, wrong_sums
from host_shim import ORDERS, SEED_SHIFT, STRAGGLING
from rank_sums import same_bits, tree_sum, values

from vnext.commands.bench.all_reduce_ranks import device_forms
from vnext.kernels.cuda import backends
from vnext.kernels.cuda.exchange import SUMMED, memory_bytes
from vnext.runtime.transport.collectives import choose_collectives, device_memory
from vnext.runtime.transport.collectives.device_group import DeviceGroup, default_limits
from vnext.runtime.transport.collectives.meeting import Meeting

HERE = Path(__file__).parent
TIMEOUT_S = 250
PAIRS = [(ORDERS[0], ORDERS[0]), (ORDERS[1], ORDERS[2]), (ORDERS[3], STRAGGLING), (STRAGGLING | 9 << SEED_SHIFT, ORDERS[1])]
LAST = 2**32 - 3


@pytest.fixture
def ranks(libraries: Path, shim: Any) -> Iterator[RankBackend]:
    backend = RankBackend(libraries, ("-O0",), precompile=True)
    backends.use("cpu", lambda: backend)
    yield backend
    backends.use("cpu", lambda: shim)


def test_the_bench_of_sums_adds_by_either_kernel(ranks: RankBackend, tmp_path: Path) -> None:
    """vnext-bench allreduce on GPUs; the shim has no NCCL."""
    given = [torch.full((4096,), value, dtype=torch.bfloat16) for value in (1, 2)]
    entered = threading.Barrier(2)

    def rank_main(rank: int) -> list[float]:
        ranks.order = ORDERS[rank]
        forms = device_forms(Meeting(tmp_path / "meeting"), rank, 2, torch.device("cpu"), HeapMemory)
        assert list(forms) == ["one_shot", "two_shot"]
        sums = [float(add(given[rank].clone()).sum()) for add in forms.values()]
        entered.wait(TIMEOUT_S)  # the memory of both is mapped until both have added
        return sums

    with ThreadPoolExecutor(2) as threads:
        assert list(threads.map(rank_main, range(2))) == [[3 * 4096] * 2] * 2


# ---- processes ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def forks(libraries: Path, root: Path) -> dict[str, Any]:
    """What ranks that are processes told."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join((str(root), str(HERE), str(HERE.parent / "runtime")))}
    command = [sys.executable, str(HERE / "exchange_forks.py"), str(libraries)]
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    assert (ran.returncode, ran.stderr) == (0, "")
    return json.loads(ran.stdout)


@pytest.mark.parametrize("world_size", [2, 4])
def test_processes_have_the_bits_of_the_tree(forks: dict[str, Any], world_size: int) -> None:
    """Odd sizes, all dtypes, one-shot, two-shot and pieces, each rank another order of threads and blocks, one straggling."""
    assert forks[f"sums{world_size}"] == [[]] * world_size


def test_a_killed_rank_ends_the_others_with_a_sentence(forks: dict[str, Any]) -> None:
    for *survivors, victim in forks["kills"]:
        assert victim == -9
        for _, is_right, message in survivors:
            assert is_right
            lost = len(survivors)
            assert re.match(rf"rank {lost} has|ranks [\d, ]*{lost} have", message)
            assert message.endswith(" ended or left the group before all ranks had met")
    assert any(done for *survivors, _ in forks["kills"] for done, *_ in survivors)


def test_a_rank_that_lives_but_does_not_come_is_named(forks: dict[str, Any]) -> None:
    assert forks["late"] == [
        "rank 1 did not come within 0.3 s; is it stuck?",
        "rank 0 has ended or left the group before all ranks had met",
    ]


# ---- threads -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("orders", PAIRS)
def test_any_order_of_threads_and_blocks_gives_the_same_bits(ranks: RankBackend, orders: tuple[int, int]) -> None:
    def work(rank: int, group: DeviceGroup) -> Any:
        return wrong_sums(group, rank, 2) + wrong_joins(group, rank, 2)

    assert run_threads(ranks, orders, work) == [[], []]


def test_counters_go_over_their_end(ranks: RankBackend) -> None:
    """As after four thousand million operations: the flags of the last ones are told again as those of the first."""

    def work(rank: int, group: DeviceGroup) -> Any:
        memory = group._memory._bytes
        memory[:8].view(torch.int64)[0] = ctypes.c_int32(LAST).value << 32
        reported = memory[16 + 2 * 8 * 8 :][: 2 * 64 * 8 * 4].view(torch.int32)
        reported[:] = ctypes.c_int32(LAST).value
        group._part()
        wrong = wrong_sums(group, rank, 2, (torch.bfloat16,))
        return wrong, memory[:8].view(torch.int64).item() >> 32

    (first, operations), (second, _) = run_threads(ranks, (0, ORDERS[1]), work)
    assert first == second == [] and 0 < operations < 100


@pytest.mark.parametrize("slept", [2**31, 2**31 + 7, 3 * 2**30])
def test_a_rank_that_slept_for_half_the_counter_is_waited_for(ranks: RankBackend, slept: int) -> None:
    """A turn that only large sums use last reported so many operations ago; what it reported is not taken for the next one."""

    def work(rank: int, group: DeviceGroup) -> Any:
        group._memory._bytes[:8].view(torch.int64)[0] = ctypes.c_int32(slept).value << 32
        group._part()
        return wrong_sums(group, rank, 2, (torch.bfloat16,))

    assert run_threads(ranks, (0, STRAGGLING), work) == [[], []]


def test_crooked_tensors_are_left_alone(ranks: RankBackend) -> None:
    """Strided ones and ones that begin inside of 16 bytes."""

    def work(rank: int, group: DeviceGroup) -> Any:
        given = values(1, rank, 1001, torch.bfloat16)
        shifted, kept = given[1:], given.clone()
        sums = same_bits(group.all_reduce(shifted), tree_sum(1, 2, 1001, torch.bfloat16)[1:])
        strided = group.all_gather(torch.full((3, 4), rank).t(), 1)
        crooked = group.all_gather(torch.arange(101)[1:] + rank, 0)
        return sums, torch.equal(given, kept), strided.tolist(), crooked.tolist()

    joined = [*range(1, 101), *range(2, 102)]
    assert run_threads(ranks, (0, 0), work) == [(True, True, [[0, 0, 0, 1, 1, 1]] * 4, joined)] * 2


def test_ranks_out_of_step_are_told_so_and_compute_no_more(ranks: RankBackend) -> None:
    def work(rank: int, group: DeviceGroup) -> Any:
        group.all_reduce(torch.ones(3 + rank))
        errors = []
        for _ in range(2):
            with pytest.raises(ValueError) as raised:
                group.require_whole()
            errors.append(str(raised.value))
            group.all_reduce(torch.ones(3))
        return errors

    reported = run_threads(ranks, (0, 0), work)
    assert reported[0] == ["the ranks are out of step: rank 1 came for another operation than rank 0"] * 2
    assert reported[1] == ["the ranks are out of step: rank 0 came for another operation than rank 1"] * 2


def test_other_types_are_refused(ranks: RankBackend) -> None:
    def work(rank: int, group: DeviceGroup) -> None:
        with pytest.raises(TypeError, match="torch.int64 is not added over ranks; there are: torch.float32, torch.bfloat16"):
            group.all_reduce(torch.ones(2, dtype=torch.int64))

    run_threads(ranks, (0, 0), work)


def test_they_are_good_operations(ranks: RankBackend) -> None:
    """A group of one rank: what torch asks of shapes, and of what counts as written."""
    memory = HeapMemory(memory_bytes(1024))
    memories = torch.tensor([memory.address, memory.watch_address])
    checks = ("test_schema", "test_faketensor", "test_aot_dispatch_static")
    x = torch.randn(3, 100)
    for order in ORDERS[:2]:
        ranks.order = order
        arguments = (x, memories, 0, 1024, 512, 20_000)
        torch.library.opcheck(torch.ops.vnext_cuda.sum_over_ranks.default, arguments, test_utils=checks)
        arguments = (x, 1, memories, 0, 1024, 20_000)
        torch.library.opcheck(torch.ops.vnext_cuda.join_over_ranks.default, arguments, test_utils=checks)


# ---- the choice --------------------------------------------------------------------------------------------------


def test_all_ranks_take_the_host_where_one_cannot_map(ranks: RankBackend, caplog: pytest.LogCaptureFixture) -> None:
    class Unmappable(HeapMemory):
        def open(self, handle: bytes) -> int:
            raise RuntimeError("cudaErrorMapBufferObjectFailed")

    def rank_main(rank: int) -> Any:
        group = join(store, rank, 3, LIMITS, Unmappable if rank == 2 else HeapMemory)
        found = [same_bits(group.all_reduce(values(1, rank, 900, dtype)), tree_sum(1, 3, 900, dtype)) for dtype in SUMMED]
        joined = group.all_gather(torch.full((2,), rank), 0).tolist()
        group.require_whole()
        group.close()
        return type(group).__name__, found, joined

    store = dist.HashStore()
    with ThreadPoolExecutor(3) as threads:
        assert list(threads.map(rank_main, range(3))) == [("HostGroup", [True] * 3, [0, 0, 1, 1, 2, 2])] * 3
    assert "over the host's memory, which is slow: rank 2 cannot map the memory of rank 0: cudaError" in caplog.text


def test_large_tensors_go_above_on_every_rank(ranks: RankBackend) -> None:
    """By a size that rank 0 tells all ranks."""

    class Above:
        def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
            return tensor.new_tensor([7.0])

        def all_gather(self, tensor: torch.Tensor, dim: int) -> torch.Tensor:
            return tensor.new_tensor([8.0])

        def close(self) -> None:
            pass

    def work(rank: int, group: DeviceGroup) -> Any:
        group._above = Above()
        most = limits.ipc_bytes_max // 4
        sums = [group.all_reduce(torch.ones(count))[0].item() for count in (most, most + 1)]
        return sums, [group.all_gather(torch.ones(count), 0)[0].item() for count in (most, most + 1)], group.describe()

    limits = msgspec.structs.replace(LIMITS, ipc_bytes_max=8192)
    for sums, joins, said in run_threads(ranks, (0, 0), work, limits):
        assert (sums, joins) == ([2.0, 7.0], [1.0, 8.0])
        assert "two-shot to 8 KiB, NCCL above" in said


def test_more_ranks_get_smaller_one_shots() -> None:
    sizes = [default_limits(world_size).one_shot_bytes_max for world_size in (2, 3, 4, 5, 8, 9)]
    assert sizes == sorted(sizes, reverse=True) and sizes[-1] == 0 < sizes[-2]


def test_the_doctors_line_names_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert choose_collectives.describe() == "none: torch sees no GPU"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(choose_collectives, "find_spec", lambda name: None)
    assert "through the host" in choose_collectives.describe() or "CuPy" in choose_collectives.describe()
    monkeypatch.setattr(choose_collectives, "find_spec", lambda name: name)
    assert "sizes not measured" in choose_collectives.describe()


# ---- CUDA's memory, its runtime played by the host ---------------------------------------------------------------


class HostRuntime:
    """The functions of CuPy's runtime that IpcMemory calls, over the heap of one process."""

    hostAllocMapped, hostAllocPortable = 2, 1

    def __init__(self) -> None:
        self.held: dict[int, Any] = {}
        self.opened: list[int] = []

    def malloc(self, size_bytes: int) -> int:
        buffer = ctypes.create_string_buffer(b"\xff" * size_bytes, size_bytes + 16)
        address = ctypes.addressof(buffer) + 15 & ~15
        self.held[address] = buffer
        return address

    def hostAlloc(self, size_bytes: int, flags: int) -> int:
        assert flags == self.hostAllocMapped | self.hostAllocPortable
        return self.malloc(size_bytes)

    def memset(self, address: int, value: int, size_bytes: int) -> None:
        ctypes.memset(address, value, size_bytes)

    def deviceSynchronize(self) -> None:
        pass

    def ipcGetMemHandle(self, address: int) -> bytes:
        return address.to_bytes(64, "big")

    def ipcOpenMemHandle(self, handle: bytes) -> int:
        self.opened.append(int.from_bytes(handle, "big"))
        return self.opened[-1]

    def ipcCloseMemHandle(self, address: int) -> None:
        self.opened.remove(address)

    def free(self, address: int) -> None:
        del self.held[address]

    freeHost = free


def test_memory_of_cuda_is_asked_for_shared_and_given_back(ranks: RankBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    """IpcMemory's own calls, every name of which CuPy must have; on a GPU perf/gpu_all_reduce.py runs them."""
    cuda = pytest.importorskip("cupy").cuda
    runtime = HostRuntime()
    names = [name for name in dir(HostRuntime) if not name.startswith("_")]
    assert set(names) <= set(dir(cuda.runtime))
    monkeypatch.setattr(cuda, "runtime", runtime)
    monkeypatch.setattr(cuda, "Device", lambda index: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)

    def rank_main(rank: int) -> Any:
        group = join(store, rank, 2, LIMITS, device_memory.IpcMemory)
        wrong = wrong_sums(group, rank, 2, (torch.float32,))
        group.close()
        return wrong

    store = dist.HashStore()
    with ThreadPoolExecutor(2) as threads:
        assert list(threads.map(rank_main, range(2))) == [[], []]
    assert (runtime.held, runtime.opened) == ({}, [])
