"""torch's flex attention for long prompts on a GPU, beside cuda/paged_attention.cu, which serves all other rows.

Owns the translation of such rows: their keys and values are copied from the pages, each row's to a multiple of BLOCK, and a mask
of blocks, made on the host, says which blocks of keys a block of queries reads. On a GPU torch compiles it; elsewhere torch's
plain form runs, for tests. A row's bits depend on where its prompt was cut, and so on hits, chunks and the batch.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from importlib.util import find_spec
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from vnext.kernels import paged_attention as plain
from vnext.kernels.calls import AttentionCall, AttentionStep
from vnext.kernels.contracts import ContractError
from vnext.kernels.cuda import operations as ours
from vnext.kernels.cuda.plan import numbered, on_device

QUERIES_MIN = 1024
"""Rows with fewer queries are the kernel's. The records have a prompt of 4,096, where this is 1.9 times as fast."""
KEYS_MAX = 1 << 17
"""Keys of a step's long rows together, which are copied from the pages for each layer; rows beyond them are the kernel's."""
BLOCK = 128
"""Queries and keys of a block of the mask: torch's own default."""
SPAN = 1 << 24
"""Codes of a row: its positions, counted from a multiple of this, so that a query's code says which keys it may see."""
SERVED = (torch.bfloat16, torch.float16)
HEAD_DIMS = (64, 128, 256)
TRIED = ((1300, 1300), (1100, 1500))
"""Queries and contexts of the rows that `why_not_here` tries: two sizes, so that torch compiles it for any."""
ERROR_MAX = 0.05
"""Of results around 1 at the first queries, where a rounding of sixteen bits is 0.004; a key more or fewer is ten times as much."""


def why_not(dtype: torch.dtype, head_dim: int) -> str:
    """Why it cannot serve such a model here; "" where it can."""
    if dtype not in SERVED or head_dim not in HEAD_DIMS:
        return f"it does not know heads of {head_dim} in {str(dtype).removeprefix('torch.')}"
    return "" if find_spec("triton") else "Triton is not installed here, by which torch compiles it"


def copied_bytes(heads: int, head_dim: int, dtype: torch.dtype, context_max: int, tokens_max: int) -> int:
    """The most that a step of `tokens_max` tokens copies of its long rows' keys and values, `heads` each, up to `context_max`."""
    keys = min(KEYS_MAX, tokens_max // QUERIES_MIN * int(up(np.array(context_max))))
    return 2 * keys * heads * head_dim * dtype.itemsize


class Rows(NamedTuple):
    """P long rows of a step, int64 [P]: number, first token, count of queries, context, and the first key that any query sees."""

    row: np.ndarray
    start: np.ndarray
    length: np.ndarray
    context: np.ndarray
    since: np.ndarray

    @property
    def first(self) -> np.ndarray:
        """The position of the first query."""
        found: np.ndarray = self.context - self.length
        return found

    @property
    def base(self) -> np.ndarray:
        """The position of the first key that is gathered."""
        return self.since // BLOCK * BLOCK

    @property
    def key_count(self) -> np.ndarray:
        found: np.ndarray = up(self.context) - self.base
        return found


class Packed(NamedTuple):
    """P long rows, side by side, each from a multiple of BLOCK on: q places of queries, k of keys.

    int64: `tokens` [q] of the step, the last one again where a row has ended; `results` [t], places that are queries; `outputs`
    [t], their tokens; `sources` [kv_heads * k], rows of the cache seen as [pages * kv_heads * block_size, D], behind a context its
    last key. int32: `limits` [q], what each query may see, and `codes` [k] of the keys, as SPAN says.
    """

    tokens: torch.Tensor
    results: torch.Tensor
    outputs: torch.Tensor
    sources: torch.Tensor
    limits: torch.Tensor
    codes: torch.Tensor


class Blocks(NamedTuple):
    """Which blocks of keys each block of queries reads: those that all its queries see whole, and the others. `lows` int32 [q]:
    codes up to this are before a query's window."""

    mixed_counts: torch.Tensor
    mixed: torch.Tensor
    whole_counts: torch.Tensor
    whole: torch.Tensor
    lows: torch.Tensor


class StepPrompts:
    """A step with long rows: described once for all layers. `rest`: the kernel's part of it, None for none."""

    __slots__ = ("_blocks", "_rows", "packed", "rest", "rest_at")

    def __init__(self, rows: Rows, packed: Packed) -> None:
        self._rows, self.packed = rows, packed
        self.rest: Any = None
        self.rest_at: torch.Tensor | None = None
        self._blocks: dict[int, BlockMask] = {}

    def mask(self, window: int) -> BlockMask:
        """torch's BlockMask for layers of this window."""
        if window not in self._blocks:
            blocks = blocks_of(self._rows, window, self.packed.limits.device)
            self._blocks[window] = block_mask(self.packed, blocks)
        return self._blocks[window]


def attention_metadata(step: AttentionStep) -> Any:
    """As paged_attention.attention_metadata: the kernel's own where no row is long."""
    query_starts, context_lengths, block_table, block_size, kv_head_count, windows, _ = step
    starts, contexts = query_starts.astype(np.int64), context_lengths.astype(np.int64)
    lengths = starts[1:] - starts[:-1]
    long = np.flatnonzero(lengths >= QUERIES_MIN)
    long = long[np.cumsum(up(contexts[long])) <= KEYS_MAX]
    if not len(long):
        return ours.attention_metadata(step)
    first = contexts[long] - lengths[long]
    since = np.zeros_like(first) if 0 in windows else np.maximum(first - max(windows) + 1, 0)
    rows = Rows(long, starts[long], lengths[long], contexts[long], since)
    made = StepPrompts(rows, pack(rows, block_table, block_size, kv_head_count))
    rest = np.setdiff1d(np.flatnonzero(lengths), long)
    if len(rest):
        place, turn = numbered(lengths[rest])
        own = np.concatenate(([0], np.cumsum(lengths[rest]))).astype(query_starts.dtype)
        made.rest_at, others = on_device((starts[rest][place] + turn, rest), block_table.device, np.int64)
        table = block_table.index_select(0, others)
        left = step._replace(query_starts=own, context_lengths=context_lengths[rest], block_table=table)
        made.rest = ours.attention_metadata(left)
    return made


def pack(rows: Rows, block_table: torch.Tensor, block_size: int, kv_head_count: int) -> Packed:
    """Rows of a step, by its table int32 [R, W]. Pages that no query sees are not looked up."""
    row, turn = numbered(up(rows.length))
    at = np.minimum(turn, rows.length[row] - 1)
    tokens, results = rows.start[row] + at, np.flatnonzero(turn < rows.length[row])
    key_row, place = numbered(rows.key_count)
    position = rows.base[key_row] + place
    seen = np.clip(position, rows.since[key_row], rows.context[key_row] - 1)
    table_at = rows.row[key_row] * block_table.shape[1] + seen // block_size
    of_queries = tokens, results, tokens[results], row * SPAN + rows.first[row] + at
    of_keys = table_at, seen % block_size, key_row * SPAN + position
    there = on_device((*of_queries, *of_keys), block_table.device, np.int64)
    tokens_there, results_there, outputs, limits, tables, offsets, codes = there
    pages = block_table.reshape(-1).index_select(0, tables).long() * kv_head_count
    heads = torch.arange(kv_head_count, device=block_table.device)[:, None]
    sources = ((pages + heads) * block_size + offsets).view(-1)
    return Packed(tokens_there, results_there, outputs, sources, limits.int(), codes.int())


def up(counts: np.ndarray) -> np.ndarray:
    """Each up to a multiple of BLOCK."""
    return -(-counts // BLOCK) * BLOCK


def blocks_of(rows: Rows, window: int, device: torch.device) -> Blocks:
    """Of some rows; `window` 0: the whole context."""
    row, turn = numbered(up(rows.length) // BLOCK)
    first = rows.first[row] + turn * BLOCK
    last = np.minimum(first + BLOCK, rows.context[row]) - 1
    begin, stop = seen_since(first, window) // BLOCK, last // BLOCK + 1
    whole = np.clip(-(-seen_since(last, window) // BLOCK), begin, stop)
    whole_stop = np.maximum((first + 1) // BLOCK, whole)
    blocks = rows.key_count // BLOCK
    behind = (np.cumsum(blocks) - blocks - rows.base // BLOCK)[row][:, None]  # of a row's blocks among all
    width = int(blocks.sum())
    columns = np.arange(width)[None]
    mixed = begin[:, None] + columns
    mixed = np.where(mixed >= whole[:, None], mixed + (whole_stop - whole)[:, None], mixed)
    mixed_there, whole_there = (np.minimum(behind + each, width - 1) for each in (mixed, whole[:, None] + columns))
    query_row, turn = numbered(up(rows.length))
    position = rows.first[query_row] + np.minimum(turn, rows.length[query_row] - 1)
    lows = query_row * SPAN + seen_since(position, window) - 1
    parts = (stop - begin - (whole_stop - whole), mixed_there, whole_stop - whole, whole_there, lows)
    return Blocks(*on_device(parts, device))


def seen_since(position: np.ndarray, window: int) -> np.ndarray:
    """The first position that a query at each sees."""
    return np.maximum(position - window + 1, 0) if window else np.zeros_like(position)


def block_mask(packed: Packed, blocks: Blocks) -> BlockMask:
    """torch's form of it, whose function sees only codes."""
    limits, lows, codes = packed.limits, blocks.lows, packed.codes

    def is_seen(batch: Any, head: Any, query: Any, key: Any) -> Any:
        return (codes[key] <= limits[query]) & (codes[key] > lows[query])

    return BlockMask.from_kv_blocks(
        blocks.mixed_counts[None, None], blocks.mixed[None, None], blocks.whole_counts[None, None], blocks.whole[None, None],
        BLOCK, is_seen, (len(limits), len(codes)), compute_q_blocks=False,
    )  # fmt: skip


@cache
def capped(softcap: float) -> Callable[..., torch.Tensor] | None:
    """The function of scores for a soft cap, one for each, so that torch compiles it once; None for none."""
    if not softcap:
        return None
    return lambda score, batch, head, query, key: softcap * torch.tanh(score / softcap)


@cache
def attend_on(device_type: str) -> Callable[..., torch.Tensor]:
    """torch's flex attention, compiled on a GPU for any sizes of a step."""
    attend: Callable[..., Any] = flex_attention
    return torch.compile(attend, dynamic=True, fullgraph=True) if device_type == "cuda" else attend


@cache
def why_not_here(device: torch.device, dtype: torch.dtype, heads: tuple[int, int, int]) -> str:
    """Why it does not serve heads (of queries, of keys, size of each) on this device: it is compiled and compared with the plain
    form for prompts of two sizes; "" where it gives the same."""
    query_heads, kv_heads, head_dim = heads
    try:
        for queries, context in TRIED:
            pages = -(-context // BLOCK)
            table = torch.arange(pages, dtype=torch.int32, device=device)[None]
            caches = torch.randn(2, pages, kv_heads, BLOCK, head_dim, device=device).to(dtype)
            query = torch.randn(queries, query_heads, head_dim, device=device).to(dtype)
            step = AttentionStep(np.array([0, queries]), np.array([context]), table, BLOCK, kv_heads)
            call = AttentionCall(caches[0], caches[1], attention_metadata(step), head_dim**-0.5)
            found = paged_attention(query, call)
            expected = plain.paged_attention(query, call._replace(metadata=plain.attention_metadata(step)))
            error = float((found.float() - expected.float()).abs().max())
            if not error <= ERROR_MAX:
                return f"its results on this GPU differ by {error:.3g} from the plain form's"
    except Exception as error:  # whatever it is, the kernel serves
        return f"torch cannot compile it here ({type(error).__name__}: {str(error).splitlines()[0][:200] if str(error) else ''})"
    return ""


def copied(cache_of: torch.Tensor, packed: Packed) -> torch.Tensor:
    """A cache's rows [1, kv_heads, k, D]."""
    kv_heads, head_dim = cache_of.shape[1], cache_of.shape[3]
    return cache_of.reshape(-1, head_dim).index_select(0, packed.sources).view(1, kv_heads, -1, head_dim)


def paged_attention(query: torch.Tensor, call: AttentionCall) -> torch.Tensor:
    """As paged_attention.paged_attention; caches of the query's type. Raises ContractError for others in a step with long rows."""
    key_cache, value_cache, metadata, scale, window, softcap, key_scale, value_scale, *_ = call
    if not isinstance(metadata, StepPrompts):
        return ours.paged_attention(query, call)
    if key_cache.dtype is not query.dtype:
        raise ContractError(f"flex attention reads caches of the query's type, {query.dtype}, and not of {key_cache.dtype}")
    packed, output = metadata.packed, torch.zeros_like(query, memory_format=torch.contiguous_format)
    queries = query.index_select(0, packed.tokens).transpose(0, 1).contiguous()[None]
    seen = attend_on(query.device.type)(
        queries, copied(key_cache, packed), copied(value_cache, packed), score_mod=capped(softcap),
        block_mask=metadata.mask(window), scale=scale * key_scale, enable_gqa=query.shape[1] != key_cache.shape[1],
    )  # fmt: skip
    results = seen[0].transpose(0, 1).index_select(0, packed.results)
    output.index_copy_(0, packed.outputs, results if value_scale == 1.0 else results * value_scale)
    if metadata.rest_at is not None:
        others = ours.paged_attention(query.index_select(0, metadata.rest_at), call._replace(metadata=metadata.rest))
        output.index_copy_(0, metadata.rest_at, others)
    return output
