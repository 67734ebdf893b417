"""The meaning of --device auto: GPUs if this torch can compute on one for each rank, else the CPU. All ranks decide alike.

Reads what the driver and torch report about the GPUs and takes no memory there. Imports nothing that a GPU needs.
"""

from __future__ import annotations

import logging

import torch


def resolved_device(name: str, world_size: int) -> str:
    """ "cpu" or "cuda" for an option's value. Prints the reason to stderr where a GPU exists and is not used."""
    if name != "auto":
        return name
    if reason := why_cpu(world_size):
        if has_gpu():
            logging.getLogger(__name__).warning("the CPU computes: %s; --device cuda insists", reason)
        return "cpu"
    return "cuda"


def why_cpu(world_size: int) -> str:
    """Why auto means the CPU on this machine, "" where it means the GPUs."""
    if not has_gpu():
        return "this torch was built without CUDA" if torch.version.cuda is None else "torch finds no GPU"
    if (count := torch.cuda.device_count()) < world_size:
        return f"there are {count} GPU(s) for {world_size} ranks"
    for index in range(world_size):
        major, minor = torch.cuda.get_device_capability(index)
        if not _serves(torch.cuda.get_arch_list(), major, minor):
            return f"this torch was built for other GPUs than number {index}, which is sm_{major}{minor}"
    return ""


def _serves(built: list[str], major: int, minor: int) -> bool:
    """Whether code that was `built`, such as ["sm_80", "sm_90a", "compute_90"], runs on a GPU: machine code runs within its own
    generation, and PTX on its own and later ones. An empty list counts as yes."""
    kinds = [(name.partition("_")[0], int("".join(filter(str.isdigit, name)) or 0)) for name in built]
    return not kinds or any(
        number <= 10 * major + minor and (kind == "compute" or number // 10 == major) for kind, number in kinds
    )


def has_gpu() -> bool:
    """Whether torch can use one."""
    return torch.version.cuda is not None and torch.cuda.is_available()
