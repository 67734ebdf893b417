"""Whole step: runs a step of the common decoder, from token ids to sampled tokens, in one call of the CPU kernels.

Owns the decision whether a model can run this way, and the angles of all positions so far. Serves the decoder of `decoder.py`
whose layers run as one call (`fused.py`), on one rank or on several that share memory. All other models, and steps whose logits
are needed, go through `forward` and `logits`, with the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from vnext.kernels.arrays import Array, address, host_dtype, is_dense, strides_of
from vnext.kernels.cpu import step as kernel
from vnext.kernels.cpu.experts import Described
from vnext.kernels.cpu.native import KINDS, Kind, kernels
from vnext.kernels.cpu.packed import Packed
from vnext.kernels.cpu.stack import Angles
from vnext.models.config.model_config import ModelConfig
from vnext.models.config.rope_config import Rope
from vnext.models.layers import fused
from vnext.models.layers.batch import ForwardBatch
from vnext.models.layers.kv_cache import KvCache, kv_groups
from vnext.models.layers.layer_inputs import InputTable
from vnext.models.layers.rope import query_factors, rotary_angles
from vnext.models.layers.sharding import Parallel

if TYPE_CHECKING:
    from vnext.kernels.thin import StackParts
    from vnext.models.layers.adapted import AdaptedStack, Slots

LOGITS_MAX = 1 << 22
"""Of a step: its memory is kept, and with more of them nothing beside the kernels counts."""
POSITIONS_MIN = 1024


class Masks(Protocol):
    """Which tokens rows may have."""

    @property
    def wait(self) -> Callable[[], None]: ...

    def addresses(self, count: int) -> np.ndarray: ...


class Sampled(Protocol):
    """The sampling parameters of the rows."""

    @property
    def allowed(self) -> Masks | None: ...

    def columns(self) -> tuple[Array, ...]: ...


class WholeStep:
    """A model with its cache. Describes steps of the same batch object once, and reads its tensors again in each step.
    `samples_max`: the most tokens that `run` may sample."""

    def __init__(
        self, model: kernel.StepModel, frequencies: list[tuple[np.ndarray, Rope]], growth: tuple[float, int, int] | None,
        adapted: AdaptedStack | None,
    ) -> None:  # fmt: skip
        self._model, self._frequencies, self._growth, self._adapted = model, frequencies, growth, adapted
        self._described = self._with_angles(POSITIONS_MIN)
        self._batch: ForwardBatch | None = None
        self._sampling: Sampled | None = None
        self._parts: StackParts | None = None
        self._step: kernel.DescribedStep | None = None
        self._room = np.empty(0, np.float32)
        self.samples_max = LOGITS_MAX // model.vocab_size
        self._dtype = host_dtype(Kind(model.stack.kind).name.lower())

    def run(self, batch: ForwardBatch, sampling: Sampled) -> np.ndarray:
        """The tokens sampled at batch.sample_at, int64 [S], to be read before the next call.

        `sampling.columns()` are those of `cpu.sampling.sample_rows`. Masks are needed only after the forward.
        """
        step = self._run(batch, sampling)
        if sampling.allowed:
            sampling.allowed.wait()
            kernels.sample_step(self._described.address, step.address)
        return step.tokens

    def hidden(self, batch: ForwardBatch) -> np.ndarray:
        """The normed states [S, hidden] at batch.sample_at, of the layers' dtype, to be read before the next call."""
        states = self._run(batch, None).kept[0].hidden
        assert states is not None
        return states

    def logits(self, hidden: np.ndarray) -> np.ndarray:
        """Those of normed states [S, hidden]: float32 [S, V], the caller's until the next call. Every rank asks for the same."""
        width = self._model.head.outputs * (self._model.ranks.world_size if self._model.ranks else 1)
        size = len(hidden) * width
        room = self._room if size <= len(self._room) else np.empty(size, np.float32)
        if size <= LOGITS_MAX:
            self._room = room
        found, states = room[:size].reshape(-1, width), np.ascontiguousarray(hidden)
        kernels.step_logits(self._described.address, states.ctypes.data, len(states), found.ctypes.data)
        return found[:, : self._model.vocab_size]

    def _run(self, batch: ForwardBatch, sampling: Sampled | None) -> kernel.DescribedStep:
        """Computes a step as far as it goes without masks: the caches take its keys and values, `tokens` what is sampled; one with
        `hidden` is not sampled. Raises what the functions of StepRanks raise."""
        parts = self._adapted.parts(batch) if self._adapted else None
        if self._step is None or batch is not self._batch or sampling is not self._sampling or parts is not self._parts:
            self._step = self._described_step(batch, sampling, parts)
            self._batch, self._sampling, self._parts = batch, sampling, parts
        while not kernels.run_step(self._described.address, self._step.address):  # a position is beyond the angles
            self._described = self._with_angles(2 * (int(self._step.kept[0].positions.max()) + 1))
        return self._step

    def _described_step(self, batch: ForwardBatch, sampling: Sampled | None, parts: StackParts | None) -> kernel.DescribedStep:
        """A step that samples or, without `sampling`, has its samples' states. The batch keeps the arrays of its groups."""
        groups = [(address(slots), address(table), strides_of(table)[0]) for slots, table in batch.groups]
        assert 1 + len(groups) == len(self._model.kv_head_counts), "a batch of other groups of layers"
        given: dict[str, Any] = {name: getattr(batch, name) for name in kernel.StepArrays._fields if hasattr(batch, name)}
        places = batch.positions if batch.turning is None else batch.turning
        given |= {"groups": np.array(groups, dtype=np.int64) if groups else None, "positions": places}
        given["states"] = batch.recurrent and tuple(batch.recurrent[1:])
        count = len(batch.sample_at)
        if sampling is not None:
            given |= {"columns": sampling.columns(), "masks": sampling.allowed and sampling.allowed.addresses(count)}
        else:
            given |= {"columns": (), "hidden": np.empty((count, self._model.stack.hidden), self._dtype)}
        return kernel.describe_step(kernel.StepArrays(**given, parts=parts))

    def _with_angles(self, position_count: int) -> kernel.DescribedModel:
        positions = np.arange(position_count)
        factors = self._growth and query_factors(positions, self._growth, on_host=True)
        angles = (Angles(*rotary_angles(positions, *each), factors) for each in self._frequencies)
        return kernel.describe_model(self._model, *angles)


def whole_step(
    params: Any,
    kv: KvCache,
    config: ModelConfig,
    parallel: Parallel,
    slots: Slots | None = None,
    pools: Sequence[tuple[Array, ...]] = (),
) -> WholeStep | None:
    """The WholeStep of this model and cache, with the adapters of `slots`, and the pools of recurrent layers; None where the
    kernels cannot run it."""
    if params.stack is None or config.stage is not None or not _goes_with(config, slots, pools):
        return None
    if not _has_plain_ends(params, config, parallel.world_size) or not _can_be_summed(parallel, slots):
        return None
    last_norm = fused.parts_of(params.norm)
    caches = fused.caches_of(params.stack, last_norm[0], kv, pools)
    if caches is None:
        return None
    (_, kv_heads, block_size, _), head_dim = kv[0][0].shape, caches.head_dim
    model = kernel.StepModel(
        stack=params.stack,
        caches=caches,
        head_count=params.stack.head_count(kv_heads, head_dim),
        kv_head_counts=_kv_head_counts(kv, config),
        block_size=block_size,
        last_norm=last_norm,
        embedding=params.embedding.linear if isinstance(params.embedding, Packed) else params.embedding,
        head=params.head.linear,
        vocab_size=config.vocab_size,
        eps=config.rms_norm_eps,
        scale=head_dim**-0.5 if config.query_scale is None else config.query_scale,
        softcap=config.attention_softcap,
        embedding_scale=params.embedding_scale,
        logits_scale=config.form.logits_scale,
        logits_cap=config.logits_softcap,
        places=params.positions,
        inputs=_inputs_of(params.inputs, parallel.rank),
        ranks=_ranks_of(parallel),
    )
    return WholeStep(model, _frequencies_of(params, config), config.form.query_growth, _adapted_stack(params, slots))


def _kv_head_counts(kv: KvCache, config: ModelConfig) -> np.ndarray:
    """Those of each group of layers, int64."""
    groups = kv_groups(config)
    group_of = groups.group_of or (0,)
    return np.array([kv[group_of.index(group)][0].shape[1] for group in range(len(groups.windows))], dtype=np.int64)


def _inputs_of(inputs: InputTable | None, rank: int) -> Described | None:
    """What tokens give to layers, as the kernels see it."""
    if inputs is None:
        return None
    table = inputs.table.linear if isinstance(inputs.table, Packed) else inputs.table
    scales = inputs.scale, inputs.projection_scale, inputs.sum_scale
    first = rank * inputs.table.shape[0]
    return kernel.describe_inputs(table, first, inputs.known, inputs.projection.linear, inputs.norm, scales)


def _frequencies_of(params: Any, config: ModelConfig) -> list[tuple[np.ndarray, Rope]]:
    """Those of the model's angles and, where layers with a window have others, of theirs."""
    frequencies = np.empty(0) if params.frequencies is None else np.asarray(params.frequencies)
    own, local = [(frequencies, config.rope)], params.local_frequencies
    return own if local is None or config.local_rope is None else [*own, (np.asarray(local), config.local_rope)]


def _goes_with(config: ModelConfig, slots: Slots | None, pools: Sequence[tuple[Array, ...]]) -> bool:
    """Whether adapters find none but dense layers that attend, and recurrent layers their pools."""
    is_other = any((config.experts, config.recurrent, config.latent, config.has_unlike_layers))
    return not (is_other and slots is not None) and (config.recurrent is None or bool(pools))


def _adapted_stack(params: Any, slots: Slots | None) -> AdaptedStack | None:
    if not slots:
        return None
    from vnext.models.layers.adapted import AdaptedStack  # needs torch, as adapters do

    return AdaptedStack(fused.products(params.layers), slots)


def _ranks_of(parallel: Parallel) -> kernel.StepRanks | None:
    group = parallel.host
    if group is None:
        return None

    def sum_over_ranks(kind: int, at: int, size_bytes: int) -> None:
        group.sum_at(Kind(kind).name.lower(), at, size_bytes)

    return kernel.StepRanks(parallel.rank, parallel.world_size, sum_over_ranks, group.join_at)


def _can_be_summed(parallel: Parallel, slots: Slots | None) -> bool:
    """Whether several ranks can sum what the kernels leave in memory: no adapter adds to its parts."""
    return parallel.world_size == 1 or (parallel.host is not None and slots is None)


def _has_plain_ends(params: Any, config: ModelConfig, rank_count: int) -> bool:
    """Whether the kernels look up the embedding and multiply by the head as they are."""
    embedding, head, kind, inputs = params.embedding, params.head, params.stack.kind, params.inputs
    if inputs is not None and not (_is_table(inputs.table, kind) and isinstance(inputs.projection, Packed)):
        return False
    if params.embedding_norm is not None or params.head_bias is not None:
        return False
    if not isinstance(head, Packed) or head.linear.gate or head.shape[0] != -(-config.vocab_size // rank_count):
        return False
    return KINDS[head.linear.dtype] is kind and _is_table(embedding, kind)


def _is_table(table: object, kind: Kind) -> bool:
    """Whether the kernels look up its rows, of this kind."""
    if isinstance(table, Packed):
        return KINDS[table.linear.dtype] is kind
    return hasattr(table, "dtype") and is_dense(table) and KINDS[table.dtype] is kind
