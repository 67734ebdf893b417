"""Attention from outside: functions of installed packages that attend in place of vnext's kernels.

Owns what is checked of them before an engine serves: results are those of the reference but for rounding, and a query's bits depend
on its own row alone, however that was cut. They run as the user's own code: neither a request nor a log can bring one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from operator import attrgetter
from typing import NamedTuple

import numpy as np
import torch

from vnext.base.installed import InstalledError, first_line, load_entry
from vnext.kernels import paged_attention as plain
from vnext.kernels.calls import AttentionCall, AttentionStep
from vnext.kernels.table import Operations
from vnext.models.config.model_config import ModelConfig
from vnext.models.layers.kv_cache import kv_groups
from vnext.models.layers.sharding import Parallel, local_heads, local_kv_heads

GROUP = "vnext.attention"
"""The entry points of packages: the value, a module say, has attention_metadata and paged_attention."""
BLOCK = 16
ROWS = ((1, 37), (21, 55), (7, 7), (1, 160), (2, 34))
"""Queries and contexts of the rows that are tried."""
ERRORS_MAX = {torch.float32: 1e-4, torch.bfloat16: 0.05, torch.float16: 0.01}
"""Of results around 1; a key more or fewer is ten times as much."""


class AttentionError(ValueError):
    """Attention that cannot be used. The message is one sentence with its name and the remedy."""


class Heads(NamedTuple):
    """What of a model attends: heads of queries, and of keys and values, their size and dtype; the layers' windows, a softcap, 0
    for none, and whether there are sinks."""

    queries: int
    keys: int
    size: int
    dtype: torch.dtype
    windows: tuple[int, ...] = (0,)
    softcap: float = 0.0
    has_sinks: bool = False


class OwnAttention(NamedTuple):
    """Of a package, with the signatures of paged_attention.py. They may raise any error for calls that they do not serve."""

    name: str
    attention_metadata: Callable[[AttentionStep], object]
    paged_attention: Callable[[torch.Tensor, AttentionCall], torch.Tensor]

    def among(self, others: Operations) -> Operations:
        return others._replace(attention_metadata=self.attention_metadata, paged_attention=self.paged_attention)


REFERENCE = OwnAttention("reference", plain.attention_metadata, plain.paged_attention)


class Row(NamedTuple):
    """Queries [Q, H, D] that end a context of so many tokens, in the blocks of `table` int32 [W]."""

    queries: torch.Tensor
    context: int
    table: torch.Tensor


def heads_of(config: ModelConfig, parallel: Parallel, dtype: torch.dtype) -> Heads:
    """A rank's. Raises AttentionError for a model whose keys and values are of another kind."""
    kinds = {"latent keys": config.latent, "layers that differ": config.has_unlike_layers, "an encoder": config.encoder}
    if kind := next((kind for kind, is_one in kinds.items() if is_one), ""):
        raise AttentionError(f"attention from outside serves no model with {kind} so far")
    queries, keys = local_heads(config, parallel.world_size), local_kv_heads(config, parallel.world_size)
    softcap, windows = config.attention_softcap, kv_groups(config).windows
    return Heads(queries, keys, config.head_dim, dtype, windows, softcap, config.form.has_sinks)


def own_attention(name: str, heads: Heads, device: str = "cpu") -> OwnAttention:
    """The attention that an installed package has under this name, after its trial. Raises AttentionError."""
    try:
        functions = attrgetter("attention_metadata", "paged_attention")(load_entry(GROUP, name, "attention"))
    except InstalledError as error:
        raise AttentionError(str(error)) from error
    except AttributeError as error:
        raise AttentionError(f"the attention {name} lacks a function: {error}") from error
    found = OwnAttention(name, *functions)
    require_same(found, heads, device)
    return found


def require_same(own: OwnAttention, heads: Heads, device: str = "cpu") -> None:
    """Raise AttentionError unless it gives what the reference does, and the same bits of a row in any step."""
    rows, caches, sinks = trial(heads, device)
    for window in heads.windows:
        call = AttentionCall(*caches, None, heads.size**-0.5, window, heads.softcap, sinks=sinks)
        wanted, whole = _attended(REFERENCE, rows, call, heads), _tried(own, rows, call, heads)
        for one, other in zip(wanted, whole, strict=True):
            if not bool((one.float() - other.float()).abs().max() <= ERRORS_MAX[heads.dtype]):
                where = f"in a window of {window}" if window else "of the whole context"
                raise AttentionError(f"the attention {own.name} gives other results {where} than vnext's reference")
        for what, some, places in _orders(rows):
            for place, found in zip(places, _tried(own, some, call, heads), strict=True):
                if not torch.equal(found, whole[place][-len(found) :] if what != "begun" else whole[place][: len(found)]):
                    why = "a query's result may depend on its own row alone, however it is cut"
                    raise AttentionError(f"the attention {own.name} gives other bits for rows {what}: {why}")


def trial(heads: Heads, device: str) -> tuple[list[Row], tuple[torch.Tensor, torch.Tensor], torch.Tensor | None]:
    """Rows with blocks in no order, a cache with more pages than those, and sinks where there are any."""
    generator = torch.Generator().manual_seed(1)
    width = -(-max(context for _, context in ROWS) // BLOCK)
    pages = torch.randperm(len(ROWS) * width + 3, generator=generator).int()

    def drawn(*sizes: int) -> torch.Tensor:
        return torch.randn(*sizes, generator=generator).to(device, heads.dtype)

    cache = drawn(len(pages), heads.keys, BLOCK, heads.size), drawn(len(pages), heads.keys, BLOCK, heads.size)
    rows = [
        Row(drawn(queries, heads.queries, heads.size), context, pages[place * width : (place + 1) * width].to(device))
        for place, (queries, context) in enumerate(ROWS)
    ]
    return rows, cache, torch.randn(heads.queries, generator=generator).to(device) if heads.has_sinks else None


def _orders(rows: list[Row]) -> Iterator[tuple[str, list[Row], list[int]]]:
    """What is tried: the rows, or parts of them, and which one each is of."""
    every = list(range(len(rows)))
    yield "again", rows, every
    yield "in another order", rows[::-1], every[::-1]
    yield from (("alone", [row], [place]) for place, row in enumerate(rows))
    long = 1
    queries, context, table = rows[long]
    for cut in (1, 8, 20):
        yield "begun", [Row(queries[:cut], context - len(queries) + cut, table), rows[0]], [long, 0]
        yield "cut otherwise", [rows[2], Row(queries[cut:], context, table)], [2, long]


def _tried(own: OwnAttention, rows: list[Row], call: AttentionCall, heads: Heads) -> list[torch.Tensor]:
    try:
        return _attended(own, rows, call, heads)
    except Exception as error:  # a package's code may raise anything
        raise AttentionError(f"the attention {own.name} fails with {type(error).__name__}: {first_line(error)}") from error


def _attended(attention: OwnAttention, rows: list[Row], call: AttentionCall, heads: Heads) -> list[torch.Tensor]:
    """One result [Q, H, D] a row."""
    counts = [len(row.queries) for row in rows]
    starts = np.concatenate(([0], np.cumsum(counts))).astype(np.int32)
    contexts, table = np.array([row.context for row in rows], np.int32), torch.stack([row.table for row in rows])
    step = AttentionStep(starts, contexts, table, BLOCK, heads.keys, heads.windows)
    query = torch.cat([row.queries for row in rows])
    found = attention.paged_attention(query, call._replace(metadata=attention.attention_metadata(step)))
    if not isinstance(found, torch.Tensor) or (found.dtype, found.shape) != (query.dtype, query.shape):
        raise TypeError(f"a {type(found).__name__} that is not of the queries' dtype and shape")
    return list(found.split(counts))
