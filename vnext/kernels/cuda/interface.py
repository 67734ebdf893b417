"""Interface of the backends that compile a source of `cuda/` with its macros into kernels. backends.py chooses one."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch

Defines = tuple[tuple[str, str], ...]
"""Macros of a source: names and values."""

SCALARS = {
    torch.float32: "float",
    torch.bfloat16: "__nv_bfloat16",
    torch.float16: "__half",
    torch.float8_e4m3fn: "__nv_fp8_e4m3",
    torch.int8: "signed char",
}
"""Element types as the sources name them; the last two are caches' alone."""


class Kernel(Protocol):
    """One `extern "C"` kernel. Grid and block have one to three sizes, `shared_mem` is dynamic memory in bytes."""

    def __call__(
        self, grid: Sequence[int], block: Sequence[int], arguments: Sequence[Argument], *, shared_mem: int = 0
    ) -> None: ...

    def prepare(self, shared_mem: int) -> tuple[int, int]:
        """For launches from C++ by this thread: the function, and how much shared memory it may have, at least what
        is asked."""
        ...


class Backend(Protocol):
    """Makes kernels for one device."""

    def kernel(self, source: str, name: str, defines: Defines) -> Kernel: ...


def sources() -> Path:
    """The folder of the CUDA sources: beside this file where vnext was installed, at the root of a checkout."""
    shipped = Path(__file__).parent / "sources"
    return shipped if shipped.is_dir() else Path(__file__).parents[3] / "cuda"


# ---- arguments ---------------------------------------------------------------------------------------------------
# Arguments of a launch, as cuLaunchKernel takes them: an array of pointers to values.
#
# Owns their form and nothing else; a GPU's driver and the tests' host shim read the same array.

Argument = torch.Tensor | np.generic | None

TYPES = {
    np.int32: ctypes.c_int32, np.uint32: ctypes.c_uint32, np.int64: ctypes.c_int64, np.uint64: ctypes.c_uint64,
    np.float32: ctypes.c_float, np.float64: ctypes.c_double,
}  # fmt: skip


class Arguments:
    """Values and the array of their addresses, alive together. `address` is what a launch gets."""

    __slots__ = ("_values", "_pointers")

    def __init__(self, arguments: Sequence[Argument]) -> None:
        self._values = [value_of(argument) for argument in arguments]
        self._pointers = (ctypes.c_void_p * len(self._values))(*map(ctypes.addressof, self._values))

    @property
    def address(self) -> int:
        return ctypes.addressof(self._pointers)


class Words:
    """Values of 64 bits each, in the form of Arguments."""

    __slots__ = ("_values", "_pointers")

    def __init__(self, values: Sequence[int]) -> None:
        self._values = (ctypes.c_int64 * len(values))(*values)
        first = ctypes.addressof(self._values)
        self._pointers = (ctypes.c_void_p * len(values))(*range(first, first + 8 * len(values), 8))

    @property
    def address(self) -> int:
        return ctypes.addressof(self._pointers)


def value_of(argument: Argument) -> Any:
    """A tensor is the address of its first element, None a null pointer, a numpy scalar itself.

    Raises TypeError for anything else: a plain number does not say how wide it is.
    """
    if argument is None:
        return ctypes.c_uint64(0)
    if isinstance(argument, torch.Tensor):
        return ctypes.c_uint64(argument.data_ptr())
    made = TYPES.get(type(argument))
    if made is None:
        raise TypeError(f"a kernel takes tensors, None and numpy's numbers of 4 or 8 bytes, not {type(argument).__name__}")
    return made(argument.item())


def three(shape: Sequence[int]) -> tuple[int, int, int]:
    """A grid or a block of one to three sizes as three."""
    first, second, third = (*shape, 1, 1, 1)[:3]
    return first, second, third
