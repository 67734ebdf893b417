"""The GPU's backend: cubins by CuPy, launched on torch's current stream with raw addresses.

Owns modules for as long as the process lives: a graph that captured a launch still needs them. The stream is asked for
at every launch, never kept. A module is never loaded while a graph is captured: that is refused with a sentence; make
every kernel before. A process uses one device; its tensors and its kernels are that device's.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

import torch
from cupy.cuda import driver, runtime
from cupy.cuda.function import Module

from vnext.kernels.cuda.compiling import cached_cubin
from vnext.kernels.cuda.interface import Argument, Arguments, Defines, Words, three

SHARED_BYTES_FREE = 48 * 1024
"""More than this is given only after asking."""


class _Bound(threading.local):
    """The device whose context is current in this thread, as far as this file knows."""

    device = -1


_bound = _Bound()


class CudaKernel:
    """One function of a module that was loaded for `device`."""

    def __init__(self, module: Module, name: str, device: int) -> None:
        self._module, self._name, self._device = module, name, device
        self._function = module.get_function(name).ptr
        self._shared_bytes = SHARED_BYTES_FREE

    def __call__(
        self, grid: Sequence[int], block: Sequence[int], arguments: Sequence[Argument], *, shared_mem: int = 0
    ) -> None:
        self.launch(grid, block, Arguments(arguments), shared_mem)

    def launch(self, grid: Sequence[int], block: Sequence[int], values: Arguments | Words, shared_mem: int = 0) -> None:
        function, _ = self.prepare(shared_mem)
        stream = torch.cuda.current_stream(self._device).cuda_stream
        driver.launchKernel(function, *three(grid), *three(block), shared_mem, stream, values.address, 0)

    def prepare(self, shared_mem: int) -> tuple[int, int]:
        """The driver's function, which this thread may now launch with so much shared memory, and how much it may have."""
        if _bound.device != self._device:
            bind(self._device)
        if shared_mem > self._shared_bytes:
            self._ask_for(shared_mem)
        return self._function, self._shared_bytes

    def attribute(self, which: int) -> int:
        """A CU_FUNC_ATTRIBUTE of the loaded function, such as driver.CU_FUNC_ATTRIBUTE_NUM_REGS."""
        return int(driver.funcGetAttribute(which, self._function))

    def _ask_for(self, shared_mem: int) -> None:
        """Raise the function's limit of dynamic shared memory. It is no work of a stream: a capture does not mind."""
        most = runtime.deviceGetAttribute(runtime.cudaDevAttrMaxSharedMemoryPerBlockOptin, self._device)
        if shared_mem > most:
            raise RuntimeError(
                f"{self._name} needs {shared_mem} bytes of shared memory a block but this GPU gives {most}: use --device cpu, or a "
                "GPU that has more"
            )
        driver.funcSetAttribute(self._function, driver.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, shared_mem)
        self._shared_bytes = shared_mem


def bind(device: int) -> None:
    """Make the device's primary context, which is torch's too, current in this thread: the driver's calls need one."""
    current = torch.cuda.current_device()
    if current != device:
        raise RuntimeError(f"this kernel was loaded for cuda:{device} but the current device is cuda:{current}")
    runtime.setDevice(device)
    _bound.device = device


def load_text(text: str, name: str) -> CudaKernel:
    """A kernel of a PTX text, which the driver compiles for the current device; the caller keeps it."""
    device, module = torch.cuda.current_device(), Module()
    bind(device)
    module.load(text.encode() + b"\0")
    return CudaKernel(module, name, device)


class CudaBackend:
    """Kernels of the current device."""

    _modules: dict[tuple[int, str, Defines], Module] = {}
    _kernels: dict[tuple[int, str, Defines, str], CudaKernel] = {}

    def kernel(self, source: str, name: str, defines: Defines) -> CudaKernel:
        """Load a source's module (compiled once for each architecture) and take a kernel from it.

        One object a function: it remembers how much shared memory the function may have. Raises RuntimeError while a
        graph is captured on the current stream, unless the kernel is there already.
        """
        device = torch.cuda.current_device()
        key = (device, source, defines, name)
        if key not in self._kernels:
            if torch.cuda.is_current_stream_capturing():
                raise RuntimeError(f"{name} of {source} is asked for the first time inside a graph's capture: run it before")
            self._kernels[key] = CudaKernel(self._module(device, source, defines), name, device)
        return self._kernels[key]

    def _module(self, device: int, source: str, defines: Defines) -> Module:
        key = (device, source, defines)
        if key not in self._modules:
            bind(device)
            major, minor = torch.cuda.get_device_capability(device)
            module = Module()
            module.load(cached_cubin(source, defines, f"sm_{major}{minor}"))
            self._modules[key] = module
        return self._modules[key]
