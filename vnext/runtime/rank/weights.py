"""The weights of one rank: an update is checked beside running steps, and takes their place when the engine's event says so.

The check reads every byte and changes nothing. The change fills the memory of the old weights, so that all that refers to it
stays; it cannot fail but for files that have changed since, which ends the rank. Decides nothing.
"""

from __future__ import annotations

import base64
import os
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from vnext.kernels.arrays import address, strides_of
from vnext.kernels.cpu import native
from vnext.kernels.cpu.memory import give_back
from vnext.kernels.cpu.traced import CALL, begin_tracing, end_tracing
from vnext.models.errors import ModelError
from vnext.models.loading.checkpoint import overlaid
from vnext.models.loading.unread import tower_tensors
from vnext.models.loading.update import (
    check_finite,
    check_ties,
    check_tower,
    check_update,
    open_pieces,
    open_update,
    tensors_digest,
)
from vnext.models.weight_index import write_index
from vnext.runtime.protocol.messages import RankAnswer
from vnext.runtime.rank.runner import ModelRunner
from vnext.runtime.transport.ring.commands import AnyCommand, CallFunction, CheckWeights, Release, Restore
from vnext.state.events import WeightsChanged

RELEASED_BYTES_MIN = 1 << 16
ERRORS = ModelError, OSError, TypeError, ValueError, LookupError


class RankWeights:
    """What a rank does for operations. All methods belong to one thread. `is_busy`: `answers` has one to come."""

    def __init__(self, rank: int, world_size: int, runner: ModelRunner) -> None:
        self._rank, self._world_size, self._runner = rank, world_size, runner
        self._reader: ThreadPoolExecutor | None = None
        self._checking: tuple[int, Future[str]] | None = None
        self._answers: list[RankAnswer] = []
        self._checked: tuple[str, str] = "", ""
        self.is_busy = False

    def answers(self) -> list[RankAnswer]:
        """The answers that there are since the last call."""
        if self._checking is not None and self._checking[1].done():
            (serial, future), self._checking = self._checking, None
            self._answer(serial, future.result)
        found, self._answers, self.is_busy = self._answers, [], self._checking is not None
        return found

    def obey(self, command: AnyCommand) -> None:
        """Carry out a command, or begin to."""
        self.is_busy = True
        match command:
            case CheckWeights():
                self._reader = self._reader or ThreadPoolExecutor(1, "weights")
                self._checking = command.serial, self._reader.submit(self._check, command)
            case Release():
                self._answer(command.serial, lambda: self._release(command.tags))
            case Restore():
                self._answer(command.serial, lambda: self._restore(command.path, command.digest))
            case CallFunction():
                self._answer(command.serial, lambda: self._call(command))

    def close(self) -> None:
        """Finish what is written in the background."""
        self._runner.close()

    def fold(self, event: WeightsChanged) -> None:
        """Compute with other weights. Raises ModelError where their files are not what they were."""
        self.load(event.path, event.digest)

    def load(self, path: str, digest: str) -> None:
        """Fill the weights from a folder or file whose tensors have this digest; the first rank makes sure, unless it has checked
        them just now. Raises ModelError."""
        tensors, weights = open_update(Path(path)), self._runner.weights
        names = weights.kept.names
        check_update(tensors, names, tensors.names(), stored=weights.kept.stored)
        if self._rank == 0 and self._checked != (path, digest) and (found := tensors_digest(tensors, names)) != digest:
            raise ModelError(f"the weights in {path} have changed ({found} instead of {digest}): keep a version's files in place")
        self._runner.refill(tensors)
        weights.source, self._checked = path, ("", "")

    def _answer(self, serial: int, make: Any) -> None:
        try:
            value, error = msgspec.json.encode(make()), ""
        except ERRORS as raised:
            value, error = b"null", str(raised) or type(raised).__name__
        self._answers.append(RankAnswer(rank=self._rank, serial=serial, error=error, value=value))

    def _check(self, command: CheckWeights) -> str:
        """The digest on the first rank. Every rank looks at its share of the tensors; all refuse what does not fit."""
        runner = self._runner
        require_refillable(runner)
        update, kept = open_pieces([Path(path) for path in command.paths]), runner.weights.kept
        names = kept.names
        check_update(update, names, {*self._own_names(), *kept.ties}, command.partial, kept.stored)
        check_finite(update, [name for name in sorted(names) if name in update][self._rank :: self._world_size])
        if self._rank == 0 and runner.inputs is not None:
            own = open_update(runner.path)
            check_tower(update, own, tower_tensors(overlaid(own, update), runner.config))
        if self._rank or command.is_piece:
            return ""
        whole = overlaid(open_update(Path(command.base or runner.path)), update) if command.partial else update
        check_ties(update, whole, kept.ties)
        update = whole
        if command.index:
            write_index(Path(command.index), {name: update.file(name) for name in sorted(names)})
        digest = tensors_digest(update, names)
        self._checked = command.index or command.paths[0], digest
        return digest

    def _own_names(self) -> Sequence[str]:
        """Names in the checkpoint that the model does not read may stay in updates."""
        return open_update(self._runner.path).names()

    def _release(self, tags: Sequence[str]) -> int:
        runner = self._runner
        require_host(runner)
        if "weights" in tags:
            runner.let_go()
        weights = runner.weights.kept.memory() if "weights" in tags else ()
        for array in (*weights, *(runner.cache_memory() if "kv_cache" in tags else ())):
            first, size_bytes = span(array)
            if size_bytes >= RELEASED_BYTES_MIN:
                give_back(first, size_bytes)
        return int(FUNCTIONS["resident_bytes"](runner))

    def _restore(self, path: str, digest: str) -> int:
        runner = self._runner
        if path:
            self.load(path, digest)
        else:
            runner.refill(open_update(runner.path))
        return int(FUNCTIONS["resident_bytes"](runner))

    def _call(self, command: CallFunction) -> Any:
        called = FUNCTIONS.get(command.function)
        if called is None:
            raise ValueError(f"there is no function {command.function!r} on the ranks: there are {', '.join(sorted(FUNCTIONS))}")
        return called(self._runner, **command.arguments)


def require_host(runner: ModelRunner) -> None:
    """Raise ModelError where memory cannot be given back while its address stays."""
    if runner.device_type != "cpu":
        raise ModelError("sleep is for the CPU: a GPU's memory cannot be given back while graphs refer to it; start another engine")


def require_refillable(runner: ModelRunner) -> None:
    """Raise ModelError where parts of the weights are known elsewhere in another form, or no rank has all of them."""
    if runner.stage is not None:
        raise ModelError("the weights of a pipeline's stages cannot be updated: start another engine")
    if runner.tail is not None:
        raise ModelError("the layers behind a text's vector cannot be updated so far: start another engine")
    try:
        list(runner.weights.kept.memory())
    except TypeError as error:
        raise ModelError(f"the weights cannot be updated in their form here ({error}): start another engine") from error


def span(array: Any) -> tuple[int, int]:
    """Where an array's elements lie: the address of the first, and the bytes to the end of the last."""
    reach = sum((size - 1) * step for size, step in zip(array.shape, strides_of(array))) + 1 if all(array.shape) else 0
    return address(array), reach * array.itemsize


# ---- functions of ranks ------------------------------------------------------------------------------------------
# A client may call them on every rank by name (LLM.collective_rpc), between two steps. Each takes the rank's runner and plain
# arguments, and returns what JSON can hold. It must not change what steps compute. A program that runs its rank in its own process
# (executor "inproc") may register more.

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
