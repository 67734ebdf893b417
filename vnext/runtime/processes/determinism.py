"""Determinism: when results are independent of the batch, by which path, and the environment a process sets before torch.

Owns the environment of a rank (threads, MKL's order of summation) and decides whether results can depend on the batch. fp32
matrix products of MKL differ in their last bits with the number of rows unless one code path is prescribed (measured: 3 to 4
bit patterns over batch sizes, one with it). See docs/determinism.md. Must not import anything that imports torch.
"""

from __future__ import annotations

import os
import platform
import re
import sys
from importlib.util import find_spec
from pathlib import Path

import msgspec

from vnext.runtime.processes.thread_plan import OPENMP_SPIN_COUNT
from vnext.runtime.protocol.settings import SettingsError

INTEL = "GenuineIntel"
COMPILED_DTYPES = ("float32", "bfloat16")  # dtypes of the CPU's own kernels


class Invariance(msgspec.Struct, frozen=True, kw_only=True):
    """Whether a request's tokens depend on its batch, in words. `form`: the format of floats that makes it hold in plain
    torch's products (kernels/format.py)."""

    holds: bool
    why: str
    form: str = "plain"

    def __str__(self) -> str:
        return f"{'yes' if self.holds else 'no'}: {self.why}"


def invariance(asked: bool | None, dtype: str, *, compiled: bool, strict_mkl: bool) -> Invariance:
    """The invariance of products in `dtype`. Raises SettingsError where it is asked for and impossible.

    `asked` None: on in float32, and wherever it costs next to nothing. `compiled`: the CPU's own kernels serve. `strict_mkl`:
    torch multiplies float32 with MKL, which here has one code path for any number of rows.
    """
    if compiled and dtype in COMPILED_DTYPES:
        return Invariance(holds=True, why="the compiled kernels sum in one order for any batch")
    if asked is False:
        return Invariance(holds=False, why="with --no-deterministic plain torch chooses the order of its sums by the batch")
    if not strict_mkl:
        if asked:
            raise SettingsError(
                "--deterministic needs the compiled kernels in float32 or bfloat16, or a torch with MKL on an Intel processor; "
                f"this one computes {dtype} without either: install a C++ compiler and vnext again, or leave --deterministic out"
            )
        return Invariance(holds=False, why=f"plain torch without a fixed MKL path sums {dtype} in an order that the batch decides")
    if dtype == "float32":
        return Invariance(holds=True, why="plain torch in float32, by one code path of MKL")
    if asked:
        return Invariance(holds=True, why=f"plain torch, products of {dtype} made in float32 by one code path of MKL", form="wide")
    why = f"plain torch's products of {dtype} depend on the batch; --deterministic makes them independent, and slower"
    return Invariance(holds=False, why=why)


def gpu_invariance(asked: bool | None, quantization: str = "none") -> Invariance:
    """The invariance on a GPU. Raises SettingsError where it is asked for and the weights have no form for it."""
    if not asked:
        why = "cuBLAS chooses the order of a product's sums by its shape, and a step's shape is that of its batch"
        return Invariance(holds=False, why=f"{why}; the same steps give the same tokens, and --deterministic gives one shape")
    if quantization not in ("auto", "none"):
        raise SettingsError(
            f"--deterministic does not support {quantization} weights on a GPU: leave out one of the two, or use --device cpu"
        )
    return Invariance(holds=True, why="every product has one shape for any batch", form="fixed")


def prepare_process(threads: int, prescribe: bool = True) -> None:
    """Set the environment for torch in this process. Call it before the first import of torch."""
    os.environ.update(process_environment(threads, prescribe))


def process_environment(threads: int, prescribe: bool = True) -> dict[str, str]:
    """This process's environment plus the variables that torch needs, for a child that imports torch at once.

    `prescribe` False lets MKL choose its code path by the number of rows.
    """
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads)}
    if prescribe:
        environment["MKL_CBWR"] = mkl_branch(cpu_flags())
    environment.setdefault("GOMP_SPINCOUNT", str(OPENMP_SPIN_COUNT))
    environment.setdefault("GLOO_SOCKET_IFNAME", "lo")  # ranks of one machine need no resolvable host name
    return environment


def limit_torch(threads: int) -> None:
    """Let torch compute with this many threads, now or when it is imported."""
    os.environ["OMP_NUM_THREADS"] = str(threads)
    if (torch := sys.modules.get("torch")) is not None:
        torch.set_num_threads(threads)


def mkl_branch(flags: frozenset[str]) -> str:
    """MKL_CBWR for a processor with these flags. MKL keeps to the prescribed path only on Intel's own processors."""
    if INTEL not in flags:
        return "AUTO"
    if "avx512f" in flags:
        return "AVX512,STRICT"
    return "AVX2,STRICT" if "avx2" in flags else "COMPATIBLE"


def has_strict_path(flags: frozenset[str]) -> bool:
    """Whether MKL's prescribed code path is the same for any number of rows on a processor with these flags."""
    return mkl_branch(flags).endswith("STRICT")


def cpu_flags() -> frozenset[str]:
    """This processor's instruction sets and vendor, as Linux names them; empty where they cannot be read."""
    info = Path("/proc/cpuinfo")
    if not info.is_file():
        return frozenset()
    first = info.read_text().partition("\n\n")[0].splitlines()
    lines = (line for line in first if line.startswith(("vendor_id", "flags", "Features")))
    return frozenset(word for line in lines for word in line.partition(":")[2].split())


def torch_version() -> str:
    """The version of the installed torch, which this process may not have imported: asking its metadata takes 40 ms."""
    spec = find_spec("torch")
    assert spec is not None and spec.origin is not None, "vnext requires torch"
    found = re.search(r"^__version__ = '(.*)'", (Path(spec.origin).parent / "version.py").read_text(), re.MULTILINE)
    assert found is not None
    return found[1]


def describe_process(device: str) -> dict[str, str]:
    """The determinism environment, as a log's first record holds it. A rank that computes without torch names its version."""
    described = {
        "python": platform.python_version(),
        "torch": torch_version(),
        "machine": platform.machine(),
        "mkl_cbwr": os.environ.get("MKL_CBWR", ""),
        "device": device,
    }
    if (torch := sys.modules.get("torch")) is None:
        return described
    name = device if device == "cpu" else torch.cuda.get_device_name(device)
    used = {"cpu_capability": torch.backends.cpu.get_cpu_capability(), "threads": str(torch.get_num_threads()), "device": name}
    return described | used
