"""Modules that take the place of a hosted model's own: products, embeddings, heads, activations and angles on this tree's parts.

A module finds the step that it computes in `Run`, which all modules of a model share. On the meta device, where a model is looked
at before its weights are there, modules give empty tensors of the right shape.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from vnext.kernels.calls import AttentionCall, RotaryWrite
from vnext.models.config.model_config import ModelConfig
from vnext.models.hosted.own_code import SLOPES, biased, with_terms
from vnext.models.layers.kv_cache import KvCache
from vnext.models.layers.layers import Linear, Step, embed, operations, output_logits, row
from vnext.models.layers.sharding import Parallel, alone

ANGLE_ROWS = 1024
"""Positions whose angles are made together: always the same ones, so that they have the same bits in every step."""


class Run:
    """What a step of a model computes with: its group, each layer's step and cache, its tokens' positions, how often each module
    has attended so far. Without steps attention gives its queries back, by which rows are compared."""

    def __init__(self) -> None:
        self.parallel: Parallel = alone()
        self.steps: Sequence[Step] = ()
        self.kv: KvCache = ()
        self.positions = torch.zeros(0)
        self.turns: dict[nn.Module, int] = {}


class Place(NamedTuple):
    """An attention module's places among the layers, one for each time that it attends in a step."""

    run: Run
    layers: tuple[int, ...]


NOWHERE = Place(Run(), ())


def attend(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    softcap: float | None = None,
    **others: object,
) -> tuple[torch.Tensor, None]:
    """Attention of query [1, heads, T, D] over the cache, after key and value [1, kv_heads, T, D] are written: [1, T, heads, D].
    `bias` among the others: [1, kv_heads, T] of all ranks, float32, what keys add to their products, before the scale."""
    place: Place = module.__dict__.get("vnext_place", NOWHERE)
    run, layers = place
    if not run.steps:
        return query.transpose(1, 2).contiguous(), None
    turn = run.turns[module] = run.turns.get(module, -1) + 1
    step, cache = run.steps[layers[turn]], run.kv[layers[turn]]
    chosen, dtype = step.operations, value.dtype
    parts = tuple(each[0].transpose(0, 1).to(dtype) for each in (query, key, value))
    scale = query.shape[-1] ** -0.5 if scaling is None else float(scaling)
    if (slopes := module.__dict__.get(SLOPES)) is not None:
        parts = biased(parts, slopes, scale, run.positions)
    elif isinstance(bias := others.get("bias"), torch.Tensor):
        count = key.shape[1]
        first = run.parallel.rank * count if count < bias.shape[1] else 0
        parts = with_terms(parts, bias[0, first : first + count].T)
    qkv = torch.cat(parts, 1).flatten(1)
    written = chosen.rotary_kv_write(qkv, RotaryWrite(None, None, 1.0, None, None, *cache, step.slots))
    seen = chosen.paged_attention(written, AttentionCall(*cache, step.metadata, scale, step.window, softcap or 0.0))
    return seen[None, ..., : query.shape[-1]], None


class Experts(NamedTuple):
    """Experts of a model: gate_up [E, 2 * I, hidden] and down [E, hidden, I], packed; `is_split` where ranks share each one."""

    run: Run
    gate_up: object
    down: object
    activation: str
    is_split: bool


def run_experts(module: nn.Module, x: torch.Tensor, ids: torch.Tensor, shares: torch.Tensor) -> torch.Tensor:
    """Each token of x [T, hidden] through the experts `ids` [T, k] with these shares: [T, hidden]."""
    found: Experts | None = module.__dict__.get("vnext_experts")
    if found is None:
        return torch.empty_like(x)
    parallel, chosen = found.run.parallel, operations(x.device.type)
    given = (x, shares.float(), ids.to(torch.int64), found.gate_up, found.down, found.activation)
    if not found.is_split or parallel.world_size == 1:
        return chosen.experts(*given)
    return chosen.experts(*given, parallel.all_reduce) if parallel.is_exact else parallel.all_reduce(chosen.experts(*given))


class Quick(nn.Module):
    """A module without hooks: a call is its forward."""

    def __call__(self, *args: object, **kwargs: object) -> object:
        return self.forward(*args, **kwargs)


class Same(Quick):
    """What dropout is where nothing is learnt."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


class Product(Quick):
    """A linear layer of `outputs` on this rank; `is_row` where its inputs are this rank's part, and the ranks' sums are added."""

    def __init__(self, run: Run, outputs: int, is_row: bool = False, linear: Linear | None = None) -> None:
        super().__init__()
        self.run, self.outputs, self.is_row, self.linear = run, outputs, is_row, linear

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., in] -> [..., out]."""
        shape = (*x.shape[:-1], self.outputs)
        if x.is_meta or self.linear is None:
            return x.new_empty(shape)
        flat = x.reshape(-1, x.shape[-1])
        if self.is_row and self.run.steps:
            return row(flat, self.linear, self.run.steps[0]).view(shape)
        found: torch.Tensor = operations(x.device.type).linear(flat, self.linear.weight, self.linear.bias)
        return found.view(shape)


class Joined:
    """One product in the place of several layers that read the same: made when the first one asks, and let go with the last one's
    part. `outputs`: each layer's; of ranks each has this part of all."""

    def __init__(self, product: Product, outputs: Sequence[int]) -> None:
        self._product, self._last = product, len(outputs) - 1
        self._edges = [end * product.outputs // sum(outputs) for end in accumulate(outputs, initial=0)]
        self._made: tuple[torch.Tensor, torch.Tensor] | None = None

    def part(self, x: torch.Tensor, place: int) -> torch.Tensor:
        """[..., in] -> [..., out] of the layer at this place."""
        if place == 0 or self._made is None or self._made[0] is not x:
            self._made = (x, self._product.forward(x))
        whole = self._made[1]
        if place == self._last:
            self._made = None
        return whole[..., self._edges[place] : self._edges[place + 1]]


class Part(Quick):
    """A layer of several that are one product."""

    def __init__(self, joined: Joined, place: int) -> None:
        super().__init__()
        self.joined, self.place = joined, place

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., in] -> [..., out]."""
        return self.joined.part(x, self.place)


class Head(nn.Module):
    """The output head: float32 logits, whole on every rank. `bias` [V_local], float32, or None."""

    def __init__(self, run: Run, config: ModelConfig, packed: object, bias: torch.Tensor | None) -> None:
        super().__init__()
        self.run, self.config, self.packed, self.bias = run, config, packed, bias

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """[1, S, hidden] -> [1, S, V]."""
        found = output_logits(self.packed, hidden[0], self.config, self.run.parallel)
        if self.bias is not None:
            found = found + self.run.parallel.all_gather(self.bias[None], 1)[:, : found.shape[1]]
        return found[None]


class StandIn:
    """What stands in the place of a weight [rows, in] for the functions of torch that models call with it: a product or a look-up.

    `look_up(ids)` gives rows [..., in], `multiply(x)` gives x [..., in] times the weight; either may be None.
    """

    def __init__(
        self,
        shape: tuple[int, int],
        dtype: torch.dtype,
        look_up: Callable[[torch.Tensor], torch.Tensor] | None = None,
        multiply: Callable[[torch.Tensor], torch.Tensor] | None = None,
    ) -> None:
        self.shape, self.dtype, self.look_up, self.multiply = torch.Size(shape), dtype, look_up, multiply

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., object], types: object, args: Sequence[object] = (), kwargs: Mapping[str, object] | None = None
    ) -> torch.Tensor:
        x, weight = args[0], args[1]
        assert isinstance(x, torch.Tensor) and isinstance(weight, StandIn)
        if func is functional.embedding and weight.look_up is not None:
            if x.is_meta:
                return x.new_empty((*x.shape, weight.shape[1]), dtype=weight.dtype)
            return weight.look_up(x)
        if func is functional.linear and weight.multiply is not None and len(args) + len(kwargs or {}) == 2:
            return x.new_empty((*x.shape[:-1], weight.shape[0])) if x.is_meta else weight.multiply(x)
        raise TypeError(f"{getattr(func, '__name__', func)} of a weight that is packed")

    def float(self) -> StandIn:
        """The same: products have their inputs' dtype."""
        return self

    def type(self, dtype: torch.dtype) -> StandIn:
        """The same, as `float`."""
        return self

    to = type


def embedding(weight: object, shape: tuple[int, int], dtype: torch.dtype, run: Run) -> StandIn:
    """The input embedding, of which each rank has a part."""

    def look_up(ids: torch.Tensor) -> torch.Tensor:
        return embed(weight, ids.flatten(), run.parallel).view(*ids.shape, -1)

    return StandIn(shape, dtype, look_up)


def table(weight: torch.Tensor) -> StandIn:
    """A table that is whole on every rank, such as that of positions."""

    def look_up(ids: torch.Tensor) -> torch.Tensor:
        return weight.index_select(0, ids.flatten()).view(*ids.shape, -1)

    return StandIn((weight.shape[0], weight.shape[1]), weight.dtype, look_up)


def router(weight: object, shape: tuple[int, int], dtype: torch.dtype) -> StandIn:
    """A router, which models multiply by without a module, in their dtype or in float32. `weight` is packed in float32."""

    def multiply(x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = operations(x.device.type).linear(x.reshape(-1, x.shape[-1]).float(), weight, None)
        return found.to(x.dtype).view((*x.shape[:-1], -1))

    return StandIn(shape, dtype, multiply=multiply)


def silu(x: torch.Tensor) -> torch.Tensor:
    """Spelled out for the reason that kernels/references.py gives at `silu_and_mul`."""
    wide = x.float()
    return (wide / wide.neg().exp_().add_(1.0)).to(x.dtype)


def gelu(x: torch.Tensor) -> torch.Tensor:
    wide = x.float()
    return torch.erf(wide * math.sqrt(0.5)).add_(1.0).mul_(wide).mul_(0.5).to(x.dtype)


def gelu_tanh(x: torch.Tensor) -> torch.Tensor:
    if x.is_meta:
        return torch.empty_like(x)
    found: torch.Tensor = operations(x.device.type).activate(x.reshape(-1, x.shape[-1]), None, None, "gelu_tanh")
    return found.view(x.shape)


def quick_gelu(x: torch.Tensor) -> torch.Tensor:
    wide = x.float()
    return (wide / (wide * -1.702).exp_().add_(1.0)).to(x.dtype)


def sigmoid(x: torch.Tensor) -> torch.Tensor:
    return x.float().neg().exp_().add_(1.0).reciprocal_().to(x.dtype)


class Activation(Quick):
    """A function of each element."""

    def __init__(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self._function = function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self._function(x)


ACTIVATIONS: Mapping[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "SiLUActivation": silu,
    "SiLU": silu,
    "GELUActivation": gelu,
    "GELU": gelu,
    "GELUTanh": gelu_tanh,
    "NewGELUActivation": gelu_tanh,
    "FastGELUActivation": gelu_tanh,
    "QuickGELUActivation": quick_gelu,
    "Sigmoid": sigmoid,
}
"""By the names of classes of transformers and of torch."""


FUNCTIONS: Mapping[object, Callable[[torch.Tensor], torch.Tensor]] = {
    torch.sigmoid: sigmoid,
    torch.Tensor.sigmoid: sigmoid,
    functional.sigmoid: sigmoid,
    functional.silu: silu,
}
"""Functions of torch and ours of the same value, in which no row depends on others."""


class Replaced(TorchFunctionMode):
    """While it is entered, FUNCTIONS give way to ours."""

    def __torch_function__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        ours = FUNCTIONS.get(func)
        return ours(args[0]) if ours is not None else func(*args, **(kwargs or {}))


class Angles(Quick):
    """The rotary embedding of a model, whose own forward is computed for ANGLE_ROWS positions at a time, once, and looked up."""

    def __init__(self, own: nn.Module) -> None:
        super().__init__()
        self.own = own
        self._tables: dict[tuple[object, ...], tuple[torch.Tensor, ...]] = {}

    def forward(self, x: torch.Tensor, position_ids: torch.Tensor, *args: object, **kwargs: object) -> tuple[torch.Tensor, ...]:
        """Cosines and sines [1, T, D] of positions [1, T]."""
        if x.is_meta:
            found: tuple[torch.Tensor, ...] = self.own(x, position_ids, *args, **kwargs)
            return found
        key, rows = (x.dtype, *args, *kwargs.items()), position_ids[0]
        tables = self._tables.get(key, ())
        while not tables or int(rows.max()) >= len(tables[0]):
            tables = self._tables[key] = self._longer(tables, x, args, kwargs)
        return tuple(each.index_select(0, rows)[None] for each in tables)

    def _longer(
        self, tables: tuple[torch.Tensor, ...], x: torch.Tensor, args: tuple[object, ...], kwargs: dict[str, object]
    ) -> tuple[torch.Tensor, ...]:
        first = len(tables[0]) if tables else 0
        positions = torch.arange(first, first + ANGLE_ROWS, device=x.device)[None]
        more = self.own(x[:, :1], positions, *args, **kwargs)
        return tuple(torch.cat((old, new[0])) for old, new in zip(tables, more)) if tables else tuple(new[0] for new in more)
