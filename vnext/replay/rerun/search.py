"""Searches for the first operation that differs: runs each recorded step layer by layer and repeats every call.

Owns the order of the search and the description of a find. One pass over the steps suffices: the watched machine runs a
step twice, as the engine runs it and layer by layer, and the counterpart repeats each operation once.
"""

from __future__ import annotations

from typing import Any

import msgspec
import torch

from vnext.kernels.table import substituted
from vnext.models.layers.batch import ForwardBatch
from vnext.replay.rerun.counterparts import Counterpart, Elsewhere, Single
from vnext.replay.rerun.gaps import Gap, Pair, gap
from vnext.replay.rerun.machine import Caches, Machine
from vnext.replay.rerun.numerics import CannotRun
from vnext.replay.rerun.watching import Call, Names, Watch

ROUNDING = {torch.float32: 1e-4, torch.bfloat16: 2.0**-5, torch.float16: 2.0**-8}
"""How much two orders of one sum may differ, relative to the largest magnitude in the row."""
STACK = "stack"
"""The name of all layers as one kernel call, listed beside the operations of the table."""


class Found(msgspec.Struct, frozen=True, kw_only=True):
    """The first operation that differs. `rows` are places among the step's tokens or, if `of_samples`, among its
    samples."""

    operation: str
    layer: int
    weight: str
    part: str
    shape: tuple[int, ...]
    dtype: str
    absolute: float
    relative: float
    elements: int
    rows: tuple[int, ...]
    of_samples: bool


class Seen(msgspec.Struct):
    """One operation so far: the number of compared calls, and the largest relative difference."""

    calls: int = 0
    relative: float = 0.0


class _Differs(Exception):
    """Ends a step at its first difference."""


class Search:
    """With `other` None, each request runs alone, by the same kernels. With `tolerance` None, the tolerance is zero
    where bits must be equal, otherwise that of rounding."""

    def __init__(self, machine: Machine, other: Machine | None, caches: Caches, tolerance: float | None) -> None:
        if machine.numerics.ranks != 1:
            raise CannotRun("operations are watched on one rank: leave --tp to what it is compared with")
        shard = machine.shards[0]
        self._machine, self._shard, self._caches = machine, shard, caches
        params = shard.params
        self._has_stack = getattr(params, STACK, None) is not None
        self._params = params._replace(stack=None) if self._has_stack else params
        names = Names(self._params)
        served = machine.kernels.operations
        self._watch = Watch(served, names, self._meet)
        exact = other is None and shard.invariance.holds
        widest = max(ROUNDING[each.shards[0].dtype] for each in (machine, other or machine))
        self.tolerance = tolerance if tolerance is not None else 0.0 if exact else widest
        alone = Single(machine, served, caches) if other is None else None
        self._counterpart: Counterpart = alone or Elsewhere(other, names, caches, machine.adapters)
        self.seen: dict[str, Seen] = {}
        self._tokens = 0
        self.found: Found | None = None

    def step(self, batch: ForwardBatch, logits: torch.Tensor | None) -> bool:
        """Whether something differs in this step; `logits` are those that the machine computed as the engine does."""
        self._watch.begin()
        self._counterpart.begin(batch, self._watch)
        self._tokens = batch.token_ids.shape[0]
        with self._machine.kernels.used(), torch.inference_mode():
            try:
                with substituted(self._watch.operations):
                    watched = self._shard.logits(batch, self._caches.of_rank[0], self._params)
            except _Differs:
                return True
        if self._has_stack and logits is not None and watched is not None:
            self._compare_stack(watched, logits)
        return self.found is not None

    def _compare_stack(self, watched: torch.Tensor, logits: torch.Tensor) -> None:
        """Check that all layers as one call give exactly the bits of the layers one by one."""
        found = gap(Pair("logits", logits, watched), 0.0)
        self._note(STACK, found)
        if found.rows:
            self.found = _reported(Call(STACK, -1, "", (), logits), found, logits, True)

    def _meet(self, call: Call) -> None:
        for pair in self._counterpart.pairs(call):
            found = gap(pair, self.tolerance)
            self._note(call.operation, found)
            if found.rows:
                self.found = _reported(call, found, pair.ours, pair.ours.shape[0] != self._tokens)
                raise _Differs

    def _note(self, operation: str, found: Gap) -> None:
        seen = self.seen.setdefault(operation, Seen())
        seen.calls += found.part in ("output", "query", "normed", "shares", "logits")
        seen.relative = max(seen.relative, found.relative)


def _reported(call: Call, found: Gap, ours: Any, of_samples: bool) -> Found:
    return Found(
        operation=call.operation, layer=call.layer, weight=call.weight, part=found.part, shape=tuple(ours.shape),
        dtype=str(ours.dtype).removeprefix("torch."), absolute=found.absolute, relative=found.relative,
        elements=found.elements, rows=found.rows, of_samples=of_samples,
    )  # fmt: skip
