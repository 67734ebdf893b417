"""Checkpoints that `vnext quantize` writes: their numbers by the formats' definitions, the errors it names, and what it refuses."""

from __future__ import annotations

import json
import sys
from hashlib import blake2b
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

sys.path.append(str(Path(__file__).resolve().parents[1]))
from checkpoints import PLAIN, random_tensors, save_checkpoint
from model_helpers import Chunk, load_model

from vnext.commands.cli import main
from vnext.kernels.formats.rounding import SHARES, to_integers
from vnext.models.loading.packed_file import FORMAT_VERSION
from vnext.models.loading.quantise import Quantiser
from vnext.models.loading.unread import unread

WIDE = {"hidden_size": 128, "intermediate_size": 192, "torch_dtype": "bfloat16"}
UP = "model.layers.0.mlp.up_proj."
TOKENS = [index % 61 for index in range(7, 57)]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    floats = {name: tensor.to(torch.bfloat16) for name, tensor in random_tensors(PLAIN | WIDE).items()}
    path = save_checkpoint(tmp_path / "floats", floats, **WIDE)
    (path / "tokenizer.json").write_text("{}")
    return path


def numbers(tensors: dict[str, torch.Tensor], bits: int) -> np.ndarray:
    """What compressed-tensors says that a weight of words is: signed numbers times the scales of their groups."""
    words, scales = tensors[UP + "weight_packed"].numpy().view(np.uint32), tensors[UP + "weight_scale"].double().numpy()
    codes = np.array([[int(word) >> bits * at & 2**bits - 1 for word in row for at in range(32 // bits)] for row in words])
    return (codes - 2 ** (bits - 1)) * np.repeat(scales, codes.shape[1] // scales.shape[1], 1)


@pytest.mark.parametrize(("scheme", "bits", "most"), [("w4a16", 4, 0.11), ("w8a16", 8, 0.008), ("fp8", 0, 0.03)])
def test_a_checkpoint_is_what_its_format_says(scheme: str, bits: int, most: float, folder: Path, tmp_path: Path) -> None:
    losses = {loss.name: loss.share for loss in Quantiser(folder, tmp_path / "out", scheme, 0).run()}
    floats, stored = load_file(folder / "model.safetensors"), load_file(tmp_path / "out" / "model.safetensors")
    if bits:
        found = numbers(stored, bits)
        assert stored[UP + "weight_shape"].tolist() == [192, 128]
    else:
        found = (stored[UP + "weight"].double() * stored[UP + "weight_scale"].double()).numpy()
    own = floats[UP + "weight"].double().numpy()
    assert losses[UP + "weight"] == pytest.approx(np.linalg.norm(found - own) / np.linalg.norm(own), rel=1e-4)
    assert len(losses) == 14 and max(losses.values()) < most
    assert torch.equal(stored["lm_head.weight"], floats["lm_head.weight"])
    assert unread(tmp_path / "out") == "" and (tmp_path / "out" / "tokenizer.json").is_file()
    both = [load_model(path).logits(Chunk(TOKENS, 0, [3, 9, 4, 21])) for path in (folder, tmp_path / "out")]
    assert (both[0] - both[1]).norm() < 5 * most * both[0].norm()


def test_the_same_bytes_each_time(folder: Path, tmp_path: Path) -> None:
    for name in ("one", "two"):
        list(Quantiser(folder, tmp_path / name, "w4a16", 32).run())
    one, two = (sorted(each.read_bytes() for each in (tmp_path / name).iterdir()) for name in ("one", "two"))
    assert one == two


def test_searched_scales_lose_less_than_the_largest_number() -> None:
    weight = np.random.default_rng(3).standard_normal((64, 256)).astype(np.float32)
    weight[3], weight[5, :128] = 0, 1e-42
    found = to_integers(weight, 4, 128, np.dtype(np.float32))
    wide = np.repeat(found.scales, 128, 1)
    largest = np.repeat(np.abs(weight.reshape(64, 2, 128)).max(-1), 128, 1) / 7
    plain = np.rint(np.divide(weight, largest, where=largest > 0, out=np.zeros_like(weight))) * largest
    error = np.square(found.numbers * wide - weight).sum()
    assert found.error == pytest.approx(error, rel=1e-4) and error < 0.8 * np.square(plain - weight).sum()
    assert np.isfinite(found.scales).all() and found.numbers.min() >= -8 and found.numbers.max() <= 7


def test_errors_of_large_numbers_count_more() -> None:
    """Of all scales that are tried, none does better by the errors as they count."""
    groups = np.random.default_rng(4).standard_normal((256, 32)).astype(np.float32) ** 3
    counted = np.sqrt(np.square(groups) + 2 * np.square(groups).mean(-1, keepdims=True))

    def errors(numbers: np.ndarray, scales: np.ndarray) -> np.ndarray:
        return (counted * np.square(numbers * scales - groups)).sum(-1)

    found = to_integers(groups, 4, 32, np.dtype(np.float32))
    largest = np.where(groups.max(-1) > -groups.min(-1), -1, 1)[:, None] * np.abs(groups).max(-1, keepdims=True) / 7
    for share in SHARES:
        scales = (largest * np.float32(share)).astype(np.float32)
        others = np.clip(np.rint(groups / scales), -8, 7)
        assert (errors(found.numbers, found.scales) <= errors(others, scales) * 1.00001).all()


@pytest.mark.parametrize(("bits", "group"), [(4, 32), (4, 128), (8, 32), (8, 384)])
def test_a_group_is_rounded_by_its_own_numbers_alone(bits: int, group: int) -> None:
    weight = np.random.default_rng(7).standard_normal((400, 384)).astype(np.float32) ** 3
    whole = to_integers(weight, bits, group, np.dtype(np.float16))
    for row in (0, 341, 399):
        found = to_integers(weight[row : row + 1, :384], bits, group, np.dtype(np.float16))
        assert np.array_equal(found.numbers[0], whole.numbers[row]) and np.array_equal(found.scales[0], whole.scales[row])
    last = to_integers(weight[7:8, -group:], bits, group, np.dtype(np.float16))
    assert np.array_equal(last.numbers[0], whole.numbers[7, -group:])


def test_numbers_change_with_the_version_of_packed_files() -> None:
    """Or a file that was written before would serve beside others."""
    weight = np.random.default_rng(6).standard_normal((64, 64)).astype(np.float32)
    found = [array.tobytes() for bits in (4, 8) for array in to_integers(weight, bits, 32, np.dtype(np.float32))[:2]]
    assert (FORMAT_VERSION, blake2b(b"".join(found), digest_size=8).hexdigest()) == (5, "0a26f6941213a8b9")


def test_settings_are_those_of_compressed_tensors(folder: Path, tmp_path: Path) -> None:
    list(Quantiser(folder, tmp_path / "out", "w4a16", 64).run())
    found = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    assert (found["quant_method"], found["format"], found["ignore"]) == ("compressed-tensors", "pack-quantized", ["lm_head"])
    weights = found["config_groups"]["group_0"]["weights"]
    assert {key: weights[key] for key in ("num_bits", "type", "strategy", "group_size", "symmetric")} == {
        "num_bits": 4, "type": "int", "strategy": "group", "group_size": 64, "symmetric": True,
    }  # fmt: skip


@pytest.mark.parametrize(("scheme", "group"), [("w4a16", 32), ("w8a16", 64)])
def test_few_bits_have_small_groups(scheme: str, group: int, folder: Path, tmp_path: Path) -> None:
    """Of 8 bits the longest ones that divide all weights, whose inputs are 128 and 192."""
    list(Quantiser(folder, tmp_path / "out", scheme, 0).run())
    scales = load_file(tmp_path / "out" / "model.safetensors")[UP + "weight_scale"]
    assert scales.shape == (192, 128 // group)


def test_what_cannot_be_quantised_is_refused(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    assert main(["quantize", str(folder), str(out), "--scheme", "w8a16"]) == 0
    assert "14 weights, 0.5 MB -> 0.3 MB" in capsys.readouterr().out
    for argv, sentence in (
        ([str(folder), str(out)], f"{out} is there already: give a folder that is not"),
        ([str(out), str(tmp_path / "again")], f"{out} is quantised already: give the float checkpoint of this model, or take a GGUF scheme"),
        ([str(folder), str(tmp_path / "new"), "--group-size", "128"], "down_proj.weight has 192 inputs, which are no whole groups of 128"),
        ([str(tmp_path), str(tmp_path / "new")], "has no config.json"),
    ):
        assert main(["quantize", *argv]) == 2
        assert sentence in capsys.readouterr().err
    for argv, sentence in (
        ([str(folder)], "out is missing: write `vnext quantize MODEL OUT`"),
        ([str(folder), "new", "--scheme", "int3"], "'int3': choose w4a16, w8a16, fp8"),
        ([str(folder), "new", "--group-size", "48"], "48: choose 128, 64, 32"),
    ):
        with pytest.raises(SystemExit):
            main(["quantize", *argv])
        assert sentence in capsys.readouterr().err


def test_nothing_is_left_of_a_run_that_fails(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    floats = load_file(folder / "model.safetensors")
    floats[UP + "weight"][5, 5] = float("nan")
    broken = save_checkpoint(tmp_path / "broken", floats, **WIDE)
    before = sorted(tmp_path.iterdir())
    assert main(["quantize", str(broken), str(tmp_path / "out")]) == 2
    assert "up_proj.weight has numbers that are not finite, which cannot be quantised" in capsys.readouterr().err
    assert sorted(tmp_path.iterdir()) == before
