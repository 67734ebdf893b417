"""`vnext doctor`: what this machine has and what vnext makes of it. Looks, changes nothing.

Owns the list of what is looked at, the warnings that follow from it, and its two forms: for people and as JSON.
"""

from __future__ import annotations

import json
from typing import Any

import msgspec
import torch
from rich.console import Console
from rich.table import Table

from vnext.exits import DONE
from vnext.kernels.cpu import native
from vnext.kernels.cuda.operations import SUMMARY as CUDA_KERNELS
from vnext.kernels.table import DEVICE_TYPES, rows
from vnext.machine import Machine, compilers, machine
from vnext.models.config import DTYPES
from vnext.options import DoctorCommand
from vnext.runtime import cores
from vnext.runtime.collectives import describe as describe_collectives
from vnext.runtime.determinism import cpu_flags, has_strict_path, invariance, mkl_branch
from vnext.runtime.device_choice import describe as describe_device_collectives
from vnext.runtime.device_loading import describe as describe_cuda
from vnext.runtime.ring_memory import implementation as ring_implementation
from vnext.runtime.sampling import choose, choose_by_kernel, choose_compiled, chooser
from vnext.sched import stride
from vnext.state import columns, log_forms, names, tails
from vnext.version import __version__

SHM_FREE_BYTES_MIN = 256 * 2**20
MEMORY_FREE_BYTES_MIN = 2 * 2**30
GIB = 2**30


def doctor(command: DoctorCommand) -> int:
    """Print the report; returns the exit status."""
    report = examine()
    if command.json:
        print(json.dumps(report, indent=2))
    else:
        show(report, Console())
    return DONE


def examine() -> dict[str, Any]:
    """The report as plain values."""
    here, found = machine(), gpus()
    return {
        "vnext": __version__,
        "machine": msgspec.to_builtins(here),
        "torch": torch_facts(),
        "gpus": found,
        "compilers": compilers(),
        "columns": columns.implementation(),
        "names": names.implementation(),
        "log": log_forms.implementation(),
        "tails": tails.implementation(),
        "strides": stride.implementation(),
        "ring": ring_implementation(),
        "collectives": describe_collectives(),
        "cuda": describe_cuda(),
        "gpu_collectives": describe_device_collectives(),
        "cpu_kernels": cpu_kernels(),
        "sampling": sampling(),
        "cores": cores.describe(),
        "batch_invariant": batch_invariant(),
        "kernels": [row._asdict() for row in rows()],
        "warnings": warnings(here, len(found)),
    }


def torch_facts() -> dict[str, Any]:
    """How torch was built, and how a single rank would use it here."""
    return {
        "version": str(torch.__version__),
        "cuda_build": torch.version.cuda or "",
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "threads_of_one_rank": cores.default_threads(1),
        "mkl_cbwr": mkl_branch(cpu_flags()),
    }


def cpu_kernels() -> str:
    """Whether the CPU's kernels were compiled, and their instruction set."""
    if not native.is_built():
        return "plain torch: no C++ compiler was found when vnext was installed"
    return f"compiled, {native.level().name}"


def sampling() -> dict[str, str]:
    """What takes the tokens from the logits, by kind of device: greedy, or drawn after top-k, top-p and min-p."""
    forms = {choose_compiled: cpu_kernels(), choose_by_kernel: CUDA_KERNELS, choose: "plain torch"}
    return {device_type: forms[chooser(device_type)] for device_type in DEVICE_TYPES}


def batch_invariant() -> dict[str, str]:
    """By number type: whether a request's tokens are independent of its batch here, without an option."""
    compiled, strict = native.is_built(), torch.backends.mkl.is_available() and has_strict_path(cpu_flags())
    return {dtype: str(invariance(None, dtype, compiled=compiled, strict_mkl=strict)) for dtype in DTYPES}


def gpus() -> list[dict[str, Any]]:
    """GPUs that torch can use."""
    if not torch.cuda.is_available():
        return []
    found = (torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count()))
    return [
        {"name": gpu.name, "memory_bytes": gpu.total_memory, "compute_capability": f"{gpu.major}.{gpu.minor}"}
        for gpu in found
    ]


def warnings(here: Machine, gpu_count: int) -> list[str]:
    """What is likely to go wrong on this machine, one sentence each, with its remedy where there is one."""
    found = []
    if gpu_count > 0:
        found.append(f"vnext computes on the CPU unless it is told --device cuda: this machine has {gpu_count} GPU(s).")
    if here.shm_available_bytes < SHM_FREE_BYTES_MIN:
        free = f"Shared memory has {here.shm_available_bytes / 2**20:.0f} MiB free"
        found.append(f"{free} and the ranks' channel lives there: enlarge /dev/shm (in a container: --shm-size).")
    if here.memory_available_bytes < MEMORY_FREE_BYTES_MIN:
        free = f"{here.memory_available_bytes / GIB:.1f} GiB"
        found.append(f"Only {free} of memory are free: set --kv-cache-memory, or end other programs.")
    if here.load[0] > here.cores_usable:
        found.append(f"The load is {here.load[0]} on {here.cores_usable} cores: times measured now say little.")
    return found


def show(report: dict[str, Any], console: Console) -> None:
    """The report for people."""
    facts = Table(show_header=False, box=None)
    for name, value in lines(report):
        facts.add_row(f"[bold]{name}[/bold]", value)
    console.print(facts)
    kernels = Table("operation", "device", "implementation", "what it is", title="kernels", title_justify="left")
    for row in report["kernels"]:
        kernels.add_row(*(str(cell) for cell in row.values()))
    console.print(kernels)
    for sentence in report["warnings"]:
        console.print(f"[yellow]warning[/yellow] {sentence}", highlight=False)


def lines(report: dict[str, Any]) -> list[tuple[str, str]]:
    """Name and value of each fact, memory in GiB."""
    here, built = report["machine"], report["torch"]
    libraries = ", ".join(f"{name} {version or 'missing'}" for name, version in here["libraries"].items())
    gpu_names = [
        f"{gpu['name']} (sm_{gpu['compute_capability'].replace('.', '')}, {gpu['memory_bytes'] / GIB:.0f} GiB)"
        for gpu in report["gpus"]
    ]
    return [
        ("vnext", report["vnext"]),
        ("python", f"{here['python']} on {here['system']}"),
        ("libraries", libraries),
        ("processor", f"{here['cpu_model']}, {here['cores_usable']} of {here['cores']} cores usable"),
        ("instructions", " ".join(here["instruction_sets"]) or "unknown"),
        ("torch", f"CPU capability {built['cpu_capability']}, CUDA {built['cuda_build'] or 'not in this build'}"),
        ("one rank", f"{built['threads_of_one_rank']} threads, MKL_CBWR={built['mkl_cbwr']}"),
        ("CPU kernels", report["cpu_kernels"]),
        ("CPU sampling", report["sampling"]["cpu"]),
        *report["cores"].items(),
        *((f"batch-invariant {dtype}", said) for dtype, said in report["batch_invariant"].items()),
        ("GPU", ", ".join(gpu_names) or "none that torch can use"),
        *((f"CUDA: {name}", said) for name, said in report["cuda"].items()),
        ("memory", _of(here["memory_available_bytes"], here["memory_bytes"])),
        ("shared memory", _of(here["shm_available_bytes"], here["shm_bytes"])),
        ("load", " ".join(map(str, here["load"]))),
        ("state's step", f"{report['columns']} columns"),
        ("log", f"{report['log']} writer, {report['tails']} tails, {report['strides']} strides"),
        ("ring", f"{report['ring']} operations"),
        ("several ranks", report["collectives"]),
        ("several GPUs", report["gpu_collectives"]),
        ("compilers", ", ".join(f"{name}: {said}" for name, said in report["compilers"].items()) or "none"),
    ]


def _of(free_bytes: int, all_bytes: int) -> str:
    return f"{free_bytes / GIB:.1f} of {all_bytes / GIB:.1f} GiB free"
