"""Memory of this rank's GPU that the other ranks' GPUs map, and the words through which the host watches them wait.

Owns their lifetime, through CUDA's IPC; knows no collectives. Uses plain allocations, never a pool: a handle names a whole
allocation, so the others would map the pool. The watch is host memory that the GPU reaches too, so reading it needs no
synchronisation. A group needs DeviceMemory; IpcMemory implements it on a GPU, the tests' host shim with shared files.
"""

from __future__ import annotations

import ctypes
from typing import Protocol

import torch

from vnext.kernels.cuda.exchange import RANKS_MAX, WATCH_WORDS

WORD_BYTES = 4


class DeviceMemory(Protocol):
    """Memory that one rank shares with the others, zeroed. Errors are RuntimeError (including CUDA's) or OSError."""

    address: int
    """Address of the memory for this rank's device."""
    watch_address: int
    """Addresses of the watch's words, for this rank's device and for the host."""
    handle: bytes
    """The handle by which another rank opens the memory."""

    def open(self, handle: bytes) -> int:
        """The address of another rank's memory for this rank's device."""

    def settle(self) -> None:
        """Return once the device has done all requested work."""

    def close(self) -> None:
        """Unmap the others' memory and free this rank's. Idempotent; no rank may use it any more."""


class Watch:
    """The host's view of the words that kernels and host share."""

    def __init__(self, address: int) -> None:
        self._words = (ctypes.c_uint32 * WATCH_WORDS).from_address(address)

    def call_off(self) -> None:
        """Tell kernels to stop waiting for ranks that will not come."""
        self._words[0] = 1

    def missing(self) -> list[int]:
        """Ranks that did not come."""
        return self._set(1)

    def differing(self) -> list[int]:
        """Ranks that came with a different operation."""
        return self._set(1 + RANKS_MAX)

    def _set(self, first: int) -> list[int]:
        return [rank for rank in range(RANKS_MAX) if self._words[first + rank]]


class IpcMemory:
    """DeviceMemory of the current GPU, through CuPy. Raises CUDA's errors, and ImportError without CuPy."""

    def __init__(self, size_bytes: int) -> None:
        from cupy.cuda import Device, runtime

        self._runtime, self._device = runtime, Device(torch.cuda.current_device())
        self._opened: list[int] = []
        with self._device:
            self.address = runtime.malloc(size_bytes)
            self.watch_address = runtime.hostAlloc(
                WATCH_WORDS * WORD_BYTES, runtime.hostAllocMapped | runtime.hostAllocPortable
            )
            ctypes.memset(self.watch_address, 0, WATCH_WORDS * WORD_BYTES)
            runtime.memset(self.address, 0, size_bytes)
            runtime.deviceSynchronize()  # the other ranks may write as soon as they have the handle
            self.handle = bytes(runtime.ipcGetMemHandle(self.address))

    def open(self, handle: bytes) -> int:
        with self._device:
            self._opened.append(self._runtime.ipcOpenMemHandle(handle))
        return self._opened[-1]

    def settle(self) -> None:
        with self._device:
            self._runtime.deviceSynchronize()

    def close(self) -> None:
        with self._device:
            while self._opened:
                self._runtime.ipcCloseMemHandle(self._opened.pop())
            if self.address:
                self._runtime.free(self.address)
                self._runtime.freeHost(self.watch_address)
        self.address = self.watch_address = 0
