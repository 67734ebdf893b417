"""The text files of a checkpoint folder that need no tokenizer: tokenizer_config.json and the chat template.

Owns their reading and the one error for all text files of a folder. Imports no tokenizer library.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from vnext.tokenizer_files import tokenizer_settings


class CheckpointUnreadable(Exception):
    """A file of the checkpoint folder is missing or broken: one sentence with its name and the remedy."""


def tokenizer_config(folder: Path) -> dict[str, Any]:
    """The contents of tokenizer_config.json with the names of special_tokens_map.json. Raises CheckpointUnreadable."""
    try:
        return tokenizer_settings(folder)
    except (OSError, ValueError) as error:
        raise CheckpointUnreadable(str(error)) from error


def chat_template(folder: Path, config: dict[str, Any] | None = None) -> str | None:
    """The template's source. A separate file takes precedence; of several named templates, it takes "default".

    `config` is the folder's tokenizer_config, if already read. Raises CheckpointUnreadable.
    """
    path = folder / "chat_template.jinja"
    if path.is_file():
        return path.read_text(encoding="utf-8")
    source = (tokenizer_config(folder) if config is None else config).get("chat_template")
    return _default_of(source) if isinstance(source, list) else source


def _default_of(named: Iterable[dict[str, str]]) -> str | None:
    return next((entry["template"] for entry in named if entry.get("name") == "default"), None)
