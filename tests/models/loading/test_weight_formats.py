"""A format of weights is one file and one row: a toy one, as floats and as codes, against its plain reference."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

sys.path.append(str(Path(__file__).resolve().parents[1]))
import toy_format
from checkpoints import PLAIN, random_tensors, save_checkpoint
from model_helpers import Chunk, ThreadGroup, load_model
from toy_format import GROUP, TOY8

from vnext.kernels import format as table
from vnext.models.errors import ModelError
from vnext.models.layers.sharding import Parallel
from vnext.models.loading.unread import unread
from vnext.runtime.protocol.settings import ModelSettings
from vnext.runtime.rank.runner import ModelRunner

TOKENS = [index % 61 for index in range(7, 57)]
BLOCKS = [3, 9, 4, 21, 5, 6, 7, 8, 30, 31]
WIDE = {"hidden_size": 64, "intermediate_size": 64}  # whole groups in each shard
NARROW = {"intermediate_size": 64}


@pytest.fixture(autouse=True)
def _row(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(table.FORMATS, "toy8", toy_format.ROW)


def is_toy(name: str) -> bool:
    return "_proj" in name


def made(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The toy's tensors of a weight."""
    groups = weight.unflatten(-1, (-1, GROUP))
    scales = groups.abs().amax(-1) / 127
    return (groups / scales.unsqueeze(-1)).round().flatten(-2).char(), scales


def floats_of(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The numbers that the toy's tensors stand for, by the format's own reference."""
    found = {name: TOY8.to_float(tuple(each.numpy() for each in made(tensors[name]))) for name in tensors if is_toy(name)}
    return tensors | {name: torch.from_numpy(each) for name, each in found.items()}


def stored(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """As a checkpoint of the toy format holds them."""
    found = {name: tensor for name, tensor in tensors.items() if not is_toy(name)}
    for name in filter(is_toy, tensors):
        found.update(zip(TOY8.tensors(name), made(tensors[name])))
    return found


@pytest.fixture
def pair(tmp_path: Path) -> tuple[Path, Path]:
    """The same model in the toy format and in its floats."""
    tensors, folders = random_tensors(PLAIN | WIDE), (tmp_path / "toy", tmp_path / "floats")
    for folder, each in zip(folders, (stored(tensors), floats_of(tensors))):
        folder.mkdir()
        save_checkpoint(folder, each, **WIDE)
    return folders


def logits(path: Path, parallel: Parallel | None = None, **given: object) -> torch.Tensor:
    return load_model(path, parallel=parallel, **given).logits(Chunk(TOKENS, 0, BLOCKS))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_checkpoint_gives_the_bits_of_its_floats(pair: tuple[Path, Path], dtype: torch.dtype) -> None:
    toy, floats = pair
    assert torch.equal(logits(toy, dtype=dtype), logits(floats, dtype=dtype))


@pytest.mark.parametrize("has_codes", [True, False])
def test_int8_rounds_what_has_no_codes(pair: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch, has_codes: bool) -> None:
    monkeypatch.setattr(TOY8, "has_codes", has_codes)
    toy, floats = (logits(path, dtype=torch.bfloat16, quantization="int8") for path in pair)
    codes = logits(pair[0], dtype=torch.bfloat16, quantization="codes")
    assert torch.equal(toy, floats) != has_codes and torch.equal(codes, logits(pair[1], dtype=torch.bfloat16)) != has_codes


def test_each_rank_reads_its_groups(pair: tuple[Path, Path]) -> None:
    toy, floats = pair
    assert all(torch.equal(found, logits(floats)) for found in ThreadGroup(2).run(lambda parallel: logits(toy, parallel)))


def test_nothing_of_it_is_unread(pair: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    assert unread(pair[0]) == ""
    monkeypatch.delitem(table.FORMATS, "toy8")
    assert "model.layers.0.mlp.gate_proj.group_scales" in unread(pair[0])


def test_a_rank_on_a_cpu_packs_it(pair: tuple[Path, Path]) -> None:
    runners = [ModelRunner(path, ModelSettings(dtype="bfloat16"), "cpu", load_model(path).parallel) for path in pair]
    toy, floats = (runner.weights.params.layers[0].mlp.down.weight.linear.buffer for runner in runners)
    assert toy.tobytes() == floats.tobytes()


@pytest.mark.parametrize("cuts", [True, False])
def test_ranks_that_would_cut_a_group(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cuts: bool) -> None:
    """A format says in how many inputs it can be cut: a rank reads that much, and takes its own of the numbers."""
    save_checkpoint(tmp_path, stored(random_tensors(PLAIN | NARROW)), **NARROW)
    one_of_four = Parallel(rank=1, world_size=4, all_reduce=lambda tensor: tensor, all_gather=lambda tensor, dim: tensor)
    if cuts:
        load_model(tmp_path, parallel=one_of_four)
        return
    monkeypatch.setattr(TOY8, "group", 1)
    cut = "o_proj.weight in the format toy8 cannot be cut so for this many ranks: inputs 8 to 16 cut a group of 16"
    with pytest.raises(ModelError, match=cut):
        load_model(tmp_path, parallel=one_of_four)


def test_inputs_that_are_no_whole_groups_are_refused(tmp_path: Path) -> None:
    tensors = stored(random_tensors(PLAIN | NARROW))
    short = {name: tensor[:52] for name, tensor in tensors.items() if "gate_proj" in name or "up_proj" in name}
    save_checkpoint(tmp_path, tensors | short)
    shape = r"down_proj.weight of the shape \[32, 52\] cannot be in the format toy8: 52 inputs are no whole groups of 16"
    with pytest.raises(ModelError, match=shape):
        load_model(tmp_path)


def test_a_tensor_of_another_shape_is_refused(tmp_path: Path) -> None:
    tensors = stored(random_tensors(PLAIN | WIDE))
    tensors["model.layers.0.mlp.up_proj.group_scales"] = torch.ones(64, 3)
    save_checkpoint(tmp_path, tensors, **WIDE)
    with pytest.raises(ModelError, match=r"up_proj.group_scales' in .* has the shape \[64, 3\] but config.json asks for \[64, 4\]"):
        load_model(tmp_path)
