"""The compiled form of the operations that a step launches in every layer: operations.cpp, which setup.py builds as `_native`.

Owns which kind of device it serves, and what it asks Python for: a kernel's function, once in each thread, and words for a
launch that fails. What is compiled, loaded and refused is the backend's as before. The form in Python (rows.py, attention.py)
is its plain implementation: the same operations of torch under the same names, in use wherever this one does not serve.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

import torch

from vnext.base.compiled import CUDA_LAUNCHES, NOT_BUILT, absent, load as load_module
from vnext.base.spelling import reason
from vnext.kernels.cuda import attention, rows
from vnext.kernels.cuda.backends import is_usable, kernel_for
from vnext.kernels.cuda.interface import SCALARS

DEVICE_TYPES = ("cpu", "cuda")
SCALAR_TYPES = tuple(SCALARS)
KERNELS = (
    ("rows.cu", "rms_norm"), ("rows.cu", "gate_and_mul"), ("rows.cu", "rotary_kv_write"),
    ("paged_attention.cu", "paged_attention"), ("paged_attention.cu", "merge_splits"),
)  # fmt: skip
NUMBERED = {
    "DeviceType": DEVICE_TYPES,
    "Scalar": [str(each).removeprefix("torch.") for each in SCALAR_TYPES],
    "Kernel": [name for _, name in KERNELS],
}
"""All three as launch.h numbers them, which `load` compares."""
OPERATIONS = ("rms_norm", "add_rms_norm", "gate_and_mul", "rotary_kv_write", "paged_attention")
"""Those that have this form, and look at their arguments themselves; the rest is launched a few times a step, or works on
ranks."""


class Launcher(NamedTuple):
    """How kernels of a device are launched: addresses of cuLaunchKernel, or what is called as it is, and of torch's
    aoti_torch_get_current_cuda_stream (0: the null stream); `explain` says in words what a launch's code means."""

    launch: int
    stream: int
    explain: Callable[[int], str]


def load() -> tuple[ModuleType | None, str]:
    """The module, or why there is none."""
    numbers = {f"{kind}.{name.upper()}": number for kind, names in NUMBERED.items() for number, name in enumerate(names)}
    module, why = load_module(CUDA_LAUNCHES, numbers), absent.get(CUDA_LAUNCHES, "")
    if why == NOT_BUILT:
        return None, "the extension was not built"
    return module, why.replace("cannot be loaded", "the extension does not fit this torch")


_native, _why_not = load()
_served: dict[str, Launcher] = {}
_refused: dict[str, str] = {}


def is_built() -> bool:
    """Whether there is a module that can be loaded."""
    return _native is not None


def describe() -> str:
    """Which form launches the kernels of a step's layers here, for people."""
    why = _why_not or _refused.get("cuda", "")
    return f"from Python: {why}" if why else "from C++"


def serves(device_type: str) -> bool:
    """Whether operations on this kind of device are the compiled ones now."""
    return device_type in _served


def serve(device_type: str, launcher: Launcher) -> None:
    """Have operations on a kind of device launched by the compiled form, with the kernels of its backend, until `leave`.

    A backend that takes another's place must be served anew. Raises RuntimeError without the module.
    """
    if _native is None:
        raise RuntimeError(_why_not)
    here, prepares = DEVICE_TYPES.index(device_type), partial(prepare, device_type)
    _native.serve(here, launcher.launch, launcher.stream, prepares, launcher.explain)
    _served[device_type] = launcher


def leave(device_type: str) -> Launcher:
    """Back to the form in Python; no operation may be running on that kind of device. What served it."""
    assert _native is not None, "what is served has the module"
    _native.leave(DEVICE_TYPES.index(device_type))
    return _served.pop(device_type)


@contextmanager
def serving(device_type: str, launcher: Launcher) -> Iterator[None]:
    """`serve`, while this lasts."""
    serve(device_type, launcher)
    try:
        yield
    finally:
        leave(device_type)


@contextmanager
def set_aside(device_type: str) -> Iterator[None]:
    """The form in Python, while this lasts, where the compiled one serves: to compare the two."""
    launcher = leave(device_type)
    try:
        yield
    finally:
        serve(device_type, launcher)


def prepare(
    device_type: str, index: int, kernel: int, scalar: int, weight: int, cache: int, head_dim: int, shared_mem: int
) -> tuple[int, int] | str:
    """A kernel's function, ready for this thread and so much shared memory, and how much it may have; or why not.

    The boundary to C++, which knows no errors of Python: what went wrong becomes the words of its own.
    """
    device = torch.device(device_type) if index < 0 else torch.device(device_type, index)
    source, name = KERNELS[kernel]
    types = [SCALAR_TYPES[each] for each in (scalar, weight, cache)]
    defines = rows.defines(*types) if source == rows.SOURCE else attention.defines(types[0], types[2], head_dim)
    try:
        return kernel_for(device, source, name, defines).prepare(shared_mem)
    except Exception as error:  # of compilers, drivers, torch and backends: all are reported where the operation is used
        return str(error) if isinstance(error, RuntimeError) and str(error) else f"{type(error).__name__}: {error}"


# ---- a GPU -------------------------------------------------------------------------------------------------------


def gpu_launcher() -> Launcher:
    """The driver's launch and torch's current stream. Raises OSError or AttributeError where one of them is missing."""
    driver = ctypes.CDLL("libcuda.so.1")
    streams = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cuda.so"))

    def explain(code: int) -> str:
        name, words = ctypes.c_char_p(), ctypes.c_char_p()
        driver.cuGetErrorName(code, ctypes.byref(name))
        driver.cuGetErrorString(code, ctypes.byref(words))
        return f"the driver refuses a launch: {(name.value or b'').decode()} ({code}), {(words.value or b'').decode()}"

    return Launcher(address_of(driver.cuLaunchKernel), address_of(streams.aoti_torch_get_current_cuda_stream), explain)


def address_of(function: ctypes._NamedFuncPointer) -> int:
    """Of a function of a library."""
    found = ctypes.cast(function, ctypes.c_void_p).value
    assert found is not None
    return found


def serve_gpu() -> None:
    """Serve the GPU where kernels can be compiled for one, or keep in mind why not. Not while operations run on it."""
    if _native is None or not is_usable():
        return
    try:
        serve("cuda", gpu_launcher())
    except (OSError, AttributeError, RuntimeError) as error:  # no driver, or a torch that lacks a function: Python serves
        _refused["cuda"] = reason(error, with_file=True).splitlines()[0]
