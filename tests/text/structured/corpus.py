"""Corpus: schemas written from the keywords of draft 2020-12, from OpenAI's strict subset and from functions as agents use them.

`corpus(count)` is the same list on every machine. Some of its schemas cannot be kept: they show that they are refused.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from typing import Any

Schema = dict[str, Any]

NAMES = ("name", "id", "tags", "a/b", "é", "x y", 'q"t', "size", "kind", "next", "$ref", "", "0")
TEXTS = ("", "a", "red", "green", "näïve", "two words", 'quo"te', "back\\slash", "line\nend", "😀", "null", "1", "a/b")
PATTERNS = (
    "^a+$", "^[A-Z]{3}-[0-9]{2,4}$", "b", "^(red|green)$", "^\\d{3}$", "[a-f0-9]{4}", "^$", "^x|y$", "^.{2,3}$", "\\w+@\\w+", "^[^,]*$",
    "^(?:a|b){1,3}c?$", "\\s", "^\\S+$", "(?=a)", "(a)\\1", "^\\p{L}$",
)  # fmt: skip
KEY_PATTERNS = ("^x-", "^[a-c]$", "_id$", "^\\d+$")
FORMATS = (
    "date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uri", "uuid", "int32", "double", "password",
    "uri-reference", "regex", "idn-email", "iri",
)  # fmt: skip
VALUES = (None, True, False, 0, 1, -7, 1.5, 100000000000, *TEXTS, [], [1, "a"], {}, {"a": [None]}, {"b": 1, "a": 2})


def corpus(count: int, seed: int = 1) -> list[tuple[str, Schema]]:
    """`count` schemas, each with the name of its family. The families take turns."""
    rng = random.Random(seed)
    families: list[tuple[str, Callable[[random.Random], Schema]]] = [
        ("string", string), ("number", number), ("array", array), ("object", an_object), ("constant", constant), ("union", union),
        ("reference", reference), ("whole draft", lambda rng: any_schema(rng, 3)), ("strict", strict), ("function", function),
    ]  # fmt: skip
    return [(name, make(rng)) for name, make in (families[at % len(families)] for at in range(count))]


def some(rng: random.Random, **keywords: Callable[[], Any]) -> Schema:
    """Each keyword with an even chance."""
    return {name.rstrip("_").replace("__", "$"): make() for name, make in keywords.items() if rng.random() < 0.5}


def string(rng: random.Random) -> Schema:
    low = rng.randrange(0, 6)
    found = {"type": "string"} | some(rng, minLength=lambda: low, maxLength=lambda: low + rng.randrange(0, 9))
    match rng.randrange(5):
        case 0:
            found["pattern"] = rng.choice(PATTERNS)
        case 1:
            found = {"type": "string", "format": rng.choice(FORMATS)}
        case 2:
            found["contentEncoding"] = "base64"
    return found


def number(rng: random.Random) -> Schema:
    kind = rng.choice(("integer", "number"))
    low = rng.choice((0, -10, 3, 1.5, -0.25, 1000)) if kind == "number" else rng.choice((0, -10, 3, 1000))
    bounds = rng.choice((("minimum", "maximum"), ("exclusiveMinimum", "exclusiveMaximum"), ("minimum", "exclusiveMaximum")))
    found = {"type": kind} | {
        name: value for name, value in zip(bounds, (low, low + rng.choice((1, 2.5, 40)))) if rng.random() < 0.6
    }
    if rng.random() < 0.4:
        found["multipleOf"] = rng.choice((1, 2, 3, 7, 10, 250)) if kind == "integer" else rng.choice((0.5, 0.01, 0.1, 2, 1.5))
    return found


def array(rng: random.Random, depth: int = 1) -> Schema:
    least = rng.randrange(0, 3)
    found: Schema = {"type": "array"} | some(rng, minItems=lambda: least, maxItems=lambda: least + rng.randrange(0, 3))
    if rng.random() < 0.8:
        found["items"] = any_schema(rng, depth - 1) if rng.random() < 0.9 else False
    if rng.random() < 0.3:
        found["prefixItems"] = [any_schema(rng, depth - 1) for _ in range(rng.randrange(1, 3))]
    if rng.random() < 0.1:
        found |= rng.choice(
            ({"uniqueItems": True}, {"uniqueItems": False}, {"contains": {"type": "null"}}, {"unevaluatedItems": False})
        )
    return found


def an_object(rng: random.Random, depth: int = 1) -> Schema:
    names = rng.sample(NAMES, rng.randrange(0, 4))
    found: Schema = {"type": "object", "properties": {name: any_schema(rng, depth - 1) for name in names}}
    if rng.random() < 0.6:
        found["required"] = [name for name in (*names, "more") if rng.random() < 0.6]
    match rng.randrange(6):
        case 0 | 1:
            found["additionalProperties"] = False
        case 2:
            found["additionalProperties"] = any_schema(rng, depth - 1)
        case 3:
            found["patternProperties"] = {rng.choice(KEY_PATTERNS): any_schema(rng, depth - 1)}
    if rng.random() < 0.15:
        found |= rng.choice((
            {"minProperties": 1}, {"maxProperties": 2}, {"minProperties": 3}, {"propertyNames": {"maxLength": 3}},
            {"dependentRequired": {"a": ["b"]}}, {"unevaluatedProperties": False}, {"if": {}, "then": {}},
        ))  # fmt: skip
    return found


def constant(rng: random.Random) -> Schema:
    return rng.choice(({"const": rng.choice(VALUES)}, {"enum": rng.sample(VALUES, rng.randrange(1, 5))}))


def union(rng: random.Random, depth: int = 1) -> Schema:
    name = rng.choice(("anyOf", "anyOf", "oneOf", "allOf", "type", "sibling", "tagged"))
    if name == "type":
        return {
            "type": rng.sample(("string", "integer", "null", "boolean", "array", "object"), 2),
            "maxLength": 3,
            "minimum": 2,
        }
    if name == "tagged":
        kinds = rng.sample(("cat", "dog", "cow"), 2)
        return {"oneOf": [
            {"type": "object", "properties": {"kind": {"const": kind}, "size": any_schema(rng, 0)}, "required": ["kind"]}
            for kind in kinds
        ]}  # fmt: skip
    if name == "sibling":
        return an_object(rng, depth) | {"anyOf": [{"required": [each]} for each in rng.sample(NAMES, 2)]}
    if name == "allOf":
        return {"allOf": [an_object(rng, depth), rng.choice((an_object(rng, 0), {"required": ["name"]}))]}
    return {name: [any_schema(rng, depth - 1) for _ in range(rng.randrange(1, 4))]}


def reference(rng: random.Random) -> Schema:
    """References, and recursion with and without an end."""
    part = any_schema(rng, 1)
    match rng.randrange(5):
        case 0:
            return {"$ref": "#/$defs/part", "$defs": {"part": part}}
        case 1:
            return {"type": "object", "properties": {"value": part, "next": {"anyOf": [{"$ref": "#"}, {"type": "null"}]}},
                    "required": ["value", "next"]}  # fmt: skip
        case 2:
            tree = {"type": "object", "properties": {"leaf": part, "children": {"type": "array", "items": {"$ref": "#/definitions/tree"}}},
                    "required": ["leaf"], "additionalProperties": False}  # fmt: skip
            return {
                "definitions": {"tree": tree},
                "$ref": "#/definitions/tree",
                "$schema": "http://json-schema.org/draft-07/schema#",
            }
        case 3:
            return {"$defs": {"a~b/c": part}, "type": "array", "items": {"$ref": "#/$defs/a~0b~1c"}, "maxItems": 2}
        case _:
            return {"properties": {"a": part, "b": {"$ref": "#/properties/a"}}, "type": "object", "required": ["b"]}


def any_schema(rng: random.Random, depth: int) -> Schema:
    leaves = (string, number, constant, lambda rng: {"type": rng.choice(("string", "integer", "number", "boolean", "null"))})
    if depth <= 0:
        return rng.choice(leaves)(rng) if rng.random() < 0.97 else rng.choice(({}, {"not": {"type": "null"}}))
    make = rng.choice((*leaves, array, an_object, union, array, an_object, union))
    return make(rng, depth) if make in (array, an_object, union) else make(rng)


def strict(rng: random.Random, depth: int = 2) -> Schema:
    """OpenAI's subset for `strict`: every property is required, and no other is allowed."""
    names = rng.sample(NAMES, rng.randrange(1, 4))
    return {
        "type": "object",
        "properties": {name: _strict_part(rng, depth) for name in names},
        "required": names,
        "additionalProperties": False,
        "description": "a thing",
    }


def _strict_part(rng: random.Random, depth: int) -> Schema:
    match rng.randrange(6 if depth else 3):
        case 0:
            return {"type": rng.choice(("string", "number", "boolean", "integer")), "description": "what it is"}
        case 1:
            return {"type": "string", "enum": rng.sample(TEXTS, 3)}
        case 2:
            return {"anyOf": [{"type": rng.choice(("string", "integer"))}, {"type": "null"}]}
        case 3:
            return {"type": "array", "items": _strict_part(rng, depth - 1), "minItems": 1, "maxItems": 3}
        case 4:
            return {"type": ["string", "null"], "default": None, "title": "A title"}
        case _:
            return strict(rng, depth - 1)


def function(rng: random.Random) -> Schema:
    """The parameters of a function."""
    found = json.loads(json.dumps(rng.choice(FUNCTIONS)))
    if rng.random() < 0.3:
        found["additionalProperties"] = rng.choice((True, False))
    if rng.random() < 0.3:
        found["required"] = [name for name in found["properties"] if rng.random() < 0.7]
    return found


def _parameters(required: str, **properties: Schema) -> Schema:
    return {"type": "object", "properties": properties, "required": required.split()}


_TEXT, _COUNT, _FLAG = {"type": "string"}, {"type": "integer", "minimum": 0}, {"type": "boolean", "default": False}
FUNCTIONS = (
    _parameters("command", command=_TEXT, timeout={"type": "number", "maximum": 600000}, background=_FLAG),
    _parameters("path", path=_TEXT, offset=_COUNT, limit={"type": "integer", "exclusiveMinimum": 0}),
    _parameters("path old new", path=_TEXT, old=_TEXT, new=_TEXT, all=_FLAG) | {"additionalProperties": False},
    _parameters("pattern", pattern=_TEXT, glob=_TEXT, mode={"enum": ["content", "files", "count"]}, lines=_COUNT),
    _parameters("steps", steps={"type": "array", "items": _parameters(
        "content status", content={"type": "string", "minLength": 1}, status={"type": "string", "enum": ["open", "done"]})}),
    _parameters("location", location=_TEXT, unit={"type": "string", "enum": ["celsius", "fahrenheit"]}),
    _parameters("url", url={"type": "string", "format": "uri"}, headers={"type": "object", "additionalProperties": _TEXT}),
    _parameters("to subject", to={"type": "array", "items": {"type": "string", "format": "email"}, "minItems": 1}, subject=_TEXT),
    _parameters("start end", start={"type": "string", "format": "date-time"}, end={"type": "string", "format": "date"}),
    _parameters("query", query=_TEXT, top={"anyOf": [{"type": "integer", "maximum": 50, "minimum": 1}, {"type": "null"}], "default": None}),
    _parameters("amount currency", amount={"type": "number", "multipleOf": 0.01, "minimum": 0}, currency={"type": "string", "pattern": "^[A-Z]{3}$"}),
    _parameters("filter", filter={"$ref": "#/$defs/filter"}) | {"$defs": {"filter": {"anyOf": [
        _parameters("field value", field=_TEXT, value={"type": ["string", "number", "boolean", "null"]}),
        _parameters("and", **{"and": {"type": "array", "items": {"$ref": "#/$defs/filter"}}}),
    ]}}},
    _parameters("id", id={"type": "string", "format": "uuid"}, labels={"type": "array", "items": _TEXT, "uniqueItems": True}),
)  # fmt: skip
