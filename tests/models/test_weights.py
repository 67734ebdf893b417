"""Weights are cut, fused and converted as the table says; a broken checkpoint is one clear error."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
import torch
from checkpoints import PLAIN, random_tensors, save_checkpoint
from safetensors.torch import save_file

from vnext.models.checkpoint import open_checkpoint
from vnext.models.config import load_config
from vnext.models.errors import ModelError
from vnext.models.sharding import Parallel, alone
from vnext.models.weights import choose_dtype, fingerprint, load_params

HALF = Parallel(rank=1, world_size=2, all_reduce=lambda tensor: tensor, all_gather=lambda tensor, dim: tensor)


def load(path: Path, parallel: Parallel | None = None, dtype: torch.dtype = torch.float32) -> object:
    return load_params(path, load_config(path), parallel or alone(), dtype, "cpu")


def test_parts_are_fused_and_cut(tmp_path: Path, plain_weights: None) -> None:
    tensors = random_tensors(PLAIN)
    params = load(save_checkpoint(tmp_path, tensors), HALF)
    prefix = "model.layers.1.self_attn."
    query, key, value = (tensors[f"{prefix}{name}_proj.weight"] for name in "qkv")
    assert torch.equal(params.layers[1].attention.qkv.weight, torch.cat((query[16:], key[8:], value[8:])))
    assert torch.equal(params.layers[1].attention.output.weight, tensors[prefix + "o_proj.weight"][:, 16:])
    gate, up = (tensors[f"model.layers.0.mlp.{name}_proj.weight"] for name in ("gate", "up"))
    assert torch.equal(params.layers[0].mlp.gate_up.weight, torch.cat((gate[26:], up[26:])))
    padded = torch.cat((tensors["lm_head.weight"][31:], torch.zeros(1, 32)))
    assert torch.equal(params.head, padded)


def test_tied_weights_are_held_once(tmp_path: Path) -> None:
    params = load(save_checkpoint(tmp_path, tie_word_embeddings=True))
    assert params.head is params.embedding


def test_dtype_is_converted(tmp_path: Path) -> None:
    tensors = random_tensors(PLAIN)
    params = load(save_checkpoint(tmp_path, tensors), dtype=torch.bfloat16)
    assert torch.equal(params.norm, tensors["model.norm.weight"].bfloat16())
    assert params.frequencies.dtype == torch.float32
    config = load_config(tmp_path)
    assert choose_dtype("auto", config) == torch.float32 and choose_dtype("bfloat16", config) == torch.bfloat16
    half = msgspec.structs.replace(config, dtype="float16")
    assert choose_dtype("auto", half) == torch.bfloat16 and choose_dtype("float16", half) == torch.float16
    assert choose_dtype("auto", half, device="cuda") == torch.float16
    with pytest.raises(ModelError, match="dtype 'int4' is not supported; choose auto, float32"):
        choose_dtype("int4", config)


def test_progress_rises_to_the_whole(tmp_path: Path) -> None:
    save_checkpoint(tmp_path)
    seen: list[tuple[int, int]] = []
    load_params(tmp_path, load_config(tmp_path), alone(), torch.float32, "cpu", lambda *pair: seen.append(pair))
    done = [pair[0] for pair in seen]
    assert done == sorted(done) and len(done) > 10
    assert {pair[1] for pair in seen} == {done[-1]} == {(tmp_path / "model.safetensors").stat().st_size}


def without(path: Path) -> None:
    tensors = random_tensors(PLAIN)
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_checkpoint(path, tensors)


def misshapen(path: Path) -> None:
    save_checkpoint(path, {**random_tensors(PLAIN), "model.norm.weight": torch.ones(31)})


def integers(path: Path) -> None:
    save_checkpoint(path, {**random_tensors(PLAIN), "model.norm.weight": torch.ones(32, dtype=torch.int64)})


def truncated(path: Path) -> None:
    file = save_checkpoint(path) / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])


def garbled(path: Path) -> None:
    file = save_checkpoint(path) / "model.safetensors"
    content = file.read_bytes()
    file.write_bytes(content[:8] + b"}" + content[9:])


def empty(path: Path) -> None:
    (save_checkpoint(path) / "model.safetensors").write_bytes(b"")


def missing_file(path: Path) -> None:
    (save_checkpoint(path) / "model.safetensors").unlink()


def missing_shard(path: Path) -> None:
    save_checkpoint(path)
    index = {"weight_map": {"model.norm.weight": "model.safetensors", "lm_head.weight": "part-2.safetensors"}}
    (path / "model.safetensors.index.json").write_text(json.dumps(index))


def escaping_index(path: Path) -> None:
    save_checkpoint(path)
    index = {"weight_map": {"model.norm.weight": "../model.safetensors"}}
    (path / "model.safetensors.index.json").write_text(json.dumps(index))


def other_form(path: Path) -> None:
    missing_file(path)
    (path / "pytorch_model.bin").write_bytes(b"")


def untied_without_a_head(path: Path) -> None:
    tensors = random_tensors(PLAIN)
    del tensors["lm_head.weight"]
    save_checkpoint(path, tensors)


BROKEN: list[tuple[Callable[[Path], None], str]] = [
    (without, "has no tensor 'model.layers.1.mlp.up_proj.weight'"),
    (misshapen, r"'model.norm.weight' in .* has the shape \[31\] but config.json asks for \[32\]"),
    (integers, "'model.norm.weight' in .* has the dtype I64; supported are F32, F16, BF16"),
    (truncated, "model.safetensors is truncated or corrupt"),
    (garbled, "model.safetensors is truncated or corrupt"),
    (empty, "model.safetensors is truncated or corrupt"),
    (missing_file, "model.safetensors is missing"),
    (other_form, "model.safetensors is missing; .* here is pytorch_model.bin: take a revision"),
    (untied_without_a_head, "has no lm_head.weight and config.json does not tie it"),
    (missing_shard, "part-2.safetensors is missing"),
    (escaping_index, "does not map tensors to files"),
]


@pytest.mark.parametrize(("damage", "message"), BROKEN)
def test_a_broken_checkpoint_is_one_clear_error(
    tmp_path: Path, damage: Callable[[Path], None], message: str
) -> None:
    damage(tmp_path)
    with pytest.raises(ModelError, match=message):
        load(tmp_path)


def test_a_world_size_that_does_not_divide_is_refused_before_reading(tmp_path: Path) -> None:
    save_checkpoint(tmp_path)
    three = Parallel(rank=0, world_size=3, all_reduce=HALF.all_reduce, all_gather=HALF.all_gather)
    with pytest.raises(ModelError, match="do not split over 3 ranks"):
        load(tmp_path, three)


def test_fingerprint_follows_the_content(tmp_path: Path) -> None:
    first = fingerprint(save_checkpoint(tmp_path / "a"))
    assert first == fingerprint(save_checkpoint(tmp_path / "b")) and len(first) == 32
    assert first != fingerprint(save_checkpoint(tmp_path / "c", rms_norm_eps=1e-6))
    assert first != fingerprint(save_checkpoint(tmp_path / "d", random_tensors(PLAIN, seed=1)))


def test_fingerprint_of_a_truncated_file_is_an_error(tmp_path: Path) -> None:
    truncated(tmp_path)
    with pytest.raises(ModelError, match="truncated or corrupt"):
        fingerprint(tmp_path)


def test_a_checkpoint_in_several_files(tmp_path: Path, plain_weights: None) -> None:
    tensors = random_tensors(PLAIN)
    expected = load(save_checkpoint(tmp_path / "one", tensors))
    path = save_checkpoint(tmp_path / "two", tensors)
    (path / "model.safetensors").unlink()
    names = sorted(tensors)
    homes = {name: f"part-{index % 2}.safetensors" for index, name in enumerate(names)}
    for home in set(homes.values()):
        save_file({name: tensors[name] for name in names if homes[name] == home}, path / home)
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": homes}))
    found = load(path)
    assert torch.equal(found.layers[1].mlp.gate_up.weight, expected.layers[1].mlp.gate_up.weight)
    assert torch.equal(found.head, expected.head)


def test_a_header_that_lies_about_a_tensor_is_refused(tmp_path: Path) -> None:
    """Another shape of other size, and offsets behind the file's end: neither may be read as memory."""
    file = save_checkpoint(tmp_path) / "model.safetensors"
    content = file.read_bytes()
    for before, after in ((b'"shape":[61,32]', b'"shape":[99,32]'), (b'"data_offsets":[0,', b'"data_offsets":[7,')):
        assert before in content
        file.write_bytes(content.replace(before, after))
        with pytest.raises(ModelError, match="model.safetensors is truncated or corrupt"):
            load(tmp_path)


def test_a_copied_tensor_can_be_released_and_read_again(tmp_path: Path) -> None:
    tensors = random_tensors(PLAIN)
    with open_checkpoint(save_checkpoint(tmp_path, tensors)) as checkpoint:
        for name, tensor in tensors.items():
            whole = tuple(slice(0, size) for size in tensor.shape)
            assert torch.equal(checkpoint.part(name, tuple(tensor.shape), whole), tensor)
            checkpoint.release(name)
            assert torch.equal(checkpoint.part(name, tuple(tensor.shape), whole), tensor)
