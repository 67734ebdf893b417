"""FlashInfer as the attention of a GPU, in the place of cuda/paged_attention.cu, where it is installed and asked for.

Owns the translation of a step to its BatchPrefillWithPagedKVCacheWrapper: our caches [blocks, kv_heads, block_size, D] are its
layout HND, a row's pages go as indptr and indices, host arrays stay on the host. A wrapper's plan lies in pinned memory that
is copied later, so wrappers are used in turn, and one is planned again when its last plan has been copied. Its results
depend on the batch in their last bits.
"""

from __future__ import annotations

import importlib
from importlib.util import find_spec
from typing import Any, NamedTuple

import numpy as np
import torch

from vnext.kernels.calls import AttentionCall, AttentionStep
from vnext.kernels.contracts import ContractError
from vnext.kernels.cuda.plan import on_device
from vnext.kernels.paged_attention import StepAttention

WORKSPACE_BYTES = 128 * 2**20
"""As its documentation recommends; shared by all plans, whose launches go to one stream."""
WRAPPERS = 6
"""Plans on their way at once: of three steps with two groups of layers."""
SERVED = (torch.bfloat16, torch.float16)
HEAD_DIMS = (64, 128, 256)


def is_installed() -> bool:
    """Whether it can be imported here."""
    return find_spec("flashinfer") is not None


def serves(dtype: torch.dtype, head_dim: int) -> bool:
    """Whether it knows this type and this size of heads."""
    return dtype in SERVED and head_dim in HEAD_DIMS


def why_not(dtype: torch.dtype, head_dim: int) -> str:
    """Why it cannot serve such a model here; "" where it can."""
    if not is_installed():
        return "it is not installed here (package flashinfer-python)"
    return "" if serves(dtype, head_dim) else f"it does not know heads of {head_dim} in {str(dtype).removeprefix('torch.')}"


class Planner(NamedTuple):
    """A wrapper and the mark behind its last plan."""

    wrapper: Any
    copied: list[torch.cuda.Event]


class Planners:
    """The wrappers of one device, in turn."""

    def __init__(self, device: torch.device) -> None:
        module = importlib.import_module("flashinfer")
        workspace = torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=device)
        self._ring = [Planner(module.BatchPrefillWithPagedKVCacheWrapper(workspace, "HND"), []) for _ in range(WRAPPERS)]
        self._next = 0

    def plan(self, device: torch.device, *arguments: Any, **more: Any) -> Any:
        """The next wrapper, planned."""
        planner = self._ring[self._next]
        self._next = (self._next + 1) % len(self._ring)
        while planner.copied:
            planner.copied.pop().synchronize()
        planner.wrapper.plan(*arguments, **more)
        if device.type == "cuda":
            planner.copied.append(torch.cuda.current_stream(device).record_event())
        return planner.wrapper


_planners: dict[torch.device, Planners] = {}


class StepPages(StepAttention):
    """Of the layers of a group: planned when a layer shows its heads, scale and cap."""

    __slots__ = ("_pages", "_planned")

    def __init__(self, step: AttentionStep) -> None:
        super().__init__(step)
        self._pages = pages_of(step.context_lengths, step.block_table, step.block_size)
        self._planned: dict[tuple[Any, ...], Any] = {}

    def wrapper(self, query: torch.Tensor, cache: torch.Tensor, scale: float, window: int, softcap: float) -> Any:
        """The wrapper that was planned for such a layer. Its last plan must still be in the ring: a step has few of them."""
        key = (query.shape[1:], query.dtype, cache.dtype, scale, window, softcap)
        if key not in self._planned:
            if len(self._planned) == WRAPPERS // 2:
                raise ContractError(f"layers of one group differ in more than {WRAPPERS // 2} ways, which FlashInfer plans apart")
            self._planned[key] = self._plan(query, cache, scale, window, softcap)
        return self._planned[key]

    def _plan(self, query: torch.Tensor, cache: torch.Tensor, scale: float, window: int, softcap: float) -> Any:
        device = query.device
        if device not in _planners:
            _planners[device] = Planners(device)
        _, heads, head_dim = query.shape
        return _planners[device].plan(
            device, on_host(self.step.query_starts), *self._pages, heads, self.kv_head_count, head_dim, self.block_size,
            causal=True, sm_scale=scale, window_left=window - 1 if window else -1, logits_soft_cap=softcap, q_data_type=query.dtype,
            kv_data_type=cache.dtype,
        )  # fmt: skip


def pages_of(
    context_lengths: np.ndarray, block_table: torch.Tensor, block_size: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """A step's pages as it takes them, int32: indptr [R + 1] on the host, indices on the device, tokens of the last pages [R]."""
    contexts = context_lengths.astype(np.int64)
    counts = -(-contexts // block_size)
    starts = np.zeros(len(counts) + 1, dtype=np.int64)
    np.cumsum(counts, out=starts[1:])
    row = np.repeat(np.arange(len(counts)), counts)
    places = row * block_table.shape[1] + np.arange(len(row)) - starts[row]
    (at,) = on_device((places,), block_table.device)
    return on_host(starts), block_table.reshape(-1).index_select(0, at), on_host(contexts - (counts - 1) * block_size)


def on_host(array: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(array.astype(np.int32))


def attention_metadata(step: AttentionStep) -> StepPages:
    """As paged_attention.attention_metadata; every row has a query."""
    return StepPages(step)


def paged_attention(query: torch.Tensor, call: AttentionCall) -> torch.Tensor:
    """As paged_attention.paged_attention, of what `serves` allows."""
    key_cache, value_cache, metadata, scale, window, softcap, key_scale, value_scale, *_ = call
    wrapper = metadata.wrapper(query, key_cache, scale, window, softcap)
    scales = {} if key_scale == value_scale == 1.0 else {"k_scale": key_scale, "v_scale": value_scale}
    found: torch.Tensor = wrapper.run(query.contiguous(), (key_cache, value_cache), **scales)
    return found
