"""Determinism: what a process must set before torch is imported so that results do not depend on the batch.

Owns the environment of a rank: threads, and MKL's order of summation. fp32 matrix products of MKL differ in their last
bits with the number of rows unless one code path is prescribed (measured: 3 to 4 bit patterns over batch sizes, one with it).
May import nothing that imports torch.
"""

from __future__ import annotations

import os
import platform
from importlib.util import find_spec
from pathlib import Path


def prepare_process(threads: int) -> None:
    """Set the environment for torch in this process. Call it before the first import of torch."""
    os.environ["OMP_NUM_THREADS"] = str(threads)
    os.environ["MKL_CBWR"] = mkl_branch(cpu_flags())
    os.environ.setdefault("GOMP_SPINCOUNT", "1000")  # a team that spins long starves the other processes of the machine
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # ranks of one machine need no resolvable host name


def default_threads(world_size: int) -> int:
    """Threads of one rank: the cores shared among the ranks.

    The engine core and the API take a core's time now and then; the kernels' team goes on with those that are left (its
    work is taken, not given). Where the kernels were not built torch's own team computes, which waits for its slowest
    member: one core is left to the others then.
    """
    cores = len(os.sched_getaffinity(0))
    return max(1, (cores if kernels_are_built() else cores - 1) // world_size)


def kernels_are_built() -> bool:
    """Whether the CPU's own kernels were compiled, without importing them or torch."""
    return find_spec("vnext.kernels.cpu._native") is not None


def mkl_branch(flags: frozenset[str]) -> str:
    """MKL_CBWR for a processor with these flags."""
    if "avx512f" in flags:
        return "AVX512,STRICT"
    return "AVX2,STRICT" if "avx2" in flags else "COMPATIBLE"


def cpu_flags() -> frozenset[str]:
    """Instruction sets of this processor as Linux names them; empty where they cannot be read."""
    info = Path("/proc/cpuinfo")
    if not info.is_file():
        return frozenset()
    lines = (line for line in info.read_text().splitlines() if line.startswith(("flags", "Features")))
    return frozenset(next(lines, "").partition(":")[2].split())


def describe_process(device: str) -> dict[str, str]:
    """The determinism environment as a log's first record has it. Call it after torch was imported."""
    import torch

    return {
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "machine": platform.machine(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "threads": str(torch.get_num_threads()),
        "mkl_cbwr": os.environ.get("MKL_CBWR", ""),
        "device": device if device == "cpu" else torch.cuda.get_device_name(device),
    }
