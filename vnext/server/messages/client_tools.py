"""Client tools: the tools that Anthropic's models know without a schema and that the client runs, as functions.

Owns their descriptions and schemas. A date at the end of a tool's type is its version.
"""

from __future__ import annotations

import re
from typing import Any

_TEXT, _LINE = {"type": "string"}, {"type": "integer"}
_RANGE = {"type": "array", "items": _LINE, "description": "The first and the last line; -1 as the last is the end."}


def _object(required: tuple[str, ...], **properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": [*required]}


def _commands(*commands: str, **properties: Any) -> dict[str, Any]:
    return _object(("command",), command={"type": "string", "enum": [*commands]}, **properties)


_EDITED = {"path": _TEXT, "file_text": _TEXT, "old_str": _TEXT, "new_str": _TEXT, "insert_line": _LINE, "view_range": _RANGE}
_RENAMED = {"old_path": _TEXT, "new_path": _TEXT}
_BASH = "Runs a command in a shell that stays open between calls. restart: true starts it anew."
_EDIT = (
    "Shows and changes files. view: path, view_range. create: path, file_text. str_replace: path, old_str, which stands in the "
    "file once, new_str. insert: path, insert_line, the line after which {} goes."
)
_MEMORY = (
    "Keeps notes in files under /memories, which last from one conversation to the next. view: path, view_range. create: path, "
    "file_text. str_replace: path, old_str, new_str. insert: path, insert_line, insert_text. delete: path. "
    "rename: old_path, new_path."
)
_SCHEMAS = {
    "bash": (_BASH, _object((), command=_TEXT, restart={"type": "boolean"})),
    "text_editor": (
        _EDIT.format("insert_text"),
        _commands("view", "create", "str_replace", "insert", **_EDITED, insert_text=_TEXT),
    ),
    "memory": (
        _MEMORY,
        _commands("view", "create", "str_replace", "insert", "delete", "rename", **_EDITED, insert_text=_TEXT, **_RENAMED),
    ),
}
_WITH_UNDO = (
    _EDIT.format("new_str") + " undo_edit: path.",
    _commands("view", "create", "str_replace", "insert", "undo_edit", **_EDITED),
)
_LAST_WITH_UNDO = "20250124"


def function_of(kind: str) -> dict[str, Any] | None:
    """The description and the schema of a tool of this type, such as bash_20250124; None for one that no client runs here."""
    if (found := re.fullmatch(r"(bash|text_editor|memory)_(\d{8})", kind)) is None:
        return None
    name, version = found.groups()
    can_undo = name == "text_editor" and version <= _LAST_WITH_UNDO
    description, parameters = _WITH_UNDO if can_undo else _SCHEMAS[name]
    return {"description": description, "parameters": parameters}
