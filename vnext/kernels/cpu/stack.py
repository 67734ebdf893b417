"""Stack: runs a sequence of decoder layers in one call of the compiled module.

Owns the description of the layers, made once at loading, and the call. The order of operations and every bit of the result
equal those of the separate calls in `vnext/models/layers/decoder.py`, which run where this call cannot.
"""

from __future__ import annotations

from enum import IntEnum
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from vnext.kernels.arrays import Array, address, address_or_0
from vnext.kernels.cpu.experts import Described
from vnext.kernels.cpu.linear import PackedLinear
from vnext.kernels.cpu.native import KINDS, Kind, agree_on, agree_on_struct, kernels
from vnext.kernels.cpu.packed import PackedExperts

if TYPE_CHECKING:
    import torch

    from vnext.kernels.cpu.attention import AttentionPlan


class Caches(NamedTuple):
    """Addresses int64 [2 * layers] of each layer's keys and values [page_count, kv_heads, block_size, head_dim], their blocks
    dense and `block_stride` elements of `kind` apart. `head_dim`: of the first layer that attends."""

    places: np.ndarray
    block_stride: int
    head_dim: int
    kind: Kind


class Rule(IntEnum):
    """What a recurring layer is, by the names of models/layers/recurrent.py."""

    SHORT_CONVOLUTION = 0
    DELTA_NET = 1
    MAMBA = 2
    SELECTIVE = 3
    LIGHTNING = 4
    KEY_DELTA = 5


class Recurring(NamedTuple):
    """A recurring layer between its products, as models/layers/recurrent.py has it, of this rank's channels and heads.
    `all_values`: those of all ranks. Of no `channels` it convolves nothing."""

    rule: Rule
    beside: PackedLinear | None = None
    steps: PackedLinear | None = None
    gates: PackedLinear | None = None
    weight: Array | None = None
    bias: Array | None = None
    channels: int = 0
    width: int = 0
    decay_logs: Array | None = None
    step_bias: Array | None = None
    norm: Array | None = None
    skips: Array | None = None
    step_norm: Array | None = None
    key_norm: Array | None = None
    query_norm: Array | None = None
    key_heads: int = 0
    key_dim: int = 0
    value_heads: int = 0
    value_dim: int = 0
    all_values: int = 0
    eps: float = 0.0
    strength_scale: float = 1.0
    bound: float = 0.0
    scales: Array | None = None


agree_on({rule.name: rule for rule in Rule})
agree_on_struct("Recurring", Recurring._fields)


def describe_recurring(layer: Recurring) -> Described:
    """What the kernels need to know of it; arrays dense."""
    return Described(np.array([_number(field) for field in layer], dtype=np.int64), (layer,))


def describe_beside(layer: StackLayer) -> Described:
    """What the kernels need to know of a layer beside attention."""
    return Described(np.array([_number(field) for field in layer], dtype=np.int64), (layer,))


GATES_APART, GATE_A_HEAD = 2, 3
agree_on({"GATES_APART": GATES_APART, "GATE_A_HEAD": GATE_A_HEAD})


class StackLayer(NamedTuple):
    """One layer's weights: `gate_up` holds its gate, all else is plain. Norms [hidden] and [head_dim], dense. `turns`: by which
    angles its heads turn, counted from 1, 0 for none; `turns_neighbours`: by pairs of neighbours. `group`: of which group of
    layers it is. `mixed_scale` and `widened_scale` multiply what attention and MLP add, with `adds_to_normed` to their own
    normed input, times `kept_mixed` and `kept_widened`. With `experts`, which `router` chooses by the product
    with `scores`, `gate_up` and `down` are of the MLP beside them, or None. `is_gated`: each query head has a gate behind it, or
    with GATES_APART all gates stand behind all queries, with GATE_A_HEAD one number for each. A layer that is `recurring` has its
    first product in `qkv`. Norms with biases, float32 as these, are layer norms. `activation` is that of a `gate_up` without a
    gate, or with one that a bias keeps apart; `above` and `below` are xIELU's. `norms_joined`: how many numbers of queries, on all
    ranks, are normed together, 0 for none; the rest as in DecoderForm. A layer without `qkv` mixes nothing, and one
    with neither `gate_up` nor experts has no MLP. With narrow products experts read what one makes of their input.
    `beside`: a layer with a state, whose part is added to attention's, which reads its input times `mixed_from`; the MLP reads its
    own times `widened_from`."""

    qkv: PackedLinear | None
    output: PackedLinear | None
    gate_up: PackedLinear | None
    down: PackedLinear | None
    qkv_bias: Array | None
    output_bias: Array | None
    down_bias: Array | None
    attention_norm: Array | None
    mlp_norm: Array | None
    query_norm: Array | None
    key_norm: Array | None
    after_attention_norm: Array | None
    after_mlp_norm: Array | None
    window: int
    turns: int
    turns_neighbours: bool
    group: int
    mixed_scale: float
    widened_scale: float
    scores: PackedLinear | None = None
    router: Described | None = None
    experts: Described | None = None
    is_gated: int = 0
    recurring: Described | None = None
    latent: Described | None = None
    attention_norm_bias: Array | None = None
    mlp_norm_bias: Array | None = None
    gate_up_bias: Array | None = None
    activation: int = 0
    above: Array | None = None
    below: Array | None = None
    is_parallel: bool = False
    is_by_head: bool = False
    norms_turned: bool = False
    norms_joined: int = 0
    shared_gate: PackedLinear | None = None
    sinks: Array | None = None
    scores_bias: Array | None = None
    share_scales: Array | None = None
    head_norm_kind: int = 0
    head_dim: int = 0
    reads: bool = False
    value_norm: Array | None = None
    router_norm: Array | None = None
    experts_norm: Array | None = None
    after_experts_norm: Array | None = None
    after_shared_norm: Array | None = None
    own_gate: PackedLinear | None = None
    own_product: PackedLinear | None = None
    own_norm: Array | None = None
    own_at: int = 0
    stream_scale: Array | None = None
    narrow_input: PackedLinear | None = None
    narrow_result: PackedLinear | None = None
    adds_to_normed: bool = False
    kept_mixed: float = 1.0
    kept_widened: float = 1.0
    beside: Described | None = None
    mixed_from: float = 1.0
    widened_from: float = 1.0


agree_on_struct("StackLayer", StackLayer._fields)
agree_on_struct("Latent", ("query", "query_norm", "norm", "keys", "values", "heads", "rank", "turning", "plain", "eps", "gates"))


class Stack(NamedTuple):
    """Layers with their description, int64 [layers, fields]: addresses into tensors that `layers` keeps alive. `joined`: the size
    of a token's queries, keys and values."""

    layers: tuple[StackLayer, ...]
    table: np.ndarray
    kind: Kind
    norm_kind: Kind
    hidden: int
    joined: int
    latent_heads: int = 0
    head_dim: int = 0

    def head_count(self, kv_heads: int, head_dim: int) -> int:
        """Of queries, beside so many of keys."""
        return self.latent_heads or self.joined // head_dim - 2 * kv_heads


class Angles(NamedTuple):
    """float32 [T, R / 2] each, dense, None where nothing turns. `query_factors` float32 [T] multiply queries, None for nothing."""

    cosine: Array | None
    sine: Array | None
    query_factors: Array | None = None


class StackStep(NamedTuple):
    """A step's tokens: a plan of attention in whose rows all of them are, slots and angles as in `rows.rotary_kv_write`, and which
    are sampled, int64 [S]."""

    plan: AttentionPlan
    slots: torch.Tensor
    angles: Angles
    sample_at: torch.Tensor


class Numbers(NamedTuple):
    """Those of a model's norms, and of `attention.paged_attention`."""

    eps: float
    scale: float
    softcap: float


class AuxStates(NamedTuple):
    """`states` [T, n, hidden], dense, takes the inputs of the layers with the indices `layers`: the sums of the embedding
    and of what all layers before have added. The index behind the last layer's stands for the last sum. The kernel takes `layers`
    as int64 [n]; compilers want a tuple."""

    layers: np.ndarray | tuple[int, ...]
    states: Array


def describe_latent(
    query: PackedLinear | None,
    norms: tuple[Array | None, Array],
    keys: PackedExperts,
    values: PackedExperts,
    turning: int,
    eps: float,
    gates: PackedLinear | None,
) -> Described:
    """Latent attention as in models/layers/latent.py. `norms`: of queries and of rows, of which `turning` numbers turn."""
    places = [np.array([each.linear.address for each in packed.weights], dtype=np.int64) for packed in (keys, values)]
    heads, rank, plain = keys.shape
    starts = (query.address if query else 0, *map(address_or_0, norms), *(each.ctypes.data for each in places))
    numbers = heads, rank, turning, plain, int(np.float64(eps).view(np.int64)), gates.address if gates else 0
    return Described(np.array([*starts, *numbers], dtype=np.int64), (query, norms, keys, values, places, gates))


def describe(layers: tuple[StackLayer, ...], norm_dtype: Any, latent_heads: int = 0) -> Stack:
    """The stack of these layers; activations are of one dtype and size, norms of `norm_dtype`. One head where none attends."""
    attending = next((layer for layer in layers if layer.recurring is None and layer.qkv is not None), None)
    first = attending or layers[0]
    assert first.qkv is not None, "the first layer of a model without attention has a state"
    table = np.array([[_number(field) for field in layer] for layer in layers], dtype=np.int64)
    kind = KINDS[first.qkv.dtype]
    norm_kind = norm_kind_of(norm_dtype, kind)
    joined = first.qkv.outputs - gate_count(first) if attending else 3 * first.head_dim
    return Stack(layers, table, kind, norm_kind, first.qkv.inputs, joined, latent_heads, first.head_dim)


def gate_count(layer: StackLayer) -> int:
    """The numbers among the outputs of a layer's first product that gate its heads."""
    if not layer.is_gated or layer.output is None:
        return 0
    return layer.output.inputs // (layer.head_dim if layer.is_gated == GATE_A_HEAD else 1)


def norm_kind_of(dtype: object, kind: Kind) -> Kind:
    """That of norms with weights of this dtype beside activations of `kind`."""
    return kind if KINDS[dtype] is kind else Kind.BFLOAT16_WIDE_NORM


def _number(field: PackedLinear | Described | Array | float | None) -> int:
    if field is None or isinstance(field, int):
        return field or 0
    if isinstance(field, (PackedLinear, Described)):
        return field.address
    return int(np.float64(field).view(np.int64)) if isinstance(field, float) else address(field)


def run(
    stack: Stack,
    residual: torch.Tensor,
    last_norm: tuple[Array, Array | None],
    caches: Caches,
    step: StackStep,
    numbers: Numbers,
    aux: AuxStates | None = None,
) -> torch.Tensor:
    """All layers on residual [T, hidden], dense, which is used up -> rows `step.sample_at` after `last_norm`, which may have a
    bias. `aux` takes the inputs of some layers."""
    angles, tokens, samples = step.angles, residual.shape[0], step.sample_at.shape[0]
    found = residual.new_empty((samples, stack.hidden))
    rotated = 0 if angles.cosine is None else 2 * angles.cosine.shape[1]
    kernels.run_stack(
        stack.kind, stack.norm_kind, caches.kind,
        stack.table.ctypes.data, caches.places.ctypes.data, len(stack.layers), caches.block_stride,
        *map(address_or_0, last_norm), step.plan.handle, tokens, stack.hidden, rotated, *numbers,
        address_or_0(angles.cosine), address_or_0(angles.sine), step.slots.data_ptr(), step.sample_at.data_ptr(), samples,
        residual.data_ptr(), found.data_ptr(), *((0, 0, 0) if aux is None else aux_numbers(aux)),
        address_or_0(angles.query_factors),
    )  # fmt: skip
    return found


def aux_numbers(aux: AuxStates) -> tuple[int, int, int]:
    """The addresses of the layers and of the states, and between them how many layers there are."""
    assert isinstance(aux.layers, np.ndarray), "the kernel reads them where they are"
    return aux.layers.ctypes.data, len(aux.layers), address(aux.states)
