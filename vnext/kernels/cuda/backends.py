"""Where kernels run: one calling form for a GPU and for the tests' host shim.

Owns the choice of a backend by kind of device and the kernels already made. A backend turns a source of `cuda/` with its
macros into kernels; launchers know no more of it:

    kernel_for(tensor.device, "rows.cu", "rms_norm", (("SCALAR", "__half"),))(grid, block, arguments, shared_mem=bytes)
"""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec

import torch

from vnext.kernels.cuda.interface import Backend, Defines, Kernel


def is_usable() -> bool:
    """Whether kernels can be made for a GPU here: torch was built for CUDA, and CuPy is installed."""
    return torch.version.cuda is not None and find_spec("cupy") is not None


def cuda_backend() -> Backend:
    """The backend of a GPU; imports CuPy."""
    from vnext.kernels.cuda.driver import CudaBackend

    return CudaBackend()


_makers: dict[str, Callable[[], Backend]] = {"cuda": cuda_backend}
_kernels: dict[tuple[torch.device, str, str, Defines], Kernel] = {}


def use(device_type: str, make: Callable[[], Backend]) -> None:
    """Have kernels for a kind of device made by another backend from now on: how tests bring theirs."""
    _makers[device_type] = make
    for key in [key for key in _kernels if key[0].type == device_type]:
        del _kernels[key]


def leave(device_type: str) -> None:
    """Forget a kind of device that `use` brought."""
    del _makers[device_type]


def kernel_for(device: torch.device, source: str, name: str, defines: Defines) -> Kernel:
    """The kernel, made when it is asked for the first time.

    Raises KeyError where a kind of device has no backend, ValueError for a GPU that is not the current one.
    """
    key = (device, source, name, defines)
    kernel = _kernels.get(key)
    if kernel is None:
        if device.type == "cuda" and device.index != torch.cuda.current_device():
            raise ValueError(f"tensors are on {device} but kernels run on the current device, {torch.cuda.current_device()}")
        kernel = _kernels[key] = _makers[device.type]().kernel(source, name, defines)
    return kernel
