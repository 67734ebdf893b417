"""Streams: decoders of several streams. Layers read one of them, predict all and correct them by what they find (Gemma 3n), or read
a sum of all and add what they find to each (hyper-connections).

Sums over a row have one order, and powers are made in float64 and rounded once: bits do not depend on the rows beside.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from vnext.kernels.shards import joined_along
from vnext.models.config.model_config import ModelConfig
from vnext.models.layers.batch import ForwardBatch
from vnext.models.layers.decoder import embedded, mix, widen
from vnext.models.layers.decoder_params import Joint, LayerParams, LayerStreams, Params
from vnext.models.layers.kv_cache import KvCache
from vnext.models.layers.layer_inputs import layer_inputs, narrowed
from vnext.models.layers.layers import LayerCache, Step, keep_input, keep_output, layer_steps, mlp, norm_of
from vnext.models.layers.sharding import Parallel

if TYPE_CHECKING:
    import torch

LEAST_SQUARE = 1e-5
"""Of a stream's mean square."""


def forward(
    params: Params, kv: KvCache, batch: ForwardBatch, config: ModelConfig, parallel: Parallel
) -> tuple[torch.Tensor, KvCache]:
    """Run one step, as `decoder.forward`. Its layers' inputs are the first stream."""
    assert params.inputs is not None and params.streams is not None
    steps = layer_steps(kv, batch, config, parallel, params.frequencies, params.local_frequencies)
    first = embedded(params, batch, parallel)
    own = layer_inputs(params.inputs, batch.token_ids, first, steps[0])
    streams = as_large(first, [steps[0].operations.linear(first, each, None) for each in params.streams.begin])
    for layer, (cache, step) in enumerate(zip(kv, steps)):
        keep_input(streams[:, 0], step)
        streams = run_layer(params.layers[layer], cache, streams, step._replace(own=own[:, layer]))
    ends = [steps[-1].operations.linear(streams[:, at], each, None) for at, each in enumerate(params.streams.end, 1)]
    parts = as_large(streams[:, 0], ends)
    hidden = sum_of(parts) / parts.shape[1]
    keep_output(hidden, steps[-1])
    return norm_of(hidden, params.norm, steps[-1]).index_select(0, batch.sample_at), kv


def as_large(first: torch.Tensor, others: Sequence[torch.Tensor]) -> torch.Tensor:
    """[T, N, hidden]: the others [T, hidden] behind the first, with its mean square."""
    wanted = mean_square(first).sqrt()
    scaled = [(each * wanted / mean_square(each).clamp(min=LEAST_SQUARE).sqrt()).to(first.dtype) for each in others]
    found = first.new_empty((first.shape[0], 1 + len(others), first.shape[1]))
    for at, each in enumerate((first, *scaled)):
        found[:, at] = each
    return found


def mean_square(x: torch.Tensor) -> torch.Tensor:
    """Of each row of x [T, hidden], float32 [T, 1]."""
    return joined_along(x.float().square())[:, None] / x.shape[1]


def sum_of(streams: torch.Tensor) -> torch.Tensor:
    """[T, N, hidden] -> [T, hidden], one after the other."""
    first, *others = streams.unbind(1)
    for each in others:
        first = first + each
    return first


def run_layer(layer: LayerParams, cache: LayerCache, streams: torch.Tensor, step: Step) -> torch.Tensor:
    """One layer on its streams [T, N, hidden]."""
    own, added = layer.streams, layer.added
    assert own is not None and added is not None and added.narrow is not None
    assert layer.attention is not None and layer.mlp is not None
    predicted = predict(own, streams, step)
    read = predicted[:, 0]
    normed = norm_of(read, layer.attention_norm, step)
    beside = step.operations.linear(step.operations.linear(normed, own.left.weight, None), own.right.weight, None)
    mixed = norm_of(mix(layer.attention, cache, normed, step), layer.after_attention_norm, step)
    found = (read + mixed + (normed + norm_of(beside, own.norm, step))) * 2**-0.5
    found = found + norm_of(mlp(layer.mlp, norm_of(found, layer.mlp_norm, step), step), layer.after_mlp_norm, step)
    shares = step.operations.linear(modes(own, found, step), own.correct, None) + 1
    corrected = predicted + (found - read)[:, None] * shares[:, :, None]
    gating = corrected[:, 0] if own.scale is None else corrected[:, 0] * own.scale
    corrected[:, 1:] += narrowed(added.narrow, gating, step)[:, None]
    return corrected


def predict(own: LayerStreams, streams: torch.Tensor, step: Step) -> torch.Tensor:
    """The streams [T, N, hidden], with what each adds to each."""
    count = streams.shape[1]
    shares: Any = step.operations.linear(modes(own, streams[:, 0], step), own.predict, None).unflatten(1, (count, count))
    total = streams
    for each in range(count):
        total = total + streams[:, each, None] * shares[:, :, each, None]
    return total


def modes(own: LayerStreams, x: torch.Tensor, step: Step) -> torch.Tensor:
    """What one stream x [T, hidden] says of all, [T, N]."""
    routed = step.operations.linear(norm_of(x, own.router_norm, step), own.router, None)
    return routed.double().tanh().to(x.dtype)


def forward_joined(
    params: Params, kv: KvCache, batch: ForwardBatch, config: ModelConfig, parallel: Parallel
) -> tuple[torch.Tensor, KvCache]:
    """Run one step, as `decoder.forward`. Its layers' inputs are the first stream."""
    assert params.joint is not None and config.joined is not None
    steps = layer_steps(kv, batch, config, parallel, params.frequencies)
    streams = embedded(params, batch, parallel)[:, None].repeat(1, config.joined.count, 1)
    for layer, cache, step in zip(params.layers, kv, steps):
        keep_input(streams[:, 0], step)
        assert layer.joints is not None and layer.attention is not None
        read, shares = read_of(layer.joints[0], streams, step)
        streams = with_added(streams, mix(layer.attention, cache, norm_of(read, layer.attention_norm, step), step), shares)
        read, shares = read_of(layer.joints[1], streams, step)
        streams = with_added(streams, widen(layer.mlp, norm_of(read, layer.mlp_norm, step), step), shares)
    hidden, _ = read_of(params.joint, streams, steps[-1])
    keep_output(hidden, steps[-1])
    return norm_of(hidden, params.norm, steps[-1]).index_select(0, batch.sample_at), kv


def read_of(joint: Joint, streams: torch.Tensor, step: Step) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Of streams [T, N, hidden] what is read of all, [T, hidden], and float32 [T, N] the shares that each has of what is made of
    it, None where the joint gives none."""
    config = step.config
    assert config.joined is not None
    flat = streams.flatten(1).float()
    factor = 1.0 / (mean_square(flat) + config.rms_norm_eps).sqrt()
    mixed: torch.Tensor = step.operations.linear(flat, joint.weight, None) * factor
    parts = mixed.unflatten(1, (-1, config.joined.count)) * joint.scale[:, None] + joint.base.reshape(len(joint.scale), -1)
    shares = 1.0 / (parts.neg().exp() + 1.0)
    taken = shares[:, 0] + config.joined.eps
    read = sum_of(streams.float() * taken[:, :, None]).to(streams.dtype)
    return read, shares[:, 1] * config.joined.magnitude + config.joined.eps if shares.shape[1] > 1 else None


def with_added(streams: torch.Tensor, found: torch.Tensor, shares: torch.Tensor | None) -> torch.Tensor:
    """Streams [T, N, hidden] with what was found [T, hidden], times the share float32 [T, N] of each."""
    assert shares is not None
    return (found.float()[:, None] * shares[:, :, None] + streams.float()).to(streams.dtype)
