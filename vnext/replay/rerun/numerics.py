"""What the bits of a run depend on besides the model: how numbers are stored, multiplied and shared among ranks.

Owns reading it from a log's environment, changing it and describing it. Imports no torch.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping

import msgspec

from vnext.kernels.format import INT8
from vnext.runtime.processes.determinism import prepare_process
from vnext.runtime.processes.thread_plan import default_threads

TORCH = "torch"
"""The name of plain torch among kernels."""
PLAIN = "plain torch"
"""The name of plain torch in a log."""
COMPARED = (
    "dtype", "quantization", "activations", "kv_cache_dtype", "kernels", "batch_invariant", "torch", "cpu_capability", "machine",
)  # fmt: skip
"""Entries of the environment that may affect bits."""


class CannotRun(Exception):
    """A model cannot run in this way: one sentence with the value and the remedy."""


class Numerics(msgspec.Struct, frozen=True, kw_only=True):
    """`kernels` is "torch", an instruction set of the compiled kernels, or "" for the best of this machine.

    `model_length` is the longest request, 0 for the default; a model may use other rotary values for longer requests.
    `deterministic` is the engine's option. `ranks` share each layer. `threads` compute, 0 for as many as the machine
    has; their number changes no bit. `sampler` and `attention` are those from outside, "" for vnext's own.
    """

    dtype: str = "auto"
    quantization: str = "none"
    activations: str = INT8
    kv_cache_dtype: str = "auto"
    kernels: str = ""
    deterministic: bool | None = None
    ranks: int = 1
    threads: int = 0
    model_length: int = 0
    sampler: str = ""
    attention: str = ""

    def words(self) -> str:
        weights = [self.quantization] if self.quantization != "none" else []
        weights += [f"activations in {self.activations}"] if self.activations != INT8 else []
        cache = [f"a cache of {self.kv_cache_dtype}"] if self.kv_cache_dtype != "auto" else []
        parts = [self.dtype, *weights, *cache, self.kernels or "best kernels"]
        return ", ".join([*parts, *([f"{self.ranks} ranks"] if self.ranks > 1 else [])])


class Ground(msgspec.Struct, frozen=True, kw_only=True):
    """An entry of the environment that differs here; bits may differ."""

    name: str
    there: str
    here: str


def recorded_numerics(environment: Mapping[str, str], ranks: int, model_length: int) -> Numerics:
    """The numerics that a log's environment and configuration record. Entries missing from the log are left to this
    machine."""
    invariant, kernels = environment.get("batch_invariant", ""), environment.get("kernels", "")
    asked = True if invariant.startswith("yes") else False if invariant.startswith("no: --no-det") else None
    return Numerics(
        dtype=environment.get("dtype", "auto"),
        quantization=environment.get("quantization", "none"),
        activations=environment.get("activations", INT8),
        kv_cache_dtype=environment.get("kv_cache_dtype", "auto"),
        kernels=TORCH if kernels == PLAIN else kernels.lower(),
        deterministic=asked,
        ranks=ranks,
        model_length=model_length,
        sampler=environment.get("sampler", ""),
        attention=environment.get("attention_function", ""),
    )


def changed(recorded: Numerics, changes: Mapping[str, object]) -> Numerics:
    """`recorded` with the entries of `changes` that are not None. What depended on the log's own numerics is dropped."""
    given = {name: value for name, value in changes.items() if value is not None}
    if given.get("kernels", recorded.kernels) != recorded.kernels or given.get("dtype", recorded.dtype) != recorded.dtype:
        given = {"deterministic": None, **given}
    if given.get("quantization", recorded.quantization) != recorded.quantization:
        given = {"dtype": "auto", **given}
    return msgspec.structs.replace(recorded, **given)


def grounds(there: Mapping[str, str], here: Mapping[str, str]) -> list[Ground]:
    """The entries that the log recorded and that differ here."""
    pairs = [(name, there.get(name, ""), here.get(name, "")) for name in COMPARED]
    return [Ground(name=name, there=old, here=new) for name, old, new in pairs if old and new and old.lower() != new.lower()]


def prepare(threads: int, prescribe: bool) -> None:
    """Set the environment that torch reads on import, unless torch is already imported; a rank sets the same."""
    if "torch" not in sys.modules:
        prepare_process(threads or default_threads(1), prescribe)
