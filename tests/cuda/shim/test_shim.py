"""The host shim: numbers, warps, barriers, copies, and the faults it is there to find."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from host_shim import EARLY_COPIES, ORDERS, REVERSE_THREADS, SEED_SHIFT, SHUFFLED, HostBackend, KernelError

HERE = Path(__file__).parent
BUILDS = {"O0": ("-O0",), "O2": ("-O2",), "ucontext": ("-O1", "-DSHIM_UCONTEXT")}


@pytest.fixture(scope="module", params=BUILDS)
def probes(request: pytest.FixtureRequest, libraries: Path) -> HostBackend:
    return HostBackend(libraries, BUILDS[request.param], HERE)


@pytest.fixture(scope="module")
def faults(libraries: Path) -> HostBackend:
    return HostBackend(libraries, ("-O1",), HERE)


def test_conversions_are_those_of_torch(libraries: Path) -> None:
    """Random bits, every value of the narrow types, and the halves between neighbours, where ties go to even."""
    words = torch.randint(-(2**31), 2**31 - 1, (100_000,), generator=torch.Generator().manual_seed(1))
    narrow = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16)
    values = [words.to(torch.int32).view(torch.float32)]
    for dtype in (torch.bfloat16, torch.float16):
        exact = narrow.view(dtype).float()
        values += [exact, exact * (1 + 2.0**-9), exact * (1 + 2.0**-12), (exact[:-1] + exact[1:]) / 2]
    small = torch.arange(256, dtype=torch.int16).to(torch.uint8).view(torch.float8_e4m3fn).float().nan_to_num(1.0)
    values += [small, (small[:-1] + small[1:]) / 2, small * 1.0625, torch.linspace(-2.0**-6, 2.0**-6, 4097)]
    x = torch.cat(values)
    x = x[~x.isnan()]  # which NaN comes out is not the same everywhere; that one does is asked below
    x = torch.cat((x, torch.tensor([float("nan")])))
    results = [torch.empty(len(x), dtype=dtype) for dtype in (torch.bfloat16, torch.float16, torch.float8_e4m3fn)]
    back = torch.empty(3, len(x))
    kernel = HostBackend(libraries, ("-O2",), HERE).kernel("shim_probe.cu", "convert", ())
    kernel((-(-len(x) // 256),), (256,), (x, *results, back, np.int32(len(x))))
    for result, wide in zip(results[:2], back, strict=False):
        assert torch.equal(result[:-1], x[:-1].to(result.dtype)) and torch.equal(wide[:-1], result[:-1].float())
    fp8 = x[:-1].clamp(-448, 448).to(torch.float8_e4m3fn)  # a GPU's conversion saturates, torch's gives NaN
    assert torch.equal(results[2][:-1].view(torch.uint8), fp8.view(torch.uint8))
    assert torch.equal(back[2, :-1], fp8.float())
    assert back[:, -1].isnan().all()


@pytest.mark.parametrize(("name", "dtype"), [("product_bf16", torch.bfloat16), ("product_half", torch.float16)])
def test_a_product_of_tiles(probes: HostBackend, name: str, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(3)
    a, b = (torch.randn(16, columns, generator=generator).to(dtype) for columns in (16, 8))
    found = torch.empty(16, 8)
    kernel = probes.kernel("shim_probe.cu", name, ())
    for probes.order in ORDERS:
        kernel((1,), (32,), (found.fill_(float("nan")), a, b), shared_mem=384 * 2)
        assert torch.allclose(found, a.float() @ b.float(), rtol=0, atol=1e-5)


def test_shuffles_and_votes(probes: HostBackend) -> None:
    lanes = np.arange(32)
    expected = [
        lanes // 8 * 8 + 5,
        lanes ^ 3,
        np.where(lanes % 16 + 2 < 16, lanes + 2, lanes),
        np.where(lanes >= 4, lanes - 4, lanes),
        np.full(32, np.int64(sum(1 << lane for lane in range(0, 32, 3))).astype(np.int32)),
        np.where(lanes < 16, 15 - lanes, 1),
    ]
    for probes.order in ORDERS:
        out = torch.full((6, 32), -1, dtype=torch.int32)
        probes.kernel("shim_probe.cu", "votes", ())((1,), (32,), (out,))
        assert np.array_equal(out.numpy(), np.stack(expected))


def test_blocks_and_threads_have_their_places(probes: HostBackend) -> None:
    for probes.order, probes.workers in ((0, 1), (3, 2)):
        out = torch.full((12, 24), -1, dtype=torch.int32)
        probes.kernel("shim_probe.cu", "indices", ())((2, 3, 2), (4, 3, 2), (out,))
        assert torch.equal(out, torch.arange(12, dtype=torch.int32)[:, None] * 1000 + torch.arange(24))


def test_atomics_and_fences_between_blocks_on_two_os_threads(probes: HostBackend) -> None:
    probes.workers = 2
    for probes.order in ORDERS:
        count, largest = torch.zeros(1, dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
        probes.kernel("shim_probe.cu", "counted", ())((50,), (64,), (count, largest))
        assert (count.item(), largest.item()) == (3200, 3199)
        finished, parts, total = torch.zeros(1, dtype=torch.int32), torch.zeros(50), torch.zeros(1)
        probes.kernel("shim_probe.cu", "last_block", ())((50,), (32,), (finished, parts, total), shared_mem=4)
        assert total.item() == 1275
    probes.workers = 1


def test_copies_arrive_at_their_wait(probes: HostBackend) -> None:
    """Late, what was not waited for is still poison; early, it is there. Bytes that are not valid become zero."""
    source = torch.arange(1, 257, dtype=torch.float32)

    def run(order: int, valid_bytes: int, wait_for_all: bool) -> torch.Tensor:
        out = torch.empty(256)
        probes.order = order
        arguments = (out, source, np.int32(valid_bytes), np.int32(wait_for_all))
        probes.kernel("shim_probe.cu", "staged", ())((1,), (32,), arguments, shared_mem=1024)
        return out

    late = run(0, 16, False)
    assert torch.equal(late[:128], source[:128]) and late[128:].isnan().all()
    for order in ORDERS:
        assert torch.equal(run(order, 16, True), source)
    assert torch.equal(run(EARLY_COPIES, 16, False), source)
    part = run(0, 8, True)[:128].view(32, 4)
    assert torch.equal(part[:, :2], source[:128].view(32, 4)[:, :2]) and not part[:, 2:].any()


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("split_barrier", r"barrier at line \d+ of .*shim_faults.cu meets the one at line \d+"),
        ("barrier_after_the_end", "ends while .* wait at a barrier|after thread .* has ended"),
        ("absent_lanes", "deadlock: thread .* waits for ever at|meets"),
        ("not_in_its_mask", "not in its mask"),
        ("reads_outside_its_mask", "reads lane 20, which is not in the mask"),
        ("mixed_collectives", "meets"),
        ("crooked_copy", "not aligned"),
        ("waits_for_nobody", "deadlock: thread .* waits for ever"),
    ],
)
def test_faults_are_named(faults: HostBackend, name: str, words: str) -> None:
    for faults.order in (0, REVERSE_THREADS, SHUFFLED | 3 << SEED_SHIFT):
        with pytest.raises(KernelError, match=words):
            faults.kernel("shim_faults.cu", name, ())((1,), (32,), (torch.zeros(64),), shared_mem=64)


def test_a_missing_barrier_shows_as_poison_or_in_another_order(faults: HostBackend) -> None:
    expected = torch.arange(1, 65).float() % 64

    def run(order: int, *defines: tuple[str, str]) -> torch.Tensor:
        faults.order = order
        out = torch.empty(64)
        faults.kernel("shim_faults.cu", "neighbour", defines)((1,), (64,), (out,), shared_mem=256)
        return out

    assert all(torch.equal(run(order), expected) for order in ORDERS)
    assert run(0, ("NO_BARRIER", "1"))[:63].isnan().all()
    assert run(REVERSE_THREADS, ("NO_BARRIER", "1")).isnan().sum() == 1


def test_a_stack_that_is_too_small_is_an_error(libraries: Path) -> None:
    deep = HostBackend(libraries, ("-O0",), HERE).kernel("shim_faults.cu", "deep", ())
    out = torch.zeros(1)
    deep((1,), (1,), (out, np.int32(20)))
    with pytest.raises(KernelError, match="larger stack"):
        deep((1,), (1,), (out, np.int32(40)))
