"""A decoder's whole step in one call of the compiled module: token ids in, tokens sampled out.

Owns the description of the model, made once, and that of a step, kept while the same arrays come again: a steady step then
touches a handful of objects, which matters because the weights push everything else out of the caches between two steps. Both are
passed to the module by their addresses (models/layers/whole_step.py).
Every bit is that of the separate calls, which serve wherever this cannot.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from vnext.kernels.arrays import Array, address, address_or_0, strides_of
from vnext.kernels.cpu.experts import Described
from vnext.kernels.cpu.linear import PackedLinear
from vnext.kernels.cpu.native import agree_on_struct
from vnext.kernels.cpu.sampling import pointers
from vnext.kernels.cpu.stack import Angles, AuxStates, Caches, Stack, aux_numbers

if TYPE_CHECKING:
    from vnext.kernels.thin import StackParts


class StepRanks(NamedTuple):
    """How a step meets those of the other ranks, in the same order on each; what these functions raise ends the step.

    `sum(kind, address, bytes)`: values of this kind become their sums over ranks. `join(part, joined, bytes, row_bytes)`: the
    rows of all ranks' parts, each part of so many bytes, come one beside the other."""

    rank: int
    world_size: int
    sum: Callable[[int, int, int], None]
    join: Callable[[int, int, int, int], None]


class StepModel(NamedTuple):
    """A decoder without its angles. `embedding` [V, hidden] is packed, or dense and of the stack's dtype; `head` [V, hidden].

    `kv_head_counts` int64 of each group of layers. `last_norm` may have a bias. `places` [N, hidden] of the stack's dtype are added
    to the embedding.
    Of a group of `ranks` each has equal shares of the vocabulary, the last one padded to `head.outputs` tokens."""

    stack: Stack
    caches: Caches
    head_count: int
    kv_head_counts: np.ndarray
    block_size: int
    last_norm: tuple[Array, Array | None]
    embedding: PackedLinear | Array
    head: PackedLinear
    vocab_size: int
    eps: float
    scale: float
    softcap: float
    embedding_scale: float = 1.0
    logits_scale: float = 1.0
    logits_cap: float = 0.0
    places: Array | None = None
    inputs: Described | None = None
    ranks: StepRanks | None = None


class StepArrays(NamedTuple):
    """One step of R rows, T tokens, S samples, all dense: as ForwardBatch (models/layers/batch.py), and as sample_rows has it.

    `masks`: as mask_rows has them; None where no row has one. `parts` are what adapters add to the stack's products, four a layer;
    None where no token has an adapter. `aux` takes the inputs of some layers. `groups` int64 [n, 3]: of
    each group of layers behind the first, the addresses of its slots and block table, and the table's stride. `hidden` [S, hidden],
    of the stack's dtype, takes the normed states of the samples in a step that goes no further, None in others. `states`: with
    recurring layers each row's page, int32 [R], and whether it begins anew, bool [R]."""

    token_ids: Array
    positions: Array
    slots: Array
    query_starts: Array
    context_lengths: Array
    block_table: Array
    sample_at: Array
    columns: tuple[Array, ...]
    masks: np.ndarray | None = None
    parts: StackParts | None = None
    aux: AuxStates | None = None
    groups: np.ndarray | None = None
    hidden: np.ndarray | None = None
    states: tuple[Array, Array, Array | None] | None = None


STATES = ("state_pages", "state_fresh", "state_trail")
BEHIND = ("part_starts", "aux_layers", "aux_count", "aux", "groups", "hidden", *STATES, "sampled")
FIELDS = (*StepArrays._fields[:-4], *BEHIND)
agree_on_struct("StepArrays", ("rows", "tokens", "samples", "table_stride", *FIELDS))


class DescribedModel(NamedTuple):
    """int64 numbers in the order of step.h, and what they are the addresses of."""

    table: np.ndarray
    address: int
    kept: tuple[StepModel, Angles, Angles]


class DescribedStep(NamedTuple):
    """int64 numbers in the order of step.h, what they are the addresses of, and where the tokens come: int64 [S]."""

    table: np.ndarray
    address: int
    kept: tuple[StepArrays, np.ndarray]
    tokens: np.ndarray


NO_ANGLES = Angles(None, None)


def describe_inputs(
    table: PackedLinear | Array, first: int, known: int, projection: PackedLinear, norm: Array, scales: tuple[float, float, float]
) -> Described:
    """What tokens give to layers, as in models/layers/layer_inputs.py. `first`: the token of the table's first row on this rank;
    `scales`: of the table, of the projection, and of their sum."""
    is_packed = isinstance(table, PackedLinear)
    own, projected, both = np.array(scales).view(np.int64).tolist()
    fields = {
        "table": table.address if is_packed else address(table),
        "table_is_packed": is_packed,
        "table_rows": table.outputs if isinstance(table, PackedLinear) else table.shape[0],
        "first": first,
        "known": known,
        "scale": own,
        "projection": projection.address,
        "projection_scale": projected,
        "norm": address(norm),
        "width": norm.shape[0],
        "sum_scale": both,
    }
    agree_on_struct("Inputs", list(fields))
    return Described(np.array([*fields.values()], dtype=np.int64), (table, projection, norm))


def describe_model(model: StepModel, angles: Angles, local: Angles = NO_ANGLES) -> DescribedModel:
    """The model with `angles` [positions, R / 2] of the positions from 0 on, and the `local` ones of layers that have others."""
    stack, caches, packed, ranks = model.stack, model.caches, isinstance(model.embedding, PackedLinear), model.ranks
    embedding_rows = model.embedding.outputs if isinstance(model.embedding, PackedLinear) else model.embedding.shape[0]
    fields = {
        "kind": stack.kind,
        "norm_kind": stack.norm_kind,
        "cache_kind": caches.kind,
        "layers": stack.table.ctypes.data,
        "caches": caches.places.ctypes.data,
        "layer_count": len(stack.layers),
        "block_stride": caches.block_stride,
        "heads": model.head_count,
        "kv_heads": model.kv_head_counts.ctypes.data,
        "block_size": model.block_size,
        "hidden": stack.hidden,
        "last_norm": address(model.last_norm[0]),
        "last_norm_bias": address_or_0(model.last_norm[1]),
        "embedding": model.embedding.address if packed else address(model.embedding),
        "embedding_is_packed": packed,
        "embedding_rows": embedding_rows,
        "embedding_first": embedding_rows * ranks.rank if ranks else 0,
        "head": model.head.address,
        "head_rows": model.head.outputs,
        "vocabulary": model.vocab_size,
        "inputs": model.inputs.address if model.inputs else 0,
        "places": address_or_0(model.places),
        "place_rows": 0 if model.places is None else model.places.shape[0],
        "group_count": len(model.kv_head_counts),
    } | _by_position(angles, local) | _meeting(ranks) | _numbers(model)
    agree_on_struct("StepModel", list(fields))
    table = np.array([*fields.values()], dtype=np.int64)
    return DescribedModel(table, table.ctypes.data, (model, angles, local))


def _by_position(angles: Angles, local: Angles) -> dict[str, int]:
    """What depends on a token's position."""
    assert angles.cosine is not None, "those of the model"
    return {
        "rotated_dim": 2 * angles.cosine.shape[1],
        "angle_rows": angles.cosine.shape[0],
        "cosine": address(angles.cosine),
        "sine": address(angles.sine),
        "local_rotated_dim": 0 if local.cosine is None else 2 * local.cosine.shape[1],
        "local_cosine": address_or_0(local.cosine),
        "local_sine": address_or_0(local.sine),
        "query_factors": address_or_0(angles.query_factors),
    }


def _meeting(ranks: StepRanks | None) -> dict[str, int]:
    """How many ranks there are and how they meet."""
    if ranks is None:
        return {"rank_count": 1, "sum": 0, "join": 0}
    return {"rank_count": ranks.world_size, "sum": id(ranks.sum), "join": id(ranks.join)}


def _numbers(model: StepModel) -> dict[str, int]:
    """The bits of the model's numbers, by the names of step.h."""
    numbers = (model.embedding_scale, model.logits_scale, model.logits_cap, model.eps, model.scale, model.softcap)
    names = ("embedding_scale", "logits_scale", "logits_cap", "eps", "scale", "cap")
    return dict(zip(names, np.array(numbers).view(np.int64).tolist()))


def describe_step(arrays: StepArrays) -> DescribedStep:
    """A step, for as long as its arrays are where they are; what they hold may change."""
    tokens = np.empty(arrays.sample_at.shape[0], dtype=np.int64)
    sizes = (len(arrays.context_lengths), len(arrays.token_ids), len(tokens), strides_of(arrays.block_table)[0])
    *dense, _, masks, parts, aux, groups, hidden, states = arrays
    columns, masks_at = pointers(arrays.columns), 0 if masks is None else masks.ctypes.data
    parts_at = (0, 0) if parts is None else (parts.lines.ctypes.data, parts.starts.ctypes.data)
    arrays_at = map(address, dense)
    states_at = (0, 0, 0) if states is None else tuple(map(address_or_0, states))
    aux_at = (0, 0, 0) if aux is None else aux_numbers(aux)
    behind = (*aux_at, address_or_0(groups), address_or_0(hidden), *states_at, tokens.ctypes.data)
    addresses = (*arrays_at, columns.ctypes.data, masks_at, *parts_at, *behind)
    table = np.array([*sizes, *addresses], dtype=np.int64)
    return DescribedStep(table, table.ctypes.data, (arrays, columns), tokens)
