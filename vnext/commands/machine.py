"""Machine: the facts about this computer that results and speeds depend on. Reads them and changes nothing.

`vnext doctor` and every recorded measurement use it. A fact that cannot be read is empty or 0, never a guess.
"""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import msgspec

from vnext.runtime.processes.determinism import cpu_flags
from vnext.runtime.processes.proc import memory_fields

INSTRUCTION_SETS = (
    "sse4_2", "avx", "avx2", "fma", "f16c", "avx512f", "avx512bw", "avx512vl", "avx512_vnni", "avx512_bf16",
    "avx512_fp16", "amx_tile", "amx_bf16", "amx_int8", "neon", "asimd", "bf16", "sve", "sve2",
)  # fmt: skip
LIBRARIES = ("torch", "numpy", "msgspec", "xxhash", "pyzmq", "aiohttp", "safetensors", "tokenizers")
COMPILERS = ("gcc", "g++", "clang", "nvcc")
COMPILER_TIMEOUT_S = 10


class Machine(msgspec.Struct, frozen=True, kw_only=True):
    """Sizes are in bytes. `cores_usable` counts the cores that this process may use; `load` holds the averages over 1, 5 and
    15 minutes."""

    system: str
    cpu_model: str
    cores: int
    cores_usable: int
    instruction_sets: tuple[str, ...]
    memory_bytes: int
    memory_available_bytes: int
    shm_bytes: int
    shm_available_bytes: int
    load: tuple[float, ...]
    python: str
    libraries: dict[str, str]


def machine() -> Machine:
    memory = memory_fields()
    shm_bytes, shm_available_bytes = shm_sizes()
    return Machine(
        system=f"{platform.system()} {platform.release()} {platform.machine()}",
        cpu_model=cpu_model(),
        cores=os.cpu_count() or 0,
        cores_usable=len(os.sched_getaffinity(0)),
        instruction_sets=tuple(name for name in INSTRUCTION_SETS if name in cpu_flags()),
        memory_bytes=memory.get("MemTotal", 0),
        memory_available_bytes=memory.get("MemAvailable", 0),
        shm_bytes=shm_bytes,
        shm_available_bytes=shm_available_bytes,
        load=tuple(round(value, 2) for value in os.getloadavg()),
        python=platform.python_version(),
        libraries={name: library_version(name) for name in LIBRARIES},
    )


def cpu_model() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.is_file() else []
    named = (line.partition(":")[2].strip() for line in lines if line.startswith(("model name", "Model")))
    return next(named, "") or platform.processor()


def shm_sizes() -> tuple[int, int]:
    """Total and free bytes of POSIX shared memory."""
    try:
        status = os.statvfs("/dev/shm")
    except OSError:
        return 0, 0
    return status.f_blocks * status.f_frsize, status.f_bavail * status.f_frsize


def library_version(name: str) -> str:
    """The version of an installed distribution, "" where it is not installed."""
    try:
        return version(name)
    except PackageNotFoundError:
        return ""


def compilers() -> dict[str, str]:
    """Name -> version line of each installed compiler."""
    found = {name: shutil.which(name) for name in COMPILERS}
    return {name: compiler_version(path) for name, path in found.items() if path}


def compiler_version(path: str) -> str:
    """The line of `--version` output that contains the version."""
    try:
        command = [path, "--version"]
        ran = subprocess.run(command, capture_output=True, text=True, timeout=COMPILER_TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return "does not run"
    lines = ran.stdout.strip().splitlines()
    return next((line for line in lines if "release" in line), lines[0] if lines else "").strip()
