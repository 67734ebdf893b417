"""A machine: all ranks of a model in this process, running steps on caches that the caller holds.

Owns the loading, the check that the model is the log's, and the ranks' work. Knows batches, no requests.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np
import torch

from vnext.base.spelling import reason
from vnext.kernels.cpu import native
from vnext.kernels.thin import ThinBlocks
from vnext.models.config.adapter_config import RANK_MAX
from vnext.models.config.model_config import load_config
from vnext.models.errors import ModelError
from vnext.models.hosted.own_attention import AttentionError, heads_of, own_attention
from vnext.models.layers.batch import ForwardBatch
from vnext.models.layers.kv_cache import KvCache, kv_groups
from vnext.models.layers.recurrent import copy_states
from vnext.models.layers.sharding import check_world_size
from vnext.models.loading.adapter import load_adapter
from vnext.models.loading.checkpoint import fingerprint
from vnext.models.loading.unread import has_tower
from vnext.replay.rerun.kept_inputs import KeptInputs
from vnext.replay.rerun.model_of_log import KeptAt, folder_of
from vnext.replay.rerun.numerics import CannotRun, Numerics
from vnext.replay.rerun.shard import Kernels, Shard
from vnext.replay.rerun.turns import Turns
from vnext.replay.rerun.versions import Versions
from vnext.runtime.processes.determinism import describe_process
from vnext.runtime.processes.thread_plan import TEAM_SPIN_US, default_threads
from vnext.runtime.protocol.settings import SettingsError
from vnext.sampling.constraint import Vocabulary
from vnext.sampling.outside import OwnSampler, SamplerError, own_sampler
from vnext.state.config import SchedulerConfig
from vnext.state.events import EngineStarted
from vnext.state.state import State

Pools = Sequence[tuple[torch.Tensor, ...]]


class Caches(NamedTuple):
    """One cache per rank, each of `pages` pages of `block_size` tokens; `states`: each rank's pools of recurrent states."""

    of_rank: tuple[KvCache, ...]
    pages: int
    block_size: int
    states: tuple[Pools, ...] = ()


class Machine:
    """A loaded model. `logits` runs one step on all ranks."""

    def __init__(
        self, path: Path, numerics: Numerics, folders: Mapping[str, str], weights: Mapping[int, Path], checks: bool = True
    ) -> None:
        """`folders` has those of LoRA adapters by digest, `weights` and `checks` are as in Versions. Raises CannotRun if the model
        or the numerics are unavailable here."""
        self.path, self.numerics = path, numerics
        self.kernels = Kernels(numerics.kernels)
        if native.is_built():
            native.start(numerics.threads, TEAM_SPIN_US)
        torch.set_num_threads(1 if native.is_built() and not self.kernels.is_torch else numerics.threads)
        try:
            check_world_size(load_config(path, asked_length=numerics.model_length), numerics.ranks)
            self.turns = Turns(numerics.ranks)
            with self.kernels.used():
                self.shards = [Shard(path, numerics, self.turns.parallel(rank)) for rank in range(numerics.ranks)]
        except (ModelError, SettingsError) as error:
            raise CannotRun(str(error)) from error
        self.config, self.adapters = self.shards[0].config, Adapters(self.shards, folders)
        self.versions = Versions(path, self.shards, self.kernels, weights, checks)
        self.vocabulary = Vocabulary(path, self.config.vocab_size, self.config.eos_token_ids)
        self.sampler = self._sampler(numerics.sampler)
        if numerics.attention:
            self._attend_by(numerics.attention)

    def have_inputs(self, started: EngineStarted, kept: KeptAt) -> None:
        """Put the vectors into steps that the log's engine kept of images and sounds, if the model reads any. Raises CannotRun."""
        if has_tower(self.path, self.config):
            inputs = KeptInputs(self.path, self.config, self.shards[0].dtype, started, kept)
            for shard in self.shards:
                shard.inputs = inputs

    def why_lacking(self, digest: bytes) -> str:
        """Why an image or a sound cannot be computed with, "" where it can."""
        inputs = self.shards[0].inputs
        return f"{self.path} reads none" if inputs is None else inputs.why_lacking(digest)

    def _attend_by(self, name: str) -> None:
        try:
            for shard in self.shards:
                own = own_attention(name, heads_of(self.config, shard.parallel, shard.dtype))
                shard.params = shard.params._replace(stack=None)  # one call of all layers has its own
        except AttentionError as error:
            raise CannotRun(f"the log's engine attended by a function from outside, and {error}") from error
        self.kernels.attend_by(own)

    def _sampler(self, name: str) -> OwnSampler | None:
        try:
            return own_sampler(name, self.config.vocab_size) if name else None
        except SamplerError as error:
            raise CannotRun(f"the log's engine chose tokens by a sampler from outside, and {error}") from error

    def environment(self) -> dict[str, str]:
        """The environment, in the format of a log's header."""
        shard = self.shards[0]
        return describe_process("cpu") | {
            "dtype": str(shard.dtype).removeprefix("torch."),
            "quantization": self.numerics.quantization,
            "activations": self.numerics.activations,
            "kv_cache_dtype": self.numerics.kv_cache_dtype,
            "kernels": self.kernels.name,
            "batch_invariant": str(shard.invariance),
        }

    def caches(self, pages: int, block_size: int, state_pages: int = 0) -> Caches:
        """Empty caches for all ranks; memory is taken as pages are used. Raises CannotRun if there is not enough
        memory."""
        try:
            states = tuple(shard.states(state_pages) for shard in self.shards)
            return Caches(tuple(shard.cache(pages, block_size) for shard in self.shards), pages, block_size, states)
        except (MemoryError, OSError, RuntimeError, OverflowError, ValueError) as error:
            raise CannotRun(f"no memory for a cache of {pages:,} blocks of {block_size} tokens ({reason(error)})") from error

    def logits(self, batch: ForwardBatch, caches: Caches) -> torch.Tensor | None:
        """One step on all ranks: float32 [S, V] of the sampled rows, None if there are none."""
        with self.kernels.used():
            return self.turns.run(lambda rank: self.shards[rank].logits(*_of_rank(batch, caches, rank)))[0]

    def copy_pages(self, source: Caches, sources: np.ndarray, target: Caches, targets: np.ndarray) -> None:
        """Copy pages of one cache into another, on every rank (int64[n] each)."""
        here, there = torch.from_numpy(sources), torch.from_numpy(targets)
        for old, new in zip(source.of_rank, target.of_rank):
            for one, other in zip(tensors_of(old), tensors_of(new)):
                other.index_copy_(0, there, one.index_select(0, here))


    def copy_states(self, caches: Caches, pairs: np.ndarray) -> None:
        """Copy pages of recurrent states (from, to), int64 [n, 2], one after the other, on every rank."""
        for pools in caches.states:
            copy_states(pools, pairs)

    def copy_state(self, source: Caches, target: Caches, page: int) -> None:
        """Copy a request's states from the first page of a cache, on every rank."""
        for old, new in zip(source.states, target.states):
            for one, other in zip(chain(*old), chain(*new)):
                other[page] = one[0]


def _of_rank(batch: ForwardBatch, caches: Caches, rank: int) -> tuple[ForwardBatch, KvCache]:
    """A step and the cache as a rank sees them."""
    if batch.recurrent is not None:
        batch = batch._replace(recurrent=batch.recurrent._replace(pools=caches.states[rank]))
    return batch, caches.of_rank[rank]


def tensors_of(cache: KvCache) -> list[torch.Tensor]:
    """Every tensor of a cache once: layers of different groups share tensors."""
    return list({id(tensor): tensor for pair in cache for tensor in pair}.values())


def open_machine(
    started: EngineStarted, model: str | None, numerics: Numerics, any_model: bool, folders: Mapping[str, str],
    weights: Mapping[int, Path], kept: KeptAt,
) -> Machine:  # fmt: skip
    """The log's model, from `model` or from where the log says, its later `weights` by version, and what it `kept` of images.
    Raises CannotRun if it is another model, or missing."""
    path = folder_of(started, model)
    try:
        found = fingerprint(path)
    except (ModelError, OSError) as error:
        raise CannotRun(reason(error, with_file=True)) from error
    if started.model_digest and found != started.model_digest and not any_model:
        raise CannotRun(
            f"{path} is another model than the log's: its weights and config have the digest {found}, the log's "
            f"{started.model} had {started.model_digest}; give that one with --model, or --any-model for this one"
        )
    threads = numerics.threads or default_threads(1)
    machine = Machine(path, msgspec.structs.replace(numerics, threads=threads), folders, weights, checks=not any_model)
    require_fit(machine, started.config)
    machine.have_inputs(started, kept)
    return machine


def require_fit(machine: Machine, config: SchedulerConfig) -> None:
    """Raises CannotRun if the log's numbers do not fit this model."""
    model = machine.config
    windows = kv_groups(model).windows
    pairs = (
        ("recurrent layers", int(config.state_pages > 0), int(model.recurrent is not None)),
        ("tokens in its vocabulary", config.vocab_size or model.vocab_size, model.vocab_size),
        ("windows of attention", config.windows[: config.group_count // (1 + config.guidance)] or (0,), windows or (0,)),
    )
    for what, there, here in pairs:
        if there != here:
            raise CannotRun(f"{machine.path} is another model than the log's: {what}: {there} in the log, {here} here")
    if config.max_model_len > model.position_count_max:
        raise CannotRun(
            f"{machine.path} is another model than the log's: requests of {config.max_model_len} tokens in the log, of "
            f"at most {model.position_count_max} here"
        )


@contextmanager
def refusing() -> Iterator[None]:
    """Convert the errors that a model raises on unchecked numbers to CannotRun."""
    try:
        yield
    except RecursionError:
        raise
    except (ValueError, IndexError, OverflowError, RuntimeError, MemoryError) as error:
        raise CannotRun(f"the model refuses what the log tells ({error})") from error


# ---- adapters ----------------------------------------------------------------------------------------------------


class Adapters:
    """`folders`: where each adapter's files are, by digest."""

    def __init__(self, shards: Sequence[Shard], folders: Mapping[str, str]) -> None:
        self._shards, self._folders = shards, folders
        self._places: dict[str, int] = {}

    def placed(self, batch: ForwardBatch, state: State) -> ForwardBatch:
        """A batch of this state, with the places of its adapters instead of the engine's slots. Raises CannotRun."""
        digests = [slot.digest if slot is not None else "" for slot in state.slots]
        return batch._replace(adapters=tuple(each._replace(slot=self._place(digests[each.slot])) for each in batch.adapters))

    def paired(self, place: int, there: Adapters, weight_of: Callable[[int], int | None]) -> Iterator[tuple[int, ThinBlocks]]:
        """The identity of each product's blocks of the adapter at `place`, with the blocks of the same product on the first rank
        of another machine; `weight_of` gives the identity of a weight there. Raises CannotRun."""
        digest = next(digest for digest, own in self._places.items() if own == place)
        theirs = there._shards[0].adapters[there._place(digest)].blocks
        for key, blocks in self._shards[0].adapters[place].blocks.items():
            if (weight := weight_of(key)) is not None:
                yield id(blocks), theirs[weight]

    def _place(self, digest: str) -> int:
        if digest not in self._places:
            self._load(digest)
            self._places[digest] = len(self._places)
        return self._places[digest]

    def _load(self, digest: str) -> None:
        if digest not in self._folders:
            raise CannotRun(f"the log does not say where the adapter {digest} is: it begins after the adapter was loaded")
        try:
            for shard in self._shards:
                shard.adapters.append(load_adapter(Path(self._folders[digest]), digest, shard.base, RANK_MAX))
        except (ModelError, OSError) as error:
            raise CannotRun(reason(error, with_file=True)) from error
