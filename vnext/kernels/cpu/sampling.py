"""Sampling: penalties and masks of logits, a token for each row, and its log-probability. What a token is, and why it is exact:
`vnext/sampling/weights.py`; a log-probability: `logprobs.py` there.

By what a row is sampled stands in sampling.cpp's list of columns and in the table of sampling parameters, which `require_columns`
compares. Logits are arrays of the host, float32[S, V], whose rows are dense.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from vnext.base.compiled import StaleModule
from vnext.kernels.arrays import Array, address, is_dense, strides_of
from vnext.kernels.cpu.native import kernels

TYPES = {"float": "float32", "int64_t": "int64"}


def require_columns(wanted: Mapping[str, str]) -> None:
    """Raise StaleModule unless the compiled module takes these columns, names and dtypes, in this order."""
    built = dict(reversed(column.split(" ")) for column in kernels.SAMPLE_COLUMNS.split(","))
    if [*wanted.items()] != [(name, TYPES[kind]) for name, kind in built.items()]:
        raise StaleModule(kernels, f"have the sampling columns {', '.join(built)}, where Python has {', '.join(wanted)}")


def pointers(arrays: Iterable[Array]) -> np.ndarray:
    """The addresses of dense arrays, which the caller keeps alive: SampleColumns of sampling.cpp, or rows."""
    return np.array([address(array) for array in arrays], dtype=np.int64)


def mask_rows(logits: Array, words: np.ndarray) -> None:
    """Set logits to minus infinity, in place, where a row's mask has a 0.

    `words` int64[S]: addresses of masks uint32[V / 32, rounded up], the lowest bit first; 0 for a row without one.
    """
    rows, vocabulary = logits.shape
    kernels.mask_rows(address(logits), strides_of(logits)[0], rows, vocabulary, words.ctypes.data)


def penalise_rows(
    logits: Array, rows: Array, prompts: Sequence[Array], counts: Sequence[Array], rates: Sequence[Array]
) -> None:
    """Penalise `rows` int64[P] of the logits, without repeats, in place. `prompts` and `counts` are bool[V] and int32[V] for each,
    `rates` float32[P] three times: repetition, presence, frequency. All dense."""
    addresses = pointers(prompts), pointers(counts)
    repetition, presence, frequency = map(address, rates)
    count, (_, vocabulary) = len(rows), logits.shape
    at = (address(rows), *(each.ctypes.data for each in addresses))
    kernels.penalise_rows(address(logits), strides_of(logits)[0], vocabulary, count, *at, repetition, presence, frequency)


def sample_rows(logits: Array, columns: Sequence[Array]) -> np.ndarray:
    """int64[S] tokens, V at most 2**22. `columns`: dense, [S] each, those of `require_columns`. At temperature 0 the token is the
    lowest id of the largest logit, or the first NaN."""
    rows, vocabulary = logits.shape
    tokens, table = np.empty(rows, dtype=np.int64), pointers(columns)
    kernels.sample_rows(address(logits), strides_of(logits)[0], rows, vocabulary, table.ctypes.data, tokens.ctypes.data)
    return tokens


class Report(NamedTuple):
    """`logprob` float32[S], `rank` int64[S], `top_tokens` int64[S, K], `top_logprobs` float32[S, K], as Sampled of
    vnext/sampling/inputs.py."""

    logprob: np.ndarray
    rank: np.ndarray
    top_tokens: np.ndarray
    top_logprobs: np.ndarray


def report_rows(logits: Array, tokens: Array, count: int) -> Report:
    """Of `tokens` int64[S], dense, and of the `count` likeliest ones, at most V, by the raw logits."""
    assert is_dense(tokens), "tokens with gaps"
    rows, vocabulary = logits.shape
    found = Report(
        np.empty(rows, np.float32), np.empty(rows, np.int64), np.empty((rows, count), np.int64), np.empty((rows, count), np.float32)
    )
    at = address(tokens), count, *map(address, found)
    kernels.report_rows(address(logits), strides_of(logits)[0], rows, vocabulary, *at)
    return found
