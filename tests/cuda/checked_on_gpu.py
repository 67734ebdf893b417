"""A program of its own: the cases of sanitized.py on a GPU, for compute-sanitizer: `checked_on_gpu.py FOLDER all|overrun|race`.

Prints "clean" where all is done. "overrun" makes a kernel read and write behind its row; "race" takes a barrier out of the
sum of a block: so that a checker that finds nothing is not believed.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from carried import CarriedBackend, GpuMemory, gpu_backend
from cupy.cuda.function import Module
from planted_bugs import ROW_BUGS, plant
from rows_cases import draw
from sanitized import attention, overrun, row_wise, sample, thin_products

from vnext.kernels.cuda import backends, rows
from vnext.kernels.cuda.compiling import compile_source
from vnext.kernels.cuda.driver import CudaBackend, bind
from vnext.kernels.cuda.interface import Defines

NO_BARRIER = next(bug for bug in ROW_BUGS if bug.name == "no barrier in the sum of a block")


class PlantedBackend(CudaBackend):
    """The GPU's, from another folder of sources."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._modules, self._kernels = folder, {}, {}

    def _module(self, device: int, source: str, defines: Defines) -> Module:
        bind(device)
        major, minor = torch.cuda.get_device_capability(device)
        module = Module()
        module.load(compile_source(source, defines, f"sm_{major}{minor}", self._folder).cubin)
        return module


def everything() -> None:
    attention()
    row_wise()
    sample()
    thin_products()


def main(folder: str, wish: str) -> None:
    if wish == "race":
        backend = CarriedBackend(PlantedBackend(plant(NO_BARRIER, Path(folder))), GpuMemory())
    else:
        backend = gpu_backend()
    backends.use("cpu", lambda: backend)
    if wish == "race":
        rows.rms_norm(draw(4, 4104), draw(4104), 1e-6)
    elif wish == "overrun":
        overrun(backend)
    else:
        everything()
    print("clean")


if __name__ == "__main__":
    main(*sys.argv[1:])
