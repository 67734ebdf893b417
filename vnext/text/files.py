"""The text files of a checkpoint folder that need no tokenizer: tokenizer_config.json and the chat template.

Owns their reading and the one error for all text files of a folder. Imports no tokenizer library.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from vnext.base.spelling import reason
from vnext.base.tokenizer_files import TEMPLATE_FILE, TEMPLATES_FOLDER, tokenizer_settings

PROCESSOR_FILE = "chat_template.json"
DEFAULT, WITH_TOOLS = "default", "tool_use"
"""Names of templates that mean something to all: the usual one, and the one for requests with tools."""

class CheckpointUnreadable(Exception):
    """A file of the checkpoint folder is missing or broken: one sentence with its name and the remedy."""


def tokenizer_config(folder: Path) -> dict[str, Any]:
    """The contents of tokenizer_config.json with the names of special_tokens_map.json. Raises CheckpointUnreadable."""
    try:
        return tokenizer_settings(folder)
    except (OSError, ValueError) as error:
        raise CheckpointUnreadable(reason(error, with_file=True)) from error


def chat_template(folder: Path) -> str | None:
    """The source of the template that is used without tools. Raises CheckpointUnreadable."""
    return chat_templates(folder).get(DEFAULT)


def chat_templates(folder: Path, config: dict[str, Any] | None = None) -> dict[str, str]:
    """The sources of a folder's templates by their names. Files of their own take precedence over tokenizer_config.json, and a
    processor's chat_template.json is the last.

    `config` is the folder's tokenizer_config, if already read. Raises CheckpointUnreadable.
    """
    source = (tokenizer_config(folder) if config is None else config).get("chat_template") or _of_processor(folder)
    files = sorted((folder / TEMPLATES_FOLDER).glob("*.jinja")) if (folder / TEMPLATES_FOLDER).is_dir() else []
    found = _named(source) | {file.stem: _text(file) for file in files}
    return found | ({DEFAULT: _text(folder / TEMPLATE_FILE)} if (folder / TEMPLATE_FILE).is_file() else {})


def _named(source: Any) -> dict[str, str]:
    """Templates as tokenizer_config.json has them: one, a list with names, or an object."""
    if isinstance(source, str):
        return {DEFAULT: source}
    if isinstance(source, list):
        pairs: list[tuple[object, object]] = [(each.get("name"), each.get("template")) for each in source if isinstance(each, dict)]
    else:
        pairs = [*source.items()] if isinstance(source, dict) else []
    return {name: template for name, template in pairs if isinstance(name, str) and isinstance(template, str)}


def _of_processor(folder: Path) -> Any:
    path = folder / PROCESSOR_FILE
    if not path.is_file():
        return None
    try:
        return msgspec.json.decode(path.read_bytes(), type=dict[str, Any]).get("chat_template")
    except (ValueError, RecursionError) as error:
        raise CheckpointUnreadable(f"{path} is no JSON object: {error}.") from error


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointUnreadable(f"{path} cannot be read as UTF-8: {reason(error)}.") from error
