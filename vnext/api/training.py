"""Training: a checkpoint's weights as torch parameters, whose log-probabilities are the engine's, bit for bit.

A family's own forward runs on the CPU's kernels with torch's derivatives (vnext/kernels/derivatives.py). Sequences are computed
whole, on one rank, without drafts or adapters: an answer's bits depend on none of this (docs/rollouts.md).
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from vnext.kernels.arrays import as_tensor, host_dtype, torch_dtype
from vnext.kernels.derivatives import TrainedWeight, exact, trainable
from vnext.kernels.formats.floats import PLAIN
from vnext.kernels.table import Operations, operations, substituted
from vnext.models.config.expert_keys import expert_activation
from vnext.models.config.folder import assigned_files, weight_files
from vnext.models.config.model_config import ModelConfig, load_config
from vnext.models.errors import ModelError
from vnext.models.layers.batch import ForwardBatch, GroupPlaces, HostBatch
from vnext.models.layers.kv_cache import kv_groups, make_kv_cache
from vnext.models.layers.sharding import alone, layout_of, shards_of_layout, weight_axes
from vnext.models.loading.checkpoint import rooted
from vnext.models.registry import family
from vnext.runtime.protocol.settings import Isa
from vnext.runtime.rank.loading import use_isa
from vnext.sampling.sampling import report

BLOCK_SIZE = 16
INDEX = "model.safetensors.index.json"
EMBEDDINGS, HEAD = ("embed_tokens.weight", "wte.weight"), "lm_head.weight"


class Trainer:
    """The checkpoint in folder `path`, computed in `dtype`. `weights` are float32 leaves by their names in the files: give them
    to an optimizer. Mutable, as they are. `dtype`, `isa` and `max_model_len` must be the engine's. Raises ModelError and
    SettingsError."""

    def __init__(self, path: Path | str, dtype: str = "float32", max_model_len: int | None = None, isa: Isa = "auto") -> None:
        use_isa(isa)
        self.path = Path(path)
        self.dtype, self.config = torch_dtype(dtype), load_config(self.path, asked_length=max_model_len)
        if self.config.has_unlike_layers:
            raise ModelError("a trainer does not serve models with unlike layers so far, and this is one: take another model")
        self._family = family(self.config.architecture)
        found = _tensors(self.path, self.config)
        self._integers = {name: tensor for name, tensor in found.items() if not tensor.is_floating_point()}
        self.weights = {name: each.float().requires_grad_() for name, each in found.items() if each.is_floating_point()}

    def logprobs(self, prompts: Sequence[Sequence[int]], answers: Sequence[Sequence[int]]) -> list[torch.Tensor]:
        """Those of the answers' tokens, float32 [n] each, which autograd follows to `weights`. Prompts and answers are token ids,
        at least one each."""
        rows = [[*prompt, *answer[:-1]] for prompt, answer in zip(prompts, answers, strict=True)]
        lengths = [len(row) for row in rows]
        ends = np.cumsum(lengths)
        at = np.concatenate([np.arange(end - len(answer), end) for end, answer in zip(ends, answers)])
        with substituted(trainable(operations("cpu"), lengths)):
            source = _Source(self.weights, self._integers, self.config, self.dtype)
            params, group = self._family.assemble(source, self.config), alone()
            batch, pages = _batch(rows, at, len(kv_groups(self.config).windows))
            kv = make_kv_cache(self.config, pages, BLOCK_SIZE, self.dtype, "cpu", group)
            hidden, _ = self._family.forward(params, kv, batch, self.config, group)
            logits = self._family.logits(params, hidden, self.config, group)
        tokens = torch.tensor([token for answer in answers for token in answer])
        kernel, plain = lambda own: report(own, tokens, 0).logprob, lambda own: own.log_softmax(-1).gather(1, tokens[:, None])[:, 0]
        found = exact(kernel, plain, logits)
        return list(found.split([len(answer) for answer in answers]))

    def save(self, folder: Path | str) -> Path:
        """Write a checkpoint with these weights in `dtype`, and the other files of the one that was read. Returns its folder."""
        into = Path(folder)
        into.mkdir(parents=True, exist_ok=True)
        for file in self.path.iterdir():
            if file.is_file() and file.suffix != ".safetensors" and file.name != INDEX:
                shutil.copy(file, into)
        tensors = {name: each.detach().to(self.dtype).contiguous() for name, each in self.weights.items()}
        save_file(tensors | self._integers, into / "model.safetensors", {"format": "pt"})
        config = json.loads((into / "config.json").read_text()) | {"torch_dtype": str(self.dtype).removeprefix("torch.")}
        (into / "config.json").write_text(json.dumps(config, indent=2) + "\n")
        return into


def _tensors(path: Path, config: ModelConfig) -> dict[str, torch.Tensor]:
    """The checkpoint's tensors but for a head that is a copy of the embedding to which config.json ties it. Raises ModelError."""
    homes = assigned_files(path)
    pairs = ((file.name, pair) for file in weight_files(path) for pair in load_file(file).items())
    found = {name: tensor for file, (name, tensor) in pairs if homes.get(name, file) == file}
    found = {rooted(name): tensor for name, tensor in found.items()}
    embedding = next((found[name] for name in found if name.endswith(EMBEDDINGS)), None)
    head = next((name for name in found if name.endswith(HEAD)), None)
    if config.tie_embeddings and head and embedding is not None and torch.equal(found[head], embedding):
        del found[head]
    return found


class _Source:
    """A family's source of weights that autograd follows, by the contract of models/layers/assembly.py."""

    def __init__(
        self, weights: Mapping[str, torch.Tensor], integers: Mapping[str, torch.Tensor], config: ModelConfig, dtype: torch.dtype
    ) -> None:
        self.dtype, self._dtype = host_dtype(str(dtype).removeprefix("torch.")), dtype
        self._weights, self._integers, self._config = weights, integers, config
        self._layouts = weight_axes(config)
        self._operations: Operations = operations("cpu")

    def __contains__(self, name: str) -> bool:
        return name in self._weights

    def is_tied(self, embedding: str, head: str) -> bool:
        return embedding not in self._weights or head not in self._weights

    def go_without(self, head: str) -> None:
        raise ModelError(f"the checkpoint has no {head}, and its log-probabilities need one")

    def fused(self, names: tuple[str, ...]) -> torch.Tensor:
        return torch.cat([self._plain(name) for name in names]).to(self._dtype)

    def table(self, name: str) -> torch.Tensor:
        return self.fused((name,))

    def wide(self, name: str) -> torch.Tensor:
        return self._plain(name)

    def packed(self, names: tuple[str, ...], *, exact: bool = False) -> TrainedWeight:
        weight = self.fused(names)
        return TrainedWeight(weight, self._operations.pack_weight(weight.detach(), PLAIN, self._shards(names[0])))

    def packed_wide(self, name: str) -> TrainedWeight:
        weight = self.wide(name)
        return TrainedWeight(weight, self._operations.pack_weight(weight.detach(), PLAIN, self._shards(name)))

    def packed_gated(self, names: tuple[str, ...]) -> TrainedWeight:
        weight = self.fused(names)
        return TrainedWeight(weight, self._operations.pack_gated_weight(weight.detach(), self._config.activation))

    def stacked(self, groups: tuple[tuple[str, ...], ...], gated: bool) -> TrainedWeight:
        weight = torch.stack([self.fused(names) for names in groups])
        activation, shards = expert_activation(self._config) if gated else "", self._shards(groups[0][0])
        return TrainedWeight(weight, self._operations.pack_experts(weight.detach(), activation, PLAIN, shards))

    def by_head(self, names: tuple[str, ...], sizes: tuple[int, int]) -> tuple[TrainedWeight, TrainedWeight]:
        raise ModelError(f"{self._config.architecture} has latent attention, through which autograd does not go so far")

    def integers(self, name: str, count: int) -> torch.Tensor:
        return self._integers[name].long()[:count]

    def place(self, array: np.ndarray) -> np.ndarray:
        return array

    share = place  # of one rank

    def _shards(self, name: str) -> int:
        return shards_of_layout(layout_of(name, self._layouts), self._config, alone())

    def _plain(self, name: str) -> torch.Tensor:
        weight = self._weights[name]
        return weight.T if layout_of(name, self._layouts).flipped else weight


def _batch(rows: Sequence[Sequence[int]], sample_at: np.ndarray, group_count: int) -> tuple[ForwardBatch, int]:
    """Whole sequences as one step, each in pages of its own for each group of layers; and how many pages these are."""
    lengths = np.array([len(row) for row in rows])
    pages = -(-lengths // BLOCK_SIZE)
    firsts = np.cumsum(pages) - pages
    table = np.zeros((len(rows), pages.max()), np.int32)
    for row, (first, count) in enumerate(zip(firsts, pages)):
        table[row, :count] = np.arange(first, first + count)
    positions = np.concatenate([np.arange(length) for length in lengths])
    slots = positions + (firsts * BLOCK_SIZE).repeat(lengths)
    host = HostBatch(np.concatenate(([0], np.cumsum(lengths))).astype(np.int32), lengths.astype(np.int32))
    tokens = np.concatenate([np.array(row, np.int64) for row in rows])
    count = int(pages.sum())
    groups = [(as_tensor(slots + group * count * BLOCK_SIZE), as_tensor(table + group * count)) for group in range(1, group_count)]
    batch = ForwardBatch(
        as_tensor(tokens), as_tensor(positions), as_tensor(slots), as_tensor(host.query_starts),
        as_tensor(host.context_lengths), as_tensor(table), as_tensor(sample_at), host,
        groups=tuple(GroupPlaces(*each) for each in groups),
    )  # fmt: skip
    return batch, count * group_count
