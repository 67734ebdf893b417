"""Index work of a step's batch: the positions and slots of tokens, and the changes that bring the batch's rows up to date.

Owns the plain torch implementations of three operations and the choice between them and the Numba kernels of batch_numba.py.
All write into the caller's tensors, which live as long as the batch, so that CUDA graphs may hold their addresses. Knows rows,
blocks and tokens, not requests. Does not check the entries of index tensors, because that would wait for the device: the
caller has made them from a state whose laws hold.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from importlib.util import find_spec
from typing import NamedTuple

import torch

from vnext.kernels.batch_contracts import check_index_tokens, check_place_tokens, check_write_spans

NOWHERE = -(2**62)
"""Stands for "no index in a span"."""


class BatchOperations(NamedTuple):
    """All three for one kind of device; signatures are those of the plain forms."""

    write_spans: Callable[..., None]
    index_tokens: Callable[..., None]
    place_tokens: Callable[..., None]


@cache
def batch_operations(device_type: str) -> BatchOperations:
    """Numba's kernels for "cuda" where Numba compiles them, else plain torch, which runs on every device."""
    if device_type != "cuda" or why_not_compiled():
        return plain_batch_operations()
    from vnext.kernels import batch_numba

    return BatchOperations(*(getattr(batch_numba, name) for name in BatchOperations._fields))


@cache
def why_not_compiled() -> str:
    """Why Numba's kernels cannot be used here, "" where they can. On a GPU they are compiled to find out, which takes seconds."""
    if find_spec("numba") is None:
        return "Numba is missing"
    try:
        from vnext.kernels import batch_numba

        if torch.cuda.is_available():
            batch_numba.compile_all()
    except Exception as error:  # of another library, which may fit neither this NumPy nor this driver
        return f"Numba does not compile its kernels ({type(error).__name__}: {error})"
    return ""


def plain_batch_operations() -> BatchOperations:
    """The oracle of every other form."""
    return BatchOperations(write_spans, index_tokens, place_tokens)


# ---- plain forms -------------------------------------------------------------------------------------------------


def write_spans(
    target: torch.Tensor, rows: torch.Tensor, columns: torch.Tensor, starts: torch.Tensor, values: torch.Tensor
) -> None:
    """Write values [starts[n], starts[n + 1]) to row rows[n] from columns[n] on. Spans do not overlap.

    One form for all differences: a row that joined is its whole span from 0, a row that grew is what was added.
    """
    check_write_spans(target, rows, columns, starts, values)
    span, inside = _spans(starts, len(values))
    target[rows[span], columns[span] + inside] = values


def index_tokens(
    begins: torch.Tensor,
    query_starts: torch.Tensor,
    rows: torch.Tensor,
    table: torch.Tensor,
    block_size: int,
    positions: torch.Tensor,
    slots: torch.Tensor,
    context_lengths: torch.Tensor,
) -> None:
    """Entry n computes tokens [query_starts[n], query_starts[n + 1]) of the step, at positions from begins[n] on, and
    holds the blocks of table[rows[n]]. Writes each token's position and slot (block * block_size + offset), and the
    entries' context lengths; places behind the last token stay as they are."""
    check_index_tokens(begins, query_starts, rows, table, block_size, positions, slots, context_lengths)
    if len(begins) == 0:
        return
    entry, inside = _spans(query_starts.long(), len(positions))
    is_token = inside >= 0
    found = (begins[entry] + inside).clamp(min=0)
    blocks = table[rows[entry], found // block_size].long()
    positions.copy_(torch.where(is_token, found, positions))
    slots.copy_(torch.where(is_token, blocks * block_size + found % block_size, slots))
    context_lengths.copy_(begins + query_starts.diff())


def place_tokens(last: torch.Tensor, rows: torch.Tensor, at: torch.Tensor, token_ids: torch.Tensor) -> None:
    """token_ids[at[n]] = last[rows[n]]: rows that run ahead of the state take the token that they sampled last."""
    check_place_tokens(last, rows, at, token_ids)
    token_ids[at] = last[rows]


def _spans(starts: torch.Tensor, total: int) -> tuple[torch.Tensor, torch.Tensor]:
    """For each of `total` places of consecutive spans (int64 each): the span, and the place in it; a negative one, and the
    last span, behind all of them. Of a shape that the host knows, so nothing waits."""
    place = torch.arange(total, device=starts.device)
    span = (torch.searchsorted(starts, place, right=True) - 1).clamp(max=len(starts) - 2)
    return span, torch.where(place < starts[-1], place - starts[span], NOWHERE)
