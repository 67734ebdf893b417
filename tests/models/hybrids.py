"""Models with recurrent layers for tests: small random checkpoints of transformers, and a loaded model with pages for its states."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from model_helpers import Chunk, Model, load_model, make_batch

from vnext.models.layers.batch import RecurrentBatch
from vnext.models.layers.kv_cache import kv_groups
from vnext.models.layers.recurrent import make_state_pools
from vnext.models.layers.sharding import Parallel

VOCAB_SIZE = 97
PAGES = 12
BASE: dict[str, Any] = dict(
    vocab_size=VOCAB_SIZE,
    hidden_size=64,
    intermediate_size=120,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=512,
    initializer_range=0.15,
    pad_token_id=None,
    bos_token_id=None,
    eos_token_id=None,
)
MIXED = ["conv", "full_attention", "conv", "conv"]
CASES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "lfm2": ("Lfm2ForCausalLM", "Lfm2Config", {"layer_types": MIXED, "block_multiple_of": 8}),
    "lfm2_bias": (
        "Lfm2ForCausalLM",
        "Lfm2Config",
        {"full_attn_idxs": [2, 3], "conv_bias": True, "conv_L_cache": 4, "block_auto_adjust_ff_dim": False, "tie_word_embeddings": False},
    ),
}  # fmt: skip
"""Architecture, configuration and what it has beside BASE."""


def save_hybrid(path: Path, name: str) -> torch.nn.Module:
    """The seeded model of a case, with norms and biases that are no constants, also saved into folder `path`."""
    architecture, config, changes = CASES[name]
    torch.manual_seed(3)
    model = getattr(transformers, architecture)(getattr(transformers, config)(**{**BASE, **changes})).eval()
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for each, parameter in model.named_parameters():
            if parameter.dim() == 1:
                spread = 2.0 if each in ("model.norm.weight", "model.embedding_norm.weight") else 0.3
                parameter.add_(torch.randn(parameter.shape, generator=generator) * spread)
    model.save_pretrained(path)
    return model


class Row(NamedTuple):
    """A chunk of a request and the page of its state."""

    chunk: Chunk
    page: int


class Hybrid(NamedTuple):
    """A loaded model with its pools."""

    model: Model
    pools: Sequence[tuple[torch.Tensor, ...]]

    def logits(self, *rows: Row) -> torch.Tensor:
        """Logits [T, V] of every token of one step; a row whose chunk begins a request starts from zeros."""
        model = self.model
        batch = make_batch([row.chunk for row in rows], 16, len(kv_groups(model.config).windows))
        pages = torch.tensor([row.page for row in rows], dtype=torch.int32)
        fresh = torch.tensor([row.chunk.computed == 0 for row in rows])
        batch = batch._replace(recurrent=RecurrentBatch(self.pools, pages, fresh))
        hidden, _ = model.family.forward(model.params, model.kv, batch, model.config, model.parallel)
        return model.family.logits(model.params, hidden, model.config, model.parallel)


def load_hybrid(path: Path, parallel: Parallel | None = None, dtype: torch.dtype = torch.float32) -> Hybrid:
    """The checkpoint in `path` on the CPU; pools hold what no request left there."""
    model = load_model(path, parallel=parallel, dtype=dtype)
    pools = make_state_pools(model.config, PAGES, dtype, "cpu", model.parallel.world_size)
    for part in (part for parts in pools for part in parts):
        part.fill_(float("nan"))
    return Hybrid(model, pools)
