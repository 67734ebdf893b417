"""Quantised checkpoints, each format as its definition says, beside the float checkpoint of the same numbers."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

sys.path.append(str(Path(__file__).resolve().parents[1]))
from checkpoints import PLAIN, random_tensors, save_checkpoint
from model_helpers import Chunk, ThreadGroup, load_model
from stored_cases import BLOCKS, CASES, COMPRESSED, Tensors, eight

from vnext.models.errors import ModelError
from vnext.models.layers.sharding import Parallel
from vnext.models.loading.checkpoint import open_checkpoint
from vnext.models.loading.unread import unread

TOKENS = [index % 61 for index in range(7, 57)]
BLOCKS_OF_CACHE = [3, 9, 4, 21, 5, 6, 7, 8, 30, 31]
WIDE: dict[str, Any] = {"hidden_size": 128, "intermediate_size": 192}
FLOATS = random_tensors(PLAIN | WIDE)
NAME = "model.layers.1.mlp.down_proj."


def made(case: str) -> tuple[Tensors, Tensors]:
    """A checkpoint's tensors as they are stored, and as floats."""
    stored, floats = dict(FLOATS), dict(FLOATS)
    for name in (name for name in FLOATS if "_proj" in name):
        tensors, numbers = CASES[case].make(stored.pop(name).double().numpy())
        stem = name.removesuffix("weight")
        stored |= {stem + suffix: tensor for suffix, tensor in tensors.items()}
        floats[name] = torch.from_numpy(numbers.astype(np.float32))
    return stored, floats


def saved(path: Path, stored: Tensors, case: str) -> Path:
    return save_checkpoint(path, stored, quantization_config=CASES[case].settings, **WIDE)


def logits(path: Path, parallel: Parallel | None = None, **given: object) -> torch.Tensor:
    return load_model(path, parallel=parallel, **given).logits(Chunk(TOKENS, 0, BLOCKS_OF_CACHE))


@pytest.mark.parametrize("case", CASES)
def test_a_checkpoint_answers_as_its_floats_on_one_rank_and_two(case: str, tmp_path: Path) -> None:
    """Its numbers are the definition's to a rounding of float32, whole and in parts, and nothing is left unread."""
    stored, floats = made(case)
    path = saved(tmp_path / "stored", stored, case)
    check_parts(path, floats)
    assert unread(path) == ""
    expected = logits(save_checkpoint(tmp_path / "floats", floats, **WIDE))
    for found in (logits(path), *ThreadGroup(2).run(lambda parallel: logits(path, parallel))):
        assert (found - expected).abs().max() <= 1e-4
        assert torch.equal(found.argmax(-1), expected.argmax(-1))


@pytest.mark.parametrize("case", ["awq", "gptq", "w4a16", "w8a16", "w8a8 zeros", "nvfp4", "mxfp4", "torchao int4"])
def test_whole_numbers_stay_in_few_bits(case: str, tmp_path: Path) -> None:
    """And answer nearly as their floats: activations are rounded to 8 bits too."""
    path = saved(tmp_path, made(case)[0], case)
    kept, floats = (load_model(path, quantization=each, dtype=torch.bfloat16) for each in ("codes", "none"))
    sizes = [model.params.layers[0].mlp.gate_up.weight.linear.buffer.nbytes for model in (kept, floats)]
    assert sizes[0] < 0.65 * sizes[1]
    found, expected = (model.logits(Chunk(TOKENS, 0, BLOCKS_OF_CACHE)) for model in (kept, floats))
    assert (found - expected).norm() <= 0.05 * expected.norm()


def check_parts(path: Path, floats: Tensors) -> None:
    with open_checkpoint(path) as checkpoint:
        for name in (name for name in floats if "layers.1" in name and "_proj" in name):
            format, expected = checkpoint.format_of(name), floats[name].numpy()
            assert format is not None
            height, width = expected.shape
            for rows, columns in ((slice(0, height), slice(0, width)), (slice(32, 64), slice(32, 96)), (slice(0, 32), slice(64, width))):
                cuts = zip(format.tensors(name), format.shapes(expected.shape), format.slices(rows, columns))
                part = tuple(checkpoint.raw(each, shape, cut) for each, shape, cut in cuts)
                np.testing.assert_allclose(format.to_float(part), expected[rows, columns], rtol=5e-7, atol=1e-8)
                if format.has_codes:
                    np.testing.assert_allclose(format.codes(part).floats(), expected[rows, columns], rtol=5e-7, atol=3e-8)


def broken(case: str, changes: dict[str, torch.Tensor | None]) -> Tensors:
    """The tensors of a case with those of one module changed, or missing."""
    stored, _ = made(case)
    named = {NAME + suffix: tensor for suffix, tensor in changes.items()}
    return {name: tensor for name, tensor in (stored | named).items() if tensor is not None}


NAN, ORDER = float("nan"), torch.arange(192, dtype=torch.int32) // 32
BAD = {
    "a scale is missing": ("awq", {"scales": None}, r"down_proj.weight in .* cannot be read: there is no tensor .*down_proj.scales'"),
    "zeros are missing": ("gptq", {"qzeros": None}, r"there is no tensor .*down_proj.qzeros'"),
    "FP8 without a scale": ("fp8 tensor", {"weight_scale": None}, r"there is no scale of .*down_proj.weight'"),
    "NaN scales": ("gptq", {"scales": torch.full((6, 128), NAN, dtype=torch.float16)}, r"scales that are not finite"),
    "NaN scales of blocks": ("fp8 blocks", {"weight_scale_inv": torch.full((3, 4), NAN)}, r"scales that are not finite"),
    "NaN exponents": ("mxfp4", {"weight_scale": torch.full((128, 6), 255, dtype=torch.uint8)}, r"scales that are not finite"),
    "zero divides": ("nvfp4", {"weight_global_scale": torch.zeros(1)}, r"scales that are not finite"),
    "NaN of a block": ("nf4", {"weight.absmax": torch.full((384,), NAN)}, r"scales that are not finite"),
    "groups do not divide": ("awq", {"scales": torch.ones(5, 128).half(), "qzeros": torch.ones(5, 16, dtype=torch.int32)},
                             r"192 inputs are no 5 whole groups"),
    "an order out of range": ("gptq act-order", {"g_idx": ORDER * 2}, r"g_idx' names groups from 0 to 10, and there are 6"),
    "a negative order": ("gptq act-order", {"g_idx": ORDER - 1}, r"g_idx' names groups from -1 to 4"),
    "an order of another length": ("gptq act-order", {"g_idx": ORDER[:96].flip(0)}, r"g_idx' is I32 \[96\], not whole numbers for 192 inputs"),
    "bits that are none": ("gptq", {"qzeros": torch.ones(6, 42, dtype=torch.int32)}, r"42 words for 128 outputs are not 2 to 8 bits"),
    "scales of no block": ("fp8 blocks", {"weight_scale_inv": torch.ones(5, 5)}, r"5 x 5 scales do not fit 128 outputs and 192 inputs"),
    "words of another kind": ("awq", {"qweight": torch.ones(192, 16)}, r"qweight' is F32 \[192, 16\], not I32"),
    "words of another shape": ("awq", {"qweight": torch.ones(96, 16, dtype=torch.int32)}, r"has the shape \[96, 16\] but config.json asks"),
    "a broken state": ("nf4", {"weight.quant_state.bitsandbytes__nf4": torch.tensor([1, 2], dtype=torch.uint8)},
                       r"quant_state cannot be read"),
    "NaN zero points": ("torchao int4", {"_weight_zero_point": torch.full((6, 128), NAN)}, r"scales that are not finite"),
    "zero points of outputs": ("torchao int4", {"_weight_zero_point": torch.ones(128, 6)}, r"and zero points \[128, 6\] are not of 128"),
    "other groups": ("torchao int4", {"_weight_scale": torch.ones(5, 128), "_weight_zero_point": torch.ones(5, 128)},
                     r"192 inputs are no 5 whole groups"),
    "tiles": ("torchao int4", {"_weight_qdata": torch.ones(16, 1, 32, 4, dtype=torch.int32), "_weight_scale": None,
                               "_weight_zero_point": None, "_weight_scale_and_zero": torch.ones(8, 128, 2)},
              r"it is torchao's Int4TilePackedTo4dTensor.*; save the model with Int4WeightOnlyConfig"),
    "words of one device": ("torchao int4", {"_weight_qdata": torch.ones(128, 24, dtype=torch.int32)}, r"torchao's Int4PlainInt32Tensor"),
    "scaled activations": ("torchao int8", {"_weight_act_pre_scale": torch.ones(192)}, r"whose activations have a scale of their own"),
    "MX of torchao": ("torchao int8", {"_weight_scale": torch.ones(128, 6).to(torch.float8_e8m0fnu)}, r"it is torchao's MXTensor"),
    "NVFP4 of torchao": ("torchao int8", {"_weight_scale": torch.ones(128, 12).to(torch.float8_e4m3fn)}, r"it is torchao's NVFP4Tensor"),
    "an old order of bitsandbytes": ("llm.int8", {"weight_format": torch.tensor(1, dtype=torch.uint8)}, r"an order for one GPU"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_broken_weights_are_refused_in_one_sentence(case: str, tmp_path: Path) -> None:
    format, changes, sentence = BAD[case]
    path = saved(tmp_path, broken(format, changes), format)
    with pytest.raises(ModelError, match=sentence) as found:
        load_model(path)
    assert "\n" not in str(found.value)


def test_blocks_of_the_usual_size_end_anywhere(tmp_path: Path) -> None:
    """128 x 128 where neither outputs nor inputs are whole blocks, and ranks that cut them."""
    make, sizes = eight(torch.float8_e4m3fn, (128, 128), ("weight", "weight_scale_inv")), {"hidden_size": 160, "intermediate_size": 320}
    stored, floats = random_tensors(PLAIN | sizes), random_tensors(PLAIN | sizes)
    for name in [name for name in stored if "_proj" in name]:
        tensors, numbers = make(stored.pop(name).double().numpy())
        stored |= {name.removesuffix("weight") + suffix: tensor for suffix, tensor in tensors.items()}
        floats[name] = torch.from_numpy(numbers.astype(np.float32))
    usual = BLOCKS | {"weight_block_size": [128, 128]}
    path = save_checkpoint(tmp_path / "stored", stored, quantization_config=usual, **sizes)
    expected = logits(save_checkpoint(tmp_path / "floats", floats, **sizes))
    for found in (logits(path), *ThreadGroup(2).run(lambda parallel: logits(path, parallel))):
        assert (found - expected).abs().max() <= 1e-4


def test_weights_without_settings_are_not_taken_for_a_method(tmp_path: Path) -> None:
    """The tensors of AWQ and GPTQ have the same names."""
    path = save_checkpoint(tmp_path, made("gptq")[0], **WIDE)
    with pytest.raises(ModelError, match=r"has no tensor 'model.layers.0.self_attn.q_proj.weight'"):
        load_model(path)


def test_older_files_name_the_method(tmp_path: Path) -> None:
    path = save_checkpoint(tmp_path, made("gptq")[0], **WIDE)
    (path / "quantize_config.json").write_text('{"bits": 4, "group_size": 32}')
    assert logits(path).isfinite().all()


def test_other_methods_are_refused_by_name(tmp_path: Path) -> None:
    for settings, sentence in (
        ({"quant_method": "hqq"}, r"quantised weights \(hqq\) are not supported; read are AWQ, GPTQ"),
        ({"quant_method": "awq", "version": "gemv"}, r"\(awq\) of version 'gemv' are not supported, only exllama, gemm, ipex"),
        ({"quant_method": "gptq", "checkpoint_format": "marlin"}, r"\(gptq\) of checkpoint_format 'marlin' are not supported"),
        (COMPRESSED | {"format": "marlin-24"}, r"format 'marlin-24' are not supported"),
        (COMPRESSED | {"transform_config": {"config_groups": {"R1": {}}}}, r"with transforms \['R1'\] are not supported"),
        ({"quant_method": "modelopt", "quant_algo": "W4A8_AWQ"}, r"quant_algo 'W4A8_AWQ' are not supported"),
    ):
        save_checkpoint(tmp_path, quantization_config=settings)
        with pytest.raises(ModelError, match=sentence):
            load_model(tmp_path)
