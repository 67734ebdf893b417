"""Facts about the machine of the check: device, clocks, versions, load. Reads only; changes nothing."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch

LIBRARIES = (
    "torch", "triton", "cupy-cuda13x", "numba", "numba-cuda", "numpy", "nvidia-cuda-nvrtc", "nvidia-cuda-runtime",
    "nvidia-cuda-nvcc", "nvidia-nccl-cu13", "msgspec", "pyzmq", "pytest",
)  # fmt: skip
CLOCKS = (
    "pstate", "clocks.sm", "clocks.mem", "clocks.max.sm", "clocks.max.mem", "power.draw", "temperature.gpu", "utilization.gpu",
    "memory.used", "driver_version",
)  # fmt: skip
TIMEOUT_S = 10


def facts() -> dict[str, Any]:
    """Return the facts that do not change during the check."""
    return {
        "device": device(),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "cores_usable": len(os.sched_getaffinity(0)),
        "python": platform.python_version(),
        "cuda_of_torch": torch.version.cuda or "",
        "libraries": {name: found for name in LIBRARIES if (found := version_of(name))},
    }


def device() -> dict[str, Any]:
    """Describe the current GPU; empty without one."""
    if not torch.cuda.is_available():
        return {}
    found = torch.cuda.get_device_properties(torch.cuda.current_device())
    return {
        "name": found.name,
        "compute_capability": f"{found.major}.{found.minor}",
        "memory_bytes": found.total_memory,
        "multiprocessors": found.multi_processor_count,
        "l2_bytes": found.L2_cache_size,
        "gpus": torch.cuda.device_count(),
    }


def state() -> dict[str, Any]:
    """Return the changing facts: the load of the machine, the GPU's clocks."""
    return {"load": [round(value, 2) for value in os.getloadavg()], "clocks": clocks()}


def clocks() -> dict[str, str]:
    """Return the clocks from nvidia-smi; empty without it."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return {}
    command = (tool, f"--query-gpu={','.join(CLOCKS)}", "--format=csv,noheader,nounits", "--id=0")
    try:
        ran = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired:
        return {}
    values = [value.strip() for value in ran.stdout.strip().split(",")]
    return dict(zip(CLOCKS, values, strict=True)) if len(values) == len(CLOCKS) else {}


def version_of(library: str) -> str:
    try:
        return version(library)
    except PackageNotFoundError:
        return ""
