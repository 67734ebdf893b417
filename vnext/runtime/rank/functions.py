"""The functions that a client may call on every rank by name (LLM.collective_rpc), between two steps.

A function takes the rank's runner and plain arguments, and returns what JSON can hold. It must not change what steps compute. A
program that runs its rank in its own process (executor "inproc") may register more.
"""

from __future__ import annotations

import base64
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from vnext.kernels.cpu import native
from vnext.kernels.cpu.traced import CALL, begin_tracing, end_tracing
from vnext.models.loading.update import open_update, tensors_digest
from vnext.runtime.rank.runner import ModelRunner

Function = Callable[..., Any]
FUNCTIONS: dict[str, Function] = {}
PROFILED_MAX = 1 << 17
"""Calls of kernels that a profile has room for: some hundred steps."""


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
    tensors = open_update(Path(runner.weights.source))
    return tensors_digest(tensors, runner.weights.kept.names)


@function
def stage_counts(runner: ModelRunner) -> dict[str, int]:
    """Of a pipeline's stage: the steps that it has computed, and of these the ones that `waited` for an earlier step's tokens."""
    return dict(runner.stage.counts) if runner.stage else {}


@function
def encoded(runner: ModelRunner) -> dict[str, int]:
    """The vectors of images and sounds that this rank has `computed` and `read`."""
    return {"computed": runner.inputs.computed, "read": runner.inputs.read} if runner.inputs else {"computed": 0, "read": 0}


@function
def weight_names(runner: ModelRunner) -> dict[str, list[int]]:
    """The tensors that an update must have, with their shapes."""
    return {name: list(shape) for name, shape in sorted(runner.weights.kept.names.items())}


# ---- a profile of the steps to come ------------------------------------------------------------------------------


class _Profile:
    """The calls of this process's kernels while a profile runs. The record stays: a call may end behind the profile. Mutable."""

    def __init__(self) -> None:
        """Has no record before its first use."""
        self.record, self.runs = np.zeros(0, dtype=CALL), False


_profile = _Profile()


@function
def start_profile(runner: ModelRunner) -> int:
    """Note each call of the compiled kernels from now on; how many there is room for. Raises ValueError where none are in use or a
    profile runs."""
    if runner.device_type != "cpu" or not native.is_built():
        raise ValueError("a profile has the calls of the compiled CPU kernels, and this rank computes without them")
    if _profile.runs:
        raise ValueError("a profile runs: stop it first")
    if not len(_profile.record):
        _profile.record = np.zeros(PROFILED_MAX, dtype=CALL)
    begin_tracing(_profile.record)
    _profile.runs = True
    return PROFILED_MAX


@function
def stop_profile(runner: ModelRunner) -> dict[str, str | int]:
    """The `calls` since start_profile (base64 of CALL[n]), and how many were `left_out`. Raises ValueError if no profile runs."""
    if not _profile.runs:
        raise ValueError("no profile runs: start one first")
    _profile.runs = False
    calls, left_out = end_tracing(_profile.record)
    whole = calls[calls["ended_ns"] >= calls["began_ns"]]
    return {"calls": base64.b64encode(whole.tobytes()).decode(), "left_out": left_out}
