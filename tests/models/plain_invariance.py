"""A program: in plain torch and 16 bits, products made in float32 under MKL_CBWR keep a token's logits whoever is beside it."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from checkpoints import save_checkpoint
from llama_invariance import BLOCKS, SPLITS, TOKENS
from model_helpers import Chunk, Model, load_model

from vnext.kernels.table import plain_operations

FORMS: list[dict[str, Any]] = [
    {"dtype": torch.bfloat16, "wide": True},
    {"dtype": torch.float16, "wide": True},
    {"dtype": torch.bfloat16, "wide": True, "quantization": "int8"},
]
CHANGES = {"hidden_size": 256, "intermediate_size": 700, "vocab_size": 1000, "head_dim": 64, "tie_word_embeddings": True}


def check(path: Path, form: dict[str, Any]) -> None:
    """Chunks and decodes, beside strangers, against the whole prompt alone."""

    def fresh() -> Model:
        return load_model(path, **form)

    whole = fresh().logits(Chunk(TOKENS, 0, BLOCKS))
    for sizes in SPLITS:
        model, done = fresh(), 0
        for size in sizes:
            strangers = [Chunk([token], 0, [22 + token]) for token in range(done % 4)]
            found = model.logits(Chunk(TOKENS[done : done + size], done, BLOCKS), *strangers)[:size]
            assert torch.equal(found, whole[done : done + size]), f"{form}, chunks of {sizes[:5]}, at {done}"
            done += size


if __name__ == "__main__":
    plain = {"new": lambda device_type: plain_operations()}
    with (
        tempfile.TemporaryDirectory() as folder,
        patch("vnext.models.loading.tensor_place.operations", **plain),
        patch("vnext.models.layers.layers.operations", **plain),
    ):
        for form in FORMS:
            check(save_checkpoint(Path(folder) / "model", **CHANGES), form)
    sys.stdout.write("invariant\n")
