"""Backends: the sets of kernels, the kinds of device that each serves, and its capabilities.

The only file that decides which kernels run on a kind of device: `table.py` takes operations from it, sampling takes its
implementation, and a rank learns whether graphs can hold its steps.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from typing import NamedTuple

import torch

from vnext.kernels.cpu import native
from vnext.kernels.cuda import backends as cuda, operations as cuda_operations

DEVICE_TYPES = ("cpu", "cuda")


class Backend(NamedTuple):
    """`serves`: kinds of device. `why_not`: why it cannot be used here, "" where it can. `describe`: its kernels, in a few
    words. `is_whole`: it has a model's operations and sampling, not only the batch's index work. `can_capture`: its steps have
    a fixed shape, so that graphs can hold them."""

    name: str
    serves: tuple[str, ...]
    why_not: Callable[[], str]
    describe: Callable[[], str]
    is_whole: bool
    can_capture: bool


def why_not_compiled() -> str:
    """Why the CPU kernels are missing, "" where they are not."""
    return "" if native.is_built() else "no C++ compiler was found when vnext was installed"


def why_not_cuda() -> str:
    """Why the CUDA kernels cannot be compiled here."""
    if cuda.is_usable():
        return ""
    return "this torch was built without CUDA" if torch.version.cuda is None else "CuPy is missing: pip install 'vnext[cuda]'"


def why_not_numba() -> str:
    """Why the batch's index kernels are missing, "" where they are not."""
    return "" if find_spec("numba") else "Numba is missing"


BACKENDS = {
    each.name: each
    for each in (
        Backend("reference", DEVICE_TYPES, lambda: "", lambda: "plain torch", is_whole=True, can_capture=False),
        Backend("compiled", ("cpu",), why_not_compiled, lambda: native.level().name, is_whole=True, can_capture=False),
        Backend("cuda", ("cuda",), why_not_cuda, lambda: cuda_operations.SUMMARY, is_whole=True, can_capture=True),
        Backend("numba", ("cuda",), why_not_numba, lambda: "batch_numba.py", is_whole=False, can_capture=True),
    )
}
"""Backends by name. Where several serve a device, the last one takes precedence."""


def backend_for(device_type: str) -> Backend:
    """What computes on a kind of device here; plain torch on one that no backend names."""
    fitting = [each for each in BACKENDS.values() if each.is_whole and device_type in each.serves and not each.why_not()]
    return fitting[-1] if fitting else BACKENDS["reference"]
