"""The functions that a client may call on every rank by name (LLM.collective_rpc), between two steps.

A function takes the rank's runner and plain arguments, and returns what JSON can hold. It must not change what steps compute. A
program that runs its rank in its own process (executor "inproc") may register more.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from vnext.models.loading.update import open_update, tensors_digest
from vnext.runtime.rank.runner import ModelRunner

Function = Callable[..., Any]
FUNCTIONS: dict[str, Function] = {}


def function(called: Function) -> Function:
    """Register a function under its own name."""
    FUNCTIONS[called.__name__] = called
    return called


@function
def resident_bytes(runner: ModelRunner) -> int:
    """The memory that this process has in use."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")


@function
def process_id(runner: ModelRunner) -> int:
    return os.getpid()


@function
def weights_digest(runner: ModelRunner) -> str:
    """The digest of the tensors that the model was loaded from or that have replaced them, read again from their files."""
    tensors = open_update(Path(runner.weights_path))
    return tensors_digest(tensors, runner.kept.names)


@function
def stage_counts(runner: ModelRunner) -> dict[str, int]:
    """Of a pipeline's stage: the steps that it has computed, and of these the ones that `waited` for an earlier step's tokens."""
    return dict(runner.stage.counts) if runner.stage else {}


@function
def weight_names(runner: ModelRunner) -> dict[str, list[int]]:
    """The tensors that an update must have, with their shapes."""
    return {name: list(shape) for name, shape in sorted(runner.kept.names.items())}
