"""Weights are cut, fused and converted as the table says; a broken checkpoint is one clear error."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable, Iterator
from math import prod
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from checkpoints import PLAIN, random_tensors, save_checkpoint
from safetensors.torch import save, save_file

from vnext.kernels.arrays import as_tensor
from vnext.models.config.folder import require_checkpoint
from vnext.models.config.model_config import load_config
from vnext.models.errors import ModelError
from vnext.models.layers.sharding import Parallel, alone
from vnext.models.loading.checkpoint import open_checkpoint
from vnext.models.loading.host_place import HostPlace
from vnext.models.loading.kept import Kept
from vnext.models.loading.update import open_update
from vnext.models.loading.weights import choose_dtype, fingerprint, load_params

HALF = Parallel(rank=1, world_size=2, all_reduce=lambda tensor: tensor, all_gather=lambda tensor, dim: tensor)


def load(path: Path, parallel: Parallel | None = None, dtype: torch.dtype = torch.float32) -> object:
    return load_params(path, load_config(path), parallel or alone(), dtype, "cpu")


def test_parts_are_fused_and_cut(tmp_path: Path, plain_weights: None) -> None:
    tensors = random_tensors(PLAIN)
    params = load(save_checkpoint(tmp_path, tensors), HALF)
    prefix = "model.layers.1.self_attn."
    query, key, value = (tensors[f"{prefix}{name}_proj.weight"] for name in "qkv")
    assert torch.equal(params.layers[1].attention.qkv.weight, torch.cat((query[16:], key[8:], value[8:])))
    assert torch.equal(torch.cat(params.layers[1].attention.output.weight.pieces, 1), tensors[prefix + "o_proj.weight"][:, 16:])
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
    assert params.frequencies.dtype == np.float32
    config = load_config(tmp_path)
    assert choose_dtype("auto", config) == "float32" and choose_dtype("bfloat16", config) == "bfloat16"
    half = msgspec.structs.replace(config, dtype="float16")
    assert choose_dtype("auto", half) == "bfloat16" and choose_dtype("float16", half) == "float16"
    assert choose_dtype("auto", half, device="cuda") == "float16"
    with pytest.raises(ModelError, match="dtype 'int4' is not supported; choose auto, float32"):
        choose_dtype("int4", config)


def test_progress_rises_to_the_whole(tmp_path: Path) -> None:
    save_checkpoint(tmp_path)
    seen: list[tuple[int, int]] = []
    load_params(tmp_path, load_config(tmp_path), alone(), torch.float32, "cpu", kept=Kept(lambda *pair: seen.append(pair)))
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


def pointer_of_lfs(path: Path) -> None:
    text = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 988097824\n"
    (save_checkpoint(path) / "model.safetensors").write_text(text)


def pointer_in_the_index(path: Path) -> None:
    pointer_of_lfs(path)
    (path / "model.safetensors").rename(path / "model.safetensors.index.json")


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
    (pointer_of_lfs, "model.safetensors is only a pointer of Git LFS to the file: run 'git lfs pull'"),
    (pointer_in_the_index, "index.json is only a pointer of Git LFS"),
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
    """Another shape of other size, offsets behind the file's end, that are no whole numbers, that overlap: none may be read."""
    file = save_checkpoint(tmp_path) / "model.safetensors"
    content = file.read_bytes()
    spans = re.findall(rb'"data_offsets":\[(\d+),(\d+)\]', content)
    one, as_large = spans[4:6]  # gate and up
    assert int(one[1]) - int(one[0]) == int(as_large[1]) - int(as_large[0])
    lies = (
        (b'"shape":[61,32]', b'"shape":[99,32]'),
        (b'"data_offsets":[0,', b'"data_offsets":[7,'),
        (b"[%s,%s]" % one, b"[%s.0,%s]" % one),
        (b"[%s,%s]" % as_large, b"[%s,%s]" % one),
    )
    for before, after in lies:
        assert before in content
        changed = content.replace(before, after, 1)
        size = int.from_bytes(content[:8], "little") + len(changed) - len(content)
        file.write_bytes(size.to_bytes(8, "little") + changed[8:])
        with pytest.raises(ModelError, match="model.safetensors is truncated or corrupt"):
            load(tmp_path)


ABSURD: tuple[Any, ...] = (
    None, True, -1, 1.5, 2**62, 2**70, 10**400, "x", [], {}, [0], [0, 0], [2**70, 2**70], [-5, 3], [0, 1.0], ["a", "b"],
    [0, 0, 0], "F99", "I64", [[1], [2]], [-61, -32], [True, 1], float("inf"), float("nan"),
)  # fmt: skip


def hostile_headers() -> Iterator[tuple[bytes, int | None]]:
    """Headers of the plain checkpoint that were meddled with, each with the length that stands before it (None: its own)."""
    rng, content = random.Random(5), save(random_tensors(PLAIN))
    size = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + size])
    for depth in (1_000, 100_000):
        yield b'{"a":' + b"[" * depth + b"]" * depth + b"}", None
        yield b'{"a":' * depth + b"1" + b"}" * depth, None
    for length in (0, 1, size - 1, size + 1, len(content), 2**31, 2**63, 2**64 - 1):
        yield content[8 : 8 + size], length
    for _ in range(200):
        changed, name = json.loads(json.dumps(header)), rng.choice(sorted(header))
        if rng.random() < 0.3:
            changed[name] = rng.choice(ABSURD)
        else:
            changed[name][rng.choice(("dtype", "shape", "data_offsets"))] = rng.choice(ABSURD)
        yield json.dumps(changed).encode(), None
    for _ in range(50):
        garbled = bytearray(content[8 : 8 + size])
        garbled[rng.randrange(size)] = rng.randrange(256)
        yield bytes(garbled), None


def test_a_hostile_header_is_one_sentence_or_harmless(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As somebody else's checkpoint may have it: no other error, and no memory for what its bytes cannot hold."""
    file = save_checkpoint(tmp_path) / "model.safetensors"
    content, taken, zeros = file.read_bytes(), [], HostPlace.zeros
    size = int.from_bytes(content[:8], "little")
    monkeypatch.setattr(HostPlace, "zeros", lambda self, shape, dtype: taken.append(prod(shape)) or zeros(self, shape, dtype))
    refused = 0
    for header, length in hostile_headers():
        file.write_bytes((len(header) if length is None else length).to_bytes(8, "little") + header + content[8 + size :])
        try:
            require_checkpoint(tmp_path)
            load(tmp_path)
        except ModelError as error:
            refused += 1
            assert len(str(error)) < 700 and "\n" not in str(error)
    assert refused > 200 and max(taken) * 4 <= len(content)


@pytest.mark.parametrize("key", ["vocab_size", "hidden_size", "intermediate_size"])
def test_sizes_that_the_files_do_not_have_take_no_memory(tmp_path: Path, key: str, monkeypatch: pytest.MonkeyPatch) -> None:
    path, taken, zeros = save_checkpoint(tmp_path), [], HostPlace.zeros
    monkeypatch.setattr(HostPlace, "zeros", lambda self, shape, dtype: taken.append(prod(shape)) or zeros(self, shape, dtype))
    (path / "config.json").write_text(json.dumps({**PLAIN, key: 2**31 - 4}))
    with pytest.raises(ModelError, match="the two files do not belong together|hidden_size must be at most 1048576"):
        load(path)
    assert max(taken, default=0) * 4 <= (path / "model.safetensors").stat().st_size


def test_a_header_of_any_length_gives_the_same_weights(tmp_path: Path, plain_weights: None) -> None:
    """Data that begin at any byte."""
    expected = load(save_checkpoint(tmp_path))
    file = tmp_path / "model.safetensors"
    content = file.read_bytes()
    size = int.from_bytes(content[:8], "little")
    for spaces in range(1, 8):
        file.write_bytes((size + spaces).to_bytes(8, "little") + content[8 : 8 + size] + b" " * spaces + content[8 + size :])
        assert torch.equal(load(tmp_path).layers[1].mlp.gate_up.weight, expected.layers[1].mlp.gate_up.weight)


def test_a_copied_tensor_can_be_released_and_read_again(tmp_path: Path) -> None:
    tensors = random_tensors(PLAIN)
    with open_checkpoint(save_checkpoint(tmp_path, tensors)) as checkpoint:
        for name, tensor in tensors.items():
            whole = tuple(slice(0, size) for size in tensor.shape)
            assert torch.equal(as_tensor(checkpoint.part(name, tuple(tensor.shape), whole)), tensor)
            checkpoint.release(name)
            assert torch.equal(as_tensor(checkpoint.part(name, tuple(tensor.shape), whole)), tensor)


def gate_of(path: Path) -> torch.Tensor:
    """One of a checkpoint's tensors, as it is read."""
    name = "model.layers.1.mlp.gate_proj.weight"
    shape = tuple(random_tensors(PLAIN)[name].shape)
    updated = open_update(path).part(name, shape, ())
    with open_checkpoint(path) as checkpoint:
        assert (updated == checkpoint.part(name, shape, ())).all(), "an engine that slept reads the folder as an update"
        return as_tensor(checkpoint.part(name, shape, tuple(slice(0, size) for size in shape))).clone()


def test_the_index_says_which_copy_of_a_tensor_counts(tmp_path: Path) -> None:
    """A stale copy in a later file is left out; a whole file that the index does not know counts before the index."""
    tensors, stale = random_tensors(PLAIN), random_tensors(PLAIN, seed=1)
    path = save_checkpoint(tmp_path, tensors)
    whole = (path / "model.safetensors").read_bytes()
    (path / "model.safetensors").unlink()
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": dict.fromkeys(tensors, "a.safetensors")}))
    save_file(tensors, path / "a.safetensors")
    expected = gate_of(path)
    others = {"model.norm.weight": "b.safetensors"}
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": dict.fromkeys(tensors, "a.safetensors") | others}))
    save_file(stale | {"model.norm.weight": tensors["model.norm.weight"]}, path / "b.safetensors")
    assert torch.equal(gate_of(path), expected)
    save_file(stale, path / "a.safetensors")
    (path / "model.safetensors").write_bytes(whole)
    assert torch.equal(gate_of(path), expected)


def test_the_dtype_is_that_of_the_tensors_where_the_configuration_names_none(tmp_path: Path) -> None:
    """That of most numbers: norms may be kept wider."""
    tensors = {name: each.bfloat16() if "norm" not in name else each for name, each in random_tensors(PLAIN).items()}
    path = save_checkpoint(tmp_path, tensors)
    assert load_config(path).dtype == "float32", "as config.json says"
    raw = {name: value for name, value in PLAIN.items() if name != "torch_dtype"}
    for named in ({}, {"torch_dtype": None}, {"dtype": None}):
        (path / "config.json").write_text(json.dumps(raw | named))
        assert load_config(path).dtype == "bfloat16"
    (path / "config.json").write_text(json.dumps(raw | {"dtype": "float16"}))
    assert load_config(path).dtype == "float16"
