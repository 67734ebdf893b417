"""The contracts of a batch's index work: shapes and types that its plain forms and Numba's kernels ask for alike.

Entries of index tensors are not looked at: that would wait for the device.
"""

from __future__ import annotations

import torch

from vnext.kernels.contracts import ContractError, expect, expect_together

INTEGERS = (torch.int32, torch.int64)


def check_write_spans(
    target: torch.Tensor, rows: torch.Tensor, columns: torch.Tensor, starts: torch.Tensor, values: torch.Tensor
) -> None:
    """target [R, W] int32 or int64; rows, columns int64 [N]; starts int64 [N + 1] from 0; values [starts[N]] as target."""
    expect("target", target, (None, None), INTEGERS, contiguous=True)
    expect("rows", rows, (None,), (torch.int64,))
    expect("columns", columns, (len(rows),), (torch.int64,))
    expect("starts", starts, (len(rows) + 1,), (torch.int64,))
    expect("values", values, (None,), (target.dtype,))
    expect_together(target, rows=rows, columns=columns, starts=starts, values=values)


def check_index_tokens(
    begins: torch.Tensor,
    query_starts: torch.Tensor,
    rows: torch.Tensor,
    table: torch.Tensor,
    block_size: int,
    positions: torch.Tensor,
    slots: torch.Tensor,
    context_lengths: torch.Tensor,
) -> None:
    """begins, rows int64 [N]; query_starts int32 [N + 1] from 0; table int32 [R, W]; written: positions, slots int64 [T],
    T = query_starts[N] or more, and context_lengths int32 [N]."""
    expect("begins", begins, (None,), (torch.int64,))
    count = len(begins)
    expect("query_starts", query_starts, (count + 1,), (torch.int32,))
    expect("rows", rows, (count,), (torch.int64,))
    expect("table", table, (None, None), (torch.int32,), contiguous=True)
    expect("positions", positions, (None,), (torch.int64,))
    expect("slots", slots, tuple(positions.shape), (torch.int64,))
    expect("context_lengths", context_lengths, (count,), (torch.int32,))
    if block_size < 1:
        raise ContractError(f"block_size must be 1 or more but is {block_size}")
    expect_together(begins, query_starts=query_starts, rows=rows, table=table, positions=positions, slots=slots)


def check_place_tokens(last: torch.Tensor, rows: torch.Tensor, at: torch.Tensor, token_ids: torch.Tensor) -> None:
    """last int64 [R]; rows, at int64 [N]; token_ids int64 [T], written at N of its places."""
    for name, tensor in (("last", last), ("rows", rows), ("token_ids", token_ids)):
        expect(name, tensor, (None,), (torch.int64,))
    expect("at", at, (len(rows),), (torch.int64,))
    expect_together(last, rows=rows, at=at, token_ids=token_ids)
