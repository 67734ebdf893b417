"""CPU tensors carried to another memory for each launch and back: how the tests of the host shim run on a GPU as they are.

Owns the carrying. A kernel gets a copy of every whole storage that its arguments lie in, each an allocation of its own, so
that strides, poison and neighbours are as in the test and a memory checker sees every end. All of them come back: a write
that should not have been is seen. The launch itself is the backend's own, the GPU's or (to test this file) the shim's.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch

from vnext.kernels.cuda.interface import Argument, Backend, Defines, Kernel

ALIGNMENT = 256
"""Of an allocation, in bytes, here and on a GPU."""


class Memory(Protocol):
    """The memory that kernels run in. Sizes in bytes, addresses as integers, multiples of ALIGNMENT."""

    def allocate(self, size: int) -> int: ...
    def free(self, address: int) -> None: ...
    def copy_in(self, to: int, host: int, size: int) -> None: ...
    def copy_out(self, host: int, source: int, size: int) -> None: ...


class HostMemory:
    """Another place of the same memory."""

    def __init__(self) -> None:
        self._held: dict[int, ctypes.Array[ctypes.c_char]] = {}

    def allocate(self, size: int) -> int:
        buffer = ctypes.create_string_buffer(size + ALIGNMENT)
        address = -(-ctypes.addressof(buffer) // ALIGNMENT) * ALIGNMENT
        self._held[address] = buffer
        return address

    def free(self, address: int) -> None:
        del self._held[address]

    def copy_in(self, to: int, host: int, size: int) -> None:
        ctypes.memmove(to, host, size)

    copy_out = copy_in


class GpuMemory:
    """A GPU's, by plain allocations: no pool in which one overrun lands in another tensor. Sizes are multiples of 16, because
    compute-sanitizer takes a copy of fewer bytes (cp.async with a source size) for one of 16; AddressSanitizer knows the rest."""

    def __init__(self) -> None:
        from cupy.cuda import runtime

        torch.cuda.init()
        self._runtime = runtime

    def allocate(self, size: int) -> int:
        return self._runtime.malloc(-(-size // 16) * 16)

    def free(self, address: int) -> None:
        self._runtime.free(address)

    def copy_in(self, to: int, host: int, size: int) -> None:
        self._runtime.memcpy(to, host, size, self._runtime.memcpyHostToDevice)

    def copy_out(self, host: int, source: int, size: int) -> None:
        torch.cuda.synchronize()  # the launch went to torch's stream
        self._runtime.memcpy(host, source, size, self._runtime.memcpyDeviceToHost)


class CarriedKernel:
    """A kernel of the other memory."""

    def __init__(self, kernel: Kernel, memory: Memory) -> None:
        self._kernel, self._memory = kernel, memory

    def __call__(
        self, grid: Sequence[int], block: Sequence[int], arguments: Sequence[Argument], *, shared_mem: int = 0
    ) -> None:
        tensors = [argument for argument in arguments if isinstance(argument, torch.Tensor)]
        storages = {each.untyped_storage().data_ptr(): each.untyped_storage().nbytes() for each in tensors}
        storages.pop(0, None)
        begins = {host: self._memory.allocate(host % ALIGNMENT + size) for host, size in storages.items()}
        places = {host: begin + host % ALIGNMENT for host, begin in begins.items()}  # launchers looked at addresses
        try:
            for host, size in storages.items():
                self._memory.copy_in(places[host], host, size)
            carried = [moved(each, places) if isinstance(each, torch.Tensor) else each for each in arguments]
            self._kernel(grid, block, carried, shared_mem=shared_mem)
            for host, size in storages.items():
                self._memory.copy_out(host, places[host], size)
        finally:
            for begin in begins.values():
                self._memory.free(begin)


def moved(tensor: torch.Tensor, places: dict[int, int]) -> np.uint64 | None:
    """Where the tensor's first element went."""
    host = tensor.untyped_storage().data_ptr()
    return np.uint64(places[host] + tensor.data_ptr() - host) if host else None


class CarriedBackend:
    """Any backend, for CPU tensors. `order` and `workers` are the shim's: a GPU has its own."""

    def __init__(self, backend: Backend, memory: Memory) -> None:
        self._backend, self._memory = backend, memory
        self.order, self.workers = 0, 1

    def kernel(self, source: str, name: str, defines: Defines) -> CarriedKernel:
        return CarriedKernel(self._backend.kernel(source, name, defines), self._memory)


def gpu_backend() -> CarriedBackend:
    """CPU tensors on the current GPU."""
    from vnext.kernels.cuda.driver import CudaBackend

    return CarriedBackend(CudaBackend(), GpuMemory())
