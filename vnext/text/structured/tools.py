"""Tools: the schemas of functions that a call can be held to.

A strict tool's schema is kept whole or refused, by its name and the place in it. What cannot be kept of another's is dropped, since
nobody asked for it: first the keywords that are not supported, then those for which llguidance refuses the innermost part. Raises
InvalidRequest, and logs what it drops.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import msgspec

from vnext.runtime.protocol.sampling_params import InvalidRequest, StructuredOutputsParams
from vnext.text.structured.grammar import PLACES_TRIED_MAX, SLOW, place_of, refusal_of_schema
from vnext.text.structured.json_schema import Schema, SchemaReader

log = logging.getLogger("vnext.server")
SEARCHED_S_MAX = 1.0
"""Of a thread's time, to find what to drop of a function's schema; all of it goes after that."""
_ANY = {"type": "object", "additionalProperties": True}
_SAFE = {*"properties required additionalProperties items enum description title default examples $schema $comment".split()}
_SAFE_DEPTH_MAX = 10
_KINDS = ("string", "integer", "number", "boolean", "array", "object", "null")
_LAST = "additionalProperties enum const anyOf $ref items required properties type".split()  # to be dropped, in this order
_OF_NAMES = ("properties", "patternProperties", "allOf", "anyOf", "oneOf", "$ref", "if")

Tool = dict[str, Any]


def kept_tools(tools: Sequence[Tool], strict: Collection[str], options: StructuredOutputsParams) -> list[Tool]:
    """The tools with the schemas to keep. `strict`: names of those whose schemas are kept whole."""
    made: dict[tuple[bool, bytes], Any] = {}
    return [_kept(tool, tool["function"]["name"] in strict, options, made) for tool in tools]


def _kept(tool: Tool, is_strict: bool, options: StructuredOutputsParams, made: dict[tuple[bool, bytes], Any]) -> Tool:
    function = tool["function"]
    given = {"type": "object"} | (function.get("parameters") or {})
    if given["type"] == "object" and _is_safe(given):
        return tool
    key = is_strict, msgspec.json.encode(given)
    if key not in made:
        schema = _Parameters(function["name"], given, options)
        if is_strict:
            schema.whole()
        made[key] = None if is_strict else schema.relaxed()
    return tool if made[key] is None else {**tool, "function": {**function, "parameters": made[key]}}


def _is_safe(schema: Any, depth: int = 0) -> bool:
    """Whether a schema is surely kept: it has only the keywords of most tools, with values that mean something."""
    if (
        depth > _SAFE_DEPTH_MAX
        or not isinstance(schema, Mapping)
        or not schema.keys() - {"type"} <= _SAFE
        or schema.get("type", "null") not in _KINDS
    ):
        return False
    named, listed, required = schema.get("properties", {}), schema.get("enum", [""]), schema.get("required", [])
    if not (isinstance(named, Mapping) and isinstance(listed, list) and isinstance(required, list)):
        return False
    values = listed and all(isinstance(each, str) and each.isprintable() and len(each) < 200 for each in listed)
    names = all(isinstance(each, str) and each.isprintable() and len(each) < 200 for each in (*named, *required))
    inner = [*named.values(), *(schema[name] for name in ("items", "additionalProperties") if name in schema)]
    is_of_texts = "enum" not in schema or schema.get("type", "string") == "string"
    return bool(values and names and is_of_texts and len(named) < 20 and False not in named.values()) and all(
        isinstance(each, bool) or _is_safe(each, depth + 1) for each in inner
    )


class _Parameters:
    """One function's schema."""

    def __init__(self, name: str, schema: Mapping[str, Any], options: StructuredOutputsParams) -> None:
        self._name, self._schema, self._options = name, schema, options
        self._is_of_objects = schema["type"] == "object" or (isinstance(schema["type"], list) and "object" in schema["type"])

    def whole(self) -> None:
        """Check that it can be kept whole. Raises InvalidRequest."""
        if not self._is_of_objects:
            raise self._refused("type", "arguments are an object")
        reader = SchemaReader(self._schema, self._refused, exact=True)
        schema = reader.read()
        if error := self._error(schema):
            raise self._refused("" if error == SLOW else place_of(reader, self._options, error), error)

    def relaxed(self) -> dict[str, Any] | None:
        """What can be kept of it; None for all. Arguments are an object."""
        of_type = [] if self._is_of_objects else ["type: arguments are an object"]
        reader = SchemaReader({**self._schema, "type": "object"}, self._refused, drops=True, exact=True)
        try:
            reader.read()
        except InvalidRequest as error:
            return self._dropped([error.message], _ANY)
        root = reader.parts[-1][1]
        members = root if isinstance(root, dict) else {}
        dropped = [*of_type, *reader.dropped, *self._search(reader)]
        whole = reader.whole(members)
        found: dict[str, Any] = {**(whole if isinstance(root, dict) and isinstance(whole, dict) else _ANY), "type": "object"}
        if why_not := self._error(found):
            return self._dropped([*dropped, why_not], _ANY)
        if not dropped:
            return None
        if any(name in self._schema and name not in members for name in _OF_NAMES):
            found.setdefault("additionalProperties", True)
        return self._dropped(dropped, found)

    def _search(self, reader: SchemaReader) -> list[str]:
        """Drop what llguidance refuses, innermost parts first; returns why."""
        dropped, root = [], reader.parts[-1][1]
        until_s = time.thread_time() + SEARCHED_S_MAX

        def fails(part: Schema) -> str:
            return self._error(reader.whole(part)) if time.thread_time() < until_s else ""

        while (error := fails(root)) and error != SLOW:
            tried = (each for each in reader.parts[:PLACES_TRIED_MAX] if isinstance(each[1], dict))
            place, part = next((each for each in tried if fails(each[1])), reader.parts[-1])
            if not isinstance(part, dict) or not part:
                break
            own, names = fails(part), sorted(part, key=lambda name: _LAST.index(name) if name in _LAST else -1)
            cause = next((name for name in names if fails(_without(part, name)) != own), None)
            for name in [*part] if cause is None else [cause]:
                del part[name]
            dropped.append(f"{place}: {error}")
        return dropped

    def _error(self, schema: Schema) -> str:
        return refusal_of_schema(schema, self._options)

    def _dropped(self, reasons: Sequence[str], kept: dict[str, Any]) -> dict[str, Any]:
        log.debug(
            "of the schema of tool %r, which is not strict, is dropped what cannot be kept: %s", self._name, "; ".join(reasons)
        )
        return kept

    def _refused(self, place: str, reason: str) -> InvalidRequest:
        at = f" at {place[:200].encode(errors='replace').decode()}" if place else ""
        name = self._name[:100].encode(errors="replace").decode()
        reason = reason[:300].encode(errors="replace").decode().rstrip(" .")
        sentence = f"tools: the parameters of the strict tool {name!r} cannot be kept{at}: {reason}, or leave out its strict."
        return InvalidRequest(sentence, "tools")


def _without(part: Mapping[str, Any], name: str) -> dict[str, Any]:
    return {key: value for key, value in part.items() if key != name}
