"""Quantised tensors: any part is that part of the whole, by the package's reference; an engine answers from such a file."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import gguf
import numpy as np
import pytest
from family_cases import CASES, Case, save_case
from gguf_writing import convert, vocabulary_of
from hybrids import CASES as HYBRIDS, QWEN, save_hybrid

from vnext import LLM, SamplingParams
from vnext.models.errors import ModelError
from vnext.models.loading import overlay as overlay_module
from vnext.models.loading.checkpoint import fingerprint, open_checkpoint
from vnext.models.loading.overlay import gguf_folder
from vnext.models.loading.stored import StoredPart
from vnext.runtime.processes.launch import DEMO_MODEL, model_folder

TYPES = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "F16", "BF16")
WIDE = Case("LlamaForCausalLM", "LlamaConfig", {"intermediate_size": 128})


@pytest.mark.parametrize("type_", TYPES)
def test_parts_are_those_of_the_whole(type_: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(CASES, "wide", WIDE)
    save_case(tmp_path / "checkpoint", "wide")
    file = convert(tmp_path / "checkpoint", tmp_path / "model.gguf", type_=type_)
    whole = {each.name: gguf.quants.dequantize(each.data, each.tensor_type) for each in gguf.GGUFReader(file).tensors}
    with open_checkpoint(gguf_folder(file, tmp_path / "folders")) as written:
        for name, theirs in (("model.layers.1.mlp.down_proj.weight", "blk.1.ffn_down.weight"), ("lm_head.weight", "output.weight")):
            ranges, shape = (slice(3, 40), slice(36, 64)), whole[theirs].shape
            if (format := written.format_of(name)) is None:
                found = written.part(name, shape, ranges)
            else:
                found = StoredPart(written, name, format, shape, *ranges, 37).floats()
            assert np.array_equal(found.astype(np.float32), whole[theirs][ranges])


@pytest.mark.parametrize("value_dim", [32, 16])
def test_heads_that_take_turns_stay_in_blocks_of_one_head(value_dim: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows keep their blocks; columns do where no block has numbers of two heads, else they become floats."""
    changes = {**QWEN, "intermediate_size": 128, "linear_key_head_dim": value_dim, "linear_value_head_dim": value_dim}
    monkeypatch.setitem(HYBRIDS, "turns", ("Qwen3_5ForCausalLM", "Qwen3_5TextConfig", changes))
    save_hybrid(tmp_path / "checkpoint", "turns")
    folder = gguf_folder(convert(tmp_path / "checkpoint", tmp_path / "model.gguf", type_="Q8_0"), tmp_path / "folders")
    with open_checkpoint(tmp_path / "checkpoint") as plain, open_checkpoint(folder) as written:
        for name in ("in_proj_qkv", "in_proj_z", "out_proj"):
            name = f"model.layers.0.linear_attn.{name}.weight"
            shape = plain.shape(name)
            assert shape is not None
            wanted = plain.part(name, shape, ())
            if (format := written.format_of(name)) is None:
                assert name.endswith("out_proj.weight") and value_dim == 16
                found = written.part(name, shape, ())
                assert np.abs(found - wanted).max() < 0.02 * np.abs(wanted).max()
            else:
                found = StoredPart(written, name, format, shape, slice(0, shape[0]), slice(0, shape[1]), 37).floats()
                rounded = gguf.quants.quantize(wanted, gguf.GGMLQuantizationType.Q8_0)
                assert np.array_equal(found, gguf.quants.dequantize(rounded, gguf.GGMLQuantizationType.Q8_0))


@pytest.fixture
def demo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The demo model as a GGUF file, its numbers in float32."""
    monkeypatch.setenv("HOME", str(tmp_path))
    spec = json.loads((DEMO_MODEL / "tokenizer.json").read_text())
    end, turn = json.loads((DEMO_MODEL / "generation_config.json").read_text())["eos_token_id"]
    ends = {"tokenizer.ggml.eos_token_id": end, "tokenizer.ggml.eot_token_id": turn}
    return convert(DEMO_MODEL, tmp_path / "demo.gguf", vocabulary_of(spec, "gpt-2") | ends)


def test_an_engine_answers_from_a_file_as_from_the_checkpoint(demo: Path) -> None:
    params = SamplingParams(max_tokens=24, temperature=0.8, seed=2)
    answers = []
    for model in (str(DEMO_MODEL), str(demo), str(demo.parent)):
        with LLM(model, threads=1, dtype="bfloat16", log="off") as llm:
            answers.append([each.outputs[0].token_ids for each in llm.generate(["def f(x):", "while"], params, use_tqdm=False)])
    assert answers[0] == answers[1] == answers[2]


def test_a_file_that_has_changed_is_another_model(demo: Path, tmp_path: Path) -> None:
    first = gguf_folder(demo, tmp_path / "folders")
    assert gguf_folder(demo, tmp_path / "folders") == first and len(fingerprint(first)) == 32
    data = bytearray(demo.read_bytes())
    data[-4:] = b"\0\0\0\1"
    demo.unlink()
    demo.write_bytes(data)
    assert gguf_folder(demo, tmp_path / "folders") != first


def test_folders_of_files_that_are_gone_or_changed_go_too(demo: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folders, other, third = tmp_path / "folders", tmp_path / "other.gguf", tmp_path / "third.gguf"
    kept = gguf_folder(Path(shutil.copy(demo, third)), folders)
    gone = gguf_folder(Path(shutil.copy(demo, other)), folders)
    changed = gguf_folder(demo, folders)
    (folders / "0123.abcd").mkdir()  # another start is making it
    other.unlink()
    os.utime(demo, ns=(0, 0))
    monkeypatch.chdir(demo.parent)
    found = gguf_folder(Path(demo.name), folders)
    assert gguf_folder(demo, folders) == found and not gone.exists() and not changed.exists()
    assert {each.name for each in folders.iterdir()} == {found.parent.name, kept.parent.name, "0123.abcd"}
    assert gguf_folder(third, folders) == kept


def test_the_folder_of_a_running_server_stays(demo: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its file is replaced, and another server starts with the new one."""
    held = model_folder(str(demo))
    monkeypatch.setattr(overlay_module, "_HELD", {})  # as another process
    os.utime(demo, ns=(0, 0))
    other = model_folder(str(demo))
    os.utime(demo, ns=(1, 1))
    gguf_folder(demo, held.parents[1])
    assert held.is_dir() and other.is_dir() and held != other


def test_a_type_that_is_not_read_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(CASES, "wide", WIDE)
    save_case(tmp_path / "checkpoint", "wide")
    folder = gguf_folder(convert(tmp_path / "checkpoint", tmp_path / "model.gguf", type_="Q8_0"), tmp_path / "folders")
    monkeypatch.setattr("vnext.models.loading.gguf_tensors.GGUF_BLOCKS", ())
    with pytest.raises(ModelError, match="has the type Q8_0, which is not read; take another quantisation"):
        with open_checkpoint(folder):
            pass
