"""What the bits of a run depend on beside the model: how numbers are held, multiplied and shared among ranks.

Owns its reading from a log's environment, its changes and its words. Imports no torch.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping

import msgspec

from vnext.runtime.cores import default_threads
from vnext.runtime.determinism import prepare_process

TORCH = "torch"
"""The name of plain torch among kernels."""
PLAIN = "plain torch"
"""What a log calls it."""
COMPARED = ("dtype", "quantization", "kernels", "batch_invariant", "torch", "cpu_capability", "machine")
"""Entries of the environment that bits may depend on."""


class CannotRun(Exception):
    """A model cannot be run so: one sentence with the value and the remedy."""


class Numerics(msgspec.Struct, frozen=True, kw_only=True):
    """`kernels` is "torch", an instruction set of the compiled kernels, or "" for the best of this machine.

    `model_length` is what a request may have, 0 for what is usual: a model may turn otherwise for longer ones.
    `deterministic` as the engine's option; `ranks` share each layer; `threads` compute, 0 for as many as the machine has: it
    changes no bit.
    """

    dtype: str = "auto"
    quantization: str = "none"
    kernels: str = ""
    deterministic: bool | None = None
    ranks: int = 1
    threads: int = 0
    model_length: int = 0

    def words(self) -> str:
        """For people."""
        parts = [self.dtype, *([self.quantization] if self.quantization != "none" else []), self.kernels or "best kernels"]
        return ", ".join([*parts, *([f"{self.ranks} ranks"] if self.ranks > 1 else [])])


class Ground(msgspec.Struct, frozen=True, kw_only=True):
    """An entry of the environment that is another one here: bits may differ."""

    name: str
    there: str
    here: str


def recorded_numerics(environment: Mapping[str, str], ranks: int, model_length: int) -> Numerics:
    """What a log's environment and configuration tell; logs that tell nothing leave it to this machine."""
    invariant, kernels = environment.get("batch_invariant", ""), environment.get("kernels", "")
    asked = True if invariant.startswith("yes") else False if invariant.startswith("no: --no-det") else None
    return Numerics(
        dtype=environment.get("dtype", "auto"),
        quantization=environment.get("quantization", "none"),
        kernels=TORCH if kernels == PLAIN else kernels.lower(),
        deterministic=asked,
        ranks=ranks,
        model_length=model_length,
    )


def changed(recorded: Numerics, changes: Mapping[str, object]) -> Numerics:
    """`recorded` with what is not None in `changes`. What the log could hold of its own numbers, others need not hold."""
    given = {name: value for name, value in changes.items() if value is not None}
    if given.get("kernels", recorded.kernels) != recorded.kernels or given.get("dtype", recorded.dtype) != recorded.dtype:
        given = {"deterministic": None, **given}
    if given.get("quantization", recorded.quantization) != recorded.quantization:
        given = {"dtype": "auto", **given}
    return msgspec.structs.replace(recorded, **given)


def grounds(there: Mapping[str, str], here: Mapping[str, str]) -> list[Ground]:
    """What is otherwise here, of what a log told."""
    pairs = [(name, there.get(name, ""), here.get(name, "")) for name in COMPARED]
    return [Ground(name=name, there=old, here=new) for name, old, new in pairs if old and new and old.lower() != new.lower()]


def prepare(threads: int, prescribe: bool) -> None:
    """What torch reads of the environment as it is imported, unless it is here already: a rank sets the same."""
    if "torch" not in sys.modules:
        prepare_process(threads or default_threads(1), prescribe)
