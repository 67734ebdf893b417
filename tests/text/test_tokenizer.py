"""Tokenizers: what a checkpoint folder may hold, in its several spellings, and what is said about a broken one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from toy_tokenizers import FAMILIES, byte_level_backend, stories

from vnext.text.files import CheckpointUnreadable, chat_templates
from vnext.text.tokenizer import Tokenizer


def folder_with(path: Path, config: dict | None = None, template: str | None = None) -> Path:
    backend = byte_level_backend()
    backend.enable_truncation(4)
    backend.enable_padding(length=8)
    backend.save(str(path / "tokenizer.json"))
    if config is not None:
        (path / "tokenizer_config.json").write_text(json.dumps(config))
    if template is not None:
        (path / "chat_template.jinja").write_text(template)
    return path


def test_texts_are_neither_cut_nor_padded(tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(folder_with(tmp_path))
    assert len(tokenizer.encode("abcdefg")) == 7 and len(tokenizer.encode("a")) == 1
    assert tokenizer.chat_template is None and tokenizer.special_tokens == {}


def test_loading_leaves_the_length_bound_to_those_who_need_it(tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(folder_with(tmp_path))
    assert "characters_per_token" not in vars(tokenizer)
    assert tokenizer.characters_per_token == max(map(len, byte_level_backend().get_vocab()))


@pytest.mark.parametrize("family", FAMILIES)
def test_the_length_bound_is_the_same_from_the_file(tmp_path: Path, family: str) -> None:
    tokenizer = FAMILIES[family]()
    (tmp_path / "tokenizer.json").write_text(tokenizer.to_json())
    found = Tokenizer.load(tmp_path, has_bound=True)
    assert vars(found)["characters_per_token"] == tokenizer.characters_per_token > 1


def test_special_tokens_in_both_spellings(tmp_path: Path) -> None:
    config = {"bos_token": "<|bos|>", "eos_token": {"content": "<|eos|>", "lstrip": False}, "pad_token": None}
    tokenizer = Tokenizer.load(folder_with(tmp_path, config | {"add_bos_token": True}))
    assert tokenizer.special_tokens == {"bos_token": "<|bos|>", "eos_token": "<|eos|>"}


def test_where_the_template_comes_from(tmp_path: Path) -> None:
    named = [{"name": "tool_use", "template": "t"}, {"name": "default", "template": "d"}]
    assert Tokenizer.load(folder_with(tmp_path, {"chat_template": "c"})).chat_template == "c"
    assert Tokenizer.load(folder_with(tmp_path, {"chat_template": named})).chat_template == "d"
    assert Tokenizer.load(folder_with(tmp_path, {"chat_template": "c"}, "file")).chat_template == "file"


def test_templates_beside_each_other(tmp_path: Path) -> None:
    named = [{"name": "tool_use", "template": "t"}, {"name": "default", "template": "d"}]
    folder = folder_with(tmp_path, {"chat_template": named})
    assert Tokenizer.load(folder).tool_template == "t" and chat_templates(folder) == {"tool_use": "t", "default": "d"}
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "tool_use.jinja").write_text("file")
    (folder / "additional_chat_templates" / "rag.jinja").write_text("r")
    assert chat_templates(folder) == {"tool_use": "file", "default": "d", "rag": "r"}
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": {"tool_use": "o"}}))
    assert chat_templates(folder) == {"tool_use": "file", "rag": "r"} and Tokenizer.load(folder).chat_template is None
    (folder / "additional_chat_templates" / "rag.jinja").write_bytes("é".encode("latin-1"))
    with pytest.raises(CheckpointUnreadable, match="rag.jinja cannot be read as UTF-8"):
        Tokenizer.load(folder)


def test_a_processor_s_template_is_the_last(tmp_path: Path) -> None:
    folder = folder_with(tmp_path, {})
    (folder / "chat_template.json").write_text(json.dumps({"chat_template": "p"}))
    assert Tokenizer.load(folder).chat_template == "p"
    assert Tokenizer.load(folder_with(tmp_path, {"chat_template": "c"})).chat_template == "c"


def test_broken_folders(tmp_path: Path) -> None:
    with pytest.raises(CheckpointUnreadable, match="has no tokenizer.json"):
        Tokenizer.load(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(CheckpointUnreadable, match="cannot be read as a tokenizer"):
        Tokenizer.load(tmp_path)
    folder_with(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text("[]")
    with pytest.raises(CheckpointUnreadable, match="tokenizer_config.json"):
        Tokenizer.load(tmp_path)


def test_a_real_checkpoint() -> None:
    tokenizer = stories()
    tokens = tokenizer.encode("Once upon a time")
    assert tokens[0] == 1 and tokenizer.decode(tokens) == "Once upon a time"
    assert tokenizer.special_tokens["eos_token"] == "</s>" and tokenizer.vocab_size == 512
