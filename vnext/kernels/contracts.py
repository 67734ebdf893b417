"""Contracts: the shape, dtype and layout that every implementation of an operation may rely on.

Owns the contract checks, one per operation. `table.choose` puts them in front of every implementation, so that a kernel never
sees an argument that it was not written for. Checks read metadata only: they neither touch a device nor wait for one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from vnext.kernels.arrays import have_dense_blocks
from vnext.kernels.calls import GATELESS, AttentionCall, AttentionStep, RotaryWrite, Router, Selection, parts_of
from vnext.kernels.codes import Codes
from vnext.kernels.format import BF16, INT8, Format
from vnext.kernels.formats.floats import PLAIN
from vnext.kernels.mxint8 import head_dim_of
from vnext.kernels.shards import SHARDS_MAX

if TYPE_CHECKING:

    from vnext.kernels.thin import ThinParts
    from vnext.kernels.thin_tiles import ThinLines

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
FP8 = torch.float8_e4m3fn
"""What a cache may also be: its keys and values are kept divided by a scale each. Or it is int8 (kernels/mxint8.py)."""
INDICES = (torch.int64,)
ACTIVATIONS = ("silu", "gelu_tanh", "swiglu_clamped", "silu_limited")
"""Of a gate."""
ALONE = ("gelu_tanh", "gelu", "gated_gelu", "relu2", "xielu")
"""Of an MLP without one."""


class ContractError(ValueError):
    """An operation was called with an argument that its contract excludes."""


def expect(
    name: str,
    tensor: torch.Tensor,
    shape: Sequence[int | None],
    dtypes: Sequence[torch.dtype],
    *,
    contiguous: bool = False,
) -> None:
    """Raise ContractError unless the tensor has the shape (None: any size), one of the dtypes and the layout.

    The last dimension must always be dense; `contiguous` asks it of all. What is right costs half a microsecond: these
    checks are passed several times a layer.
    """
    if tensor.dtype not in dtypes:
        wanted = " or ".join(str(dtype) for dtype in dtypes)
        raise ContractError(f"{name} must be {wanted} but is {tensor.dtype}")
    found = tensor.shape
    if found != shape and not fits(found, shape):
        raise ContractError(f"{name} must have the shape {shown(shape)} but has {list(found)}")
    if contiguous and not tensor.is_contiguous():
        raise ContractError(f"{name} must be contiguous but has the strides {tensor.stride()}")
    if tensor.stride(-1) != 1 and found[-1] > 1:
        raise ContractError(f"the last dimension of {name} must be dense but has the stride {tensor.stride(-1)}")


def fits(found: Sequence[int], shape: Sequence[int | None]) -> bool:
    """Whether sizes are as wanted, None standing for any."""
    if len(found) != len(shape):
        return False
    for want, have in zip(shape, found):
        if want != have and want is not None:
            return False
    return True


def shown(shape: Sequence[int | None]) -> str:
    """A wanted shape, for people."""
    return f"[{', '.join('any' if size is None else str(size) for size in shape)}]"


def expect_together(first: torch.Tensor, **others: torch.Tensor) -> None:
    """Raise ContractError unless all tensors live on one device."""
    device = first.device
    for name, tensor in others.items():
        if tensor.device != device:
            raise ContractError(f"{name} is on {tensor.device} but the other arguments are on {device}")


def expect_eps(eps: float) -> None:
    """Raise ContractError unless eps > 0."""
    if not eps > 0:
        raise ContractError(f"eps must be above 0 but is {eps}")


def check_rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> None:
    """x [T, H] float, weight [H] of the same dtype or float32, eps > 0."""
    expect("x", x, (None, None), FLOATS)
    expect("weight", weight, (x.shape[1],), (x.dtype, torch.float32))
    expect_together(x, weight=weight)
    expect_eps(eps)


def check_add_rms_norm(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float) -> None:
    """As rms_norm, with residual [T, H] of x's dtype."""
    check_rms_norm(x, weight, eps)
    expect("residual", residual, x.shape, (x.dtype,))
    expect_together(x, residual=residual)


def check_layer_norm(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, eps: float) -> None:
    """As rms_norm, with bias [H] of the weight's dtype."""
    check_rms_norm(x, weight, eps)
    expect("bias", bias, weight.shape, (weight.dtype,))
    expect_together(x, bias=bias)


def check_activate(x: torch.Tensor, above: torch.Tensor | None, below: torch.Tensor | None, activation: str) -> None:
    """x [T, I] float; above and below float32 [1], of "xielu" alone; an activation of an MLP without a gate."""
    expect("x", x, (None, None), FLOATS)
    if activation not in ALONE:
        raise ContractError(f"activation {activation!r} is not known; there are: {', '.join(ALONE)}")
    for name, slope in (("above", above), ("below", below)):
        if slope is not None:
            expect(name, slope, (1,), (torch.float32,))
    if (above is None or below is None) == (activation == "xielu"):
        raise ContractError("slopes above and below are those of xielu, which has both")


def check_gate_by(x: torch.Tensor, gates: torch.Tensor) -> None:
    """x [T, I] float; gates [T, I] or [T, 1] of its dtype."""
    expect("x", x, (None, None), FLOATS)
    expect("gates", gates, (x.shape[0], 1 if gates.shape[-1] == 1 else x.shape[1]), (x.dtype,))


def check_soft_cap(x: torch.Tensor, cap: float) -> None:
    """x [S, V] float32; cap above 0."""
    expect("x", x, (None, None), (torch.float32,))
    if not cap > 0:
        raise ContractError(f"cap must be above 0 but is {cap}")


def check_pack_weight(weight: torch.Tensor | tuple[torch.Tensor, ...], format: Format = PLAIN, shards: int = 1) -> None:
    """weight [out, in] float, or parts of it of one dtype, one below the other, whose rows may lie apart; a format; shards that
    divide the inputs."""
    expect_format(format)
    if not isinstance(weight, tuple):
        expect("weight", weight, (None, None), FLOATS, contiguous=True)
        return expect_shards(shards, weight.shape[1])
    if not weight:
        raise ContractError("a weight in parts must have one at least")
    for part in weight:
        expect("each part of weight", part, (None, weight[0].shape[-1]), FLOATS if part is weight[0] else (weight[0].dtype,))
    expect_shards(shards, weight[0].shape[1])


def check_pack_gated_weight(
    weight: torch.Tensor | tuple[torch.Tensor, ...], activation: str, format: Format = PLAIN
) -> None:
    """weight [2 * I, in] float: gate, then up; as in `check_pack_weight`."""
    check_pack_weight(weight, format)
    parts = weight if isinstance(weight, tuple) else (weight,)
    expect_gate(sum(part.shape[0] for part in parts), activation)


def check_pack_codes(codes: tuple[Codes, ...], dtype: torch.dtype, activation: str, shards: int, activations: str = INT8) -> None:
    """Codes [out, in] in parts, one below the other; with an activation gate, then up. Shards divide the inputs."""
    if not codes or len({part.codes.shape[1] for part in codes}) > 1 or dtype not in FLOATS or activations not in (INT8, BF16):
        raise ContractError(f"parts of {[part.codes.shape for part in codes]} in {dtype} are no weight in codes")
    expect_shards(shards, codes[0].codes.shape[1])
    if activation:
        expect_gate(sum(len(part.codes) for part in codes), activation)


def check_pack_experts(weights: torch.Tensor, activation: str, format: Format = PLAIN, shards: int = 1) -> None:
    """weights [E, out, in] float; with an activation they hold gate, then up."""
    expect("weights", weights, (None, None, None), FLOATS, contiguous=True)
    expect_format(format)
    expect_shards(shards, weights.shape[-1])
    if activation:
        expect_gate(weights.shape[1], activation)


def expect_format(format: Format) -> None:
    """Raise ContractError for what is no format of weights."""
    if not isinstance(format, Format):
        raise ContractError(f"the format of a weight must be an object of kernels/format.py but is {format!r}")


def expect_shards(shards: int, inputs: int) -> None:
    """Raise ContractError unless so many inputs can be cut into so many shards."""
    if not 1 <= shards <= SHARDS_MAX or inputs % shards:
        raise ContractError(f"{inputs} inputs cannot be cut into {shards} shards: there are at most {SHARDS_MAX}, of one size")


def check_embedding_rows(table: Any, ids: torch.Tensor, first: int) -> None:
    """table [V, H] float, plain or packed, ids int64 [N]."""
    expect_weight("table", table, (None, None), table.dtype)
    expect("ids", ids, (None,), INDICES)


def expect_weight(name: str, weight: Any, shape: tuple[int | None, ...], dtype: torch.dtype) -> None:
    """A weight, plain or packed: both have the `shape` and `dtype` that the plain one had."""
    found = weight.shape
    if not fits(found, shape):
        raise ContractError(f"{name} must have the shape {shown(shape)} but has {list(found)}")
    if weight.dtype != dtype:
        raise ContractError(f"{name} must be {dtype} but is {weight.dtype}")


def check_linear(x: torch.Tensor, weight: Any, bias: torch.Tensor | None) -> None:
    """x [T, in] float, weight [out, in] and bias [out] or None of the same dtype."""
    expect("x", x, (None, None), FLOATS)
    expect_weight("weight", weight, (None, x.shape[1]), x.dtype)
    if bias is not None:
        expect("bias", bias, (weight.shape[0],), (x.dtype,))
        expect_together(x, bias=bias)


def check_sums(x: torch.Tensor, weight: Any) -> None:
    """As linear, without bias."""
    check_linear(x, weight, None)


def check_row_linear(x: torch.Tensor, weight: Any, bias: torch.Tensor | None, join: Callable[..., Any]) -> None:
    """As linear; `join` gives a tensor of the shape and dtype of its argument."""
    check_linear(x, weight, bias)


def check_add_thin(
    product: torch.Tensor, x: torch.Tensor, parts: ThinParts, shards: int = 1, join: Callable[..., Any] | None = None
) -> None:
    """product [T, out] and x [T, in] of one float dtype; blocks of the same dtype within them; shards that divide the inputs."""
    expect_shards(shards, x.shape[1])
    expect("product", product, (None, None), FLOATS)
    expect("x", x, (product.shape[0], None), (product.dtype,))
    expect_together(product, x=x)
    inputs, columns, dtypes = parts.needs
    if inputs - {x.shape[1]} or dtypes - {x.dtype}:
        raise ContractError(f"blocks of {sorted(inputs)} inputs in {sorted(map(str, dtypes))} for x {list(x.shape)} in {x.dtype}")
    if columns > product.shape[1]:
        raise ContractError(f"a block ends at column {columns} of a product of {product.shape[1]}")


def check_add_tiled(
    product: torch.Tensor, x: torch.Tensor, memory: torch.Tensor, tokens: torch.Tensor, tiles: torch.Tensor, lines: ThinLines
) -> None:
    """product [T, out] and x [T, in] of one float dtype; memory uint8 [regions, bytes], tokens int32 [N], tiles int32 [M, 3].

    What tiles and regions hold is not looked at: it is on the device.
    """
    expect("product", product, (None, None), FLOATS)
    expect("x", x, (product.shape[0], None), (product.dtype,))
    expect("memory", memory, (None, None), (torch.uint8,), contiguous=True)
    expect("tokens", tokens, (None,), (torch.int32,))
    expect("tiles", tiles, (None, 3), (torch.int32,), contiguous=True)
    expect_together(product, x=x, memory=memory, tokens=tokens, tiles=tiles)
    if lines.count < 1 or lines.rank_room < 1 or lines.width_max > product.shape[1]:
        raise ContractError(f"{lines.count} lines of {lines.width_max} columns, rank {lines.rank_room}, for {list(product.shape)}")


def check_logits(hidden: torch.Tensor, weight: Any) -> None:
    """hidden [S, in] float, weight [vocabulary, in] of the same dtype."""
    expect("hidden", hidden, (None, None), FLOATS)
    expect_weight("weight", weight, (None, hidden.shape[1]), hidden.dtype)


def check_gated_linear(
    x: torch.Tensor, weight: Any, bias: torch.Tensor | None, activation: str, change: Callable[..., Any] | None = None
) -> None:
    """As linear, with weight [2 * I, in]: gate, then up."""
    check_linear(x, weight, bias)
    expect_gate(weight.shape[0], activation)


def expect_gate(width: int, activation: str) -> None:
    """Gate and up side by side, and an activation that is known."""
    if activation in GATELESS:
        return
    if width % 2:
        raise ContractError(f"weight must hold gate and up side by side, an even height, but is {width} high")
    if activation not in ACTIVATIONS:
        raise ContractError(f"activation {activation!r} is not known; there are: {', '.join(ACTIVATIONS)}")


def check_route(scores: torch.Tensor, router: Router, bias: torch.Tensor | None = None) -> None:
    """scores [T, E] float, bias float32 [E] or None; groups, of equal size, of which the kept ones have `per_token` experts."""
    expect("scores", scores, (None, None), FLOATS)
    count, groups = scores.shape[1], router.groups
    if not 1 <= router.per_token <= count:
        raise ContractError(f"{router.per_token} experts cannot be chosen out of {count}")
    if groups < 1 or count % groups or not 1 <= router.kept_groups <= groups:
        raise ContractError(f"{count} experts do not have {groups} groups of one size, of which {router.kept_groups} are kept")
    if groups > 1 and (count // groups < router.group_best or count // groups * router.kept_groups < router.per_token):
        raise ContractError(f"groups of {count // groups} experts are too small for {router.per_token} experts a token")
    if bias is not None:
        expect("bias", bias, (count,), (torch.float32,))


def check_experts(
    x: torch.Tensor,
    shares: torch.Tensor,
    ids: torch.Tensor,
    gate_up: Any,
    down: Any,
    activation: str,
    join: Callable[..., Any] | None = None,
) -> None:
    """x [T, H], shares float32 [T, k], ids int64 [T, k]; gate_up [E, 2 * I, H], or [E, I, H] without a gate, and down [E, H, I] of
    x's dtype; `join` as of check_row_linear."""
    expect("x", x, (None, None), FLOATS)
    tokens, width = x.shape
    expect("shares", shares, (tokens, None), (torch.float32,))
    expect("ids", ids, shares.shape, INDICES)
    expect_weight("gate_up", gate_up, (None, None, width), x.dtype)
    expect_gate(gate_up.shape[1], activation)
    expect_weight("down", down, (gate_up.shape[0], width, gate_up.shape[1] // (1 if activation in GATELESS else 2)), x.dtype)
    for name, (weights, biases) in (("gate_up", parts_of(gate_up)), ("down", parts_of(down))):
        if biases:
            expect(f"a bias of {name}", biases[0], (weights.shape[1],), (x.dtype,))
    expect_together(x, shares=shares, ids=ids)


def check_head_products(x: torch.Tensor, weight: Any) -> None:
    """x [T, H, in] float, weight [H, out, in] of x's dtype."""
    expect("x", x, (None, None, None), FLOATS)
    expect_weight("weight", weight, (x.shape[1], None, x.shape[2]), x.dtype)


def check_caches(key_cache: torch.Tensor, value_cache: torch.Tensor) -> None:
    """Both [page_count, kv_heads, block_size, D], contiguous, of one dtype: a float or float8_e4m3fn, or int8 with rows as
    mxint8.py has them.

    On the CPU blocks may lie apart, each of them dense: other layers' may be between them.
    """
    apart = key_cache.device.type == "cpu" and key_cache.dim() == 4
    expect("key_cache", key_cache, (None, None, None, None), (*FLOATS, FP8, torch.int8), contiguous=not apart)
    expect("value_cache", value_cache, key_cache.shape, (key_cache.dtype,), contiguous=not apart)
    if apart and not have_dense_blocks(key_cache, value_cache):
        found = f"{key_cache.stride()} and {value_cache.stride()}"
        raise ContractError(f"key_cache and value_cache must have dense blocks and equal strides but have {found}")


def expect_scales(cache: torch.Tensor, key_scale: float, value_scale: float) -> None:
    """Raise ContractError unless both are above 0, and 1 where the cache keeps keys and values as they are."""
    if not (key_scale > 0 and value_scale > 0):
        raise ContractError(f"the scales of keys and values must be above 0 but are {key_scale} and {value_scale}")
    if cache.dtype != FP8 and (key_scale, value_scale) != (1.0, 1.0):
        raise ContractError(f"a cache of {cache.dtype} has no scales but they are {key_scale} and {value_scale}")


def check_rotary_kv_write(qkv: torch.Tensor, write: RotaryWrite) -> None:
    """qkv [T, (heads + 2 * kv_heads) * D] float, slots int64 [T], caches as in `check_caches`, scales above 0.

    q_norm and k_norm [D] of qkv's dtype or float32, or None; cosine and sine float32 [T, R / 2] with R <= D, or both
    None.
    """
    q_norm, k_norm, eps, cosine, sine, key_cache, value_cache, slots, *scales = write
    check_caches(key_cache, value_cache)
    expect_scales(key_cache, *scales)
    expect("qkv", qkv, (None, None), FLOATS)
    tokens, width = qkv.shape
    kv_heads, head_dim = key_cache.shape[1], head_dim_of(key_cache)
    if width % head_dim or (width // head_dim) % kv_heads or width // head_dim < 3 * kv_heads:
        raise ContractError(
            f"qkv is {width} wide, which is no query, key and value of {kv_heads} key-value heads of {head_dim}"
        )
    expect("slots", slots, (tokens,), INDICES)
    expect_together(key_cache, qkv=qkv, value_cache=value_cache, slots=slots)
    for name, weight in (("q_norm", q_norm), ("k_norm", k_norm)):
        if weight is not None:
            expect(name, weight, (head_dim,), (qkv.dtype, torch.float32))
            expect_eps(eps)
    check_angles(cosine, sine, tokens, head_dim)


def check_angles(cosine: torch.Tensor | None, sine: torch.Tensor | None, tokens: int, head_dim: int) -> None:
    """Both float32 [T, R / 2] with R <= D, or both None."""
    if (cosine is None) != (sine is None):
        raise ContractError("cosine and sine come together or not at all")
    if cosine is not None and sine is not None:
        expect("cosine", cosine, (tokens, None), (torch.float32,))
        expect("sine", sine, cosine.shape, (torch.float32,))
        if 2 * cosine.shape[1] > head_dim:
            raise ContractError(f"{cosine.shape[1]} angles turn more than a head of {head_dim} has")


def check_attention_metadata(step: AttentionStep) -> None:
    """A block table wide enough for the contexts; `shared_blocks`, at most W: of every row with a query."""
    query_starts, context_lengths, block_table, block_size, kv_head_count, windows, shared_blocks = step
    if not windows or min(windows) < 0:
        raise ContractError(f"windows must be at least one number that is not negative but are {windows}")
    rows = context_lengths.shape[0]
    expect("block_table", block_table, (rows, None), (torch.int32,))
    if query_starts.shape != (rows + 1,):
        raise ContractError(f"query_starts must have {rows + 1} entries but has the shape {query_starts.shape}")
    if block_size < 1 or kv_head_count < 1:
        raise ContractError(f"block size {block_size} and key-value heads {kv_head_count} must be at least 1")
    if not 0 <= shared_blocks <= block_table.shape[1]:
        raise ContractError(f"{shared_blocks} shared blocks do not stand in a table of {block_table.shape[1]}")
    query_lengths = query_starts[1:] - query_starts[:-1]
    if rows and (query_lengths < 0).any():
        raise ContractError("query_starts must not fall")
    if rows and (context_lengths < query_lengths).any():
        raise ContractError("context_lengths must count the tokens of this step too")
    longest = int(context_lengths.max(initial=0))
    if longest > block_table.shape[1] * block_size:
        raise ContractError(
            f"a context of {longest} tokens needs more than the {block_table.shape[1]} blocks of {block_size} "
            "that block_table holds a row"
        )


def check_paged_attention(query: torch.Tensor, call: AttentionCall) -> None:
    """query [T, heads, D] with heads a multiple of kv_heads; metadata made for the same caches and the window; sinks float32
    [heads] or None; a selection of the query's tokens and dtype, without a window and scales, or None."""
    key_cache, value_cache, metadata, scale, window, softcap, *scales, sinks, selection = call
    check_caches(key_cache, value_cache)
    expect_scales(key_cache, *scales)
    _, kv_heads, block_size, _ = key_cache.shape
    head_dim = head_dim_of(key_cache)
    expect("query", query, (None, None, head_dim), FLOATS)
    expect_together(query, key_cache=key_cache, value_cache=value_cache)
    if sinks is not None:
        expect("sinks", sinks, (query.shape[1],), (torch.float32,))
        expect_together(query, sinks=sinks)
    if query.shape[1] % kv_heads:
        raise ContractError(f"{query.shape[1]} query heads cannot share {kv_heads} key-value heads evenly")
    if (metadata.block_size, metadata.kv_head_count) != (block_size, kv_heads):
        raise ContractError(
            f"metadata was made for blocks of {metadata.block_size} and {metadata.kv_head_count} key-value heads but "
            f"the cache has blocks of {block_size} and {kv_heads} heads"
        )
    if window not in metadata.windows:
        raise ContractError(f"metadata was made for the windows {metadata.windows} but the window is {window}")
    if not scale > 0 or softcap < 0:
        raise ContractError(f"scale must be above 0 and softcap not below it but they are {scale} and {softcap}")
    if selection is not None:
        check_selection(query, call, selection)


def check_selection(query: torch.Tensor, call: AttentionCall, selection: Selection) -> None:
    """query [T, H, I] and weights float32 [T, H] beside a cache of index keys with the blocks of the key cache."""
    expect("selection.query", selection.query, (query.shape[0], None, None), (query.dtype,))
    expect("selection.weights", selection.weights, selection.query.shape[:2], (torch.float32,))
    pages, _, block_size, _ = call.key_cache.shape
    expect("selection.cache", selection.cache, (pages, 1, block_size, selection.query.shape[2]), (query.dtype,), contiguous=False)
    expect_together(query, **{"selection.query": selection.query, "selection.weights": selection.weights})
    if call.window or selection.count < 1:
        raise ContractError(f"a selection is of at least one key, without a window, but of {selection.count} and {call.window}")
