"""The CPU's row of the selection table: the compiled kernels with the signatures of the references.

Owns the choice between a kernel and its reference: kernels take float32 and bfloat16 weights and steps, references all others.
A quick check of each call's shapes precedes the kernels, because the table's full contract checks cost more than a small
product. A call that fails the quick check goes to the contract, which raises the error.
"""

from __future__ import annotations

from typing import Any

import torch

from vnext.kernels import (
    contracts,
    paged_attention as plain_attention,
    products,
    recurrence as plain_recurrence,
    references,
    selected,
    thin as plain_thin,
)
from vnext.kernels.arrays import dtype_name, have_dense_blocks
from vnext.kernels.calls import (
    GATELESS,
    AttentionCall,
    AttentionStep,
    ConvolutionCall,
    RecurrenceCall,
    RotaryWrite,
    Router,
    Selection,
)
from vnext.kernels.codes import Codes
from vnext.kernels.cpu import attention, experts as chosen, linear as packing, native, recurrence, rows, thin
from vnext.kernels.cpu.native import GATES
from vnext.kernels.cpu.packed import HEAD_DIM_MAX, Packed, PackedExperts, packed, packed_codes, packed_experts
from vnext.kernels.format import INT8, Format
from vnext.kernels.formats.floats import PLAIN
from vnext.kernels.mxint8 import head_dim_of
from vnext.kernels.thin import ThinParts

PACKED_TYPES = (torch.float32, torch.bfloat16)
SUMMARY = "vnext/kernels/cpu"


# ---- products ----------------------------------------------------------------------------------------------------


def pack_weight(weight: products.Parts, format: Format = PLAIN, shards: int = 1) -> Any:
    """As products.pack_weight; a format without panels for it is the reference's."""
    return _packed(weight, "", format, shards)


def pack_gated_weight(weight: products.Parts, activation: str, format: Format = PLAIN) -> Any:
    """As products.pack_gated_weight; a format without panels for it is the reference's."""
    return _packed(weight, activation, format)


def _packed(weight: products.Parts, gate: str, format: Format, shards: int = 1) -> Any:
    dtype = (weight[0] if isinstance(weight, tuple) else weight).dtype
    return packed(weight, gate, shards) if _has_panels(format, dtype) else products.pack_weight(weight, format, shards)


def _has_panels(format: Format, dtype: torch.dtype) -> bool:
    return bool(format.panels(dtype_name(dtype)))


def pack_experts(weights: torch.Tensor, activation: str, format: Format = PLAIN, shards: int = 1) -> Any:
    """As products.pack_experts; a format without panels for it is the reference's."""
    if _has_panels(format, weights.dtype):
        return packed_experts(weights, activation, shards)
    return products.pack_experts(weights, activation, format, shards)


def pack_codes(codes: tuple[Codes, ...], dtype: torch.dtype, activation: str, shards: int, activations: str = INT8) -> Packed:
    """As products.pack_codes."""
    return packed_codes(codes, dtype, activation, shards, activations)


def linear(x: torch.Tensor, weight: Any, bias: torch.Tensor | None) -> torch.Tensor:
    """As products.linear."""
    if not _suits(x, weight):
        contracts.check_linear(x, weight, bias)
    if not isinstance(weight, Packed):
        return products.linear(x, weight, bias)
    if bias is None or (bias.dtype is weight.dtype and bias.is_contiguous() and not weight.linear.gate):
        return packing.linear(x, weight.linear, bias=bias)
    return packing.linear(x, weight.linear).add_(bias)


def sums(x: torch.Tensor, weight: Any) -> torch.Tensor:
    """As products.sums, in float32."""
    if not _suits(x, weight):
        contracts.check_sums(x, weight)
    if not isinstance(weight, Packed):
        return products.sums(x, weight)
    return packing.linear(x, weight.linear, torch.float32)


def row_linear(x: torch.Tensor, weight: Any, bias: torch.Tensor | None, join: products.Change) -> torch.Tensor:
    """As products.row_linear."""
    return products.completed(join(sums(x, weight)), x.dtype, bias)


def gated_linear(
    x: torch.Tensor, weight: Any, bias: torch.Tensor | None, activation: str, change: products.Change | None = None
) -> torch.Tensor:
    """As products.gated_linear; a weight packed without its gate is multiplied first and gated then."""
    if not _suits(x, weight):
        contracts.check_gated_linear(x, weight, bias, activation)
    if not isinstance(weight, Packed):
        return products.gated_linear(x, weight, bias, activation, change)
    is_gated = weight.linear.gate == activation and bias is None
    if is_gated and change is None:
        return packing.linear(x, weight.linear)
    wide = packing.linear(x, weight.linear, apart=True) if is_gated else linear(x, weight, bias)
    if activation in GATELESS:
        return rows.activate(wide if change is None else change(wide), None, None, activation)
    return rows.gate_and_mul(wide if change is None else change(wide), activation)


def logits(hidden: torch.Tensor, weight: Any) -> torch.Tensor:
    """As products.logits, float32 from the sums on."""
    if not _suits(hidden, weight):
        contracts.check_logits(hidden, weight)
    if not isinstance(weight, Packed):
        return products.logits(hidden, weight)
    return packing.linear(hidden, weight.linear, torch.float32)


def experts(
    x: torch.Tensor,
    shares: torch.Tensor,
    ids: torch.Tensor,
    gate_up: Any,
    down: Any,
    activation: str,
    join: products.Change | None = None,
) -> torch.Tensor:
    """As products.experts, with the products of this file."""
    contracts.check_experts(x, shares, ids, gate_up, down, activation)
    gate, alone = ("", activation) if activation in GATELESS else (activation, "")
    if join is None and _are_packed(gate_up, gate) and _are_packed(down, "") and x.stride(1) == 1:
        return chosen.experts(x.contiguous(), shares.contiguous(), ids.contiguous(), gate_up, down, alone)
    return products.experts_by(products.ExpertProducts(linear, sums, gated_linear), x, shares, ids, gate_up, down, activation, join)


def head_products(x: torch.Tensor, weight: Any) -> torch.Tensor:
    """As products.head_products."""
    serves = isinstance(weight, PackedExperts) and x.dtype is weight.dtype and x.dim() == 3 and x.stride(2) == 1
    if serves and x.shape[1:] == (weight.shape[0], weight.shape[2]):
        return packing.head_products(x, [each.linear for each in weight.weights])
    contracts.check_head_products(x, weight)
    return products.head_products(x, weight)


def _are_packed(weights: Any, gate: str) -> bool:
    return isinstance(weights, PackedExperts) and all(weight.linear.gate == gate for weight in weights.weights)


def route(scores: torch.Tensor, router: Router, bias: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """As products.route."""
    contracts.check_route(scores, router, bias)
    if router.marks == "mixer":
        return products.route(scores, router)
    return chosen.route(scores.float().contiguous(), router, bias)


def add_thin(
    product: torch.Tensor, x: torch.Tensor, parts: ThinParts, shards: int = 1, join: products.Change | None = None
) -> torch.Tensor:
    """As thin.add_thin."""
    contracts.check_add_thin(product, x, parts, shards)
    if x.dtype not in PACKED_TYPES or x.stride(1) != 1 or product.stride(1) != 1:
        return plain_thin.add_thin(product, x, parts, shards, join)
    return thin.add_thin(product, x, parts, shards, join)


def short_convolution(x: torch.Tensor, call: ConvolutionCall) -> torch.Tensor:
    """As recurrence.short_convolution."""
    plain_recurrence.check_short_convolution(x, call)
    serves = x.dtype in PACKED_TYPES and call.pool[0].is_contiguous()
    return recurrence.short_convolution(x, call) if serves else plain_recurrence.short_convolution(x, call)


def recur(x: torch.Tensor, call: RecurrenceCall) -> torch.Tensor:
    """As recurrence.recur."""
    plain_recurrence.check_recur(x, call)
    serves = x.dtype in PACKED_TYPES and call.pool[0].is_contiguous()
    return recurrence.recur(x, call) if serves else plain_recurrence.recur(x, call)


def embedding_rows(table: Any, ids: torch.Tensor, first: int) -> torch.Tensor:
    """As references.embedding_rows, of a plain or of a packed table."""
    contracts.check_embedding_rows(table, ids, first)
    if isinstance(table, Packed):
        return packing.rows_of(table.linear, ids, first)
    if not isinstance(table, torch.Tensor):
        return references.embedding_rows(table, ids, first)
    return rows.table_rows(table, ids, first)


def _suits(x: torch.Tensor, weight: Any) -> bool:
    """Whether a kernel may take them as they are."""
    if not isinstance(weight, Packed):
        return False
    return x.dtype is weight.dtype and x.dim() == 2 and x.shape[1] == weight.shape[1] and x.stride(1) == 1


# ---- rows --------------------------------------------------------------------------------------------------------


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """As references.rms_norm."""
    if x.dim() == 2 and x.shape[1] == weight.shape[0] and x.stride(1) == 1 and _norms_by(x, weight) and eps > 0:
        return rows.rms_norm(x, weight, eps)
    contracts.check_rms_norm(x, weight, eps)
    return references.rms_norm(x, weight, eps)


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """As references.add_rms_norm."""
    fits = x.dim() == 2 and x.shape == residual.shape and x.shape[1] == weight.shape[0] and x.stride(1) == 1
    if fits and residual.stride(1) == 1 and _norms_by(x, weight) and residual.dtype is x.dtype and eps > 0:
        return rows.add_rms_norm(x, residual, weight, eps)
    contracts.check_add_rms_norm(x, residual, weight, eps)
    return references.add_rms_norm(x, residual, weight, eps)


def layer_norm(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, eps: float) -> torch.Tensor:
    """As references.layer_norm; weights of other types than float32 are the reference's."""
    fits = x.dim() == 2 and x.dtype in PACKED_TYPES and x.stride(1) == 1 and eps > 0
    if fits and _is_row_of(weight, x.shape[1]) and _is_row_of(bias, x.shape[1]):
        return rows.layer_norm(x, weight, bias, eps)
    contracts.check_layer_norm(x, weight, bias, eps)
    return references.layer_norm(x, weight, bias, eps)


def activate(x: torch.Tensor, above: torch.Tensor | None, below: torch.Tensor | None, activation: str) -> torch.Tensor:
    """As references.activate."""
    contracts.check_activate(x, above, below, activation)
    if x.dtype not in PACKED_TYPES or x.stride(1) != 1:
        return references.activate(x, above, below, activation)
    if activation == "gated_gelu":
        return rows.gate_and_mul(x, "gelu")
    return rows.activate(x, above, below, activation)


def gate_by(x: torch.Tensor, gates: torch.Tensor) -> torch.Tensor:
    """As references.gate_by."""
    contracts.check_gate_by(x, gates)
    serves = x.dtype in PACKED_TYPES and x.stride(1) == gates.stride(1) == 1
    return rows.gate_by(x, gates) if serves else references.gate_by(x, gates)


def soft_cap(x: torch.Tensor, cap: float) -> torch.Tensor:
    """As references.soft_cap, in place."""
    contracts.check_soft_cap(x, cap)
    dense = x.contiguous()
    native.kernels.soft_cap(*dense.shape, cap, dense.data_ptr())
    return dense


def _norms_by(x: torch.Tensor, weight: torch.Tensor) -> bool:
    """A norm's weight that the kernels take beside x: of its dtype, or float32."""
    return x.dtype in PACKED_TYPES and (weight.dtype is x.dtype or weight.dtype is torch.float32)


def rotary_kv_write(qkv: torch.Tensor, write: RotaryWrite) -> torch.Tensor:
    """As references.rotary_kv_write; caches of another dtype are the reference's."""
    q_norm, k_norm, eps, cosine, sine, key_cache, value_cache, slots, key_scale, value_scale = write
    tokens, kv_heads, head_dim = slots.shape[0], key_cache.shape[1], head_dim_of(key_cache)
    heads, rest = divmod(qkv.shape[-1], head_dim)
    fits = qkv.shape == (tokens, heads * head_dim) and not rest and heads >= 3 * kv_heads and heads % kv_heads == 0
    fits = fits and slots.dtype is torch.int64 and slots.dim() == 1 and qkv.stride(1) == 1
    caches = _suit_caches(qkv, key_cache, value_cache) and key_cache.shape == value_cache.shape
    caches = caches and have_dense_blocks(key_cache, value_cache) and key_scale == value_scale == 1.0
    if fits and caches and _turns(cosine, sine, tokens, head_dim) and _norms(q_norm, k_norm, qkv, head_dim, eps):
        return rows.rotary_kv_write(qkv, write)
    contracts.check_rotary_kv_write(qkv, write)
    return references.rotary_kv_write(qkv, write)


def _suit_caches(x: torch.Tensor, key_cache: torch.Tensor, value_cache: torch.Tensor) -> bool:
    """Caches of one dtype that the kernels take beside x: of its own, or int8."""
    kinds = key_cache.dtype is x.dtype or (key_cache.dtype is torch.int8 and head_dim_of(key_cache) <= HEAD_DIM_MAX)
    return kinds and value_cache.dtype is key_cache.dtype and x.dtype in PACKED_TYPES


def _turns(cosine: torch.Tensor | None, sine: torch.Tensor | None, tokens: int, head_dim: int) -> bool:
    """Angles that the kernel takes: none, or dense float32 [T, R / 2] with R <= D."""
    if cosine is None or sine is None:
        return cosine is sine
    sized = cosine.dim() == 2 and cosine.shape[0] == tokens and 2 * cosine.shape[1] <= head_dim
    kinds = cosine.dtype is torch.float32 and sine.dtype is torch.float32
    return sized and kinds and sine.shape == cosine.shape and cosine.is_contiguous() and sine.is_contiguous()


def _norms(
    q_norm: torch.Tensor | None, k_norm: torch.Tensor | None, qkv: torch.Tensor, head_dim: int, eps: float
) -> bool:
    """Norms of heads that the kernel takes: none, or both [D] and of one dtype that goes with the activations'."""
    if q_norm is None or k_norm is None:
        return q_norm is k_norm
    kinds = q_norm.dtype is k_norm.dtype and _norms_by(qkv, q_norm)
    return kinds and q_norm.shape == k_norm.shape == (head_dim,) and eps > 0


# ---- attention ---------------------------------------------------------------------------------------------------


class StepAttention(plain_attention.StepAttention):
    """Planned by the kernel when the first layer shows its heads."""

    __slots__ = ("_kernel",)

    def __init__(self, step: AttentionStep) -> None:
        super().__init__(step)
        self._kernel: attention.AttentionPlan | None = None

    def kernel(self, head_count: int) -> attention.AttentionPlan:
        if self._kernel is None:
            self._kernel = attention.plan(self.step, head_count)
        return self._kernel


def attention_metadata(step: AttentionStep) -> StepAttention:
    """As paged_attention.attention_metadata; the arrays are kept until the step is over. The kernel sees by itself what
    rows share."""
    return StepAttention(step)


def _is_row_of(x: torch.Tensor, count: int) -> bool:
    """Whether it is float32 [count], dense."""
    return x.dtype is torch.float32 and x.shape == (count,) and x.is_contiguous()


def paged_attention(query: torch.Tensor, call: AttentionCall) -> torch.Tensor:
    """As paged_attention.paged_attention; other dtypes and head sizes are the reference's."""
    key_cache, value_cache, metadata, scale, window, softcap, key_scale, value_scale, sinks, selection = call
    if selection is not None:
        contracts.check_paged_attention(query, call)
        return selected.selected_attention(query, call, paged_attention, StepAttention, choose_keys)
    wanted = (metadata.kv_head_count, metadata.block_size, query.shape[-1])
    fits = (*key_cache.shape[1:3], head_dim_of(key_cache)) == wanted
    fits = fits and value_cache.shape == key_cache.shape and query.is_contiguous()
    sized = query.shape[-1] <= HEAD_DIM_MAX and query.shape[-1] % 2 == 0 and query.shape[1] % wanted[0] == 0
    sized = sized and key_scale == value_scale == 1.0 and have_dense_blocks(key_cache, value_cache)
    sized = sized and (sinks is None or _is_row_of(sinks, query.shape[1]))
    if fits and sized and _suit_caches(query, key_cache, value_cache) and window in metadata.windows and scale > 0 and softcap >= 0:
        return attention.paged_attention(query, call._replace(metadata=metadata.kernel(query.shape[1])))
    contracts.check_paged_attention(query, call)
    return plain_attention.paged_attention(query, call._replace(metadata=metadata.plain()))


def choose_keys(queries: selected.Queries, selection: Selection, table: torch.Tensor) -> torch.Tensor:
    """As selected.chosen_keys."""
    dense = have_dense_blocks(selection.cache) and queries.query.is_contiguous() and queries.weights.is_contiguous()
    fits = dense and selection.cache.dtype in PACKED_TYPES and table.stride(1) == 1
    return (attention.choose_keys if fits else selected.chosen_keys)(queries, selection, table)


FUNCTIONS = (
    attention_metadata, paged_attention, rotary_kv_write, rms_norm, add_rms_norm, pack_weight, pack_gated_weight, pack_codes,
    layer_norm, activate, gate_by, soft_cap, linear, sums, row_linear, gated_linear, logits, pack_experts, route, experts,
    head_products, embedding_rows, add_thin, short_convolution, recur,
)  # fmt: skip
"""What the kernels serve; the rest of the table stays the references'."""


def describe() -> str:
    """Where the code is and which instruction set serves, for the table's rows."""
    return f"{SUMMARY}: {native.level().name.lower()}"


assert set(GATES) - {""} == set(contracts.ACTIVATIONS), "a gate that the kernels do not know"
