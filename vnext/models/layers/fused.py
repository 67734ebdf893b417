"""A decoder's layers as one call of the CPU's kernels, where they have the form for it.

Owns the question whether they have: the common decoder, or one with latent attention, with MLPs or experts, weights and norms of
one dtype that the kernels packed, on one rank, with one group of layers in the cache. All else runs layer by layer in
`decoder.py`, with the same bits; a whole step (`whole_step.py`) serves several ranks and groups, and recurrent layers, too.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from vnext.kernels.arrays import Array, address, is_dense, strides_of
from vnext.kernels.calls import GATELESS, BiasedExperts, parts_of as experts_and_biases
from vnext.kernels.cpu import stack as kernel
from vnext.kernels.cpu.experts import Described, describe_experts, describe_router
from vnext.kernels.cpu.native import ACTIVATIONS, CACHE_KINDS, KINDS, Kind
from vnext.kernels.cpu.packed import HEAD_DIM_MAX, Packed, PackedExperts
from vnext.kernels.cpu.stack import Caches, Rule, Stack, StackLayer
from vnext.kernels.mxint8 import head_dim_of
from vnext.models.config.expert_keys import expert_activation
from vnext.models.config.model_config import DecoderForm, ModelConfig, without_windows
from vnext.models.layers.batch import ForwardBatch
from vnext.models.layers.decoder_params import Alone, LayerParams, Mixing, SideBySide
from vnext.models.layers.kv_cache import KvCache, KvPairs, has_index, kv_groups
from vnext.models.layers.latent import EPS, LatentAttention
from vnext.models.layers.layers import Attention, GatedMlp, LayerNorm, Linear, Norm, PlainMlp, ReadingAttention, SparseMlp, Step
from vnext.models.layers.recurrent import (
    LIGHTNING_EPS,
    DeltaNet,
    GatedRecurrence,
    KeyDelta,
    Lightning,
    Mamba,
    Recurring,
    Selective,
    ShortConvolution,
)

if TYPE_CHECKING:
    import torch

RULES = {
    DeltaNet: Rule.DELTA_NET, Mamba: Rule.MAMBA, Selective: Rule.SELECTIVE, Lightning: Rule.LIGHTNING, KeyDelta: Rule.KEY_DELTA,
}  # fmt: skip
NOTHING = StackLayer(
    *(None,) * 13, window=0, turns=0, turns_neighbours=False, group=0, mixed_scale=1.0, widened_scale=1.0
)  # fmt: skip
"""A layer that has nothing."""
ARRAYS = ("weight", "bias", "decay_logs", "step_bias", "norm", "skips")
"""Of recurrent layers, as they and the kernels call them."""


def describe(layers: tuple[LayerParams, ...], config: ModelConfig) -> Stack | None:
    """The layers as the kernels see them; None where they must run one by one."""
    if config.streams or config.joined or config.encoder is not None or has_index(config):
        return None
    if config.experts is not None and (config.experts.router.marks == "mixer" or config.experts.ahead or config.experts.idle):
        return None
    if not (layers and config.form.fits_one_call and all(_is_common(layer, config.activation) for layer in layers)):
        return None
    windows, groups = config.windows or (0,) * len(layers), dict(zip(config.attending_layers, kv_groups(config).group_of))
    plain = (_describe_layer(layer, at, windows[at], groups.get(at, 0), config) for at, layer in enumerate(layers))
    shared = (_with_shares(each, layer, config.form) for each, layer in zip(plain, layers))
    described = tuple(_with_state(each, layer, config) for each, layer in zip(shared, layers))
    attending = next((layer.attention for layer in layers if isinstance(layer.attention, LatentAttention)), None)
    latent_heads = len(attending.keys.weights) if attending else 0
    stack = kernel.describe(described, _norms_of(described[0])[0].dtype, latent_heads)
    return stack if all(_is_alike(layer, stack) for layer in described) else None


def products(layers: tuple[LayerParams, ...]) -> list[Any]:
    """The packed weights of the layers' products, four a layer, in the order of the kernels."""
    return [weight for layer in layers for weight in _products_of(layer)]


def run(
    stack: Stack, residual: torch.Tensor, norm: Norm, kv: KvCache, batch: ForwardBatch, step: Step
) -> torch.Tensor | None:
    """The layers on residual [T, hidden], which is used up -> [S, hidden] at batch.sample_at after the last norm.

    None, with nothing done, where this step or cache is not what the kernels take.
    """
    from vnext.kernels.cpu.operations import StepAttention  # needs torch, as residual does

    if not isinstance(step.metadata, StepAttention) or not residual.is_contiguous() or batch.groups or batch.recurrent:
        return None
    last_norm = parts_of(norm)
    caches = caches_of(stack, last_norm[0], kv)
    _, kv_heads, block_size, _ = kv[0][0].shape
    if caches is None or (kv_heads, block_size) != (step.metadata.kv_head_count, step.metadata.block_size):
        return None
    plan, config = step.metadata.kernel(stack.head_count(kv_heads, caches.head_dim)), step.config
    if plan.token_count != residual.shape[0]:
        return None
    angles = kernel.Angles(step.cosine, step.sine, step.query_factors)
    aux = batch.aux and batch.aux._replace(layers=np.array(batch.aux.layers, dtype=np.int64))
    tokens = kernel.StackStep(plan, step.slots, angles, batch.sample_at)
    numbers = kernel.Numbers(config.rms_norm_eps, step.scale, config.attention_softcap)
    return kernel.run(stack, residual, last_norm, caches, tokens, numbers, aux)


def caches_of(stack: Stack, norm: Array, kv: KvCache, pools: Sequence[tuple[Array, ...]] = ()) -> Caches | None:
    """The cache, and the pools of recurrent layers, as the kernels see them beside these layers and the norm behind them; None
    where they do not take it."""
    keys = kv[0][0]
    head_dim, kind = head_dim_of(keys), CACHE_KINDS[keys.dtype]
    sizes = {head_dim_of(each) for each, _ in kv}
    if kind not in (stack.kind, Kind.INT8) or KINDS[norm.dtype] is not _norm_kind(stack):
        return None
    if any(size > HEAD_DIM_MAX or size % 2 for size in sizes):
        return None
    places = (kv if isinstance(kv, KvPairs) else KvPairs(kv)).places
    heads = stack.head_count(keys.shape[1], head_dim)
    if places is None or any(heads % kv_heads for kv_heads in {each.shape[1] for each, _ in kv}):
        return None
    if any(layer.recurring or layer.beside for layer in stack.layers):
        places = _with_pools(stack, places, pools)
    return Caches(places, strides_of(keys)[0], head_dim, kind)


def _with_pools(stack: Stack, places: np.ndarray, pools: Sequence[tuple[Array, ...]]) -> np.ndarray:
    """Of each layer two addresses, those of its pools among those of attending layers, or behind them all."""
    assert all(is_dense(part) for parts in pools for part in parts)
    if any(layer.beside for layer in stack.layers):
        return np.concatenate((places, np.array([*map(_pools_of, pools)], dtype=np.int64).reshape(-1)))
    attending, own = iter(places.reshape(-1, 2).tolist()), iter(pools)
    idle = [0, 0]
    found = [
        idle if layer.qkv is None else _pools_of(next(own)) if layer.recurring else next(attending) for layer in stack.layers
    ]
    return np.array(found, dtype=np.int64).reshape(-1)


def _pools_of(parts: tuple[Array, ...]) -> list[int]:
    """The addresses of a recurring layer's inputs and states, 0 where it has none."""
    found = [*map(address, parts)]
    return [0, *found] if parts[0].ndim == 4 else [*found, 0][:2]


def _is_common(layer: LayerParams, activation: str) -> bool:
    """Whether all weights were packed by the kernels, and norms behind attention and MLP are of the kernels' kind."""
    if any(isinstance(norm, tuple) for norm in (layer.after_attention_norm, layer.after_mlp_norm)):
        return False
    if isinstance(layer.mlp, GatedMlp) and layer.mlp.cutoff is not None:
        return False
    experts = experts_of(layer)
    if experts is not None and not _are_common(experts, activation):
        return False
    if isinstance(layer.attention, GatedRecurrence) or layer.block is not None:
        return False
    wide = _wide_of(layer)
    mixing = _products_of_mixing(layer)
    if layer.added is not None and layer.added.narrow is not None:
        narrow = layer.added.narrow
        if not _is_plain(narrow.gate) or not _is_plain(narrow.projection):
            return False
    beside = _beside_of(layer.attention)
    if isinstance(layer.attention, SideBySide):
        beside += layer.attention.recurring.inner, layer.attention.recurring.output
    if not all(isinstance(each.weight, Packed) for each in (*mixing, *beside, *wide)):
        return False
    if isinstance(layer.attention, LatentAttention) and not _has_heads(layer.attention):
        return False
    plain, may_gate = (*mixing, *beside, *wide[1:]), wide and wide[0].bias is None and not isinstance(layer.mlp, PlainMlp)
    gates = ("", activation) if may_gate else ("",)
    return all(not each.weight.linear.gate for each in plain) and all(each.weight.linear.gate in gates for each in wide[:1])


def _beside_of(attention: Mixing | None) -> tuple[Linear, ...]:
    """The products of a layer's mixing but the first and the last one."""
    found: tuple[Linear | None, ...] = ()
    if isinstance(attention, LatentAttention):
        found = attention.query, attention.gates
    elif isinstance(attention, KeyDelta):
        found = attention.beside, attention.steps, attention.gates
    elif isinstance(attention, Selective):
        found = attention.beside, attention.steps
    elif isinstance(attention, DeltaNet):
        found = (attention.beside,)
    return tuple(each for each in found if each is not None)


def _is_plain(layer: Linear) -> bool:
    """Whether the kernels packed its weight, without a gate, and it has no bias."""
    return isinstance(layer.weight, Packed) and not layer.weight.linear.gate and layer.bias is None


def _mixing_of(layer: LayerParams) -> Alone | None:
    """What mixes the tokens of a layer that the kernels may take, if anything does."""
    return layer.attention.attention if isinstance(layer.attention, SideBySide) else layer.attention


def _products_of_mixing(layer: LayerParams) -> tuple[()] | tuple[Linear, Linear]:
    attention = _mixing_of(layer)
    return (first_of(attention), attention.output) if attention is not None else ()


def first_of(attention: Alone) -> Linear:
    """The product with a layer's input."""
    if isinstance(attention, ReadingAttention):
        return attention.query
    return attention.qkv if isinstance(attention, Attention) else attention.inner


def experts_of(layer: LayerParams) -> SparseMlp | None:
    """A layer's experts, in the place of its MLP or beside it."""
    if layer.beside is not None:
        return layer.beside.experts
    return layer.mlp if isinstance(layer.mlp, SparseMlp) else None


def _has_heads(attention: LatentAttention) -> bool:
    """Whether the kernels packed the products of each head, and norms are of their dtype."""
    norms = [norm for norm in (attention.query_norm, attention.norm) if norm is not None]
    kinds = [KINDS[norm.dtype] is KINDS[attention.inner.weight.linear.dtype] for norm in norms]
    packs = [isinstance(each, PackedExperts) for each in (attention.keys, attention.values)]
    plain = all(each is None or each.bias is None for each in (attention.query, attention.gates))
    return plain and all((*kinds, *packs, *map(is_dense, norms)))


def _is_gated_apart(mlp: SparseMlp, activation: str) -> bool:
    """Whether the product of experts with their input does not gate what it gives."""
    return isinstance(mlp.gate_up, BiasedExperts) or activation in GATELESS


def _are_common(mlp: SparseMlp, activation: str) -> bool:
    """Whether the kernels packed all experts, the router and the shared MLP's gate."""
    packs = ((mlp.gate_up, "" if _is_gated_apart(mlp, activation) else activation), (mlp.down, ""))
    packed = [(*experts_and_biases(pack), gate) for pack, gate in packs]
    are_packed = all(
        isinstance(pack, PackedExperts) and all(weight.linear.gate == gate for weight in pack.weights) for pack, _, gate in packed
    )
    are_packed = are_packed and all(_is_plain(each) for each in mlp.narrow or ())
    are_packed = are_packed and all(isinstance(each, Packed) for each in (mlp.router, mlp.shared_gate or mlp.router))
    return are_packed and all(is_dense(bias) for _, biases, _ in packed for bias in biases)


def _wide_of(layer: LayerParams) -> tuple[()] | tuple[Linear, Linear]:
    """The products of a layer's MLP, or of that beside its experts."""
    found = layer.mlp.shared if isinstance(layer.mlp, SparseMlp) else layer.mlp
    if found is None:
        return ()
    return (found.up if isinstance(found, PlainMlp) else found.gate_up), found.down


def parts_of(norm: Norm | None) -> tuple[Array | None, Array | None]:
    """Its weight, and the bias of a layer norm."""
    return norm if isinstance(norm, LayerNorm) else (norm, None)


def _products_of(layer: LayerParams) -> tuple[Any, ...]:
    return tuple(each.weight for each in (*_products_of_mixing(layer), *_wide_of(layer)))


def _turns(layer: int, window: int, config: ModelConfig) -> int:
    """By which angles a layer's heads turn: 0 for none, 1 for the model's, 2 for those of its layers with a window."""
    if layer in config.still_layers:
        return 0
    return 2 if window and config.local_rope is not None else 1


def _describe_layer(layer: LayerParams, at: int, window: int, group: int, config: ModelConfig) -> StackLayer:
    attention, form, (given, output) = _mixing_of(layer), config.form, _products_of_mixing(layer) or (None, None)
    own, reads = attention if isinstance(attention, Attention) else None, isinstance(attention, ReadingAttention)
    attention_norm = parts_of(layer.attention_norm)
    mlp_norm = attention_norm if form.is_parallel and layer.mlp_norm is None else parts_of(layer.mlp_norm)
    return StackLayer(
        qkv=given and given.weight.linear,
        output=output and output.weight.linear,
        qkv_bias=given and given.bias,
        output_bias=output and output.bias,
        attention_norm=attention_norm[0],
        mlp_norm=mlp_norm[0],
        query_norm=attention.q_norm if isinstance(attention, (Attention, ReadingAttention)) else None,
        key_norm=own.k_norm if own else None,
        after_attention_norm=layer.after_attention_norm,
        after_mlp_norm=layer.after_mlp_norm,
        window=window,
        turns=_turns(at, window, config),
        turns_neighbours=form.turns_neighbours,
        group=group,
        mixed_scale=form.residual_scale,
        is_gated=_gates(form) if own else 0,
        recurring=kernel.describe_recurring(_recurring(attention, config)) if isinstance(attention, Recurring) else None,
        latent=_latent(attention, config) if isinstance(attention, LatentAttention) else None,
        attention_norm_bias=attention_norm[1],
        mlp_norm_bias=mlp_norm[1],
        is_parallel=form.is_parallel,
        is_by_head=form.is_by_head,
        norms_turned=form.head_norms == "turned",
        sinks=own.sinks if own else None,
        head_norm_kind=_head_norm_kind(attention),
        head_dim=(config if window else without_windows(config)).head_dim,
        reads=reads,
        value_norm=own.v_norm if own else None,
        norms_joined=config.head_count * config.head_dim if form.head_norms == "all" else 0,
        widened_from=form.mlp_scales[0] if form.mlp_scales else 1.0,
        **_widening(layer, config),
        **_beside_and_added(layer, at),
    )


def _with_state(described: StackLayer, layer: LayerParams, config: ModelConfig) -> StackLayer:
    """The same, with the state that it has beside attention, if any."""
    if not isinstance(layer.attention, SideBySide):
        return described
    own = layer.attention.recurring
    assert config.recurrent is not None and config.recurrent.beside is not None
    before, behind, beside = config.recurrent.beside
    row = NOTHING._replace(
        qkv=own.inner.weight.linear,
        qkv_bias=own.inner.bias,
        output=own.output.weight.linear,
        output_bias=own.output.bias,
        mixed_scale=beside,
        recurring=kernel.describe_recurring(_recurring(own, config)),
    )
    return described._replace(beside=kernel.describe_beside(row), mixed_from=before, mixed_scale=behind)


def _with_shares(described: StackLayer, layer: LayerParams, form: DecoderForm) -> StackLayer:
    """The same, if its form has parts that add to their normed input."""
    if not form.shares:
        return described
    (kept, mixed), (kept_widened, widened) = form.shares[isinstance(layer.attention, Recurring)], form.shares[2]
    scales = described._replace(mixed_scale=mixed, widened_scale=widened)
    return scales._replace(adds_to_normed=True, kept_mixed=kept, kept_widened=kept_widened)


def _gates(form: DecoderForm) -> int:
    """Where the gates of attention's heads stand, as StackLayer has it."""
    if form.gates_heads:
        return kernel.GATE_A_HEAD
    return kernel.GATES_APART if form.gates_apart else int(form.is_gated)


def _head_norm_kind(attention: Alone | None) -> Kind:
    """That of the norms of its queries and keys."""
    if not isinstance(attention, (Attention, ReadingAttention)):
        return Kind.FLOAT32
    kind = KINDS[first_of(attention).weight.linear.dtype]
    return kind if attention.q_norm is None else kernel.norm_kind_of(attention.q_norm.dtype, kind)


def _widening(layer: LayerParams, config: ModelConfig) -> dict[str, Any]:
    """The fields of a layer's MLP and experts."""
    mlp, experts, (up, down) = layer.mlp, experts_of(layer), _wide_of(layer) or (None, None)
    found = dict.fromkeys(("gate_up", "down", "gate_up_bias", "down_bias"))
    if up is not None and down is not None:
        found = {"gate_up": up.weight.linear, "down": down.weight.linear, "gate_up_bias": up.bias, "down_bias": down.bias}
        found["activation"] = 0 if up.weight.linear.gate else ACTIVATIONS[config.activation]
    if isinstance(mlp, PlainMlp) and mlp.slopes:
        found["above"], found["below"] = mlp.slopes
    found["widened_scale"] = config.form.mlp_scales[1] if config.form.mlp_scales else config.form.residual_scale
    if experts is not None:
        assert config.experts is not None
        found["scores"], found["shared_gate"] = experts.router.linear, experts.shared_gate and experts.shared_gate.linear
        found["router"] = describe_router(config.experts.router, experts.router.shape[0], experts.bias)
        packed, activation = experts_and_biases(experts.gate_up)[0], expert_activation(config)
        apart = activation if _is_gated_apart(experts, activation) else ""
        found["experts"] = describe_experts(experts.gate_up, experts.down, packed.first, apart)
        found["scores_bias"], found["share_scales"] = experts.score_bias, experts.share_scales
        found |= zip(("narrow_input", "narrow_result"), (each.weight.linear for each in experts.narrow or ()))
    return found


def _beside_and_added(layer: LayerParams, at: int) -> dict[str, Any]:
    """The fields of norms around experts beside an MLP, and of what the layer adds behind it."""
    norms = ("router_norm", "experts_norm", "after_shared_norm", "after_experts_norm")
    found = dict(zip(norms, layer.beside[1:])) if layer.beside else {}
    if layer.added is None:
        return found
    if layer.added.narrow is not None:
        gate, projection, norm = layer.added.narrow
        found |= {"own_gate": gate.weight.linear, "own_product": projection.weight.linear, "own_norm": norm}
        found["own_at"] = at * gate.weight.linear.outputs
    return found | {"stream_scale": layer.added.scale}


def _latent(attention: LatentAttention, config: ModelConfig) -> Described:
    assert config.latent is not None
    query, norms = attention.query and attention.query.weight.linear, (attention.query_norm, attention.norm)
    gates = attention.gates and attention.gates.weight.linear
    return kernel.describe_latent(query, norms, attention.keys, attention.values, config.latent.turning, EPS, gates)


def _recurring(layer: Recurring, config: ModelConfig) -> kernel.Recurring:
    """What stands between the products of a recurrent layer."""
    own: dict[str, Any] = {name: getattr(layer, name, None) for name in ARRAYS}
    if not isinstance(layer, Lightning):
        own["channels"], own["width"] = layer.weight.shape
    if isinstance(layer, ShortConvolution):
        return kernel.Recurring(Rule.SHORT_CONVOLUTION, **own)
    if isinstance(layer, Selective):
        own |= zip(("step_norm", "key_norm", "query_norm"), layer.norms)
    products: dict[str, Linear | None] = {name: getattr(layer, name, None) for name in ("beside", "steps", "gates")}
    own |= {name: each and each.weight.linear for name, each in products.items()}
    assert config.recurrent is not None and not isinstance(layer, GatedRecurrence)
    sizes, heads = config.recurrent, len(layer.decay_logs)
    return kernel.Recurring(
        RULES[type(layer)],
        **own,
        key_heads=heads * sizes.key_heads // sizes.value_heads or 1,
        key_dim=sizes.key_dim,
        value_heads=heads,
        value_dim=sizes.value_dim,
        all_values=sizes.values,
        eps=LIGHTNING_EPS if isinstance(layer, Lightning) else sizes.norm_eps or config.rms_norm_eps,
        strength_scale=sizes.strength_scale,
        bound=sizes.bound,
        scales=np.array(sizes.scales) if sizes.scales else None,
    )


def _is_alike(layer: StackLayer, stack: Stack) -> bool:
    """Sizes and dtypes of the first layer throughout."""
    wide = () if layer.gate_up is None or layer.down is None else (layer.gate_up, layer.down)
    mixing = () if layer.qkv is None or layer.output is None else (layer.qkv, layer.output)
    rows = () if layer.beside is None else layer.beside.kept
    beside = [each for row in rows if isinstance(row, StackLayer) for each in (row.qkv, row.output) if each is not None]
    fields, sizes = (*mixing, *wide, *beside), True
    if mixing:
        is_unlike = layer.recurring is not None or layer.reads or layer.head_dim != stack.head_dim
        sizes = mixing[0].inputs == mixing[1].outputs == stack.hidden
        sizes = sizes and (is_unlike or mixing[0].outputs == stack.joined + kernel.gate_count(layer))
    if wide:
        sizes = sizes and wide[0].inputs == wide[1].outputs == stack.hidden
        sizes = sizes and wide[0].width in (wide[1].inputs, 2 * wide[1].inputs)
    biases = [each for each in (layer.qkv_bias, layer.output_bias, layer.gate_up_bias, layer.down_bias) if each is not None]
    norms, own = _norms_of(layer), [norm for norm in (layer.query_norm, layer.key_norm) if norm is not None]
    dense = all(map(is_dense, (*biases, *norms, *own)))
    heads = len({norm.dtype for norm in own}) < 2 and (layer.reads or len(own) != 1)
    kinds = all(KINDS[field.dtype] is stack.kind for field in (*fields, *biases))
    return sizes and dense and heads and kinds and all(KINDS[norm.dtype] is _norm_kind(stack) for norm in norms)


def _norms_of(layer: StackLayer) -> list[Array]:
    """The norms of the stream that a layer has."""
    around = (layer.attention_norm, layer.mlp_norm, layer.after_attention_norm, layer.after_mlp_norm)
    beside = (layer.router_norm, layer.experts_norm, layer.after_experts_norm, layer.after_shared_norm, layer.own_norm)
    return [norm for norm in (*around, *beside) if norm is not None]


def _norm_kind(stack: Stack) -> Kind:
    """That of the norms' weights."""
    return Kind.FLOAT32 if stack.norm_kind is Kind.BFLOAT16_WIDE_NORM else stack.kind
