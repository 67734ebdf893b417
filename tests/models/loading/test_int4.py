"""--quantization int4: the numbers of `vnext quantize --scheme w4a16`, but for values, rounded as a checkpoint of floats is loaded."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

sys.path.append(str(Path(__file__).resolve().parents[1]))
from checkpoints import PLAIN, random_tensors, save_checkpoint
from model_helpers import Chunk, ThreadGroup, load_model

sys.path.append(str(Path(__file__).resolve().parents[2] / "kernels"))
from cpu_levels import needs_native

from vnext.kernels.arrays import host_dtype
from vnext.kernels.codes import FloatRows
from vnext.kernels.format import weight_formats
from vnext.kernels.formats.rounded import INT4
from vnext.models.config.model_config import load_config
from vnext.models.errors import ModelError
from vnext.models.layers.layers import embed
from vnext.models.layers.sharding import Parallel, alone, weight_axes
from vnext.models.loading.checkpoint import open_checkpoint
from vnext.models.loading.kept import Kept
from vnext.models.loading.quantise import Quantiser
from vnext.models.loading.stored import StoredPart, StoredWeights
from vnext.models.loading.weights import load_params
from vnext.runtime.protocol.settings import ModelSettings
from vnext.runtime.rank.runner import ModelRunner

WIDE = {"hidden_size": 128, "intermediate_size": 256, "torch_dtype": "bfloat16"}
JOINED = {"q_proj": ("qkv_proj", "k_proj", "v_proj"), "gate_proj": ("gate_up_proj", "up_proj")}
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
    file = tmp_path / "out" / "model.safetensors"
    kept = {name: tensor for name, tensor in load_file(file).items() if "v_proj" not in name}
    save_file(kept | {name: tensor for name, tensor in tensors().items() if "v_proj" in name}, file)
    found = logits(folder, "int4")
    assert torch.equal(found, logits(tmp_path / "out", "int4"))  # whose head and values are still in floats
    for each in ThreadGroup(2).run(lambda parallel: logits(folder, "int4", parallel)):
        assert (each - found).abs().max() <= 0.02 * found.abs().max()


def test_weights_of_layers_stay_in_few_bits(folder: Path) -> None:
    runner = ModelRunner(folder, ModelSettings(dtype="bfloat16", quantization="int4"), "cpu", load_model(folder).parallel)
    down = runner.weights.params.layers[0].mlp.down.weight
    assert runner.quantization == "int4" and down.linear.buffer.nbytes * 8 < 6 * 128 * 256


@pytest.mark.parametrize("has_values", [True, False])
def test_what_makes_values_has_8_bits(tmp_path: Path, has_values: bool) -> None:
    """Keys stand in where a model has no values of their own."""
    save_checkpoint(tmp_path, {name: tensor for name, tensor in tensors().items() if has_values or "v_proj" not in name}, **WIDE)
    config, here = load_config(tmp_path), "model.layers.0."
    with open_checkpoint(tmp_path) as checkpoint:
        stored = StoredWeights(checkpoint, config, alone(), weight_axes(config))
        bits = {}
        for part in ("self_attn.q_proj", "self_attn.k_proj", "mlp.down_proj", *["self_attn.v_proj"] * has_values):
            stored.round((f"{here}{part}.weight",), INT4)
            bits[part[-6:]] = stored.parts(f"{here}{part}.weight")[0].probed().codes(0).bits
    assert bits == {"q_proj": 4, "k_proj": 4 if has_values else 8, "n_proj": 4} | ({"v_proj": 8} if has_values else {})


def test_values_have_8_bits_below_queries_and_keys_too(folder: Path, tmp_path: Path) -> None:
    """In one weight with them, as Phi 3 has it."""
    apart, joined = tensors(), {}
    for name, tensor in apart.items():
        first, parts = next(((first, parts) for first, parts in JOINED.items() if first in name), ("", ()))
        if parts:
            joined[name.replace(first, parts[0])] = torch.cat([apart[name.replace(first, each)] for each in (first, *parts[1:])])
        elif not any(each in name for _, *others in JOINED.values() for each in others):
            joined[name] = tensor
    save_checkpoint(tmp_path / "phi3", joined, **WIDE, architectures=["Phi3ForCausalLM"], model_type="phi3")
    assert torch.equal(logits(tmp_path / "phi3", "int4"), logits(folder, "int4"))
    ranks = ThreadGroup(2).run(lambda parallel: (logits(tmp_path / "phi3", "int4", parallel), logits(folder, "int4", parallel)))
    assert all(torch.equal(*each) for each in ranks)


def odd_heads(path: Path) -> None:
    """Heads of 24 numbers: of two ranks' shares, values stand behind 72 others."""
    changes = WIDE | {"head_dim": 24, "num_attention_heads": 4, "num_key_value_heads": 2}
    kept = {name: tensor.to(torch.bfloat16) for name, tensor in random_tensors(PLAIN | changes).items()}
    save_checkpoint(path, kept, **changes)


def gates(path: Path) -> None:
    """One gate for each of 16 heads, before keys and values: 8 on each of two ranks."""
    torch.manual_seed(6)
    sizes = {"vocab_size": 61, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "head_dim": 16}
    ends = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"), 0)
    heads = {"num_attention_heads": 16, "num_key_value_heads": 8, "layer_types": ["sliding_attention", "full_attention"]}
    transformers.Lfm3ForCausalLM(transformers.Lfm3Config(**sizes, **heads, **ends)).to(torch.bfloat16).save_pretrained(path)


@pytest.mark.parametrize("save", [odd_heads, gates])
def test_values_that_stand_nowhere_even_leave_all_8_bits(tmp_path: Path, save: Callable[[Path], None]) -> None:
    """On any number of ranks, or it would be seen: some would multiply by floats."""
    save(tmp_path)
    found = logits(tmp_path, "int4")
    for each in ThreadGroup(2).run(torch.inference_mode()(lambda parallel: logits(tmp_path, "int4", parallel))):
        assert torch.equal(each, found)
    model = load_model(tmp_path, quantization="int4", dtype=torch.bfloat16)
    qkv = model.params.layers[1].attention.qkv.weight
    assert 1 < qkv.linear.buffer.nbytes / (qkv.linear.outputs * 128) < 1.5


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


@needs_native
@pytest.mark.parametrize(("rank", "count"), [(0, 1), (1, 2)])
def test_kernels_round_to_the_bytes_of_the_plain_form(rank: int, count: int, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which also serves where a rank's inputs cut a group."""
    taken, blocks, parallel = Counter[bool](), StoredPart.blocks, msgspec.structs.replace(alone(), rank=rank, world_size=count)

    def counted(*given: Any) -> object:
        taken[isinstance(found := blocks(*given), FloatRows)] += 1
        return found

    def memory() -> list[bytes]:
        kept, formats = Kept(), weight_formats("int4")
        load_params(folder, load_config(folder), parallel, host_dtype("bfloat16"), "cpu", formats=formats, kept=kept)
        return [array.tobytes() for array in kept.memory()]

    monkeypatch.setattr(StoredPart, "blocks", counted)
    found = memory()
    assert taken[True] > 0
    monkeypatch.setattr(StoredPart, "blocks", lambda *given: None)
    assert memory() == found
