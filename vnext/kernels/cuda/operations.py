"""The GPU's row of the selection table: the CUDA kernels with the signatures of the references.

Owns the choice between a kernel and its reference, and the registration of kernels with torch (`torch.ops.vnext_cuda`), so
that `torch.compile` and graphs see each as one operation. Arguments have passed their contracts; the reference serves the
cases that a kernel does not support (mixed types, odd head sizes).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch

from vnext.kernels import contracts, paged_attention as plain_attention, products, references
from vnext.kernels.calls import AttentionCall, AttentionStep, RotaryWrite
from vnext.kernels.codes import Codes
from vnext.kernels.cuda import attention, compiled, exchange, experts as grouped, few_bits, rows, sampling, thin
from vnext.kernels.cuda.interface import SCALARS
from vnext.kernels.cuda.plan import TILE_ROWS, StepPlan, make_plan
from vnext.kernels.formats.floats import PLAIN, FixedWeight
from vnext.kernels.mxint8 import head_dim_of
from vnext.kernels.thin_tiles import ThinLines

SUMMARY = "cuda/*.cu by NVRTC"
LIBRARY = torch.library.Library("vnext_cuda", "DEF")
DISPATCH = "CompositeExplicitAutograd"
"""One implementation for a GPU and for the tests' host shim: the backend is chosen by the tensors' device. The compiled form
stands before it, where it serves a kind of device."""


# ---- operations of torch -----------------------------------------------------------------------------------------


def register(schema: str, function: Any, fake: Any) -> Any:
    """Define an operation, its kernel and its shapes; the callable that dispatches to it."""
    name = schema.partition("(")[0]
    LIBRARY.define(schema)
    LIBRARY.impl(name, function, DISPATCH)
    torch.library.register_fake(f"vnext_cuda::{name}", fake, lib=LIBRARY)
    return getattr(torch.ops.vnext_cuda, name).default


def _fake_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return x.new_empty(x.shape)


def _fake_add_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    return x.new_empty(x.shape), x.new_empty(x.shape)


def _fake_gate(x: torch.Tensor, gate: str) -> torch.Tensor:
    return x.new_empty((x.shape[0], x.shape[1] // 2))


def _fake_rotary(qkv: torch.Tensor, *others: Any) -> torch.Tensor:
    kv_heads, head_dim = others[5].shape[1], head_dim_of(others[5])
    return qkv.new_empty((qkv.shape[0], qkv.shape[1] // head_dim - 2 * kv_heads, head_dim))


def _fake_rows(table: torch.Tensor, ids: torch.Tensor, first: int) -> torch.Tensor:
    return table.new_empty((ids.shape[0], table.shape[1]))


def _attend(query: torch.Tensor, *given: Any) -> torch.Tensor:
    key_cache, value_cache, block_table, plan, slot_count, narrow_is_partial, *numbers = given
    plan = StepPlan._make((*plan, slot_count, narrow_is_partial))
    return attention.paged_attention(query, block_table, AttentionCall(key_cache, value_cache, plan, *numbers))


def _fake_sample(logits: torch.Tensor, *others: Any) -> torch.Tensor:
    return logits.new_empty((logits.shape[0],), dtype=torch.int64)


def _fake_sum(x: torch.Tensor, *others: Any) -> torch.Tensor:
    return x.new_empty(x.shape)


def _fake_join(x: torch.Tensor, dim: int, memories: torch.Tensor, *others: Any) -> torch.Tensor:
    shape = list(x.shape)
    shape[dim] *= memories.shape[0] - 1
    return x.new_empty(shape)


def _fake_attend(query: torch.Tensor, *others: Any) -> torch.Tensor:
    return query.new_empty(query.shape)


_rms_norm: Callable[..., torch.Tensor] = register(
    "rms_norm(Tensor x, Tensor weight, float eps) -> Tensor", rows.rms_norm, _fake_norm
)
_add_rms_norm: Callable[..., tuple[torch.Tensor, torch.Tensor]] = register(
    "add_rms_norm(Tensor x, Tensor residual, Tensor weight, float eps) -> (Tensor, Tensor)",
    rows.add_rms_norm,
    _fake_add_norm,
)
_gate_and_mul: Callable[..., torch.Tensor] = register("gate_and_mul(Tensor x, str gate) -> Tensor", rows.gate_and_mul, _fake_gate)
_rotary_kv_write: Callable[..., torch.Tensor] = register(
    "rotary_kv_write(Tensor qkv, Tensor? q_norm, Tensor? k_norm, float eps, Tensor? cosine, Tensor? sine, "
    "Tensor(a!) key_cache, Tensor(b!) value_cache, Tensor slots, float key_scale=1.0, float value_scale=1.0) -> Tensor",
    lambda qkv, *write: rows.rotary_kv_write(qkv, RotaryWrite(*write)),
    _fake_rotary,
)
_embedding_rows: Callable[..., torch.Tensor] = register(
    "embedding_rows(Tensor table, Tensor ids, int first) -> Tensor", rows.embedding_rows, _fake_rows
)
_paged_attention: Callable[..., torch.Tensor] = register(
    "paged_attention(Tensor query, Tensor key_cache, Tensor value_cache, Tensor block_table, Tensor[] plan, int slot_count, "
    "bool narrow_is_partial, float scale, int window, float softcap, float key_scale=1.0, float value_scale=1.0) -> Tensor",
    _attend,
    _fake_attend,
)
_sample_rows: Callable[..., torch.Tensor] = register(
    "sample_rows(Tensor logits, Tensor[] columns, int threads=0, Tensor(a!)? spoilt=None) -> Tensor",
    sampling.sample_rows,
    _fake_sample,
)
_adjust_rows = register(
    "adjust_rows(Tensor(a!) logits, Tensor places, Tensor positions, Tensor rates, Tensor marks, Tensor history, "
    "Tensor bias_tokens, Tensor bias_values, Tensor stop_tokens, Tensor? fed=None, Tensor? depths=None) -> ()",
    lambda logits, places, positions, *given: sampling.adjust_rows(logits, places, positions, given[:6], given[6:] or (None, None)),
    lambda *arguments: None,
)
_mask_rows = register(
    "mask_rows(Tensor(a!) logits, Tensor rows, Tensor masks) -> ()", sampling.mask_rows, lambda *arguments: None
)
_add_tiled = register(
    "add_tiled(Tensor(a!) product, Tensor x, Tensor memory, Tensor tokens, Tensor tiles, int first_line, int line_count, "
    "int width_max, int rank_room) -> ()",
    lambda product, x, memory, tokens, tiles, *lines: thin.add_tiled(product, x, memory, tokens, tiles, ThinLines(*lines)),
    lambda *arguments: None,
)
register(
    "multiply_few_bits(Tensor x, Tensor words, Tensor scales, Tensor? lows, int zero, int group) -> Tensor",
    few_bits.multiply,
    lambda x, words, *others: x.new_empty((x.shape[0], words.shape[0]), dtype=torch.float32),
)
# What other ranks see is no tensor of ours: that `memories` counts as written keeps every launch, and their order.
_sum_over_ranks: Callable[..., torch.Tensor] = register(
    "sum_over_ranks(Tensor x, Tensor(a!) memories, int rank, int capacity_bytes, int one_shot_bytes_max, int timeout_ms) "
    "-> Tensor",
    exchange.sum_over_ranks,
    _fake_sum,
)
_join_over_ranks: Callable[..., torch.Tensor] = register(
    "join_over_ranks(Tensor x, int dim, Tensor(a!) memories, int rank, int capacity_bytes, int timeout_ms) -> Tensor",
    exchange.join_over_ranks,
    _fake_join,
)
compiled.serve_gpu()  # from here on a GPU's tensors go to the compiled form, where there is one


# ---- the table's functions ---------------------------------------------------------------------------------------


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """As references.rms_norm."""
    return _rms_norm(x, weight, eps)


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """As references.add_rms_norm."""
    return _add_rms_norm(x, residual, weight, eps)


def gated_linear(
    x: torch.Tensor, weight: Any, bias: torch.Tensor | None, activation: str, change: products.Change | None = None
) -> torch.Tensor:
    """As products.gated_linear: torch's product, our gate."""
    wide = products.linear(x, weight, bias)
    return _gated(wide if change is None else change(wide), activation)


def _gated(wide: torch.Tensor, activation: str) -> torch.Tensor:
    """wide [T, 2 * I] -> [T, I] by our gate, or by the reference's."""
    return _gate_and_mul(wide, activation) if activation in rows.GATES else products.GATES[activation](wide)


def pack_codes(codes: tuple[Codes, ...], dtype: torch.dtype, activation: str, shards: int, activations: str = "") -> Any:
    """As products.pack_codes, as tensors of the host: four bits for activations of 16 bits, floats where the kernel reads none."""
    width = codes[0].codes.shape[1] // shards
    inputs = [slice(at * width, (at + 1) * width) for at in range(shards)]
    pieces = [few_bits.packed_parts(tuple(part.inputs(each) for part in codes)) for each in inputs]
    if dtype == torch.float32 or None in pieces:
        whole = torch.cat([torch.from_numpy(part.floats()).to(dtype) for part in codes])
        return products.pack_weight(whole, PLAIN, shards)
    weights = tuple(few_bits.on_host(piece, dtype) for piece in pieces if piece is not None)
    return weights[0] if shards == 1 else products.CutWeight(weights)  # type: ignore[arg-type]  # as products.pack_codes


def add_tiled(
    product: torch.Tensor, x: torch.Tensor, memory: torch.Tensor, tokens: torch.Tensor, tiles: torch.Tensor, lines: ThinLines
) -> torch.Tensor:
    """As thin_tiles.add_tiled."""
    _add_tiled(product, x, memory, tokens, tiles, *lines)
    return product


def experts(
    x: torch.Tensor,
    shares: torch.Tensor,
    ids: torch.Tensor,
    gate_up: Any,
    down: Any,
    activation: str,
    join: products.Change | None = None,
) -> torch.Tensor:
    """As products.experts: torch's grouped product where it serves, our gate."""
    return grouped.experts(_gated, x, shares, ids, gate_up, down, activation, join)


def rotary_kv_write(qkv: torch.Tensor, write: RotaryWrite) -> torch.Tensor:
    """As references.rotary_kv_write."""
    return _rotary_kv_write(qkv, *write._replace(slots=write.slots.contiguous()))


def embedding_rows(table: Any, ids: torch.Tensor, first: int) -> torch.Tensor:
    """As references.embedding_rows; tables of other types and forms are the reference's."""
    if isinstance(table, FixedWeight):
        table = table.weight
    if not isinstance(table, torch.Tensor) or table.dtype not in SCALARS:
        return references.embedding_rows(table, ids, first)
    return _embedding_rows(table, ids, first)


def sample_rows(logits: torch.Tensor, columns: Sequence[torch.Tensor], spoilt: torch.Tensor | None = None) -> torch.Tensor:
    """As sampling.sample_rows: what a runtime calls in the place of its torch form."""
    return _sample_rows(logits, list(columns), 0, spoilt)


def mask_rows(logits: torch.Tensor, rows: torch.Tensor, masks: torch.Tensor) -> None:
    """As sampling.mask_rows."""
    _mask_rows(logits, rows, masks)


def adjust_rows(
    logits: torch.Tensor, places: torch.Tensor, positions: torch.Tensor,
    tables: Sequence[torch.Tensor], drafts: Sequence[torch.Tensor | None],
) -> None:  # fmt: skip
    """As sampling.adjust_rows."""
    _adjust_rows(logits, places, positions, *tables, *drafts)


def sum_over_ranks(x: torch.Tensor, memories: torch.Tensor, *group: int) -> torch.Tensor:
    """As exchange.sum_over_ranks."""
    return _sum_over_ranks(x, memories, *group)


def join_over_ranks(x: torch.Tensor, dim: int, memories: torch.Tensor, *group: int) -> torch.Tensor:
    """As exchange.join_over_ranks."""
    return _join_over_ranks(x, dim, memories, *group)


@cache
def multiprocessors(device: torch.device) -> int:
    """How many blocks a device computes side by side, at least; the tests' host shim has a few."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 8


class StepAttention(plain_attention.StepAttention):
    """Planned when a layer shows its heads and its window."""

    __slots__ = ("_plans", "block_table")

    def __init__(self, step: AttentionStep) -> None:
        super().__init__(step)
        self._plans: dict[tuple[int, int, int], StepPlan] = {}
        self.block_table = step.block_table

    def plan(self, head_count: int, head_dim: int, window: int) -> StepPlan:
        """The kernel's plan."""
        key = (head_count // self.kv_head_count, attention.warps_of(head_dim), window)
        if key not in self._plans:
            step, device = self.step, self.block_table.device
            shared = step.shared_blocks * step.block_size
            blocks = self.kv_head_count * -(-key[0] // TILE_ROWS)  # of a unit
            self._plans[key] = make_plan(
                step.query_starts, step.context_lengths, key[0], window, shared, key[1], device, multiprocessors(device) // blocks
            )
        return self._plans[key]


def attention_metadata(step: AttentionStep) -> StepAttention:
    """As paged_attention.attention_metadata; arrays are kept until the step is over, and blocks that rows share are read once."""
    return StepAttention(step)


def is_made_for(metadata: StepAttention, query: torch.Tensor, key_cache: torch.Tensor, window: int) -> bool:
    """Whether the step was described for this window, these caches and so many heads: the operation itself is given a plan."""
    if query.dim() != 3 or key_cache.dim() != 4 or window not in metadata.windows:
        return False
    _, kv_heads, block_size, _ = key_cache.shape
    return metadata.block_size == block_size and metadata.kv_head_count == kv_heads and query.shape[1] % kv_heads == 0


def paged_attention(query: torch.Tensor, call: AttentionCall) -> torch.Tensor:
    """As paged_attention.paged_attention; sinks, other types and sizes of heads are the reference's, behind its contract."""
    key_cache, value_cache, metadata, scale, window, *others, sinks, selection = call
    served = sinks is None and selection is None and attention.serves(query, key_cache)
    if not served or not is_made_for(metadata, query, key_cache, window):
        contracts.check_paged_attention(query, call)
        return plain_attention.paged_attention(query, call._replace(metadata=metadata.plain()))
    *plan, slot_count, narrow_is_partial = metadata.plan(query.shape[1], query.shape[2], window)
    return _paged_attention(
        query, key_cache, value_cache, metadata.block_table, plan, slot_count, narrow_is_partial, scale, window, *others
    )


FUNCTIONS = (
    attention_metadata, paged_attention, rotary_kv_write, rms_norm, add_rms_norm, gated_linear, experts, embedding_rows,
    add_tiled, pack_codes,
)  # fmt: skip
"""What the kernels serve of the table; the rest stays the references'."""
