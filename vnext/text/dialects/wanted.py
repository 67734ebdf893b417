"""Wanted: the JSON of an argument that a model wrote as bare text, by the kinds of value that its schema wants.

It is read as JSON, and as Python where that fails and the schema wants what it then says. What is neither, or of a kind that
the schema does not want where it also wants texts, is a text.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from vnext.text.dialects.literals import PYTHON, literal
from vnext.text.dialects.reader import whole

_DEPTH_MAX = 20
_CONSTANTS = ("True", "False", "None")
_BY_KIND = {bool: "boolean", int: "integer", float: "number", str: "string", list: "array", dict: "object", type(None): "null"}


def json_of(text: str, schema: Any, root: Mapping[str, Any]) -> str:
    """The JSON of an argument. `schema` is its own, `root` the function's, in which references lead to others."""
    kinds = frozenset(_kinds(schema, root, 0))
    if kinds == {"string"}:
        return json.dumps(text, ensure_ascii=False)
    written = text.strip()
    found = _kind(written)
    if found and (not kinds or _fits(found, kinds) or "string" not in kinds):
        return written
    made = whole(written, lambda reader, take: literal(reader, take, PYTHON)) if kinds or written in _CONSTANTS else None
    if made is not None and (not kinds or _fits(_kind(made), kinds - {"string"})):
        return made
    lowered = written.lower()  # TRUE and NULL
    if (found := _kind(lowered)) in ("boolean", "null") and (not kinds or found in kinds):
        return lowered
    return json.dumps(text, ensure_ascii=False)


def _kind(text: str) -> str:
    """The kind of a JSON text, "" where it is none."""
    try:
        return _BY_KIND[type(json.loads(text, parse_constant=_refuse))]
    except (ValueError, RecursionError):
        return ""


def _refuse(name: str) -> None:
    raise ValueError(name)


def _fits(kind: str, kinds: frozenset[str]) -> bool:
    return kind in kinds or (kind == "integer" and "number" in kinds)


def _kinds(schema: Any, root: Mapping[str, Any], depth: int) -> Iterator[str]:
    """The kinds of value that a schema wants, as JSON Schema names them; none where it says nothing about them."""
    if not isinstance(schema, Mapping) or depth > _DEPTH_MAX:
        return
    named = schema.get("type")
    if named is not None:
        yield from (kind for kind in (named if isinstance(named, list) else [named]) if isinstance(kind, str))
        return
    for value in [schema["const"]] if "const" in schema else schema.get("enum") or ():
        yield _BY_KIND.get(type(value), "")
    for name in ("anyOf", "oneOf", "allOf"):
        for each in schema.get(name) or ():
            yield from _kinds(each, root, depth + 1)
    if isinstance(reference := schema.get("$ref"), str):
        yield from _kinds(_target(reference, root), root, depth + 1)


def _target(reference: str, root: Mapping[str, Any]) -> Any:
    """What a reference within the function's schema leads to; None where that is nothing."""
    target: Any = root
    for part in reference.removeprefix("#/").split("/"):
        target = target.get(part.replace("~1", "/").replace("~0", "~")) if isinstance(target, Mapping) else None
    return target
