"""The draft head of a rank (EAGLE-3): one layer that reads the target's hidden states, whole on every rank.

Owns the head's weights, its keys and values, and the states that it reads, all under the target's page numbers. A step of the
target writes the states of its tokens, as it writes keys and values: what holds for these, after a hit in the prefix cache or a
preemption, holds for the states. Behind the tokens that the target has computed, the head writes states of its own.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from vnext.kernels.cpu.memory import huge
from vnext.kernels.cpu.stack import AuxStates
from vnext.models.config.model_config import ModelConfig, load_head_config
from vnext.models.families import llama_eagle3
from vnext.models.families.llama_eagle3 import HeadBatch
from vnext.models.layers.batch import ForwardBatch, HostBatch
from vnext.models.layers.kv_cache import kv_bytes_per_page, kv_groups, make_kv_cache
from vnext.models.layers.sharding import alone
from vnext.models.loading.weights import load_params
from vnext.runtime.rank.draft_model import require_same_drafts, vocabulary_of
from vnext.runtime.rank.runner import ModelRunner
from vnext.runtime.settings import RankSettings, SettingsError
from vnext.sampling.inputs import SamplingInputs
from vnext.sampling.sampling import sample

TIMED_STEPS = 9
NOTHING = np.empty(0, dtype=np.int64)


class EagleHead:
    """A head with its cache. Call `make_cache` before the first `run`."""

    def __init__(self, path: Path, config: ModelConfig, target: ModelRunner) -> None:
        """Raises ModelError, SettingsError."""
        self.config, self._target = config, target
        self._params = load_params(path, config, alone(), target.dtype, "cpu", form=target.invariance.form)
        self._layers = np.array(layers_of(config, target.config), dtype=np.int64)
        self._roomy: tuple[ForwardBatch, ForwardBatch] | None = None
        own, self.has_embedding = self._params.embedding, self._params.embedding is not None
        self._embed: Callable[[torch.Tensor], torch.Tensor] = (
            target.embedded if own is None else lambda token_ids: own.index_select(0, token_ids)
        )

    def block_bytes(self, block_size: int) -> int:
        """Bytes of one page: keys and values of one layer, and states."""
        states = block_size * self.config.hidden_size * self._target.dtype.itemsize
        return kv_bytes_per_page(self.config, block_size, self._target.dtype, alone()) + states

    def make_cache(self, page_count: int, block_size: int) -> None:
        """Allocate keys, values and states. Raises MemoryError."""
        dtype, width, slots = self._target.dtype, self.config.hidden_size, page_count * block_size
        self._kv = make_kv_cache(self.config, slots, 1, dtype, "cpu", alone())
        self._states = huge(slots * width * dtype.itemsize).view(dtype).view(slots, width)

    def with_room(self, batch: ForwardBatch) -> ForwardBatch:
        """The target's batch with room for the states; the same one for the same batch."""
        if self._roomy is None or self._roomy[0] is not batch:
            sizes = (len(batch.token_ids), len(self._layers), self._target.config.hidden_size)
            states = torch.empty(sizes, dtype=self._target.dtype)
            self._roomy = batch, batch._replace(aux=AuxStates(self._layers, states))
        return self._roomy[1]

    @torch.inference_mode()
    def keep(self, batch: ForwardBatch) -> None:
        """Write the states of a batch that the target has computed."""
        assert batch.aux is not None
        self._states.index_copy_(0, batch.slots, llama_eagle3.combine(self._params, batch.aux.states))

    @torch.inference_mode()
    def run(self, rows: ForwardBatch, before: torch.Tensor, sampling: SamplingInputs | None) -> np.ndarray:
        """Compute tokens, of which those `before` (slots, int64 [T]) have states; sample what follows those at sample_at
        (int64 [S]), whose own states become the head's. Rows as in HeadBatch."""
        batch = HeadBatch(rows, self._embed(rows.token_ids), self._states.index_select(0, before))
        hidden, states = llama_eagle3.forward(self._params, self._kv, batch, self.config, alone())
        if sampling is None:
            return NOTHING
        self._states.index_copy_(0, rows.slots.index_select(0, rows.sample_at), states)
        drawn: np.ndarray = sample(llama_eagle3.logits(self._params, hidden, self.config, alone()), sampling).tokens.numpy()
        return drawn

    def step_seconds(self) -> float:
        """The shortest time of a draft."""
        one, zero = torch.ones(1, dtype=torch.int64), torch.zeros(1, dtype=torch.int64)
        host = HostBatch(np.array([0, 1], dtype=np.int32), np.array([1], dtype=np.int32))
        rows = ForwardBatch(one, one, one, *map(torch.from_numpy, host), one.int()[None], zero, host)
        sampling = SamplingInputs(zero.float(), zero, one.float(), zero.float(), zero, one, any_random=False, any_filter=False)
        seconds = []
        for _ in range(TIMED_STEPS):
            began_s = time.perf_counter()
            self.run(rows, zero, sampling)
            seconds.append(time.perf_counter() - began_s)
        return min(seconds)


def load_eagle_head(settings: RankSettings, target: ModelRunner) -> EagleHead:
    """The head that the settings name. Raises ModelError, SettingsError."""
    path = Path(settings.draft_path)
    config = load_head_config(path)
    if reason := why_not(path, config, target):
        raise SettingsError(f"speculative_config names the EAGLE-3 head {path}, {reason}")
    require_same_drafts(settings, target)
    head = EagleHead(path, config, target)
    if head.config.hidden_size != target.config.hidden_size and not head.has_embedding:
        raise SettingsError(
            f"speculative_config names the EAGLE-3 head {path}, which has no embedding and the width {config.hidden_size}, and the "
            f"model's embedding has {target.config.hidden_size}: name a head that was trained for this model"
        )
    return head


def layers_of(config: ModelConfig, target: ModelConfig) -> tuple[int, ...]:
    """The target's layers whose inputs the head reads: by default one low, one in the middle and one high."""
    assert config.head is not None
    return config.head.layers or (2, target.layer_count // 2, target.layer_count - 3)


def why_not(path: Path, config: ModelConfig, target: ModelRunner) -> str:
    """Why a head cannot draft for a model, with the remedy; "" where it can."""
    assert config.head is not None
    model, layers, remedy = target.config, layers_of(config, target.config), "name a head that was trained for this model"
    if config.vocab_size != model.vocab_size:
        return f"which has a vocabulary of {config.vocab_size} tokens, and the model has {model.vocab_size}: {remedy}"
    if config.head.target_size != model.hidden_size:
        return f"which reads hidden states of width {config.head.target_size}, and the model's have {model.hidden_size}: {remedy}"
    if not all(0 <= layer < model.layer_count for layer in layers) or len(set(layers)) < len(layers):
        return f"which reads the inputs of layers {', '.join(map(str, layers))} of a model of {model.layer_count} layers: {remedy}"
    if (path / "tokenizer.json").is_file() and vocabulary_of(path) != vocabulary_of(target.path):
        return f"whose tokenizer.json gives tokens other numbers than the model's: {remedy}"
    if any(kv_groups(model).windows):
        return "and the model has attention windows: take another method"
    return ""
