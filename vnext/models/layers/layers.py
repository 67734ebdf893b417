"""Layers: the parts that families are put together from, as pure functions over NamedTuples of tensors.

Each is a handful of calls of the operations table and of the group's collectives. They know no ranks, no requests and no files. In
a layer all writes to the cache precede the attention's reads, since rows of one step may share a block that this very step fills.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from vnext.kernels.arrays import Array, as_tensor
from vnext.kernels.calls import AttentionCall, AttentionStep, BiasedExperts, RotaryWrite, Selection, StateRows
from vnext.kernels.shards import joined_along, largest
from vnext.models.config.model_config import ModelConfig, without_windows
from vnext.models.layers.batch import ForwardBatch, host_batch, in_runs
from vnext.models.layers.both_sides import by_token, mutual, near
from vnext.models.layers.kv_cache import KvCache, kv_groups
from vnext.models.layers.rope import query_factors, rotary_angles
from vnext.models.layers.sharding import Parallel, own_experts

if TYPE_CHECKING:
    import torch

    from vnext.kernels.table import Operations

LayerCache = tuple[Array, Array]
PART_ROWS = 64
"""Parts of a product are multiples of it: of a tile, and of products of one shape."""


class Linear(NamedTuple):
    """weight: packed, of [out, in]. bias [out] or None."""

    weight: Any
    bias: Array | None


class Attention(NamedTuple):
    """`qkv` is column-parallel and fused, `output` row-parallel; norms [head_dim] of each query and key head or None; `sinks`
    float32 [heads], scores without a key, or None; `v_norm` [head_dim] of each value head, or None."""

    qkv: Linear
    output: Linear
    q_norm: Array | None = None
    k_norm: Array | None = None
    sinks: Array | None = None
    v_norm: Array | None = None


class ReadingAttention(NamedTuple):
    """Attention to the keys and values that another layer writes: `query` is column-parallel, `output` row-parallel, `q_norm`
    [head_dim] of each query head."""

    query: Linear
    output: Linear
    q_norm: Array


class LayerNorm(NamedTuple):
    """A layer norm: weight and bias float32 [hidden]."""

    weight: Array
    bias: Array


class GatedNorm(NamedTuple):
    """An rms_norm, times the sigmoid of what `wide` makes of the silu of what `narrow` makes of it."""

    weight: Array
    narrow: Linear
    wide: Linear


class FineNorm(NamedTuple):
    """An rms_norm with an epsilon of its own."""

    weight: Array
    eps: float


Norm = Array | LayerNorm | GatedNorm | FineNorm
"""Of a layer's or a model's states; an array is the weight of an rms_norm."""


class PlainMlp(NamedTuple):
    """`up` is column-parallel, `down` row-parallel. `slopes` float32 [1] each: xIELU's above 0 and below, None for others."""

    up: Linear
    down: Linear
    slopes: tuple[Array, Array] | None = None


class GatedMlp(NamedTuple):
    """`gate_up` is column-parallel and fused, `down` row-parallel. `cutoff`: so many standard deviations above their mean gates
    begin to count, and `gate_up` is packed without their activation; None where all count as they are."""

    gate_up: Linear
    down: Linear
    cutoff: float | None = None


class SparseMlp(NamedTuple):
    """Experts: `router` packed [E, hidden]; gate_up [E, 2 * I, hidden], or [E, I, hidden] without gates, and down [E, hidden, I]
    packed, I split. `shared` is of all tokens, times the sigmoid of what `shared_gate` packed [1, hidden] gives, or None for 1.
    `bias` float32 [E] or None is the router's, for its choice alone; `score_bias` of the same form is added to its scores;
    `share_scales` of the same form multiply experts' shares. `narrow`: experts read what the first makes of their input, and the
    second makes [T, hidden] of what they give together."""

    router: Any
    gate_up: Any
    down: Any
    shared: GatedMlp | PlainMlp | None = None
    shared_gate: Any = None
    bias: Array | None = None
    score_bias: Array | None = None
    share_scales: Array | None = None
    narrow: tuple[Linear, Linear] | None = None


Mlp = GatedMlp | PlainMlp | SparseMlp


class Step(NamedTuple):
    """What a layer of one step needs beside its weights; layers of one group share one.

    `cosine` and `sine` float32 [T, R / 2], None where nothing turns. `scale` multiplies scores.
    `aux` [T, hidden] takes the layer's input and `output` what the last layer adds up to; None where nothing reads it. `rows`:
    where recurrent layers keep states. `query_factors` float32 [T, 1] multiply queries, None where nothing does. `own` [T, P]: what
    the tokens give to this layer, None for nothing. `chosen`: what an index has chosen in this step's last layer with one, which
    layers without one share; None where nothing does. `ahead`: what experts gave that the next layer adds, taken from there by it.
    """

    operations: Operations
    config: ModelConfig
    parallel: Parallel
    slots: torch.Tensor
    metadata: Any
    cosine: torch.Tensor | None
    sine: torch.Tensor | None
    scale: float
    window: int
    aux: torch.Tensor | None = None
    output: torch.Tensor | None = None
    rows: StateRows | None = None
    query_factors: torch.Tensor | None = None
    own: torch.Tensor | None = None
    chosen: list[Selection] | None = None
    ahead: list[torch.Tensor] | None = None


def state_rows(batch: ForwardBatch) -> StateRows | None:
    """Where the batch's rows keep the states of recurrent layers; None where all layers attend."""
    states = batch.recurrent
    return states and StateRows(batch.query_starts, states.pages, states.fresh, states.trail)


def operations(device_type: str) -> Operations:
    """The table's operations for a kind of device. The table needs torch: it is imported when something computes."""
    from vnext.kernels import table

    return table.operations(device_type)


def layer_steps(
    kv: KvCache,
    batch: ForwardBatch,
    config: ModelConfig,
    parallel: Parallel,
    frequencies: torch.Tensor | None,
    local_frequencies: torch.Tensor | None = None,
) -> tuple[Step, ...]:
    """Each layer's step, made once for all layers. `local_frequencies`: those of layers with a window, if others."""
    chosen, places = operations(batch.token_ids.device.type), batch.positions if batch.turning is None else batch.turning
    groups, prepared = kv_groups(config), batch.attention
    if prepared is not None and prepared.attend is not None:
        chosen = chosen._replace(paged_attention=prepared.attend)
    if batch.adapted is not None:
        chosen = batch.adapted(chosen)
    cosine, sine = (None, None) if frequencies is None else rotary_angles(places, frequencies, config.rope)
    scale = config.head_dim**-0.5 if config.query_scale is None else config.query_scale
    growth, rows = config.form.query_growth, state_rows(batch)
    factors = growth and as_tensor(query_factors(batch.positions, growth, isinstance(frequencies, np.ndarray)))[:, None]
    plain = Step(chosen, config, parallel, batch.slots, None, cosine, sine, scale, 0, rows=rows, query_factors=factors, chosen=[])
    if local_frequencies is not None and config.local_rope is not None:
        cosine, sine = rotary_angles(places if config.local_rope.axes else batch.positions, local_frequencies, config.local_rope)
    local, plain = plain._replace(cosine=cosine, sine=sine), plain._replace(config=without_windows(config))
    if config.encoder is not None:
        return _both_sides(kv, batch, plain, local)
    runs = config.form.sees_runs

    def step_of(window: int, slots: torch.Tensor, metadata: Any) -> Step:
        return (local if window else plain)._replace(slots=slots, metadata=metadata, window=0 if runs else window)

    places = ((batch.slots, batch.block_table), *batch.groups)
    firsts = kv if config.whole_heads is None else [kv[groups.group_of.index(group)] for group in range(len(groups.windows))]
    metadata = describe_attention(firsts, batch, chosen, groups.windows, runs=runs) if prepared is None else prepared.metadata
    steps = [step_of(window, slots, each) for window, (slots, _), each in zip(groups.windows, places, metadata, strict=True)]
    if batch.inputs and config.tower is not None and config.tower.is_mutual:
        steps = [_mutual(step, kv, batch._replace(block_table=table)) for step, (_, table) in zip(steps, places)]
    steps, still = _by_turning(steps, config)
    group_of = dict(zip(config.attending_layers, groups.group_of))
    found = [(still if at in config.still_layers else steps)[group_of.get(at, 0)] for at in range(config.layer_count)]
    return tuple(_keeping(found, batch))


def _by_turning(steps: list[Step], config: ModelConfig) -> tuple[list[Step], list[Step]]:
    """The steps of layers that turn, and of those that do not."""
    still = [step._replace(cosine=None, sine=None) for step in steps] if config.still_layers else steps
    return [step._replace(query_factors=None) for step in steps] if config.form.grows_still else steps, still


def _keeping(steps: list[Step], batch: ForwardBatch) -> list[Step]:
    """The steps of layers, of which some keep their inputs, or the last one its output."""
    if batch.aux is None:
        return steps
    for place, layer in enumerate(batch.aux.layers):
        at, name = (layer, "aux") if layer < len(steps) else (-1, "output")
        steps[at] = steps[at]._replace(**{name: batch.aux.states[:, place]})
    return steps


def _mutual(step: Step, kv: KvCache, batch: ForwardBatch) -> Step:
    """The step of layers in which the tokens of an input see each other to both sides."""
    chosen, (_, kv_heads, block_size, _) = step.operations, kv[0][0].shape
    return step._replace(operations=chosen._replace(paged_attention=mutual(chosen, batch, (block_size, kv_heads), step.window)))


def _both_sides(kv: KvCache, batch: ForwardBatch, plain: Step, local: Step) -> tuple[Step, ...]:
    """The steps of layers that see to both sides, `local` where they do not see far."""
    chosen, config, (_, kv_heads, block_size, _) = plain.operations, plain.config, kv[0][0].shape
    assert config.encoder is not None
    whole = by_token(batch)
    (metadata,) = describe_attention(kv, whole, chosen, (0,))
    steps = {0: plain._replace(metadata=metadata)}
    reaches = config.encoder.reaches or (0,) * config.layer_count
    for reach in {*reaches} - {0}:
        attend = near(chosen, batch, (block_size, kv_heads), reach)
        steps[reach] = local._replace(operations=chosen._replace(paged_attention=attend))
    return tuple(steps[reach] for reach in reaches)


def keep_input(hidden: torch.Tensor, step: Step) -> None:
    """Keep a layer's input [T, hidden] where the step asks for it."""
    if step.aux is not None:
        step.aux.copy_(hidden)


def keep_output(hidden: torch.Tensor, step: Step) -> None:
    """Keep the last layer's output [T, hidden], before the last norm, where its step asks for it."""
    if step.output is not None:
        step.output.copy_(hidden)


def describe_attention(
    kv: Sequence[LayerCache], batch: ForwardBatch, chosen: Operations, windows: tuple[int, ...], *shared: int, runs: bool = False
) -> list[Any]:
    """The attention's metadata of each group of layers, whose caches have the shapes of these pairs, in turn, or of the last
    one, as in a stage of few layers. `shared`: with how many common blocks all rows begin, for an attention that reads them
    once. `runs`: as DecoderForm.sees_runs; there is then no window to attend with."""
    host, (_, _, block_size, _) = host_batch(batch), kv[0][0].shape
    tables = [batch.block_table, *[group.block_table for group in batch.groups]]
    steps = [
        AttentionStep(*host, table, block_size, kv[min(at, len(kv) - 1)][0].shape[1], (window,), *shared)
        for at, (window, table) in enumerate(zip(windows, tables, strict=True))
    ]
    return [chosen.attention_metadata(in_runs(step) if runs and step.windows != (0,) else step) for step in steps]


def attention(layer: Attention, cache: LayerCache, x: torch.Tensor, step: Step) -> torch.Tensor:
    """Self-attention of x [T, hidden]: writes this step's keys and values, then reads the contexts."""
    qkv = step.operations.linear(x, layer.qkv.weight, layer.qkv.bias)
    return attend(qkv, layer, cache, step)


def attend(
    qkv: torch.Tensor, layer: Attention, cache: LayerCache, step: Step, gates: torch.Tensor | None = None
) -> torch.Tensor:
    """The rest of attention from qkv [T, (heads + 2 * kv_heads) * head_dim], which is used up -> [T, hidden]. `gates`: what heads
    give is multiplied by their sigmoid."""
    return read_and_join(written(qkv, layer, cache, step), layer, cache, step, gates)


def read_and_join(
    query: torch.Tensor, layer: Attention, cache: LayerCache, step: Step, gates: torch.Tensor | None
) -> torch.Tensor:
    """What queries [T, heads, head_dim] see of the contexts, their heads joined -> [T, hidden]. `gates` as in `attend`."""
    seen = read(query, cache, step, layer.sinks)
    if step.config.form.values is not None:
        seen = seen.unflatten(1, (-1, step.config.head_dim))[:, :, : step.config.form.values[0]].flatten(1)
    if step.config.form.softplus_gates and gates is not None:
        return row((seen.float() * gates).to(seen.dtype), layer.output, step)
    return row(seen if gates is None else step.operations.gate_by(seen, gates), layer.output, step)


def written(qkv: torch.Tensor, layer: Attention, cache: LayerCache, step: Step) -> torch.Tensor:
    """The queries [T, heads, head_dim] of qkv, as `attend` takes it, whose keys and values go into the cache."""
    write = RotaryWrite(layer.q_norm, layer.k_norm, step.config.rms_norm_eps, step.cosine, step.sine, *cache, step.slots)
    return step.operations.rotary_kv_write(qkv, write)


def read(query: torch.Tensor, cache: LayerCache, step: Step, sinks: Array | None = None) -> torch.Tensor:
    """What queries [T, heads, head_dim] see of the contexts, [T, heads * head_dim]."""
    call = AttentionCall(*cache, step.metadata, step.scale, step.window, step.config.attention_softcap, sinks=sinks)
    return step.operations.paged_attention(query, call).flatten(1)


def norm_of(x: torch.Tensor, norm: Norm | None, step: Step) -> torch.Tensor:
    """The norm of x [T, hidden], or x where there is none."""
    if norm is None:
        return x
    chosen, eps = step.operations, step.config.rms_norm_eps
    if isinstance(norm, GatedNorm):
        normed = chosen.rms_norm(x, norm.weight, eps)
        inner = chosen.linear(normed, *norm.narrow)
        return chosen.gate_by(normed, chosen.linear(chosen.gate_by(inner, inner), *norm.wide))
    if isinstance(norm, FineNorm):
        return chosen.rms_norm(x, *norm)
    return chosen.layer_norm(x, *norm, eps) if isinstance(norm, LayerNorm) else chosen.rms_norm(x, norm, eps)


def add_and_norm(added: torch.Tensor, residual: torch.Tensor, norm: Norm | None, step: Step) -> tuple[torch.Tensor, torch.Tensor]:
    """(the norm of the sum of both [T, hidden], the sum)."""
    if norm is not None and not isinstance(norm, LayerNorm | GatedNorm | FineNorm):
        return step.operations.add_rms_norm(added, residual, norm, step.config.rms_norm_eps)
    total = residual + added
    return norm_of(total, norm, step), total


def mlp(layer: Mlp, x: torch.Tensor, step: Step) -> torch.Tensor:
    """Any kind of MLP of x [T, hidden]."""
    if isinstance(layer, PlainMlp):
        widened = step.operations.linear(x, layer.up.weight, layer.up.bias)
        return row(step.operations.activate(widened, *(layer.slopes or (None, None)), step.config.activation), layer.down, step)
    return gated_mlp(layer, x, step) if isinstance(layer, GatedMlp) else sparse_mlp(layer, x, step)


def gated_mlp(layer: GatedMlp, x: torch.Tensor, step: Step) -> torch.Tensor:
    """down(activation(gate(x)) * up(x)) of x [T, hidden]."""
    if layer.cutoff is not None:
        gates, ups = step.operations.linear(x, layer.gate_up.weight, None).chunk(2, dim=1)
        kept = largest(gates, layer.cutoff, step.parallel.world_size, step.parallel.all_reduce)
        return row(step.operations.activate(kept, None, None, "gelu_tanh") * ups, layer.down, step)
    widened = step.operations.gated_linear(x, layer.gate_up.weight, layer.gate_up.bias, step.config.activation)
    return row(widened, layer.down, step)


def sparse_mlp(layer: SparseMlp, x: torch.Tensor, step: Step, routed: torch.Tensor | None = None) -> torch.Tensor:
    """Each token of x [T, hidden] through the experts that the router gives it, by `routed` [T, hidden] where that is not x. Every
    rank holds a part of each expert, or some whole ones: the sums over ranks, in float32, are the same."""
    chosen, experts = step.operations, step.config.experts
    assert experts is not None
    scores = chosen.logits(x if routed is None else routed, layer.router)
    if layer.score_bias is not None:
        scores = scores + layer.score_bias
    shares, ids = chosen.route(scores, experts.router, layer.bias)
    if layer.share_scales is not None:
        shares = shares * layer.share_scales[ids]
    parallel = step.parallel
    packs: tuple[Any, ...] = (layer.gate_up, layer.down)
    seen = x if layer.narrow is None else chosen.linear(x, *layer.narrow[0])
    if experts.scales_inputs:
        seen, shares = (seen * shares).to(seen.dtype), shares * 0 + 1
    whole_ids = ids
    if parallel.by_expert:
        first = own_experts(experts.count, parallel).start
        ids, packs = ids - first, tuple(pack._replace(first=first) if isinstance(pack, BiasedExperts) else pack for pack in packs)
    given, once = (seen, shares, ids, *packs, experts.activation or step.config.activation), isinstance(layer.down, BiasedExperts)
    if parallel.world_size > 1 and (parallel.is_exact or parallel.by_expert or once):  # a bias is added once
        found = chosen.experts(*given, parallel.all_reduce)
    else:
        found = parallel.all_reduce(chosen.experts(*given))
    if layer.narrow is not None:
        found = chosen.linear(found, *layer.narrow[1])
    if experts.idle:
        found = found + kept_by_idle(x, shares, whole_ids, experts.count)
    if layer.shared is None:
        return found
    shared = mlp(layer.shared, x, step)
    return found + (shared if layer.shared_gate is None else chosen.gate_by(shared, chosen.linear(x, layer.shared_gate, None)))


def kept_by_idle(x: torch.Tensor, shares: torch.Tensor, ids: torch.Tensor, count: int) -> torch.Tensor:
    """What experts behind the first `count` give of x [T, hidden], which is it, times their shares [T, k]."""
    own = joined_along(shares.where(ids >= count, shares * 0))
    return (x.float() * own[:, None]).to(x.dtype)


def row(x: torch.Tensor, linear: Linear, step: Step) -> torch.Tensor:
    """[T, in_local] -> [T, out]: partial sums over the ranks' inputs, then the bias, once."""
    chosen, parallel = step.operations, step.parallel
    if parallel.world_size == 1:
        return chosen.linear(x, linear.weight, linear.bias)
    part = -(-x.shape[0] // (2 * PART_ROWS)) * PART_ROWS
    out, inputs = linear.weight.shape
    if part < x.shape[0] and parallel.goes_beside((out, inputs), x.shape[0], part * out * x.itemsize):
        product = summed_beside(x.split(part), linear.weight, step)
    elif parallel.is_exact:
        return chosen.row_linear(x, linear.weight, linear.bias, parallel.all_reduce)
    else:
        product = parallel.all_reduce(chosen.linear(x, linear.weight, None))
    return product if linear.bias is None else product + linear.bias


def summed_beside(parts: Sequence[torch.Tensor], weight: Any, step: Step) -> torch.Tensor:
    """The product's sum over ranks [T, out], of rows in parts: each is summed while the next one is multiplied."""
    import torch  # of a group of ranks

    begin, chosen = step.parallel.begin_all_reduce, step.operations
    assert begin is not None
    if step.parallel.is_exact:
        ends = [begin(chosen.sums(rows, weight)) for rows in parts]
    else:
        ends = [begin(chosen.linear(rows, weight, None)) for rows in parts]
    return torch.cat([end().to(parts[0].dtype) for end in ends])


def embed(embedding: Any, token_ids: torch.Tensor, parallel: Parallel) -> torch.Tensor:
    """Rows of the vocabulary-parallel embedding [V_local, hidden], plain or packed: ids held elsewhere give zeros, summed."""
    rows = operations(token_ids.device.type).embedding_rows(embedding, token_ids, parallel.rank * embedding.shape[0])
    return rows if parallel.world_size == 1 else parallel.all_reduce(rows)


def output_logits(
    head: Any, hidden: torch.Tensor, config: ModelConfig, parallel: Parallel, bias: Array | None = None
) -> torch.Tensor:
    """Hidden states [S, hidden] by the packed head [V_local, hidden], plus bias float32 [V_local] if any -> float32
    [S, vocab_size], whole on every rank.

    No operation that can be left out: between two steps' weights even a slice's code has left the caches.
    """
    chosen = operations(hidden.device.type)
    own = chosen.logits(hidden, head)
    whole = parallel.all_gather(own if bias is None else own + bias, 1)
    if whole.shape[1] != config.vocab_size:
        whole = whole[:, : config.vocab_size]
    if config.form.logits_scale != 1.0:
        whole = whole * config.form.logits_scale
    return chosen.soft_cap(whole, config.logits_softcap) if config.logits_softcap else whole
