"""Recurrent layers: a state of one size a request in the place of keys and values, and the pools that hold the states.

A pool is a tensor [page_count, ...] of one part of one layer's states. A convolution's part has the activations' dtype, for it
holds inputs as they came: more bits would add nothing. Sums over a request's tokens are float32. Which page is whose is not known
here.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from vnext.kernels.arrays import Array, as_tensor, dense, dtype_name, host_dtype
from vnext.kernels.calls import ConvolutionCall, RecurrenceCall
from vnext.models.config.model_config import ModelConfig, Recurrent
from vnext.models.errors import ModelError
from vnext.models.layers.assembly import Source, linear
from vnext.models.layers.batch import ForwardBatch
from vnext.models.layers.heads import sum_of_heads
from vnext.models.layers.kv_cache import KvCache
from vnext.models.layers.layers import Linear, Step, row

if TYPE_CHECKING:
    import torch


class StatePart(NamedTuple):
    """A tensor of a layer's state of one request on one rank; `is_wide`: float32 whatever the activations' dtype."""

    shape: tuple[int, ...]
    is_wide: bool


class ShortConvolution(NamedTuple):
    """`inner` is column-parallel: gates before, gates behind, inputs. `output` is row-parallel. weight [C, W], bias [C] or None."""

    inner: Linear
    weight: Array
    bias: Array | None
    output: Linear


class DeltaNet(NamedTuple):
    """A gated delta net. `inner` is column-parallel: queries, keys, values, gates; `beside` too: strengths, steps, never quantised.
    weight [channels, W] of the convolution; decay_logs and step_bias float32 [H], norm float32 [V]. `output` is row-parallel."""

    inner: Linear
    beside: Linear
    weight: Array
    decay_logs: Array
    step_bias: Array
    norm: Array
    output: Linear


class Mamba(NamedTuple):
    """Mamba-2. `inner` is column-parallel: gates, values, keys, queries, steps. weight [channels, W] and bias [channels] or None of
    the convolution; decay_logs, step_bias and skips float32 [H]; norm float32 [H * V], over the heads of each group, or None.
    `output` is row-parallel."""

    inner: Linear
    weight: Array
    bias: Array | None
    decay_logs: Array
    step_bias: Array
    skips: Array
    norm: Array | None
    output: Linear


class Selective(NamedTuple):
    """Mamba, the first. `inner` is column-parallel: values, gates; weight [channels, W] and bias [channels] or None of the
    convolution. `beside` is row-parallel and makes of the values what steps are made of, keys and queries, which `norms` are of,
    () for none; `steps` is column-parallel; neither is ever quantised. decay_logs float32 [H, K, V], step_bias and skips float32
    [channels]. `output` is row-parallel."""

    inner: Linear
    weight: Array
    bias: Array | None
    beside: Linear
    norms: tuple[Array, ...]
    steps: Linear
    decay_logs: Array
    step_bias: Array
    skips: Array
    output: Linear


class Lightning(NamedTuple):
    """Lightning attention. `inner` is column-parallel: query, key and value of each head, and behind them all gates. decay_logs
    float32 [H]; norm [H * V], of all heads together. `output` is row-parallel."""

    inner: Linear
    decay_logs: Array
    norm: Array
    output: Linear


class KeyDelta(NamedTuple):
    """Kimi Delta Attention. `inner` is column-parallel: queries, keys, values; weight [channels, W] of the convolution. `beside`
    makes what steps and what gates are made of, whole on each rank, and this rank's strengths; with `steps` and `gates`, which are
    column-parallel, it is never quantised. Where the two are None it makes steps and strengths, and `inner` gates too. decay_logs
    float32 [H], step_bias float32 [H * K], norm float32 [V]. `output` is row-parallel."""

    inner: Linear
    weight: Array
    beside: Linear
    steps: Linear | None
    gates: Linear | None
    decay_logs: Array
    step_bias: Array
    norm: Array
    output: Linear


class GatedRecurrence(NamedTuple):
    """A gated linear recurrence, RG-LRU (arXiv 2402.19427). `inner` is column-parallel: values, gates behind; weight [channels, W]
    and bias [channels] of the convolution. `gates` packed [heads, V, V], of inputs and of decays, with biases float32 [heads, V];
    rates float32 [channels], before softplus. `output` is row-parallel."""

    inner: Linear
    weight: Array
    bias: Array
    gates: tuple[Array, ...]
    gate_biases: tuple[Array, ...]
    rates: Array
    output: Linear


Recurring = ShortConvolution | DeltaNet | Mamba | Selective | Lightning | KeyDelta | GatedRecurrence
"""What a layer has in the place of attention."""
LEAST, RATE = 1e-20, 8.0
"""Of an RG-LRU: the least step, by which inputs are divided, and what multiplies rates."""
LIGHTNING_EPS = 1e-6
"""Of the norm over all heads, whatever rms_norm_eps is."""


def state_parts(config: ModelConfig, world_size: int) -> tuple[StatePart, ...]:
    """What each recurrent layer keeps of a request on one rank, in the order of its pools."""
    recurrent = config.recurrent
    assert recurrent is not None
    channels = (2 * recurrent.keys + recurrent.values) // world_size
    parts: tuple[StatePart, ...] = (StatePart((recurrent.width - 1, channels), is_wide=False),) if recurrent.width > 1 else ()
    if recurrent.key_dim:
        heads = recurrent.value_heads // world_size
        parts += (StatePart((heads, recurrent.key_dim, recurrent.value_dim), is_wide=True),)
    return parts


def state_bytes_per_page(config: ModelConfig, dtype: np.dtype | torch.dtype, world_size: int) -> int:
    """Bytes of one request's states on one rank, over all layers; `dtype`: the activations'."""
    if config.recurrent is None:
        return 0
    parts = state_parts(config, world_size)
    return len(config.recurrent.layers) * sum(int(np.prod(part.shape)) * (4 if part.is_wide else dtype.itemsize) for part in parts)


def make_state_pools(config: ModelConfig, page_count: int, dtype: Any, world_size: int) -> tuple[tuple[Array, ...], ...]:
    """Of each recurrent layer in turn its pools on the host, zeroed, () where all layers attend; arrays for a dtype of numpy, else
    tensors."""
    if config.recurrent is None:
        return ()

    def zeros(part: StatePart) -> Array:
        found = np.zeros((page_count, *part.shape), dtype=host_dtype("float32" if part.is_wide else dtype_name(dtype)))
        return found if isinstance(dtype, np.dtype) else as_tensor(found)

    return tuple(tuple(map(zeros, state_parts(config, world_size))) for _ in config.recurrent.layers)


def copy_states(pools: Sequence[tuple[Array, ...]], pairs: np.ndarray) -> None:
    """Copy pages (from, to), int64 [n, 2], one after the other."""
    for source, target in pairs.tolist():
        for part in (part for parts in pools for part in parts):
            part[target] = part[source]


def layer_caches(kv: KvCache, batch: ForwardBatch, config: ModelConfig) -> tuple[tuple[Array, ...], ...]:
    """Each layer's keys and values, its pools, or both."""
    if config.recurrent is None:
        return kv
    if batch.recurrent is None:
        raise ModelError(f"{config.architecture} has layers with a state, for which this batch has no place")
    own, seen = dict(zip(config.recurrent.layers, batch.recurrent.pools)), dict(zip(config.attending_layers, kv))
    return tuple((*seen.get(layer, ()), *own.get(layer, ())) for layer in range(config.layer_count))


def assemble_convolution(source: Source, prefix: str, *, bias: bool) -> ShortConvolution:
    return ShortConvolution(
        inner=linear(source, prefix, "in_proj", bias=bias),
        weight=source.fused((prefix + "conv.weight",)),
        bias=source.fused((prefix + "conv.bias",)) if bias else None,
        output=linear(source, prefix, "out_proj", bias=bias),
    )


def assemble_delta_net(source: Source, prefix: str) -> DeltaNet:
    """The gated delta net at `prefix`, which ends with a dot."""
    joined = ("in_proj_qkvz", "in_proj_ba")
    wide, small = (prefix + name + ".weight" in source for name in joined)
    beside = source.packed(tuple(f"{prefix}in_proj_{part}.weight" for part in (("ba",) if small else "ba")), exact=True)
    return DeltaNet(
        inner=linear(source, prefix, *(joined[:1] if wide else ("in_proj_qkv", "in_proj_z"))),
        beside=Linear(beside, None),
        weight=source.fused((prefix + "conv1d.weight",)),
        decay_logs=source.wide(prefix + "A_log"),
        step_bias=source.wide(prefix + "dt_bias"),
        norm=source.wide(prefix + "norm.weight"),
        output=linear(source, prefix, "out_proj"),
    )


def assemble_mamba(source: Source, config: ModelConfig, prefix: str) -> Mamba:
    assert config.recurrent is not None
    return Mamba(
        inner=linear(source, prefix, "in_proj"),
        weight=source.fused((prefix + "conv1d.weight",)),
        bias=source.fused((prefix + "conv1d.bias",)) if config.recurrent.has_bias else None,
        decay_logs=source.wide(prefix + "A_log"),
        step_bias=source.wide(prefix + "dt_bias"),
        skips=source.wide(prefix + "D"),
        norm=source.wide(prefix + "norm.weight") if config.recurrent.has_norm else None,
        output=linear(source, prefix, "out_proj"),
    )


def logs_of_heads(logs: Array, sizes: Recurrent) -> Array:
    """decay_logs [channels, K] as a state has its numbers, [H, K, V], dense."""
    return dense(logs.reshape(-1, sizes.value_dim, sizes.key_dim).swapaxes(1, 2))


def recurrent(layer: Recurring, pools: tuple[Array, ...], x: torch.Tensor, step: Step) -> torch.Tensor:
    """A recurrent layer of x [T, hidden] -> [T, hidden]; the step's rows go on from their pages."""
    if isinstance(layer, DeltaNet):
        return delta_net(layer, pools, x, step)
    if isinstance(layer, Selective):
        return selective(layer, pools, x, step)
    if isinstance(layer, Lightning):
        return lightning(layer, pools, x, step)
    if isinstance(layer, KeyDelta):
        return key_delta(layer, pools, x, step)
    if isinstance(layer, GatedRecurrence):
        return gated_recurrence(layer, pools, x, step)
    return mamba(layer, pools, x, step) if isinstance(layer, Mamba) else short_convolution(layer, pools, x, step)


def mamba(layer: Mamba, pools: tuple[Array, ...], x: torch.Tensor, step: Step) -> torch.Tensor:
    """x [T, hidden] through Mamba-2."""
    chosen, (convolved, states) = step.operations, pools
    assert step.rows is not None and step.config.recurrent is not None
    inner = chosen.linear(x, layer.inner.weight, layer.inner.bias)
    sizes = step.config.recurrent
    groups = sizes.key_heads // step.parallel.world_size
    values, channels = len(layer.decay_logs) * sizes.value_dim, len(layer.weight)
    if sizes.scales:
        keys = groups * sizes.key_dim
        for part, scale in zip(inner.split((values, values, keys, keys, len(layer.decay_logs)), 1), sizes.scales):
            part.mul_(scale)
    call = ConvolutionCall(layer.weight, layer.bias, convolved, step.rows, "silu")
    mixed = chosen.recur(
        chosen.short_convolution(inner[:, values : values + channels], call),
        RecurrenceCall(
            steps=inner[:, values + channels :],
            strengths=None,
            gates=inner[:, :values],
            decay_logs=layer.decay_logs,
            step_bias=layer.step_bias,
            norm=None,
            skips=layer.skips,
            eps=step.config.rms_norm_eps,
            key_heads=groups,
            pool=states,
            rows=step.rows,
        ),
    )
    if layer.norm is None:
        return row(mixed, layer.output, step)
    parts = zip(mixed.chunk(groups, 1), layer.norm.chunk(groups))
    normed = [chosen.rms_norm(part, weight, sizes.norm_eps or step.config.rms_norm_eps) for part, weight in parts]
    return row(normed[0] if groups == 1 else _beside(normed), layer.output, step)


def selective(layer: Selective, pools: tuple[Array, ...], x: torch.Tensor, step: Step) -> torch.Tensor:
    """x [T, hidden] through Mamba."""
    chosen, (convolved, states) = step.operations, pools
    assert step.rows is not None and step.config.recurrent is not None
    keys, channels = step.config.recurrent.key_dim, len(layer.weight)
    inner = chosen.linear(x, layer.inner.weight, None)
    call = ConvolutionCall(layer.weight, layer.bias, convolved, step.rows, "silu")
    values = chosen.short_convolution(inner[:, :channels], call)
    parts = row(values, layer.beside, step).split((step.config.recurrent.step_rank, keys, keys), 1)
    if layer.norms:
        eps = step.config.recurrent.norm_eps or step.config.rms_norm_eps
        parts = tuple(chosen.rms_norm(part, as_tensor(norm), eps) for part, norm in zip(parts, layer.norms))
    given, key, query = parts
    mixed = chosen.recur(
        _beside([values, key, query]),
        RecurrenceCall(
            steps=chosen.linear(given, layer.steps.weight, None),
            strengths=None,
            gates=inner[:, channels:],
            decay_logs=layer.decay_logs,
            step_bias=layer.step_bias,
            norm=None,
            skips=layer.skips,
            eps=step.config.rms_norm_eps,
            key_heads=1,
            pool=states,
            rows=step.rows,
        ),
    )
    return row(mixed, layer.output, step)


def key_delta(layer: KeyDelta, pools: tuple[Array, ...], x: torch.Tensor, step: Step) -> torch.Tensor:
    """x [T, hidden] through Kimi Delta Attention."""
    chosen, (convolved, states), sizes = step.operations, pools, step.config.recurrent
    assert step.rows is not None and sizes is not None
    inner, beside = (chosen.linear(x, each.weight, None) for each in (layer.inner, layer.beside))
    channels, heads = len(layer.weight), sizes.value_heads // step.parallel.world_size
    given, strengths, gates = beside[:, :-heads], beside[:, -heads:], inner[:, channels:]
    if layer.steps is not None and layer.gates is not None:
        given, gates = (chosen.linear(part, own.weight, None) for part, own in zip(given.chunk(2, 1), (layer.steps, layer.gates)))
    mixed = chosen.short_convolution(inner[:, :channels], ConvolutionCall(layer.weight, None, convolved, step.rows, "silu"))
    call = RecurrenceCall(
        steps=given,
        strengths=strengths,
        gates=gates,
        decay_logs=layer.decay_logs,
        step_bias=layer.step_bias,
        norm=layer.norm,
        skips=None,
        eps=step.config.rms_norm_eps,
        key_heads=heads,
        pool=states,
        rows=step.rows,
        gate="sigmoid",
        bound=sizes.bound,
    )
    return row(chosen.recur(mixed, call), layer.output, step)


def lightning(layer: Lightning, pools: tuple[Array, ...], x: torch.Tensor, step: Step) -> torch.Tensor:
    """x [T, hidden] through lightning attention."""
    chosen, (states,), sizes = step.operations, pools, step.config.recurrent
    assert step.rows is not None and sizes is not None
    inner = chosen.linear(x, layer.inner.weight, None)
    heads, width = sizes.value_heads // step.parallel.world_size, layer.norm.shape[0]
    call = RecurrenceCall(
        steps=None,
        strengths=None,
        gates=None,
        decay_logs=as_tensor(layer.decay_logs),
        step_bias=None,
        norm=None,
        skips=None,
        eps=LIGHTNING_EPS,
        key_heads=heads,
        pool=states,
        rows=step.rows,
        by_head=True,
        activates=True,
    )
    mixed = chosen.recur(inner[:, : 3 * width], call).float()
    squares = step.parallel.all_reduce(sum_of_heads(mixed.square(), sizes.value_dim)[:, None])
    normed = (mixed * (squares / sizes.values + LIGHTNING_EPS).rsqrt() * layer.norm).to(x.dtype)
    return row(chosen.gate_by(normed, inner[:, 3 * width :]), layer.output, step)


def gated_recurrence(layer: GatedRecurrence, pools: tuple[Array, ...], x: torch.Tensor, step: Step) -> torch.Tensor:
    """x [T, hidden] through an RG-LRU. A channel's state decays by exp(-rate * r) and takes sqrt(1 - that squared) of its input,
    all of a request's first one; r, a sigmoid, is a step, so that inputs are divided by it and the step's softplus is undone."""
    chosen, (convolved, states), sizes, rows = step.operations, pools, step.config.recurrent, step.rows
    assert rows is not None and sizes is not None
    inner, channels = chosen.linear(x, *layer.inner), len(layer.weight)
    values = chosen.short_convolution(inner[:, :channels], ConvolutionCall(layer.weight, layer.bias, convolved, rows))
    by_head = values.unflatten(1, (-1, sizes.value_dim))
    taken, paced = (
        (chosen.head_products(by_head, gate).float() + bias).neg_().exp_().add_(1.0).reciprocal_().flatten(1)
        for gate, bias in zip(layer.gates, layer.gate_biases)
    )
    paced = paced.clamp_(min=LEAST)
    rates = as_tensor(layer.rates).exp().log1p() * RATE
    counts, firsts = rows.starts.diff(), paced.new_zeros(len(x) + 1)
    firsts.index_add_(0, rows.starts[:-1].long(), (rows.fresh & (counts > 0)).float())
    shares = (1.0 - (paced * rates * -2.0).exp_()).clamp_(min=0.0).sqrt_()
    shares = shares.where(firsts[: len(x), None] == 0, 1.0)
    given = (values * taken.to(x.dtype) * shares.to(x.dtype)).float() / paced
    call = RecurrenceCall(
        steps=paced.expm1().log_(),
        strengths=None,
        gates=None,
        decay_logs=rates.log().view(-1, 1, sizes.value_dim),
        step_bias=paced.new_zeros(channels),
        norm=None,
        skips=None,
        eps=step.config.rms_norm_eps,
        key_heads=1,
        pool=states,
        rows=rows,
    )
    mixed = chosen.recur(_beside([given, given.new_ones((len(x), 2))]), call).to(x.dtype)
    return row(mixed * chosen.activate(inner[:, channels:], None, None, "gelu_tanh"), layer.output, step)


def _beside(parts: list[torch.Tensor]) -> torch.Tensor:
    import torch  # as its callers, which have tensors

    return torch.cat(parts, dim=1)


def delta_net(layer: DeltaNet, pools: tuple[Array, ...], x: torch.Tensor, step: Step) -> torch.Tensor:
    """x [T, hidden] through a gated delta net."""
    chosen, (convolved, states) = step.operations, pools
    assert step.rows is not None and step.config.recurrent is not None
    inner = chosen.linear(x, layer.inner.weight, layer.inner.bias)
    beside = chosen.linear(x, layer.beside.weight, None)
    channels, heads = len(layer.weight), len(layer.decay_logs)
    mixed = chosen.short_convolution(inner[:, :channels], ConvolutionCall(layer.weight, None, convolved, step.rows, "silu"))
    call = RecurrenceCall(
        steps=beside[:, heads:],
        strengths=beside[:, :heads],
        gates=inner[:, channels:],
        decay_logs=layer.decay_logs,
        step_bias=layer.step_bias,
        norm=layer.norm,
        skips=None,
        eps=step.config.recurrent.norm_eps or step.config.rms_norm_eps,
        key_heads=step.config.recurrent.key_heads // step.parallel.world_size,
        pool=states,
        rows=step.rows,
        strength_scale=step.config.recurrent.strength_scale,
    )
    return row(chosen.recur(mixed, call), layer.output, step)


def short_convolution(layer: ShortConvolution, pools: tuple[Array, ...], x: torch.Tensor, step: Step) -> torch.Tensor:
    """x [T, hidden] through gates and a short convolution -> [T, hidden]; the step's rows go on from their pages."""
    chosen = step.operations
    assert step.rows is not None
    inner = chosen.linear(x, layer.inner.weight, layer.inner.bias)
    mixed = chosen.short_convolution(inner, ConvolutionCall(layer.weight, layer.bias, pools[0], step.rows, gated=True))
    return row(mixed, layer.output, step)
