"""Index work of a step's batch as Numba CUDA kernels: the fast implementations of the operations in batch_index.py.

Owns four kernels and the arguments of their launch. Imported only on use, because `numba.cuda` takes most of a second to load.
Numba compiles them to PTX; they are loaded and launched as the other kernels are, because its own launch wraps each tensor and
took 0.5 ms of the host on an H200's machine. One block of threads handles a span or entry, and its threads stride over the
tokens. Needs no shared memory, barrier or order among blocks: at most one thread writes each element.
In Numba's simulator (NUMBA_ENABLE_CUDASIM=1 before Numba is first imported) the same kernels run over CPU tensors.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import torch
from numba import cuda

from vnext.kernels import batch_contracts
from vnext.kernels.cuda.interface import Words

THREADS_OF_A_TOKEN, THREADS_OF_A_CHUNK = 32, 128
CHUNK_TOKENS = 64  # spans of this average length are worth more than a warp


# ---- kernels: arrays as in batch_index.py ------------------------------------------------------------------------


def write_spans_kernel(
    target: torch.Tensor, rows: torch.Tensor, columns: torch.Tensor, starts: torch.Tensor, values: torch.Tensor
) -> None:
    span = cuda.blockIdx.x
    begin, end = starts[span], starts[span + 1]
    row, column = rows[span], columns[span] - begin
    place = begin + cuda.threadIdx.x
    while place < end:
        target[row, column + place] = values[place]
        place += cuda.blockDim.x


def index_tokens_kernel(
    begins: torch.Tensor,
    query_starts: torch.Tensor,
    rows: torch.Tensor,
    table: torch.Tensor,
    block_size: int,
    positions: torch.Tensor,
    slots: torch.Tensor,
    context_lengths: torch.Tensor,
) -> None:
    entry = cuda.blockIdx.x
    begin, end = query_starts[entry], query_starts[entry + 1]
    first, row = begins[entry], rows[entry]
    if cuda.threadIdx.x == 0:
        context_lengths[entry] = first + (end - begin)
    place = begin + cuda.threadIdx.x
    while place < end:
        position = first + (place - begin)
        block = position // block_size
        positions[place] = position
        slots[place] = table[row, block] * block_size + (position - block * block_size)
        place += cuda.blockDim.x


def place_tokens_kernel(last: torch.Tensor, rows: torch.Tensor, at: torch.Tensor, token_ids: torch.Tensor) -> None:
    index = cuda.blockIdx.x * cuda.blockDim.x + cuda.threadIdx.x
    if index < rows.shape[0]:
        token_ids[at[index]] = last[rows[index]]


_L, _I, _TABLE = "int64[::1]", "int32[::1]", "int32[:, ::1]"
SIGNATURES = {
    write_spans_kernel: (f"void({_TABLE}, {_L}, {_L}, {_L}, {_I})", f"void(int64[:, ::1], {_L}, {_L}, {_L}, {_L})"),
    index_tokens_kernel: (f"void({_L}, {_I}, {_L}, {_TABLE}, int64, {_L}, {_L}, {_I})",),
    place_tokens_kernel: (f"void({_L}, {_L}, {_L}, {_L})",),
}
"""The argument types that contracts let through: compiled before a graph is captured, see `compile_all`."""

_ENTRY = re.compile(r"\.visible \.entry (\w+)\(")
_ready: dict[Any, Any] = {}


def compile_all() -> None:
    """Compile and load every kernel for the current device: that is refused while a CUDA graph is captured."""
    for kernel, signatures in SIGNATURES.items():
        for signature in signatures:
            _loaded(kernel, signature)


def _loaded(kernel: Any, signature: str) -> Any:
    """The kernel for the current device, compiled when it is first asked for."""
    if (kernel, signature) not in _ready:
        from vnext.kernels.cuda.driver import load_text

        text, _ = cuda.compile_ptx(kernel, signature, cc=torch.cuda.get_device_capability())
        entry = _ENTRY.search(text)
        assert entry is not None, "PTX has an entry"
        _ready[kernel, signature] = load_text(text, entry[1])
    return _ready[kernel, signature]


def words(arguments: Sequence[torch.Tensor | int]) -> list[int]:
    """What Numba's kernels take, 64 bits each: an array is two null pointers, its count, the size of an item, its address, its
    sizes and its strides in bytes."""
    found: list[int] = []
    for each in arguments:
        if isinstance(each, int):
            found.append(each)
        else:
            size = each.element_size()
            found += (0, 0, each.numel(), size, each.data_ptr(), *each.shape, *(size * stride for stride in each.stride()))
    return found


# ---- launches ----------------------------------------------------------------------------------------------------


def write_spans(
    target: torch.Tensor, rows: torch.Tensor, columns: torch.Tensor, starts: torch.Tensor, values: torch.Tensor
) -> None:
    batch_contracts.check_write_spans(target, rows, columns, starts, values)
    _launch(write_spans_kernel, len(rows), _threads(len(rows), len(values)), target, rows, columns, starts, values)


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
    arguments = (begins, query_starts, rows, table, block_size, positions, slots, context_lengths)
    batch_contracts.check_index_tokens(*arguments)
    _launch(index_tokens_kernel, len(rows), _threads(len(rows), len(positions)), *arguments)


def place_tokens(last: torch.Tensor, rows: torch.Tensor, at: torch.Tensor, token_ids: torch.Tensor) -> None:
    batch_contracts.check_place_tokens(last, rows, at, token_ids)
    threads = THREADS_OF_A_CHUNK
    _launch(place_tokens_kernel, -(-len(rows) // threads), threads, last, rows, at, token_ids)


def _threads(span_count: int, token_count: int) -> int:
    """Threads of a block: a warp in a decode step, more where spans are long."""
    return THREADS_OF_A_CHUNK if token_count >= CHUNK_TOKENS * max(span_count, 1) else THREADS_OF_A_TOKEN


def _launch(kernel: Any, blocks: int, threads: int, *arguments: torch.Tensor | int) -> None:
    """On torch's current stream, or in the simulator; nothing for no blocks, which CUDA refuses."""
    if blocks == 0:
        return
    first = arguments[0]
    assert isinstance(first, torch.Tensor)
    if first.is_cuda:
        signature = SIGNATURES[kernel][len(SIGNATURES[kernel]) > 1 and first.dtype == torch.int64]
        _loaded(kernel, signature).launch((blocks,), (threads,), Words(words(arguments)))
        return
    if kernel not in _ready:
        _ready[kernel] = cuda.jit(kernel)
    _ready[kernel][blocks, threads](*(each if isinstance(each, int) else each.numpy() for each in arguments))
