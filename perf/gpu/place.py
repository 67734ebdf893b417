"""Where the check runs: a GPU and its table of operations, or the host shim of tests/cuda behind the same signatures.

Owns only that choice: code that holds a Place makes the same calls on both. In a dry run tensors are on the CPU, the shim runs
the CUDA kernels there, and nothing is timed.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import NamedTuple

import torch

from perf.gpu.report import ROOT
from perf.gpu.timing import Clock, DryClock, GpuClock
from vnext.kernels.cuda import compiled
from vnext.kernels.table import Operations, operations, plain_operations

CASES = (*(ROOT / "tests" / room for room in ("cuda", "kernels", "runtime")), ROOT / "tests")
"""Folders of the tests' case files, which the check shares."""


class Place(NamedTuple):
    """`operations`: those the runtime selects for the device; `plain`: their references, on the same tensors."""

    device: torch.device
    is_dry: bool
    operations: Operations
    plain: Operations
    clock: Clock


def use_cases() -> None:
    """Make the tests' case files importable by name."""
    for folder in CASES:
        if str(folder) not in sys.path:
            sys.path.insert(0, str(folder))


def place(dry: bool, libraries: Path) -> Place:
    """Return the place. `libraries`: a folder for a dry run's compiled files. Raises RuntimeError without a compiler."""
    if not dry:
        device = torch.device("cuda", torch.cuda.current_device())
        return Place(device, False, operations("cuda"), plain_operations(), GpuClock(device))
    use_shim(libraries)
    from vnext.kernels.cuda.operations import FUNCTIONS

    shimmed = plain_operations()._replace(**{function.__name__: function for function in FUNCTIONS})
    return Place(torch.device("cpu"), True, shimmed, plain_operations(), DryClock())


def use_shim(libraries: Path) -> None:
    """Run CPU tensors on the host shim, compiled without optimization."""
    use_cases()
    from host_shim import HostBackend, HostLauncher, compiler

    from vnext.kernels.cuda import backends

    if compiler() is None:
        raise RuntimeError("a dry run compiles the kernels for the CPU: install g++")
    backend = HostBackend(libraries, ("-O0",), precompile=True)
    backends.use("cpu", lambda: backend)
    if compiled.is_built():
        compiled.serve("cpu", HostLauncher(backend).launcher())


def launch_forms(place: Place) -> Iterator[str]:
    """Yield "from C++", then "from Python"; each implementation is active until the next is requested."""
    if compiled.serves(place.device.type):
        yield "from C++"
    with compiled.set_aside(place.device.type) if compiled.serves(place.device.type) else nullcontext():
        yield "from Python"
