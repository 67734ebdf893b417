"""Weights that stay in the blocks of their file: the same bits in any batch and on any number of ranks, near those of their floats."""

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
from family_cases import CASES, Case, save_case
from gguf_writing import convert, mixed
from model_helpers import Chunk, ThreadGroup, load_model

sys.path.append(str(Path(__file__).resolve().parents[2] / "kernels"))
from cpu_levels import needs_native

from vnext.kernels.arrays import host_dtype
from vnext.kernels.codes import BlockRows
from vnext.kernels.format import weight_formats
from vnext.kernels.formats.coded import CodesWeight
from vnext.kernels.table import plain_operations, substituted
from vnext.models.config.model_config import load_config
from vnext.models.errors import ModelError
from vnext.models.layers.sharding import Parallel, alone
from vnext.models.loading.held import held, scheme
from vnext.models.loading.kept import Kept
from vnext.models.loading.overlay import gguf_folder
from vnext.models.loading.stored import StoredPart
from vnext.models.loading.update import check_update, open_update, tensors_digest
from vnext.models.loading.weights import load_params
from vnext.runtime.protocol.settings import ModelSettings
from vnext.runtime.rank.runner import ModelRunner

TOKENS, BLOCKS = [(7 * index + 3) % 97 for index in range(90)], list(range(8))
TYPES: dict[str, str | Callable[[str], str]] = {"Q8_0": "Q8_0", "Q4_1": "Q4_1", "Q4_K_M": mixed}
WIDE = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64, "num_hidden_layers": 2, "initializer_range": 0.05}
FORMS = {"llama": Case("LlamaForCausalLM", "LlamaConfig", WIDE), "mixtral": Case("MixtralForCausalLM", "MixtralConfig", WIDE)}
FORMS["gpt_oss"] = CASES["gpt_oss"]._replace(changes={**CASES["gpt_oss"].changes, "intermediate_size": 128})
FORMS["gemma4"] = CASES["gemma4"]._replace(
    changes={**CASES["gemma4"].changes, "moe_intermediate_size": 64, "head_dim": 32, "global_head_dim": 64, "intermediate_size": 128}
)


def written(folder: Path, family: str, type_: str | Callable[[str], str]) -> Path:
    save_case(folder / "checkpoint", family)
    return gguf_folder(convert(folder / "checkpoint", folder / "model.gguf", type_=type_), folder / "folders")


@pytest.fixture(autouse=True)
def _cases(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, case in FORMS.items():
        monkeypatch.setitem(CASES, name, case)


def logits(path: Path, quantization: str = "codes", parallel: Parallel | None = None, cut: int = 37) -> torch.Tensor:
    model = load_model(path, parallel=parallel, dtype=torch.bfloat16, quantization=quantization)
    return torch.cat([model.logits(Chunk(TOKENS[first:last], first, BLOCKS)) for first, last in ((0, cut), (cut, len(TOKENS)))])


def near(found: torch.Tensor, expected: torch.Tensor) -> bool:
    """Of most tokens: one that a router sends to another expert is far off."""
    return float(((found - expected).norm(dim=-1) / expected.norm(dim=-1)).median()) <= 0.04


@needs_native
@pytest.mark.parametrize("name", TYPES)
@torch.inference_mode()
def test_any_cut_and_number_of_ranks_gives_the_same_bits(name: str, tmp_path: Path) -> None:
    path = written(tmp_path, "llama", TYPES[name])
    found = logits(path)
    assert near(found, logits(path, "none")) and not torch.equal(found, logits(path, "none"))
    assert torch.equal(logits(path, cut=len(TOKENS) - 1)[-1], found[-1])
    assert all(torch.equal(each, found) for each in ThreadGroup(2).run(lambda parallel: logits(path, "codes", parallel)))


@needs_native
@pytest.mark.parametrize(("family", "type_"), [("mixtral", "Q8_0"), ("gemma4", "Q8_0"), ("gpt_oss", "MXFP4")])
@torch.inference_mode()
def test_experts_stay_in_blocks(tmp_path: Path, family: str, type_: str) -> None:
    path = written(tmp_path, family, lambda name: type_ if "_exps" in name or type_ == "Q8_0" else "F32")
    assert type_.removesuffix("_0") in held(path)
    found = logits(path)
    assert near(found, logits(path, "none"))
    assert all(torch.equal(each, found) for each in ThreadGroup(2).run(lambda parallel: logits(path, "codes", parallel)))


@torch.inference_mode()
def test_plain_torch_multiplies_by_the_same_codes(tmp_path: Path) -> None:
    path = written(tmp_path, "llama", mixed)
    with substituted(plain_operations()):
        model = load_model(path, dtype=torch.bfloat16, quantization="codes")
        assert isinstance(model.params.layers[0].attention.qkv.weight, CodesWeight)
        found = model.logits(Chunk(TOKENS, 0, BLOCKS))[-1:]
    assert near(found, logits(path)[-1:])


def runner(path: Path, folder: Path | str = "", **given: Any) -> ModelRunner:
    found = ModelRunner(path, ModelSettings(packed_weights_dir=str(folder), **given), "cpu", alone())
    found.close()
    return found


@needs_native
def test_a_rank_keeps_them_by_itself_and_reads_less(tmp_path: Path) -> None:
    path = written(tmp_path, "llama", mixed)
    kept, floats = runner(path, quantization="auto"), runner(path, quantization="none")
    assert (kept.quantization, floats.quantization) == ("codes", "none")
    assert kept.token_bytes() < 0.5 * floats.token_bytes()
    assert scheme(kept.weights.kept.codes) == "Q4_K and Q6_K blocks"
    assert not floats.weights.kept.codes and held(tmp_path / "checkpoint") == ""
    assert held(path).startswith("Q4_K and Q6_K blocks, ") and 0.9 < kept.token_bytes() / 1e6 / float(held(path).split()[4]) < 1.2
    assert runner(tmp_path / "checkpoint", quantization="auto").quantization == "none"


@needs_native
def test_a_packed_file_has_them(tmp_path: Path) -> None:
    path = written(tmp_path, "llama", mixed)
    first, second = (runner(path, tmp_path / "packed", quantization="auto") for _ in range(2))
    file = second.weights.kept.packed_file
    assert file is not None and file.is_mapped and second.quantization == "codes"
    ours, theirs = (each.weights.params.layers[1].mlp.down.weight.linear.buffer for each in (first, second))
    assert ours.tobytes() == theirs.tobytes() and np.shares_memory(theirs, file._mapped.memory)


def memory(path: Path, parallel: Parallel) -> list[bytes]:
    """What the weights of a rank take in memory, as it loads them."""
    kept = Kept()
    formats = weight_formats("codes")
    load_params(path, load_config(path), parallel, host_dtype("bfloat16"), "cpu", formats=formats, kept=kept)
    return [array.tobytes() for array in kept.memory()]


@needs_native
@pytest.mark.parametrize(("rank", "count"), [(0, 1), (0, 2), (1, 2)])
def test_kernels_take_the_blocks_of_the_file_apart(rank: int, count: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The bytes are those of the plain form, which also serves where a rank's inputs cut a block."""
    path, taken, blocks = written(tmp_path, "llama", mixed), Counter[bool](), StoredPart.blocks

    def counted(*given: Any) -> BlockRows | None:
        taken[(found := blocks(*given)) is not None] += 1
        return found

    parallel = msgspec.structs.replace(alone(), rank=rank, world_size=count)
    monkeypatch.setattr(StoredPart, "blocks", counted)
    found = memory(path, parallel)
    assert taken[True] > 0 and (taken[False] > 0) == (count > 1)
    monkeypatch.setattr(StoredPart, "blocks", lambda *given: None)
    assert memory(path, parallel) == found


@needs_native
def test_codes_and_floats_have_packed_files_of_their_own(tmp_path: Path) -> None:
    path = written(tmp_path, "llama", mixed)
    wide = runner(path, tmp_path / "packed", quantization="auto", activations="bf16")
    names = {each: runner(path, tmp_path / "packed", quantization=each).weights.kept.packed_file for each in ("auto", "none")}
    assert wide.activations == "bf16" and wide.weights.kept.packed_file.path != names["auto"].path  # type: ignore[union-attr]
    assert names["auto"].path != names["none"].path  # type: ignore[union-attr]
    assert all(runner(path, tmp_path / "packed", quantization=each).weights.kept.packed_file.is_mapped for each in names)
    floats = [runner(tmp_path / "checkpoint", tmp_path / "packed", quantization=each).weights.kept.packed_file for each in names]
    assert floats[0].path == floats[1].path  # type: ignore[union-attr]


@needs_native
def test_floats_are_no_update_of_a_quantised_checkpoint(tmp_path: Path) -> None:
    found = runner(written(tmp_path, "llama", mixed), quantization="auto")
    update = open_update(tmp_path / "checkpoint")
    name = "tensor '.*' is F32 in the update, and the model's own quantised checkpoint holds it as Q4_K: send it so"
    with pytest.raises(ModelError, match=name):
        check_update(update, found.weights.kept.names, update.names(), stored=found.weights.kept.stored)


@needs_native
def test_the_file_itself_is_an_update(tmp_path: Path) -> None:
    path = written(tmp_path, "llama", mixed)
    found = runner(path, tmp_path / "packed", quantization="auto")
    before = [np.array(array) for array in found.weights.kept.memory()]
    targets = [id(target) for target in found.weights.kept.targets]
    update = open_update(path)
    check_update(update, found.weights.kept.names, update.names())
    assert len(tensors_digest(update, found.weights.kept.names)) == 32
    found.refill(update)
    after = found.weights.kept.memory()
    assert targets == [id(target) for target in found.weights.kept.targets] != []
    assert all(np.array_equal(old.view(np.uint8), new.view(np.uint8)) for old, new in zip(before, after, strict=True))


@pytest.mark.parametrize("quantization", ["codes", "none"])
def test_a_scale_that_is_not_finite_is_refused(quantization: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules["gguf_writing"].DRAWN, "Q6_K", ((208, float("nan")),))
    path = written(tmp_path, "llama", mixed)
    name = "v_proj.weight in .* cannot be read: it has a scale that is not finite; download the model again"
    with pytest.raises(ModelError, match=name):
        load_model(path, dtype=torch.bfloat16, quantization=quantization)
    with pytest.raises(ModelError, match=name):
        runner(path, quantization=quantization)
