"""The key-value cache: its layout, size and making. Who holds which block is not known here.

Layers that attend come in groups, those of one group seeing equally far back; all groups have pages of one size, so that one pool
serves them, also where heads differ from kind to kind. A page holds `block_size` tokens of every layer of a group: each place in a
page has a pair (key, value) of [page_count, kv_heads_local, block_size, head_dim], shared by the layers that have this place in
their groups. A layer that reads another one's cache has that one's group and place. Heads come before slots so that one head's
tokens of a page are one run of memory: attention reads a head at a time. Latent attention keeps one row of a token for all heads,
on every rank: key and value of such a pair are the same memory; where an index chooses keys, the second is a token's index key.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Iterator
from functools import cache, cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from vnext.kernels.arrays import (
    Array,
    address,
    as_tensor,
    dtype_name,
    have_dense_blocks,
    host_dtype,
    is_int8,
    strides_of,
    torch_dtype,
)
from vnext.kernels.cpu.memory import huge, spread
from vnext.kernels.mxint8 import packed_width
from vnext.models.config.model_config import ModelConfig, without_windows
from vnext.models.errors import ModelError
from vnext.models.layers.sharding import Parallel, local_kv_heads

if TYPE_CHECKING:
    import torch

KvCache = tuple[tuple[Array, Array], ...]


class KvPairs(KvCache):
    """A cache that is asked each step where it lies: looked at once."""

    @cached_property
    def places(self) -> np.ndarray | None:
        """Addresses int64 [2 * layers] of keys and values, one layer after the other, where all have dense blocks at equal
        distances; else None."""
        caches = [cache for pair in self for cache in pair]
        alike = all(have_dense_blocks(*pair) for pair in self) and len({strides_of(cache)[0] for cache in caches}) == 1
        return np.array([address(cache) for cache in caches], dtype=np.int64) if alike else None


class KvGroups(NamedTuple):
    """`windows`: what each group's layers see, 0 for all. `group_of`, `place_of`: each attending layer's group and its place
    in the pages of that group, below `page_layers`."""

    windows: tuple[int, ...]
    group_of: tuple[int, ...]
    place_of: tuple[int, ...]
    page_layers: int


NO_LAYERS = KvGroups((0,), (), (), 1)
"""Of a model without attention: its pages still name the blocks whose states are kept, with one place that no layer has."""


@cache
def kv_groups(config: ModelConfig) -> KvGroups:
    """The layers in groups of one size: that of the kind that takes least, or, where the kinds take about as much, of the one that
    takes most. A group that is not full leaves a part of its pages unused.

    The rule and its factor are vLLM's (docs, "Hybrid KV Cache Manager"; v1/core/kv_cache_utils.py). The layers of a stage are in
    the groups that they have in the whole model, whose block tables they use.
    """
    if config.stage is not None:
        return _part(_grouped(config.stage.windows), config.layer_numbers)
    windows = config.attending_windows
    if not windows:
        return NO_LAYERS
    return _shared(windows, tuple(_sizes(config, windows)), config.cache_layers)


def _sizes(config: ModelConfig, windows: tuple[int, ...]) -> Iterator[int]:
    """What a token takes in each layer, as layers compare: 1 where all are alike."""
    whole = config.whole_heads
    for window in windows:
        heads = config if window or whole is None else whole
        yield heads.kv_head_count * heads.head_dim if whole else 1


def _shared(windows: tuple[int, ...], sizes: tuple[int, ...], cache_layers: tuple[int, ...]) -> KvGroups:
    """Groups of the layers that write, each of the others with that which it reads."""
    sources = cache_layers or tuple(range(len(windows)))
    writing = sorted(set(sources))
    found = _grouped(tuple(windows[layer] for layer in writing), tuple(sizes[layer] for layer in writing))
    at = [writing.index(layer) for layer in sources]
    return found._replace(group_of=tuple(found.group_of[each] for each in at), place_of=tuple(found.place_of[each] for each in at))


def _part(whole: KvGroups, layers: range) -> KvGroups:
    """These layers alone: their places in the pages move together."""
    group_of = whole.group_of[layers.start : layers.stop]
    place_of = tuple(group_of[:at].count(group) for at, group in enumerate(group_of))
    return whole._replace(group_of=group_of, place_of=place_of, page_layers=1 + max(place_of))


def _grouped(layer_windows: tuple[int, ...], sizes: tuple[int, ...] = ()) -> KvGroups:
    kinds: dict[int, list[int]] = {window: [] for window in layer_windows}
    for layer, window in enumerate(layer_windows):
        kinds[window].append(layer)
    size_of = dict(zip(layer_windows, sizes or (1,) * len(layer_windows)))
    counts = [len(layers) * size_of[window] for window, layers in kinds.items()]
    page = max(counts) if max(counts) < 1.25 * min(counts) else min(counts)
    windows: list[int] = []
    group_of, place_of = [0] * len(layer_windows), [0] * len(layer_windows)
    for window, layers in kinds.items():
        size = max(1, page // size_of[window])
        for first in range(0, len(layers), size):
            for place, layer in enumerate(layers[first : first + size]):
                group_of[layer], place_of[layer] = len(windows), place
            windows.append(window)
    return KvGroups(tuple(windows), tuple(group_of), tuple(place_of), 1 + max(place_of))


def _check(config: ModelConfig, block_size: int, is_coded: bool, is_host: bool) -> None:
    """Raise ModelError for a cache that cannot be."""
    if config.whole_heads is not None and not is_host:
        raise ModelError("--device cuda does not serve layers of two head sizes so far: leave it out")
    if config.form.sees_runs and any(window % block_size for window in config.windows):
        raise ModelError(f"--block-size {block_size} does not divide the {max(config.windows)} tokens of a run: choose another")
    if has_index(config) and not is_host:
        raise ModelError("--device cuda does not serve layers that choose keys so far: leave it out")
    if has_index(config) and is_coded:
        raise ModelError("--kv-cache-dtype int8 is not for layers that choose keys: leave it out")
    if config.hosted is not None and config.hosted.is_biased and is_coded:
        raise ModelError("--kv-cache-dtype int8 is not for keys that hold what they add to scores (ALiBi, Doge): leave it out")


def make_kv_cache(
    config: ModelConfig,
    page_count: int,
    block_size: int,
    dtype: Any,
    device: torch.device | str,
    parallel: Parallel,
    together: bool = False,
) -> KvCache:
    """An empty cache of `dtype` (the activations', or int8: kernels/mxint8.py), zeroed: a (key, value) pair for each
    layer that attends; arrays of the host for a dtype of numpy, else tensors. On the CPU a page takes memory when it is first used.

    `together`: a page's layers are one run of memory, [page_count, layers, 2, ...], so that few pages take few huge pages;
    else each tensor is. What computes on the CPU takes both forms, with the same bits.
    """
    groups, is_host = kv_groups(config), str(device) == "cpu"
    shape = (local_kv_heads(config, parallel.world_size), block_size, row_width(config, dtype))
    _check(config, block_size, is_int8(dtype), is_host)

    def zeros(*sizes: int) -> Array:
        if not is_host:
            import torch  # for a GPU

            return torch.zeros(sizes, dtype=dtype, device=device)
        found = spread(huge(math.prod(sizes) * dtype.itemsize)).view(host_dtype(dtype_name(dtype))).reshape(sizes)
        return found if isinstance(dtype, np.dtype) else as_tensor(found)

    parts = row_count(config)
    if config.whole_heads is not None or has_index(config):
        pages = zeros(page_count, kv_bytes_per_page(config, block_size, dtype, parallel) // dtype.itemsize)
        return KvPairs(_unlike_layers(pages, config, block_size, dtype, parallel))
    if together:
        pages = zeros(page_count, groups.page_layers, parts, *shape)
        pairs = tuple((pages[:, place, 0], pages[:, place, parts - 1]) for place in range(groups.page_layers))
    else:
        found = [[zeros(page_count, *shape) for _ in range(parts)] for _ in range(groups.page_layers)]
        pairs = tuple((each[0], each[-1]) for each in found)
    layers = tuple(pairs[place] for place in groups.place_of) or pairs
    return KvPairs(layers) if is_host else layers  # compilers want a plain tuple


def _unlike_layers(
    pages: Array, config: ModelConfig, block_size: int, dtype: Any, parallel: Parallel
) -> Iterator[tuple[Array, Array]]:
    """Each layer's keys and values in pages [page_count, elements], one behind the other in the places of its group."""
    places = kv_groups(config).place_of
    for place, (kv_heads, *widths) in zip(places, _shapes(config, dtype, parallel)):
        tokens = kv_heads * block_size
        begin = place * sum(widths) * tokens
        middle, end = begin + widths[0] * tokens, begin + sum(widths) * tokens
        keys, values = pages[:, begin:middle], pages[:, middle:end]
        yield tuple(each.reshape(-1, kv_heads, block_size, width) for each, width in zip((keys, values), widths))


def _shapes(config: ModelConfig, dtype: Any, parallel: Parallel) -> Iterator[tuple[int, int, int]]:
    """Each attending layer's local key-value heads, the elements of a token's key in one, and those of what is beside it."""
    windows = config.attending_windows
    for window in windows:
        own = config if window else without_windows(config)
        width = row_width(own, dtype)
        yield local_kv_heads(own, parallel.world_size), width, own.latent.index.dim if own.latent and own.latent.index else width


def page_rows(cache: KvCache) -> np.ndarray:
    """The memory of a cache on the host that was made `together`, page by page: uint8 [page_count, bytes]."""
    first = cache[0][0]
    count, page_bytes = first.shape[0], strides_of(first)[0] * first.itemsize
    memory = (ctypes.c_uint8 * (count * page_bytes)).from_address(address(first))
    return np.frombuffer(memory, np.uint8).reshape(count, page_bytes)


def cache_dtype(name: str, dtype: Any) -> Any:
    """The dtype of an option's value, "auto", "int8" or "fp8", beside activations of `dtype`, of the same library; "fp8" is for
    tensors alone."""
    if name == "auto":
        return dtype
    if name == "fp8":
        return torch_dtype("float8_e4m3fn")
    return host_dtype("int8") if isinstance(dtype, np.dtype) else torch_dtype("int8")


def has_index(config: ModelConfig) -> bool:
    """Whether tokens keep an index key beside their row."""
    return config.latent is not None and config.latent.index is not None


def row_count(config: ModelConfig) -> int:
    """Rows that a token has in a layer: a key and a value, or one for both."""
    return 1 if config.latent else 2


def row_width(config: ModelConfig, dtype: Any) -> int:
    """Elements of a token's key, or value, of one head in a cache of `dtype`, or of its row for both."""
    return packed_width(config.head_dim) if is_int8(dtype) else config.head_dim


def kv_bytes_per_page(config: ModelConfig, block_size: int, dtype: Any, parallel: Parallel) -> int:
    """Bytes of one page on one rank, over all layers of a group, keys and values; of the largest group where they differ."""
    groups, item_bytes = kv_groups(config), int(dtype.itemsize)
    if config.whole_heads is not None or has_index(config):
        shapes = zip(groups.place_of, _shapes(config, dtype, parallel))
        return max((place + 1) * kv_heads * sum(widths) for place, (kv_heads, *widths) in shapes) * block_size * item_bytes
    rows = row_count(config) * local_kv_heads(config, parallel.world_size) * block_size
    return rows * row_width(config, dtype) * item_bytes * groups.page_layers
