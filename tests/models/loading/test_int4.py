"""--quantization int4: the numbers of `vnext quantize --scheme w4a16`, rounded as a checkpoint of floats is loaded."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
import torch

sys.path.append(str(Path(__file__).resolve().parents[1]))
from checkpoints import PLAIN, random_tensors, save_checkpoint
from model_helpers import Chunk, ThreadGroup, load_model

from vnext.models.errors import ModelError
from vnext.models.layers.layers import embed
from vnext.models.layers.sharding import Parallel
from vnext.models.loading.quantise import Quantiser
from vnext.runtime.rank.runner import ModelRunner

WIDE = {"hidden_size": 128, "intermediate_size": 256, "torch_dtype": "bfloat16"}
CHUNK = Chunk([index % 61 for index in range(7, 57)], 0, [3, 9, 4, 21])


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return save_checkpoint(tmp_path / "floats", tensors(), **WIDE)


def tensors() -> dict[str, torch.Tensor]:
    return {name: tensor.to(torch.bfloat16) for name, tensor in random_tensors(PLAIN | WIDE).items()}


def logits(path: Path, quantization: str, parallel: Parallel | None = None) -> torch.Tensor:
    return load_model(path, quantization=quantization, dtype=torch.bfloat16, parallel=parallel).logits(CHUNK)


def test_it_has_the_bits_of_a_checkpoint_that_was_quantised_before(folder: Path, tmp_path: Path) -> None:
    list(Quantiser(folder, tmp_path / "out", "w4a16", 32).run())
    found = logits(folder, "int4")
    assert torch.equal(found, logits(tmp_path / "out", "int4"))  # whose head is still in floats
    for each in ThreadGroup(2).run(lambda parallel: logits(folder, "int4", parallel)):
        assert (each - found).abs().max() <= 0.02 * found.abs().max()


def test_weights_of_layers_stay_in_few_bits(folder: Path) -> None:
    runner = ModelRunner(folder, "bfloat16", "cpu", load_model(folder).parallel, quantization="int4")
    down = runner.weights.params.layers[0].mlp.down.weight
    assert runner.quantization == "int4" and down.linear.buffer.nbytes * 8 < 6 * 128 * 256


@pytest.mark.parametrize("is_tied", [False, True])
def test_the_head_has_the_bits_of_int8(tmp_path: Path, is_tied: bool) -> None:
    """An embedding that is the head has them too, read row by row; another one stays exact."""
    kept = {name: tensor for name, tensor in tensors().items() if not (is_tied and name == "lm_head.weight")}
    save_checkpoint(tmp_path, kept, **WIDE, tie_word_embeddings=is_tied)
    ids, exact = torch.arange(61), kept["model.embed_tokens.weight"][:61]
    models = [load_model(tmp_path, quantization=each, dtype=torch.bfloat16) for each in ("int4", "int8")]
    few, more = (model.params.head.linear.buffer for model in models)
    assert np.array_equal(few, more)
    rows = [embed(model.params.embedding, ids, model.parallel) for model in models]
    assert torch.equal(*rows) and torch.equal(rows[0], exact) != is_tied


def test_what_is_not_finite_is_refused(tmp_path: Path) -> None:
    broken = tensors()
    broken["model.layers.0.mlp.up_proj.weight"][3, 4] = float("inf")
    save_checkpoint(tmp_path, broken, **WIDE)
    with pytest.raises(ModelError, match="up_proj.weight in .* has weights that are not finite, which cannot be quantised"):
        logits(tmp_path, "int4")
