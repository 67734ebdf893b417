"""Special tokens that tokenizer.json lacks: they have the numbers that transformers gives them, in every reader."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import transformers
from toy_tokenizers import SPECIAL, byte_level_backend

from vnext.base.tokenizer_files import special_token, tokenizer_json
from vnext.models.config.model_config import load_config
from vnext.runtime.processes.launch import DEMO_MODEL
from vnext.sampling.constraint import Vocabulary
from vnext.text.files import CheckpointUnreadable
from vnext.text.tokenizer import Tokenizer

IM, END, TOOL = "<|im_start|>", "<|im_end|>", "<tool_call>"
COUNT = byte_level_backend().get_vocab_size()
TEXT = f"{IM}hello{END} world{TOOL}{SPECIAL[1]}"
NAMES = {"bos_token": SPECIAL[0], "eos_token": END}
BY_ID = {str(COUNT): {"content": IM, "special": True}, str(COUNT + 1): {"content": END, "special": True}}
TOOLS = {str(COUNT + 2): {"content": TOOL, "special": False}}
CASES: dict[str, dict[str, dict[str, Any]]] = {
    "added_tokens_decoder": {"tokenizer_config.json": {"added_tokens_decoder": BY_ID | TOOLS} | NAMES},
    "added_tokens.json": {
        "added_tokens.json": {END: COUNT + 1, IM: COUNT, TOOL: COUNT + 2},
        "special_tokens_map.json": {"extra_special_tokens": [IM], "eos_token": {"content": END, "lstrip": True}},
        "tokenizer_config.json": {"eos_token": SPECIAL[1]},
    },
    "special_tokens_map.json": {
        "special_tokens_map.json": NAMES | {"additional_special_tokens": [IM, TOOL]}, "tokenizer_config.json": {},
    },
    "tokenizer_config.json": {"tokenizer_config.json": NAMES | {"extra_special_tokens": [IM, TOOL]}},
    "a name in the vocabulary": {"tokenizer_config.json": {"eos_token": "he", "unk_token": "ll"}},
    "one of an older file": {
        "tokenizer_config.json": {"added_tokens_decoder": BY_ID, "bos_token": IM, "eos_token": None}, "special_tokens_map.json": NAMES,
    },
}  # fmt: skip


def folder_with(path: Path, files: dict[str, dict[str, Any]]) -> Path:
    byte_level_backend().save(str(path / "tokenizer.json"))
    for name, value in files.items():
        (path / name).write_text(json.dumps(value))
    return path


@pytest.mark.parametrize("case", CASES)
def test_as_in_transformers(tmp_path: Path, case: str) -> None:
    folder = folder_with(tmp_path, CASES[case])
    oracle, ours = transformers.PreTrainedTokenizerFast.from_pretrained(folder), Tokenizer.load(folder)
    assert ours.encode(TEXT, add_special_tokens=False) == oracle.encode(TEXT, add_special_tokens=False)
    assert set(ours.special_ids.values()) == {number for number, token in oracle.added_tokens_decoder.items() if token.special}
    assert ours.special_tokens | oracle.special_tokens_map == ours.special_tokens
    assert special_token(folder) == oracle.eos_token_id
    read = json.loads(tokenizer_json(folder))
    assert {each["content"]: each["id"] for each in read["added_tokens"]} == ours.added_tokens
    vocabulary = Vocabulary(folder, COUNT + 8, [0]).tokenizer
    assert all(map(vocabulary.is_special_token, ours.special_ids.values()))


def test_a_folder_that_lacks_nothing_is_read_as_it_is(tmp_path: Path) -> None:
    folder = folder_with(tmp_path, {"tokenizer_config.json": {"eos_token": SPECIAL[1]}})
    assert tokenizer_json(folder) == (folder / "tokenizer.json").read_bytes()
    assert tokenizer_json(DEMO_MODEL) == (DEMO_MODEL / "tokenizer.json").read_bytes()


def test_gaps_are_filled_and_numbers_that_are_taken_refused(tmp_path: Path) -> None:
    folder = folder_with(tmp_path, {"added_tokens.json": {IM: COUNT + 3, END: COUNT + 1}})
    tokenizer = Tokenizer.load(folder)
    assert tokenizer.encode(END + IM) == [COUNT + 1, COUNT + 3] and tokenizer.decode([COUNT]) == ""
    (folder / "added_tokens.json").write_text(json.dumps({IM: COUNT - 1}))
    with pytest.raises(CheckpointUnreadable, match=f"another file gives '<.im_start.>' the number {COUNT - 1}, which is taken"):
        Tokenizer.load(folder)


def test_a_name_that_the_model_has_no_row_for_is_none(tmp_path: Path) -> None:
    """Transformers would give it a number beyond the model's vocabulary."""
    files = {"tokenizer_config.json": {"pad_token": "[PAD]"}, "config.json": {"vocab_size": COUNT}}
    assert "[PAD]" not in Tokenizer.load(folder_with(tmp_path, files)).added_tokens
    (tmp_path / "config.json").write_text(json.dumps({"vocab_size": COUNT + 1}))
    assert Tokenizer.load(tmp_path).added_tokens["[PAD]"] == COUNT


@pytest.mark.parametrize("broken", [{"added_tokens_decoder": [1]}, {"added_tokens_decoder": {"x": 1}}])
def test_broken_files(tmp_path: Path, broken: dict[str, Any]) -> None:
    folder = folder_with(tmp_path, {"tokenizer_config.json": broken | {"eos_token": SPECIAL[1]}})
    with pytest.raises(CheckpointUnreadable, match="added_tokens_decoder that is no object of tokens"):
        Tokenizer.load(folder)
    assert special_token(folder) is None


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json", "added_tokens.json"])
def test_pointers_of_git_lfs_are_named(tmp_path: Path, name: str) -> None:
    folder = folder_with(tmp_path, {})
    (folder / name).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 7031645\n")
    with pytest.raises(CheckpointUnreadable, match=f"{name} is only a pointer of Git LFS"):
        Tokenizer.load(folder)


def test_the_tokenizer_s_end_ends_answers(tmp_path: Path) -> None:
    """Fine-tunes of base models: only the tokenizer knows the end of a turn."""
    for file in DEMO_MODEL.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    config = json.loads((tmp_path / "config.json").read_text())
    names = json.loads((tmp_path / "tokenizer_config.json").read_text())
    del config["eos_token_id"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "generation_config.json").write_text("{}")
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(names | {"eos_token": "<|end|>"}))
    assert load_config(tmp_path).eos_token_ids == (4,)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [0, 7]}))
    assert load_config(tmp_path).eos_token_ids == (0, 7, 4) and load_config(tmp_path, with_generation=False).eos_token_ids == (4,)


def test_changed_files_are_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And none that is as it was."""
    folder = folder_with(tmp_path, {"tokenizer_config.json": {"eos_token": "he"}})
    first = special_token(folder)
    read = Path.read_bytes
    monkeypatch.setattr(Path, "read_bytes", lambda path: pytest.fail(f"{path} is read"))
    assert special_token(folder) == first is not None
    monkeypatch.setattr(Path, "read_bytes", read)
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "ll"}))
    assert special_token(folder) not in (first, None)
    (folder / "tokenizer.json").unlink()
    assert special_token(folder) is None
