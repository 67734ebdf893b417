"""Helpers for tests of models: batches by hand, small checkpoints, the demo model, ranks as threads."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import torch

from vnext.kernels.cpu.stack import AuxStates
from vnext.kernels.format import INT8, WeightFormats, weight_formats
from vnext.models.config.model_config import ModelConfig, Rope
from vnext.models.layers.batch import ForwardBatch, GroupPlaces, HostBatch
from vnext.models.layers.sharding import Parallel, alone
from vnext.replay.rerun.turns import added

DEMO_MODEL = Path(__file__).resolve().parents[3] / "shared" / "models" / "stories260k"


class Chunk(NamedTuple):
    """Tokens of one row in this step, how many came before, and the row's blocks."""

    tokens: Sequence[int]
    computed: int
    blocks: Sequence[int]


def make_batch(chunks: Sequence[Chunk], block_size: int, groups: int = 1) -> ForwardBatch:
    """A batch that samples every token, so that all logits can be compared. A block is `groups` neighbouring pages."""
    (slots, table), *others = [places(chunks, block_size, groups, group) for group in range(groups)]
    positions = [np.arange(chunk.computed, chunk.computed + len(chunk.tokens)) for chunk in chunks]
    starts = np.cumsum([0] + [len(chunk.tokens) for chunk in chunks]).astype(np.int32)
    lengths = np.array([chunk.computed + len(chunk.tokens) for chunk in chunks], dtype=np.int32)
    return ForwardBatch(
        token_ids=torch.tensor([token for chunk in chunks for token in chunk.tokens]),
        positions=torch.from_numpy(np.concatenate(positions)),
        slots=slots,
        query_starts=torch.from_numpy(starts),
        context_lengths=torch.from_numpy(lengths),
        block_table=table,
        sample_at=torch.arange(int(starts[-1])),
        host=HostBatch(starts, lengths),
        groups=tuple(others),
    )


def with_aux(batch: ForwardBatch, layers: Sequence[int], hidden: int, dtype: torch.dtype = torch.float32) -> ForwardBatch:
    """The batch with room for the inputs of these layers."""
    states = torch.full((len(batch.token_ids), len(layers), hidden), float("nan"), dtype=dtype)
    return batch._replace(aux=AuxStates(np.array(layers, dtype=np.int64), states))


def places(chunks: Sequence[Chunk], block_size: int, groups: int, group: int) -> GroupPlaces:
    """Slots and block tables in one group of layers."""
    slots, table = [], np.full((len(chunks), max(len(chunk.blocks) for chunk in chunks)), 10**6, dtype=np.int32)
    for index, chunk in enumerate(chunks):
        pages, place = np.asarray(chunk.blocks) * groups + group, np.arange(chunk.computed, chunk.computed + len(chunk.tokens))
        slots.append(pages[place // block_size] * block_size + place % block_size)
        table[index, : len(pages)] = pages
    return GroupPlaces(torch.from_numpy(np.concatenate(slots)), torch.from_numpy(table))


def tiny_config(**changes: Any) -> ModelConfig:
    """A configuration small enough to compute in no time; changes override it."""
    plain: dict[str, Any] = dict(
        architecture="LlamaForCausalLM",
        vocab_size=61,
        hidden_size=32,
        intermediate_size=52,
        layer_count=2,
        head_count=4,
        kv_head_count=2,
        head_dim=8,
        position_count_max=512,
        rms_norm_eps=1e-5,
        rope=Rope(theta=10000.0),
        tie_embeddings=False,
        attention_bias=False,
        mlp_bias=False,
        dtype="float32",
        bos_token_id=None,
        eos_token_ids=(),
    )
    return ModelConfig(**{**plain, **changes})


class Model(NamedTuple):
    """A loaded model as one value, with a cache big enough for the test."""

    family: Any
    params: Any
    kv: Any
    config: ModelConfig
    parallel: Parallel

    def logits(self, *chunks: Chunk) -> torch.Tensor:
        """Logits [T, V] of every token of one step."""
        from vnext.models.layers.kv_cache import kv_groups

        batch = make_batch(chunks, self.kv[0][0].shape[2], len(kv_groups(self.config).windows))
        hidden, _ = self.family.forward(self.params, self.kv, batch, self.config, self.parallel)
        return self.family.logits(self.params, hidden, self.config, self.parallel)


def formats_of(text: str, exact: str = "plain") -> WeightFormats:
    """Of a value of --quantization, and of --activations behind it where it is "... by ..."."""
    quantization, _, activations = text.partition(" by ")
    return weight_formats(quantization, exact, activations or INT8)


def load_model(
    path: Path,
    *,
    page_count: int = 64,
    block_size: int = 16,
    parallel: Parallel | None = None,
    dtype: torch.dtype = torch.float32,
    quantization: str = "none",
    wide: bool = False,
    asked_length: int | None = None,
) -> Model:
    """The checkpoint in `path` on the CPU, in float32 unless told otherwise."""
    from vnext.models.config.model_config import load_config
    from vnext.models.layers.kv_cache import kv_groups, make_kv_cache
    from vnext.models.loading.weights import load_params
    from vnext.models.registry import family

    parallel = parallel or alone()
    config = load_config(path, asked_length=asked_length)
    module = family(config.architecture)
    formats = formats_of(quantization, "wide" if wide else "plain")
    params = load_params(path, config, parallel, dtype, "cpu", formats=formats)
    page_count = page_count * len(kv_groups(config).windows)
    kv = make_kv_cache(config, page_count, block_size, dtype, "cpu", parallel)
    return Model(module, params, kv, config, parallel)


def bytes_at(address: int, size_bytes: int) -> torch.Tensor:
    """The memory at an address, uint8."""
    return torch.frombuffer((ctypes.c_char * size_bytes).from_address(address), dtype=torch.uint8)


class ThreadGroup:
    """Ranks as threads of one process: every collective meets at a barrier and sums by the tree of ranks."""

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self._barrier = threading.Barrier(world_size, timeout=60)
        self._parts: list[torch.Tensor] = [torch.empty(0)] * world_size

    def _exchange(self, rank: int, tensor: torch.Tensor) -> list[torch.Tensor]:
        self._barrier.wait()
        self._parts[rank] = tensor
        self._barrier.wait()
        return list(self._parts)

    def sum_at(self, rank: int, dtype: str, at: int, size_bytes: int) -> None:
        """See sharding.HostRanks."""
        if not size_bytes:
            return
        mine = bytes_at(at, size_bytes).view(getattr(torch, dtype))
        mine.copy_(added(self._exchange(rank, mine.clone())))

    def join_at(self, rank: int, part: int, joined: int, size_bytes: int, row_bytes: int) -> None:
        """See sharding.HostRanks."""
        if not size_bytes:
            return
        parts = self._exchange(rank, bytes_at(part, size_bytes).view(-1, row_bytes).clone())
        bytes_at(joined, size_bytes * self.world_size).copy_(torch.cat(parts, 1).flatten())

    def parallel(self, rank: int) -> Parallel:
        """The view of one rank."""
        host = SimpleNamespace(sum_at=partial(self.sum_at, rank), join_at=partial(self.join_at, rank))
        return Parallel(
            rank=rank,
            world_size=self.world_size,
            all_reduce=lambda tensor: added(self._exchange(rank, tensor)),
            all_gather=lambda tensor, dim: torch.cat(self._exchange(rank, tensor), dim),
            host=host,
        )

    def run(self, work: Callable[[Parallel], Any]) -> list[Any]:
        """`work` on every rank; the results in rank order. The first error is raised again."""
        results: list[Any] = [None] * self.world_size
        errors: list[Exception] = []

        def body(rank: int) -> None:
            try:
                results[rank] = work(self.parallel(rank))
            except Exception as error:  # a thread's error must reach the test, whatever it is
                errors.append(error)
                self._barrier.abort()

        threads = [threading.Thread(target=body, args=(rank,)) for rank in range(self.world_size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if errors:
            raise errors[0]
        return results
