"""Searches for the first operation that differs: runs each recorded step layer by layer and repeats every call.

Owns the order of the search and the description of a find. One pass over the steps suffices: the watched machine runs a
step twice, as the engine runs it and layer by layer, and the counterpart repeats each operation once.
"""

from __future__ import annotations

import sys
from typing import Any, NamedTuple, Protocol

import msgspec
import numpy as np
import torch

from vnext.kernels.table import Operations, substituted
from vnext.kernels.thin import ThinBlocks, ThinParts
from vnext.models.layers.adapted import Addition
from vnext.models.layers.batch import ForwardBatch, host_batch
from vnext.models.layers.kv_cache import KvCache
from vnext.models.layers.sharding import local_heads, local_kv_heads
from vnext.replay.rerun.machine import Adapters, Caches, Machine, tensors_of
from vnext.replay.rerun.numerics import CannotRun
from vnext.replay.rerun.turns import added
from vnext.replay.rerun.watching import ACTIVATIONS, BESIDE, CACHES, METADATA, PARTS, SLOTS, Call, Names, Watch, of_fields

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

    def __init__(self, machine: Machine, other: Machine | None, tolerance: float | None) -> None:
        if machine.numerics.ranks != 1:
            raise CannotRun("operations are watched on one rank: leave --tp to what it is compared with")
        if machine.config.recurrent is not None:
            raise CannotRun("bisect repeats operations, and those of recurrent layers change what they read: use exec")
        shard = machine.shards[0]
        self._machine, self._shard, self._other = machine, shard, other
        params = shard.params
        self._has_stack = getattr(params, STACK, None) is not None
        self._params = params._replace(stack=None) if self._has_stack else params
        self._names = Names(self._params)
        self._watch = Watch(machine.kernels.operations, self._names, self._meet)
        exact = other is None and shard.invariance.holds
        widest = max(ROUNDING[each.shards[0].dtype] for each in (machine, other or machine))
        self.tolerance = tolerance if tolerance is not None else 0.0 if exact else widest
        self._caches: Caches | None = None
        self._counterpart: Counterpart
        self.seen: dict[str, Seen] = {}
        self._tokens = 0
        self.found: Found | None = None

    def step(self, batch: ForwardBatch, logits: torch.Tensor | None, caches: Caches) -> bool:
        """Whether something differs in this step; `logits` are those that the machine computed as the engine does, in `caches`."""
        if caches is not self._caches:
            self._use(caches)
        if batch.inputs and (tower := self._machine.config.tower) is not None and tower.is_mutual:
            raise CannotRun("bisect repeats operations, and what is seen to both sides of an image is computed twice: use exec")
        self._watch.begin()
        self._counterpart.begin(batch, self._watch)
        self._tokens = batch.token_ids.shape[0]
        with self._machine.kernels.used(), torch.inference_mode():
            try:
                with substituted(self._watch.operations):
                    watched = self._shard.logits(batch, caches.of_rank[0], self._params)
            except _Differs:
                return True
        if self._has_stack and logits is not None and watched is not None:
            self._compare_stack(watched, logits)
        return self.found is not None

    def _use(self, caches: Caches) -> None:
        """Compare in these caches from here on: the first ones, or those of ranks that took others' places."""
        self._caches, machine = caches, self._machine
        if self._other is None:
            self._counterpart = Single(machine, machine.kernels.operations, caches)
        else:
            self._counterpart = Elsewhere(self._other, self._names, caches, machine.adapters)

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


# ---- counterparts ------------------------------------------------------------------------------------------------
# Counterparts of a call: the same operation on the same inputs, computed another way.
#
#     Single       for each request alone, by the same kernels: shows what depends on the batch
#     Elsewhere    by another machine: other kernels, dtype, weight format, or ranks that share the layer
#
# The inputs are always those of the watched run, so differences do not propagate: each one arises in its own operation.
# Each counterpart owns a cache for its writes; it reads what the watched run has written.


NOTHING_ADDED = ThinParts(())


class Counterpart(Protocol):
    """Repeats calls."""

    def begin(self, batch: ForwardBatch, watch: Watch) -> None:
        """Begin the next step."""

    def pairs(self, call: Call) -> list[Pair]:
        """The parts of the call's result, each with its expected value."""


def at_slots(cache: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    """The content of a cache [pages, heads, size, D] at slots int64 [T]: [T, heads, D]."""
    size = cache.shape[2]
    return cache[torch.div(slots, size, rounding_mode="floor"), :, slots % size]


def paired(call: Call, theirs: tuple[torch.Tensor, ...]) -> list[Pair]:
    names = PARTS.get(call.operation, ("output",))
    return [Pair(*each) for each in zip(names, parts_of(call.result), theirs, strict=True)]


# ---- each request alone ------------------------------------------------------------------------------------------


class Single:
    """Computes each request's rows alone."""

    def __init__(self, machine: Machine, served: Operations, caches: Caches) -> None:
        self._served = served
        written = machine.caches(caches.pages, caches.block_size)
        self._own = _by_identity(caches.of_rank[0], written.of_rank[0])

    def begin(self, batch: ForwardBatch, watch: Watch) -> None:
        starts = host_batch(batch).query_starts.tolist()
        self._tokens = list(zip(starts, starts[1:]))
        self._samples = [(place, place + 1) for place in range(batch.sample_at.shape[0])]
        self._watch = watch
        self._metadata: dict[tuple[int, int], Any] = {}

    def pairs(self, call: Call) -> list[Pair]:
        spans = self._tokens if call.rows == self._tokens[-1][1] else self._samples
        if call.rows not in (self._tokens[-1][1], len(self._samples)):  # tokens of one image
            spans = [(0, call.rows)]
        function = of_fields(call.operation, getattr(self._served, call.operation))
        results = [parts_of(function(*self._arguments(call, number, *span))) for number, span in enumerate(spans)]
        found = paired(call, tuple(torch.cat(parts) for parts in zip(*results)))
        if call.operation == "rotary_kv_write":
            slots, caches = call.arguments[SLOTS], [call.arguments[place] for place in CACHES[call.operation]]
            for name, cache in zip(("keys", "values"), caches):
                found.append(Pair(name, at_slots(cache, slots), at_slots(self._own[id(cache)], slots)))
        return found

    def _arguments(self, call: Call, number: int, start: int, stop: int) -> list[Any]:
        arguments = list(call.arguments)
        for place in (*ACTIVATIONS[call.operation], *BESIDE.get(call.operation, ())):
            if arguments[place] is not None:
                arguments[place] = arguments[place][start:stop].clone()
        if call.operation == "rotary_kv_write":
            for place in CACHES[call.operation]:
                arguments[place] = self._own[id(arguments[place])]
        elif call.operation == "paged_attention":
            arguments[METADATA] = self._described(arguments[METADATA], number)
        return [self._cut(value, start, stop) for value in arguments]

    def _cut(self, value: Any, start: int, stop: int) -> Any:
        """What adapters add, of one request alone."""
        if isinstance(value, ThinParts):
            return value.cut(start, stop) or NOTHING_ADDED
        if isinstance(value, Addition):
            parts = value.parts.cut(start, stop)
            return Addition(self._served.add_thin, value.x[start:stop].clone(), parts) if parts else None
        return value

    def _described(self, metadata: Any, number: int) -> Any:
        """The metadata of one request alone."""
        key = id(metadata), number
        if key not in self._metadata:
            step, here = self._watch.described(metadata), slice(number, number + 1)
            starts, contexts, table = step.query_starts, step.context_lengths[here].copy(), step.block_table[here].contiguous()
            alone = np.array([0, starts[number + 1] - starts[number]], dtype=starts.dtype)
            own = step._replace(query_starts=alone, context_lengths=contexts, block_table=table)
            self._metadata[key] = self._served.attention_metadata(own)
        return self._metadata[key]


# ---- another machine ---------------------------------------------------------------------------------------------


class Elsewhere:
    """Another machine's operations, with its own weight format, on the inputs of the watched run."""

    def __init__(self, machine: Machine, watched: Names, caches: Caches, adapters: Adapters) -> None:
        """`adapters` are those of the watched machine."""
        self._machine, self._watched, self._adapters = machine, watched, adapters
        self._names = [Names(shard.params) for shard in machine.shards]
        self._ranks = machine.numerics.ranks
        self._dtype = machine.shards[0].dtype
        written = machine.caches(caches.pages, caches.block_size)
        self._own = [_by_identity(caches.of_rank[0], other) for other in written.of_rank]

    def begin(self, batch: ForwardBatch, watch: Watch) -> None:
        self._watch = watch
        self._metadata: dict[tuple[int, int], Any] = {}
        if batch.adapters and self._ranks > 1:
            raise CannotRun("what adapters add is compared on one rank: give --solo, or --tp 1 and --kernels, --dtype or the like")
        self._blocks: dict[int, ThinBlocks] = {}
        for rows in batch.adapters:
            self._blocks.update(self._adapters.paired(rows.slot, self._machine.adapters, self._weight))

    def _weight(self, key: int) -> int | None:
        """The identity of the weight here whose counterpart in the watched machine has this identity."""
        return id(self._names[0].at(where)) if (where := self._watched.place_of(key)) else None

    def pairs(self, call: Call) -> list[Pair]:
        with self._machine.kernels.used():
            served = self._machine.kernels.operations
            special = {
                "linear": self._linear, "gated_linear": self._columns, "logits": self._columns, "experts": self._sums,
                "embedding_rows": self._embedding, "rotary_kv_write": self._rotary, "paged_attention": self._attention,
            }  # fmt: skip
            function = of_fields(call.operation, getattr(served, call.operation))
            return special.get(call.operation, self._whole)(call, function)

    # ---- arguments -----------------------------------------------------------------------------------------------

    def _arguments(self, call: Call, rank: int) -> list[Any]:
        """The call's arguments, with the rank's weights and with activations in its dtype."""
        return [self._argument(call, rank, place, value) for place, value in enumerate(call.arguments)]

    def _argument(self, call: Call, rank: int, place: int, value: Any) -> Any:
        if where := self._watched.place(value):
            return self._names[rank].at(where)
        if isinstance(value, ThinParts):
            return value.replaced(lambda blocks: self._blocks[id(blocks)])
        if isinstance(value, Addition):
            add_thin, parts = self._machine.kernels.operations.add_thin, value.parts.replaced(lambda each: self._blocks[id(each)])
            return Addition(add_thin, value.x.to(self._dtype), parts)
        return value.to(self._dtype) if place in ACTIVATIONS[call.operation] else value

    def _heads(self, rank: int) -> tuple[slice, slice]:
        """The rank's query heads and key-value heads among all."""
        config = self._machine.config
        heads, kv_heads = local_heads(config, self._ranks), local_kv_heads(config, self._ranks)
        first = rank * config.kv_head_count // self._ranks
        return slice(rank * heads, (rank + 1) * heads), slice(first, first + kv_heads)

    def _joined(self, qkv: torch.Tensor, rank: int) -> torch.Tensor:
        """The rank's part of qkv [T, (heads + 2 * kv_heads) * D]."""
        config = self._machine.config
        query, kv = self._heads(rank)
        parts = qkv.view(qkv.shape[0], -1, config.head_dim).split(
            (config.head_count, config.kv_head_count, config.kv_head_count), dim=1
        )
        taken = (parts[0][:, query], parts[1][:, kv], parts[2][:, kv])
        return torch.cat(taken, dim=1).flatten(1).contiguous()

    # ---- operations ----------------------------------------------------------------------------------------------

    def _whole(self, call: Call, function: Any) -> list[Pair]:
        return paired(call, parts_of(function(*self._arguments(call, 0))))

    def _each(self, call: Call, function: Any) -> list[torch.Tensor]:
        return [function(*self._arguments(call, rank)) for rank in range(self._ranks)]

    def _columns(self, call: Call, function: Any) -> list[Pair]:
        """Compare where each rank has some of the outputs."""
        width = call.result.shape[1]
        return paired(call, (torch.cat(self._each(call, function), dim=1)[:, :width],))

    def _sums(self, call: Call, function: Any) -> list[Pair]:
        """Compare where each rank has a part of every sum."""
        return paired(call, (added(self._each(call, function)),))

    def _embedding(self, call: Call, function: Any) -> list[Pair]:
        tables = [self._arguments(call, rank)[0] for rank in range(self._ranks)]
        found = [function(table, call.arguments[1], rank * table.shape[0]) for rank, table in enumerate(tables)]
        return paired(call, (added(found),))

    def _linear(self, call: Call, function: Any) -> list[Pair]:
        inputs, weight = call.arguments[0].shape[1], self._arguments(call, 0)[1]
        if weight.shape[1] < inputs:
            return self._rows_of_weight(call, function)
        if weight.shape == call.arguments[1].shape:
            return self._whole(call, function)
        if not call.weight.endswith("qkv.weight"):
            return self._columns(call, function)
        found = self._each(call, function)
        ours = torch.cat([self._joined(call.result, rank) for rank in range(self._ranks)], dim=1)
        return [Pair("output", ours, torch.cat(found, dim=1))]

    def _rows_of_weight(self, call: Call, function: Any) -> list[Pair]:
        """Compare where each rank has some of the inputs; the bias is added once, after the sum."""
        found = []
        for rank in range(self._ranks):
            x, weight, bias = self._arguments(call, rank)
            width = weight.shape[1]
            found.append(function(x[:, rank * width : (rank + 1) * width].contiguous(), weight, None))
        total = added(found)
        return paired(call, (total if bias is None else total + bias,))

    def _rotary(self, call: Call, function: Any) -> list[Pair]:
        slots, caches = call.arguments[SLOTS], [call.arguments[place] for place in CACHES[call.operation]]
        pairs = []
        for rank in range(self._ranks):
            arguments, (query, kv) = self._arguments(call, rank), self._heads(rank)
            own = [self._own[rank][id(cache)] for cache in caches]
            arguments[0] = self._joined(arguments[0], rank)
            arguments[CACHES[call.operation][0] : CACHES[call.operation][1] + 1] = own
            turned = function(*arguments)
            pairs.append(Pair("query", call.result[:, query], turned))
            for name, cache, other in zip(("keys", "values"), caches, own):
                pairs.append(Pair(name, at_slots(cache, slots)[:, kv], at_slots(other, slots)))
        return _side_by_side(pairs)

    def _attention(self, call: Call, function: Any) -> list[Pair]:
        pairs = []
        for rank in range(self._ranks):
            arguments, (query, kv) = self._arguments(call, rank), self._heads(rank)
            arguments[0] = arguments[0][:, query].contiguous()
            pages = self._watch.described(call.arguments[METADATA]).block_table.unique().long()
            for place in CACHES[call.operation]:
                own = self._own[rank][id(call.arguments[place])]
                own.index_copy_(0, pages, call.arguments[place].index_select(0, pages)[:, kv].to(own.dtype))
                arguments[place] = own
            arguments[METADATA] = self._described(call.arguments[METADATA], rank, kv.stop - kv.start)
            pairs.append(Pair("output", call.result[:, query], function(*arguments)))
        return _side_by_side(pairs)

    def _described(self, metadata: Any, rank: int, kv_heads: int) -> Any:
        key = id(metadata), rank
        if key not in self._metadata:
            step = self._watch.described(metadata)._replace(kv_head_count=kv_heads)
            self._metadata[key] = self._machine.kernels.operations.attention_metadata(step)
        return self._metadata[key]


def _by_identity(caches: KvCache, others: KvCache) -> dict[int, torch.Tensor]:
    """Each tensor of `others`, by the identity of its counterpart in `caches`."""
    return {id(one): other for one, other in zip(tensors_of(caches), tensors_of(others))}


def _side_by_side(pairs: list[Pair]) -> list[Pair]:
    """Join the ranks' parts of one name."""
    names = dict.fromkeys(pair.part for pair in pairs)
    same = [(name, [pair for pair in pairs if pair.part == name]) for name in names]
    return [Pair(name, torch.cat([p.ours for p in found], 1), torch.cat([p.theirs for p in found], 1)) for name, found in same]


class Pair(NamedTuple):
    """A part of two results, [rows, ...] of one shape: the computed value and the one to compare with."""

    part: str
    ours: torch.Tensor
    theirs: torch.Tensor


class Gap(NamedTuple):
    """`relative` is to the largest magnitude in the row; `rows` are those that differ by more than the tolerance."""

    part: str
    absolute: float
    relative: float
    elements: int
    rows: tuple[int, ...]


def gap(pair: Pair, tolerance: float) -> Gap:
    """With a tolerance of 0 every bit counts except the sign of zero; NaNs equal each other."""
    rows = pair.ours.shape[0]
    if not pair.ours.numel():
        return Gap(pair.part, 0.0, 0.0, 0, ())
    ours, theirs = pair.ours.reshape(rows, -1).float(), pair.theirs.reshape(rows, -1).float()
    equal = (ours == theirs) | (ours.isnan() & theirs.isnan())
    apart = torch.where(equal, 0.0, (ours - theirs).abs()).nan_to_num(nan=torch.inf)
    scale = theirs.abs().nan_to_num(nan=0.0, posinf=0.0).amax(1)
    largest = apart.amax(1)
    relative = torch.where(largest > 0, largest / scale.clamp(min=torch.finfo(torch.float32).tiny), 0.0)
    wrong = (~equal).any(1) if tolerance == 0 else relative > tolerance
    return Gap(
        part=pair.part, absolute=_finite(largest.max()), relative=_finite(relative.max()),
        elements=int((~equal).sum()), rows=tuple(wrong.nonzero()[:, 0].tolist()),
    )  # fmt: skip


def parts_of(result: Any) -> tuple[torch.Tensor, ...]:
    return result if isinstance(result, tuple) else (result,)


def _finite(value: torch.Tensor) -> float:
    """A value that JSON can hold."""
    return min(float(value), sys.float_info.max)
