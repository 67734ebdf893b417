"""The GPU's backend: cubins by CuPy, launched on torch's current stream with raw addresses.

Owns modules for as long as the process lives: a graph that captured a launch still needs them. The stream is asked for
at every launch, never kept. Make and run every kernel once before capturing a graph: loading inside a capture fails.
"""

from __future__ import annotations

from collections.abc import Sequence

import cupy
import torch
from cupy.cuda import driver
from cupy.cuda.function import Module

from vnext.kernels.cuda.arguments import Argument, Arguments, three
from vnext.kernels.cuda.backends import Defines
from vnext.kernels.cuda.compiling import cached_cubin

MAX_DYNAMIC_SHARED_SIZE_BYTES = 8  # CUfunction_attribute
SHARED_BYTES_FREE = 48 * 1024
"""More than this is given only after asking."""


class CudaKernel:
    """One function of a loaded module."""

    def __init__(self, module: Module, name: str) -> None:
        self._module = module
        self._function = module.get_function(name)
        self._shared_bytes = SHARED_BYTES_FREE

    def __call__(
        self, grid: Sequence[int], block: Sequence[int], arguments: Sequence[Argument], *, shared_mem: int = 0
    ) -> None:
        if shared_mem > self._shared_bytes:
            driver.funcSetAttribute(self._function.ptr, MAX_DYNAMIC_SHARED_SIZE_BYTES, shared_mem)
            self._shared_bytes = shared_mem
        values = Arguments(arguments)
        stream = torch.cuda.current_stream().cuda_stream
        driver.launchKernel(self._function.ptr, *three(grid), *three(block), shared_mem, stream, values.address, 0)


class CudaBackend:
    """Kernels of the current device."""

    _modules: dict[tuple[int, str, Defines], Module] = {}

    def kernel(self, source: str, name: str, defines: Defines) -> CudaKernel:
        """Load a source's module (compiled once for each architecture) and take a kernel from it."""
        device = torch.cuda.current_device()
        key = (device, source, defines)
        if key not in self._modules:
            major, minor = torch.cuda.get_device_capability(device)
            module = Module()
            with cupy.cuda.Device(device):
                module.load(cached_cubin(source, defines, f"sm_{major}{minor}"))
            self._modules[key] = module
        return CudaKernel(self._modules[key], name)
