"""The GPU's face keeps the promises that the twin in tests/ makes more strictly: order, late copies, graphs, figures."""

from __future__ import annotations

import threading
from collections.abc import Callable

import numpy as np
import pytest
import torch

from vnext.kernels import products
from vnext.kernels.cuda import experts
from vnext.kernels.table import operations
from vnext.runtime.gpu.cuda import CudaDevice
from vnext.runtime.gpu.pages import DeviceFilling, DevicePages
from vnext.runtime.gpu.staging import Staging


@pytest.fixture(scope="module")
def device() -> CudaDevice:
    return CudaDevice(0)


def test_blocks_arrive_in_order_while_the_device_is_busy(device: CudaDevice) -> None:
    staging, total = Staging(device, 2), torch.zeros(1000, dtype=torch.int64, device=device.torch_device)
    matrix = torch.randn(2048, 2048, device=device.torch_device)
    for value in range(50):
        matrix = (matrix @ matrix).clamp(-1, 1)
        total += staging.send({"numbers": np.full(1000, value)})["numbers"]
        staging.release()
    (found,), mark = device.fetch([total])
    mark.wait()
    assert mark.is_reached() and (found == 49 * 50 // 2).all()


def read(filling: DeviceFilling, parts: Callable[[], list[list[memoryview]]]) -> None:
    """Have pages filled, the last one first."""
    for number, (page,) in enumerate(parts()):
        room = filling.room()
        room[68:] = page
        assert filling.put(39 - number)


def test_pages_leave_and_come_back_beside_a_busy_device(device: CudaDevice) -> None:
    """Bit for bit, with work before, between and behind the copies; in words of 64 bits and of 8."""
    for width in (64, 9):
        drawn = torch.randint(-128, 128, (2, 40, 2, 4, width), dtype=torch.int8)
        left, right = (each.to(device.torch_device) for each in (drawn.clone(), torch.zeros_like(drawn)))
        pages = [DevicePages(device, 68, 2 * 8 * width) for _ in range(2)]
        for each, cache in zip(pages, (left, right), strict=True):
            each.use([((cache[0], cache[1]),)])
        matrix = torch.randn(4096, 4096, device=device.torch_device)
        for _ in range(20):
            matrix = (matrix @ matrix).clamp(-1, 1)
        parts = pages[0].copy(range(40))
        left.zero_()
        right.copy_(matrix.view(-1)[: right.numel()].view_as(right).to(torch.int8))
        filling = pages[1].fill()
        reader = threading.Thread(target=read, args=(filling, parts))
        reader.start()
        while reader.is_alive() or not filling.look():
            filling.look()
        filling.stop()
        assert torch.equal(right.clone().cpu(), drawn.flip(1))


def test_a_graph_reads_what_lies_in_its_memory(device: CudaDevice) -> None:
    source = torch.ones(4, device=device.torch_device)
    source * 2 + 1
    graph = device.graph()
    graph.begin()
    result = source * 2 + 1
    graph.end()
    source.fill_(5)
    graph.replay()
    (found,), mark = device.fetch([result])
    mark.wait()
    assert found.tolist() == [11.0] * 4


def test_the_figures_of_memory_add_up(device: CudaDevice) -> None:
    device.begin_peak()
    before = device.memory()
    held = torch.zeros(2**28, dtype=torch.uint8, device=device.torch_device)
    after = device.memory()
    assert after.peak - before.peak >= 2**28 and after.cached >= held.numel() and after.free + after.cached <= after.total


def test_experts_are_multiplied_and_captured_without_the_host(device: CudaDevice) -> None:
    """Beside the reference, which cuts them on the host; some experts have no token."""
    if not experts.serves(torch.bfloat16, 256, 192):
        pytest.skip("this GPU has no grouped product that asks the host for nothing")

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device=device.torch_device).bfloat16()

    ids = torch.randint(0, 6, (40, 2), device=device.torch_device)
    given = (drawn(40, 256), torch.rand(40, 2, device=device.torch_device), ids, drawn(8, 384, 256), drawn(8, 256, 192), "silu")
    multiply = operations("cuda").experts
    expected, found = products.experts(*given).float(), multiply(*given).float()
    assert (found - expected).norm() <= 0.01 * expected.norm()
    graph = device.graph()
    graph.begin()
    held = multiply(*given)
    graph.end()
    ids.copy_(ids.flip(0))
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(held, multiply(*given))
