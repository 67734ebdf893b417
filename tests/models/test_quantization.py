"""Models of int8 weights: near the float32 ones by a measured bound, the same bits in any batch, on one rank or on two."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from checkpoints import PLAIN, random_tensors, save_checkpoint
from model_helpers import Chunk, Model, ThreadGroup, load_model

from vnext.kernels.cpu import native
from vnext.kernels.format import weight_formats
from vnext.kernels.formats.coded import CodesWeight
from vnext.kernels.formats.floats import PLAIN as FLOATS
from vnext.kernels.formats.rounded import INT8
from vnext.models.config.model_config import load_config
from vnext.models.errors import ModelError
from vnext.models.layers.sharding import Parallel, alone
from vnext.models.loading.weights import choose_dtype, load_params

BUNDLED = Path(__file__).resolve().parents[2] / "vnext" / "demo_model"
BLOCKS = [3, 9, 4, 21, 5, 6, 7, 8, 30, 31]
needs_native = pytest.mark.skipif(not native.is_built(), reason="the CPU's kernels are not built here: no C++ compiler was found")


def load_int8(path: Path, parallel: Parallel | None = None) -> Model:
    return load_model(path, parallel=parallel, dtype=torch.bfloat16, quantization="int8")


def plain_params(path: Path, parallel: Parallel | None = None) -> object:
    config = load_config(path)
    return load_params(path, config, parallel or alone(), torch.bfloat16, "cpu", formats=weight_formats("int8"))


def require_codes(found: CodesWeight, *weights: torch.Tensor) -> None:
    """`found` are those of these weights, in groups of 32 inputs or of all that there are."""
    assert len(found.parts) == len(weights)
    for part, weight in zip(found.parts, weights, strict=True):
        expected = INT8.rounds(FLOATS, weight.shape[1], weight.shape[1], True).codes((weight.float().numpy(),))
        assert part.form == expected.form and np.array_equal(part.floats(), expected.floats())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_weights_are_rounded_once_from_the_file_s_numbers(tmp_path: Path, plain_weights: None, dtype: torch.dtype) -> None:
    tensors = {name: tensor.to(dtype) for name, tensor in random_tensors(PLAIN).items()}
    params = plain_params(save_checkpoint(tmp_path, tensors))
    layer = "model.layers.1."
    require_codes(params.layers[1].attention.qkv.weight, *(tensors[f"{layer}self_attn.{name}_proj.weight"] for name in "qkv"))
    down = params.layers[1].mlp.down.weight
    assert down.shards == 4
    for piece, weight in zip(down.pieces, tensors[layer + "mlp.down_proj.weight"].chunk(4, 1), strict=True):
        require_codes(piece, weight)
    require_codes(params.head, tensors["lm_head.weight"])
    assert torch.equal(params.embedding, tensors["model.embed_tokens.weight"].bfloat16())
    assert torch.equal(params.norm, tensors["model.norm.weight"].bfloat16())


def test_a_tied_weight_is_held_once(tmp_path: Path, plain_weights: None) -> None:
    params = plain_params(save_checkpoint(tmp_path, tie_word_embeddings=True))
    assert params.head is params.embedding and isinstance(params.head, CodesWeight)


def test_a_rank_rounds_its_own_part(tmp_path: Path, plain_weights: None) -> None:
    """Of a row-parallel weight each shard has its own scales; the padding of the vocabulary is zeros."""
    tensors = random_tensors(PLAIN)
    half = Parallel(rank=1, world_size=2, all_reduce=lambda tensor: tensor, all_gather=lambda tensor, dim: tensor)
    params = plain_params(save_checkpoint(tmp_path, tensors), half)
    pieces = tensors["model.layers.0.self_attn.o_proj.weight"][:, 16:].chunk(2, 1)
    for piece, weight in zip(params.layers[0].attention.output.weight.pieces, pieces, strict=True):
        require_codes(piece, weight)
    (head,) = params.head.parts
    require_codes(CodesWeight((head.outputs(slice(0, 30)),), torch.bfloat16), tensors["lm_head.weight"][31:])
    assert len(head.codes) == 31 and not head.floats()[30:].any()


def test_auto_is_bfloat16(tmp_path: Path) -> None:
    config = load_config(save_checkpoint(tmp_path))
    assert choose_dtype("auto", config) == "float32"
    assert choose_dtype("auto", config, "int8") == "bfloat16"


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_a_weight_that_is_not_finite_is_refused(tmp_path: Path, bad: float) -> None:
    tensors = random_tensors(PLAIN)
    tensors["model.layers.1.mlp.up_proj.weight"][5, 6] = bad
    save_checkpoint(tmp_path, tensors)
    with pytest.raises(ModelError, match="up_proj.weight in .* has weights that are not finite, which cannot be quantised"):
        plain_params(tmp_path)


def test_logits_are_near_those_of_float32() -> None:
    """Measured on this text: 1.41 % of the logits' size (bfloat16 alone: 0.51 %, rounded weights alone: 0.78 %), divergence 0.0009
    nats, two greedy tokens of near equals."""
    from tokenizers import Tokenizer

    text = "The module provides a function that returns a list of all the names in the current scope. When the argument is an object"
    tokens = Tokenizer.from_file(str(BUNDLED / "tokenizer.json")).encode(text).ids
    exact = load_model(BUNDLED).logits(Chunk(tokens, 0, BLOCKS)).double()
    found = load_int8(BUNDLED).logits(Chunk(tokens, 0, BLOCKS)).double()
    assert (found - exact).norm() <= 0.018 * exact.norm()
    divergence = torch.nn.functional.kl_div(found.log_softmax(-1), exact.log_softmax(-1), log_target=True, reduction="none")
    assert divergence.sum(-1).mean() <= 0.0012
    assert (found.argmax(-1) != exact.argmax(-1)).sum() <= 2


@needs_native
@pytest.mark.parametrize("tied", [False, True])
def test_a_token_s_logits_do_not_depend_on_its_batch(tmp_path: Path, tied: bool) -> None:
    path = save_checkpoint(tmp_path, tie_word_embeddings=tied, hidden_size=72, head_dim=18, attention_bias=True)
    tokens = [int(token) for token in torch.randint(0, 61, (150,), generator=torch.Generator().manual_seed(8))]
    whole = load_int8(path).logits(Chunk(tokens, 0, BLOCKS))
    for sizes in ([1] * 150, [16] * 9 + [6], [37, 1, 1, 100, 11]):
        model, done = load_int8(path), 0
        for size in sizes:
            strangers = [Chunk(tokens[10 + done % 5 : 31], 0, [20, 22]), *(Chunk([token], 0, [40 + token]) for token in range(done % 4))]
            found = model.logits(Chunk(tokens[done : done + size], done, BLOCKS), *strangers)[:size]
            assert torch.equal(found, whole[done : done + size]), f"chunks of {sizes[:5]}, at {done}"
            done += size


def test_compiled_and_plain_kernels_agree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both round to bfloat16 at the same places; sums in another order may round to the neighbour, so by some steps of it."""
    from vnext.kernels.table import plain_operations

    path = save_checkpoint(tmp_path, attention_bias=True, tie_word_embeddings=True)
    tokens = list(range(7, 57))
    chosen = load_int8(path).logits(Chunk(tokens, 0, BLOCKS))
    for name in ("loading.tensor_place", "layers.layers"):
        monkeypatch.setattr(f"vnext.models.{name}.operations", lambda device_type: plain_operations())
    plain = load_int8(path).logits(Chunk(tokens, 0, BLOCKS))
    assert (chosen - plain).norm() <= 2.0**-6 * plain.norm()


@pytest.mark.parametrize("tied", [False, True])
def test_two_ranks_agree_with_one(tmp_path: Path, tied: bool) -> None:
    save_checkpoint(tmp_path, tie_word_embeddings=tied, attention_bias=True, mlp_bias=True)
    tokens = [index % 61 for index in range(7, 57)]

    def run(parallel: Parallel | None) -> torch.Tensor:
        model = load_int8(tmp_path, parallel)
        first = model.logits(Chunk(tokens[:-1], 0, BLOCKS))
        return torch.cat((first, model.logits(Chunk(tokens[-1:], len(tokens) - 1, BLOCKS))))

    expected, found = run(None), ThreadGroup(2).run(run)
    assert torch.equal(found[0], found[1]) and torch.equal(found[0], expected)
