"""Interface of the backends that compile a source of `cuda/` with its macros into kernels. backends.py chooses one."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import torch

from vnext.kernels.cuda.arguments import Argument

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
