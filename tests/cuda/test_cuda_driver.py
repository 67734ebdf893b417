"""The GPU's backend without a GPU: CuPy's driver calls are recorded in place of being made, so what is asked for is seen."""

from __future__ import annotations

import ctypes
import threading
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from vnext.kernels.cuda import backends

GIVEN = 227 * 1024
SHARED_LIMIT, MOST_SHARED = 8, 97  # as CUDA numbers the attributes


class Gpu:
    """What was asked of it, in order."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.is_capturing, self.device = False, 0

    def launch(self, function: int, *rest: int) -> None:
        """cuLaunchKernel: three sizes of a grid, three of a block, shared memory, stream, pointers to values, nothing."""
        *sizes, shared, stream, pointers, extra = rest
        values = ctypes.cast(pointers, ctypes.POINTER(ctypes.c_void_p))
        tensor, number = ctypes.cast(values[0], ctypes.POINTER(ctypes.c_uint64))[0], ctypes.cast(values[1], ctypes.POINTER(ctypes.c_float))[0]
        self.calls.append(("launch", function, sizes, shared, stream, tensor, number, extra))

    def named(self, name: str) -> list[tuple[Any, ...]]:
        return [call[1:] for call in self.calls if call[0] == name]


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Gpu:
    pytest.importorskip("cupy", reason='no CuPy here: pip install -e ".[cuda-test]"')
    from vnext.kernels.cuda import driver

    found = Gpu()

    class Module:
        def load(self, cubin: bytes) -> None:
            found.calls.append(("load", cubin))

        def get_function(self, name: str) -> SimpleNamespace:
            return SimpleNamespace(ptr=len(name))

    calls = SimpleNamespace(
        launchKernel=found.launch,
        funcSetAttribute=lambda *call: found.calls.append(("attribute", *call)),
        CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES=driver.driver.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES,
    )
    limits = SimpleNamespace(
        deviceGetAttribute=lambda which, device: {MOST_SHARED: GIVEN}[which],
        setDevice=lambda device: found.calls.append(("bind", device)),
        cudaDevAttrMaxSharedMemoryPerBlockOptin=driver.runtime.cudaDevAttrMaxSharedMemoryPerBlockOptin,
    )
    for name, value in {"driver": calls, "runtime": limits, "Module": Module, "_bound": driver._Bound()}.items():
        monkeypatch.setattr(driver, name, value)
    monkeypatch.setattr(driver, "cached_cubin", lambda source, defines, arch: f"{source} for {arch}".encode())
    monkeypatch.setattr(driver.CudaBackend, "_modules", {})
    monkeypatch.setattr(driver.CudaBackend, "_kernels", {})
    monkeypatch.setattr(torch.cuda, "current_device", lambda: found.device)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: found.is_capturing)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: SimpleNamespace(cuda_stream=700 + device))
    return found


def kernel(name: str) -> Any:
    from vnext.kernels.cuda.driver import CudaBackend

    return CudaBackend().kernel("rows.cu", name, (("SCALAR", "float"),))


def test_a_launch_goes_to_the_current_stream_with_its_values(gpu: Gpu) -> None:
    x = torch.zeros(4)
    kernel("rms_norm")((5,), (32, 2), (x, np.float32(0.5)), shared_mem=64)
    assert gpu.named("launch") == [(8, [5, 1, 1, 32, 2, 1], 64, 700, x.data_ptr(), 0.5, 0)]
    assert gpu.named("load") == [(b"rows.cu for sm_90",)] and gpu.named("attribute") == []


def test_a_module_is_loaded_once_and_a_function_is_one_object(gpu: Gpu) -> None:
    assert kernel("rms_norm") is kernel("rms_norm") is not kernel("gather_rows")
    assert len(gpu.named("load")) == 1


def test_more_shared_memory_is_asked_for_once_and_only_what_there_is(gpu: Gpu) -> None:
    x, norm = torch.zeros(4), kernel("rms_norm")
    for shared in (48 * 1024, 60_000, 50_000, 100_000, 100_000):
        norm((1,), (32,), (x, np.float32(1)), shared_mem=shared)
    assert gpu.named("attribute") == [(8, SHARED_LIMIT, 60_000), (8, SHARED_LIMIT, 100_000)]
    assert norm.prepare(0) == (8, 100_000), "what launches from C++ are told"
    with pytest.raises(RuntimeError, match=f"rms_norm needs {GIVEN + 1} bytes of shared memory a block but this GPU gives {GIVEN}"):
        norm((1,), (32,), (x, np.float32(1)), shared_mem=GIVEN + 1)
    assert len(gpu.named("launch")) == 5


def test_nothing_is_loaded_while_a_graph_is_captured(gpu: Gpu) -> None:
    ready = kernel("rms_norm")
    gpu.is_capturing = True
    assert kernel("rms_norm") is ready
    with pytest.raises(RuntimeError, match="gather_rows of rows.cu is asked for the first time inside a graph's capture"):
        kernel("gather_rows")
    ready((1,), (32,), (torch.zeros(1), np.float32(1)), shared_mem=60_000)
    assert len(gpu.named("load")) == 1 and len(gpu.named("launch")) == 1


def test_each_thread_gets_the_context_once(gpu: Gpu) -> None:
    norm, x = kernel("rms_norm"), torch.zeros(4)

    def twice() -> None:
        for _ in range(2):
            norm((1,), (32,), (x, np.float32(1)))

    twice()
    assert gpu.named("bind") == [(0,)]
    other = threading.Thread(target=twice)
    other.start()
    other.join()
    assert gpu.named("bind") == [(0,), (0,)] and len(gpu.named("launch")) == 4


def test_another_gpu_than_the_current_one_is_refused(gpu: Gpu) -> None:
    with pytest.raises(ValueError, match="tensors are on cuda:1 but kernels run on the current device, 0"):
        backends.kernel_for(torch.device("cuda", 1), "rows.cu", "rms_norm", ())
    norm = kernel("rms_norm")
    gpu.device = 1
    found = []

    def elsewhere() -> None:
        with pytest.raises(RuntimeError, match="loaded for cuda:0 but the current device is cuda:1"):
            norm((1,), (32,), (torch.zeros(1), np.float32(1)))
        found.append(True)

    other = threading.Thread(target=elsewhere)
    other.start()
    other.join()
    assert found == [True]
