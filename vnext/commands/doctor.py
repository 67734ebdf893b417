"""`vnext doctor`: reports this machine's hardware and libraries, and how vnext would use them. Changes nothing.

Owns the list of facts, the warnings that follow from them, and the two output formats: text and JSON.
"""

from __future__ import annotations

import json
import os
import shlex
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import torch
from rich.console import Console
from rich.table import Table

from vnext.base import compiled
from vnext.base.exits import DONE
from vnext.base.version import __version__
from vnext.commands.machine import Machine, compilers, machine
from vnext.kernels.backends import DEVICE_TYPES
from vnext.kernels.cpu import native
from vnext.kernels.cuda.operations import SUMMARY as CUDA_KERNELS
from vnext.kernels.table import rows
from vnext.models.config.folder import require_checkpoint
from vnext.models.config.model_config import DTYPES
from vnext.models.errors import ModelError
from vnext.models.gguf.folder import linked_files
from vnext.models.loading.held import held
from vnext.models.loading.named import here
from vnext.models.loading.unread import unread
from vnext.options.reader import DoctorCommand
from vnext.runtime.gpu.auto import why_cpu
from vnext.runtime.processes import thread_plan
from vnext.runtime.processes.determinism import cpu_flags, has_strict_path, invariance, mkl_branch
from vnext.runtime.processes.launch import model_folder, named_models
from vnext.runtime.rank.gpu_loading import describe as describe_cuda
from vnext.runtime.transport.collectives.choose_collectives import describe as describe_device_collectives
from vnext.runtime.transport.collectives.cpu_collectives import describe as describe_collectives
from vnext.runtime.transport.ring.memory import implementation as ring_implementation
from vnext.sampling.sampling import choose, choose_by_kernel, choose_compiled, sampler_for

SHM_FREE_BYTES_MIN = 256 * 2**20
MEMORY_FREE_BYTES_MIN = 2 * 2**30
GIB = 2**30
OF_GPUS = ("CUDA: device", "several GPUs")
"""Lines that say nothing where there is no GPU."""


def doctor(command: DoctorCommand) -> int:
    """Print the report; returns the exit status."""
    report = examine()
    if command.model:
        report |= checkpoint(command.model)
    if command.json:
        print(json.dumps(report, indent=2))
    else:
        show(report, Console(), command.verbose)
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
        "compiled": compiled_modules(),
        "ring": ring_implementation(),
        "collectives": describe_collectives(),
        "cuda": describe_cuda(),
        "gpu_collectives": describe_device_collectives(),
        "cpu_kernels": cpu_kernels(),
        "sampling": sampling(),
        "cores": thread_plan.describe(),
        "batch_invariant": batch_invariant(),
        "kernels": [row._asdict() for row in rows()],
        "warnings": warnings(here, len(found)),
    }


def checkpoint(model: str) -> dict[str, Any]:
    """What vnext makes of a checkpoint, of a GGUF file or of a model by name that is here."""
    try:
        folder = Path(os.path.expanduser(model))  # as it is, for a user without a home
        if folder.exists() or here(model, named_models("")):
            folder = model_folder(model)
        require_checkpoint(folder)
        files = " and ".join(link.readlink().name for link in linked_files(folder))
        found = {"checkpoint": unread(folder) or f"all of {files or folder} that bears on answers is read"}
        return found | ({"weights": scheme} if (scheme := held(folder)) else {})
    except ModelError as error:
        return {"checkpoint": f"{error}."}


def torch_facts() -> dict[str, Any]:
    """How torch was built, and how a single rank would use it here."""
    return {
        "version": str(torch.__version__),
        "cuda_build": torch.version.cuda or "",
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "threads_of_one_rank": thread_plan.default_threads(1),
        "mkl_cbwr": mkl_branch(cpu_flags()),
    }


def compiled_modules() -> dict[str, str]:
    """Module name -> its file, or why it is missing and the plain implementation runs. Raises StaleModule for a module that
    does not match its sources."""
    modules = {name: compiled.load(name) for name in compiled.MODULES}
    return {name: str(module.__file__) if module else compiled.absent[name] for name, module in modules.items()}


def cpu_kernels() -> str:
    """Whether the CPU's kernels were compiled, and their instruction set."""
    if not native.is_built():
        return f"plain torch: {native.why_absent()}"
    names = [level.name.lower() for level in native.levels()]
    return f"compiled, {names[-1]}" + (f" (--isa can choose {', '.join(names[:-1])})" if names[1:] else "")


def sampling() -> dict[str, str]:
    """Kind of device -> the implementations that pick tokens from logits: greedy, or sampled after the filters."""
    implementations = {choose_compiled: cpu_kernels(), choose_by_kernel: CUDA_KERNELS, choose: "plain torch"}
    return {device_type: implementations[sampler_for(device_type)] for device_type in DEVICE_TYPES}


def batch_invariant() -> dict[str, str]:
    """Number type -> whether a request's tokens are independent of its batch here, without an option."""
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
    """Likely problems on this machine, one sentence each, with the remedy where there is one."""
    found = []
    if leftovers := compiled.leftovers():
        found.append(f"Modules of an earlier build lie where none is loaded: rm {shlex.join(map(str, leftovers))}")
    if incomplete := native.why_incomplete():
        found.append(incomplete)
    if gpu_count > 0 and (reason := why_cpu(1)):
        found.append(f"This machine has {gpu_count} GPU(s), but vnext runs on the CPU: {reason}.")
    if here.shm_available_bytes < SHM_FREE_BYTES_MIN:
        free = f"Shared memory has {here.shm_available_bytes / 2**20:.0f} MiB free"
        found.append(f"{free}, and the ranks communicate through it: enlarge /dev/shm (in a container: --shm-size).")
    if here.memory_available_bytes < MEMORY_FREE_BYTES_MIN:
        free = f"{here.memory_available_bytes / GIB:.1f} GiB"
        found.append(f"Only {free} of memory is free: set --kv-cache-memory, or stop other programs.")
    if here.load[0] > here.cores_usable:
        found.append(f"The load is {here.load[0]} on {here.cores_usable} cores: measurements taken now mean little.")
    return found


def show(report: dict[str, Any], console: Console, verbose: bool = False) -> None:
    """Print the report as text. `verbose`: with what concerns other machines, and the kernels one by one."""
    facts = Table(show_header=False, box=None)
    for name, value in lines(report):
        if verbose or report["gpus"] or name not in OF_GPUS:
            facts.add_row(f"[bold]{name}[/bold]", value)
    if not verbose:
        facts.add_row("[bold]kernels[/bold]", kernels_line(report))
    console.print(facts)
    if verbose:
        kernels = Table("operation", "device", "implementation", "source", title="kernels", title_justify="left")
        for row in report["kernels"]:
            kernels.add_row(*(str(cell) for cell in row.values()))
        console.print(kernels)
    for sentence in report["warnings"]:
        console.print(f"[yellow]warning[/yellow] {sentence}", highlight=False)


def kernels_line(report: dict[str, Any]) -> str:
    """How many operations each implementation serves on the devices of this machine."""
    here = {"cpu"} | ({"cuda"} if report["gpus"] else set())
    counts = Counter(f"{row['implementation']} ({row['device_type']})" for row in report["kernels"] if row["device_type"] in here)
    return f"{', '.join(f'{count} by {name}' for name, count in counts.items())}; `vnext doctor --verbose` lists them"


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
        *((name, report[name]) for name in ("checkpoint", "weights") if name in report),
        ("python", f"{here['python']} on {here['system']}"),
        ("libraries", libraries),
        ("processor", f"{here['cpu_model']}, {here['cores_usable']} of {here['cores']} cores usable"),
        ("instructions", " ".join(here["instruction_sets"]) or "unknown"),
        ("torch", f"CPU capability {built['cpu_capability']}, CUDA {built['cuda_build'] or 'not in this build'}"),
        ("one rank", f"{built['threads_of_one_rank']} threads, MKL_CBWR={built['mkl_cbwr']}"),
        ("CPU kernels", report["cpu_kernels"]),
        ("CPU sampling", report["sampling"]["cpu"]),
        *report["cores"].items(),
        *((f"batch-invariant {dtype}", text) for dtype, text in report["batch_invariant"].items()),
        ("GPU", ", ".join(gpu_names) or "none that torch can use"),
        *((f"CUDA: {name}", text) for name, text in report["cuda"].items() if gpu_names or name == "device"),
        ("memory", _of(here["memory_available_bytes"], here["memory_bytes"])),
        ("shared memory", _of(here["shm_available_bytes"], here["shm_bytes"])),
        ("load", " ".join(map(str, here["load"]))),
        *_compiled_lines(report["compiled"]),
        ("ring", f"{report['ring']} operations"),
        ("several ranks", report["collectives"]),
        ("several GPUs", report["gpu_collectives"]),
        ("compilers", ", ".join(f"{name}: {text}" for name, text in report["compilers"].items()) or "none"),
    ]


def _compiled_lines(found: dict[str, str]) -> Iterator[tuple[str, str]]:
    """One line for all modules that are present, and one for each missing module with its reason."""
    names = {name: name.removeprefix("vnext.") for name in found}
    yield "compiled", ", ".join(names[name] for name in found if name not in compiled.absent) or "no module"
    yield from ((f"plain: {names[name]}", why) for name, why in found.items() if name in compiled.absent)


def _of(free_bytes: int, all_bytes: int) -> str:
    return f"{free_bytes / GIB:.1f} of {all_bytes / GIB:.1f} GiB free"
