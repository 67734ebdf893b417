"""Updates of some tensors, and updates that are sent in pieces: the tokens of a fresh engine, one version, nothing changed by a wrong one."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from changing_engine import Tensors, made
from engine_here import engines_here
from safetensors.torch import save_file
from saved_adapters import DEMO

from vnext.api.llm import LLM
from vnext.replay.cli.main import main as replay
from vnext.runtime.client.connection import weights_folder
from vnext.runtime.client.pending_operations import NotDone
from vnext.runtime.protocol.sampling_params import SamplingParams

CORE = "vnext.runtime.engine.main"
PROMPTS = ["The module", "What is", "Return the", "def main"]
GREEDY = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
NUMBERS = {"float32": {"dtype": "float32"}, "int8": {"dtype": "bfloat16", "quantization": "int8"}}


def tokens_of(llm: LLM) -> list[list[int]]:
    return [each.outputs[0].token_ids for each in llm.generate(PROMPTS, GREEDY, False)]


def fresh(tensors: Tensors, folder: Path, **settings: Any) -> tuple[list[list[int]], str]:
    """Tokens and digest of an engine that starts with these weights."""
    shutil.copytree(DEMO, folder)
    save_file(tensors, folder / "model.safetensors")
    with engines_here(), made(model=str(folder), **settings) as llm:
        return tokens_of(llm), llm.collective_rpc("weights_digest")[0]


def some(tensors: Tensors, *parts: str) -> Tensors:
    found = {name: each for name, each in tensors.items() if any(part in name for part in parts)}
    assert 0 < len(found) < len(tensors)
    return found


@pytest.mark.parametrize("numbers", NUMBERS.values(), ids=NUMBERS)
def test_some_tensors_change_and_the_others_stay(numbers, old, new, tmp_path):
    """A part of what is fused (queries), a norm, and tensors of one layer."""
    parts = some(new, "layers.0.self_attn.q_proj", "layers.1.", "model.norm")
    expected, digest = fresh(old | parts, tmp_path / "m", **numbers)
    with engines_here(), made(tmp_path / "log", **numbers) as llm:
        before = tokens_of(llm)
        assert llm.update_weights(parts, partial=True) == {"version": 1, "digest": digest}
        assert tokens_of(llm) == expected != before
        assert llm.collective_rpc("weights_digest") == [digest]
        llm.sleep(), llm.wake_up()
        assert tokens_of(llm) == expected, "from the files of both"
        assert llm.update_weights(old)["version"] == 2 and tokens_of(llm) == before
        assert len(list(weights_folder(llm._address).glob("weights.*"))) == 1, "the files of the first version have gone"
    assert replay(["verify", "--laws", llm.log_dir]) == 0


def test_two_ranks_and_a_core_that_follows_compute_with_the_parts(old, new, tmp_path):
    parts = some(new, "layers.0.self_attn.q_proj", "model.norm")
    expected, digest = fresh(old | parts, tmp_path / "m", dtype="float32")
    with made(tmp_path / "log", executor="mp", tensor_parallel_size=2, dtype="float32", digest_interval=1) as llm:
        llm.start_weight_update(partial=True)
        for name, each in parts.items():
            llm.update_weights({name: each})
        assert llm.finish_weight_update()["digest"] == digest and tokens_of(llm) == expected
        next(each for each in psutil.Process().children() if CORE in each.cmdline()).kill()
        assert tokens_of(llm) == expected and llm.residence.version == 1
    assert replay(["verify", "--laws", llm.log_dir]) == 0


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with engines_here(), made(dtype="float32") as running:
        yield running


def test_partial_updates_follow_each_other(llm, old, new, tmp_path):
    """Each keeps what those before it changed; files are kept while a tensor of theirs is in use."""
    llm.update_weights(old)
    folder = weights_folder(llm._address)
    for part in ("layers.0.", "layers.1.", "model.norm", "layers.0."):
        llm.update_weights(some(new, part), partial=True)
    assert len(list(folder.glob("weights.*.safetensors"))) == 4, "the first version, and three of the four parts"
    expected, digest = fresh(old | some(new, "layers.0.", "layers.1.", "model.norm"), tmp_path / "m", dtype="float32")
    assert tokens_of(llm) == expected and llm.residence.digest == digest


def test_an_update_in_pieces_is_one_version(llm, old, new, tmp_path):
    version = llm.update_weights(old)["version"]
    before, names = tokens_of(llm), sorted(new)
    llm.start_weight_update()
    for first in range(0, len(names), 7):
        assert llm.update_weights({name: new[name] for name in names[first : first + 7]}) == {}
        assert tokens_of(llm) == before, "nothing changes before the end"
    expected, digest = fresh(new, tmp_path / "m", dtype="float32")
    assert llm.finish_weight_update() == {"version": version + 1, "digest": digest}
    assert tokens_of(llm) == expected != before


def test_files_and_tensors_may_be_pieces(llm, old, new, tmp_path):
    llm.update_weights(old)
    path = tmp_path / "norm.safetensors"
    save_file(some(new, "model.norm"), path)
    llm.start_weight_update(partial=True)
    llm.update_weights(path), llm.update_weights(some(new, "layers.0.").items())
    llm.finish_weight_update(mode="keep")
    expected, digest = fresh(old | some(new, "model.norm", "layers.0."), tmp_path / "m", dtype="float32")
    assert tokens_of(llm) == expected and llm.residence.digest == digest and path.exists()


NORM = "model.norm.weight"
WRONG: dict[str, tuple[Tensors, str]] = {
    "unknown": ({"extra.weight": torch.zeros(3)}, "has 'extra.weight', which this model does not"),
    "shape": ({NORM: torch.zeros(255)}, r"shape \[255\] where the model has \[256\]"),
    "dtype": ({NORM: torch.zeros(256, dtype=torch.int64)}, "has the dtype I64"),
    "nan": ({NORM: torch.full((256,), torch.nan)}, "not finite"),
}


@pytest.mark.parametrize("name", WRONG)
@pytest.mark.parametrize("in_pieces", [False, True])
def test_a_wrong_part_is_one_sentence_and_changes_nothing(llm, new, name, in_pieces):
    before, residence, files = tokens_of(llm), llm.residence, sorted(weights_folder(llm._address).glob("weights.*"))
    wrong, sentence = WRONG[name]
    if in_pieces:
        llm.start_weight_update(partial=True)
        llm.update_weights(some(new, "layers.0."))
    with pytest.raises(NotDone, match=sentence) as caught:
        llm.update_weights(wrong, **({} if in_pieces else {"partial": True}))
    assert "\n" not in str(caught.value) and str(caught.value).endswith("nothing has changed")
    if in_pieces:
        llm.start_weight_update()  # which forgets the piece that was right
        with pytest.raises(NotDone, match="has no tensors; nothing has changed"):
            llm.finish_weight_update()
    assert tokens_of(llm) == before and llm.residence == residence
    assert sorted(weights_folder(llm._address).glob("weights.*")) == files


def test_what_was_half_sent_is_not_computed_with(llm, new):
    before, residence = tokens_of(llm), llm.residence
    llm.start_weight_update()
    llm.update_weights(some(new, "layers."))
    with pytest.raises(NotDone, match="lacks .*: send every tensor of the model, or say that the update is partial; nothing has changed"):
        llm.finish_weight_update()
    llm.start_weight_update(partial=True)
    llm.update_weights(some(new, "layers.0.")), llm.update_weights(some(new, "layers.0.self_attn"))
    with pytest.raises(NotDone, match=r"the update has 'model.layers.0.self_attn.* twice; nothing has changed"):
        llm.finish_weight_update()
    with pytest.raises(NotDone, match="start_weight_update comes before finish_weight_update"):
        llm.finish_weight_update()
    llm.start_weight_update()
    with pytest.raises(NotDone, match="give only weights: partial to start_weight_update"):
        llm.update_weights(new, version=3)
    llm._updates = None
    assert tokens_of(llm) == before and llm.residence == residence
