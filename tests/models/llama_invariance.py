"""A program: under MKL_CBWR a token's logits are bitwise the same alone, in a batch, chunked or decoded."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from checkpoints import save_checkpoint
from model_helpers import DEMO_MODEL, Chunk, load_model

TOKENS = [int(token) for token in torch.randint(0, 61, (150,), generator=torch.Generator().manual_seed(8))]
BLOCKS = [9, 2, 30, 4, 11, 8, 50, 51, 52, 53]
CASES: list[dict[str, Any]] = [
    {},
    {"num_key_value_heads": 4, "intermediate_size": 172},
    {"num_key_value_heads": 1, "attention_bias": True, "mlp_bias": True, "hidden_size": 72, "head_dim": 18},
    {"hidden_size": 256, "intermediate_size": 700, "vocab_size": 1000, "head_dim": 64, "tie_word_embeddings": True},
]


SPLITS = ([1] * 150, [16] * 9 + [6], [37, 1, 1, 100, 11])


def check(path: Path, splits: Sequence[Sequence[int]] = SPLITS) -> None:
    """Chunks and decodes, beside strangers, against the whole prompt alone."""
    model = load_model(path)
    whole = model.logits(Chunk(TOKENS, 0, BLOCKS))
    for sizes in splits:
        model = load_model(path)
        done = 0
        for size in sizes:
            strangers = [
                Chunk(TOKENS[10 + done % 5 : 31], 0, [20, 21]),
                *(Chunk([token], 0, [22 + token]) for token in range(done % 4)),
            ]
            chunk = Chunk(TOKENS[done : done + size], done, BLOCKS)
            found = model.logits(chunk, *strangers)[:size]
            assert torch.equal(found, whole[done : done + size]), f"{path.name}, chunks of {sizes[:5]}, at {done}"
            done += size


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        for index, case in enumerate(CASES):
            check(save_checkpoint(Path(folder) / f"case-{index}", **case))
    if DEMO_MODEL.is_dir():
        check(DEMO_MODEL)
    sys.stdout.write("invariant\n")
