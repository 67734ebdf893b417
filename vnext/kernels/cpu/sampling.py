"""Sampling: a token for each row of logits. What a token is, and why it is exact: `vnext/sampling/weights.py`.

Knows no penalties, bias or bans: those are in the logits already. By what a row is sampled stands in sampling.cpp's list of columns
and in the table of sampling parameters, which `require_columns` compares.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from vnext.compiled import StaleModule
from vnext.kernels.arrays import Array, address, torch_dtype
from vnext.kernels.cpu.native import module

if TYPE_CHECKING:
    import torch

TYPES = {"float": "float32", "int64_t": "int64"}


def require_columns(wanted: Mapping[str, str]) -> None:
    """Raise StaleModule unless the compiled module takes these columns, names and dtypes, in this order."""
    built = dict(reversed(column.split(" ")) for column in module().SAMPLE_COLUMNS.split(","))
    if [*wanted.items()] != [(name, TYPES[kind]) for name, kind in built.items()]:
        raise StaleModule(module(), f"have the sampling columns {', '.join(built)}, where Python has {', '.join(wanted)}")


def pointers(columns: Sequence[Array]) -> np.ndarray:
    """SampleColumns of sampling.cpp: the addresses of dense columns, which the caller keeps alive."""
    return np.array([address(column) for column in columns], dtype=np.int64)


def mask_rows(logits: torch.Tensor, words: np.ndarray) -> None:
    """Set logits float32[S, V] to minus infinity, in place, where a row's mask has a 0; its elements lie side by side.

    `words` int64[S]: addresses of masks uint32[V / 32, rounded up], the lowest bit first; 0 for a row without one.
    """
    rows, vocabulary = logits.shape
    module().mask_rows(logits.data_ptr(), logits.stride(0), rows, vocabulary, words.ctypes.data)


def sample_rows(logits: torch.Tensor, columns: Sequence[torch.Tensor]) -> torch.Tensor:
    """int64[S] tokens of `logits` float32[S, V], V at most 2**22, each row's elements side by side (else it is copied).

    `columns`: dense, [S] each, those of `require_columns`. At temperature 0 the token is the lowest id of the largest
    logit, or the first NaN.
    """
    if logits.stride(1) != 1:
        logits = logits.contiguous()
    rows, vocabulary = logits.shape
    tokens, table = logits.new_empty(rows, dtype=torch_dtype("int64")), pointers(columns)
    module().sample_rows(logits.data_ptr(), logits.stride(0), rows, vocabulary, table.ctypes.data, tokens.data_ptr())
    return tokens
