"""A client's schema becomes one that holds only what constrains; a keyword that cannot be kept is named with its place."""

from __future__ import annotations

from typing import Any

import pytest
from test_grammar import admits, grammar

from vnext.sampling_params import InvalidRequest
from vnext.text.structured.json_schema import SchemaReader, _levels


def read(schema: Any, **options: Any) -> Any:
    return SchemaReader(schema, lambda place, reason: InvalidRequest(f"{place}|{reason}"), **options).read()


def test_what_constrains_nothing_is_left_out() -> None:
    words = {
        "title": "T",
        "description": "d",
        "default": 1,
        "examples": [1],
        "$comment": "c",
        "$id": "x",
        "nullable": True,
        "own": 1,
    }
    schema = {"$schema": "http://json-schema.org/draft-07/schema#", "type": "integer", "format": "int32", "uniqueItems": False}
    assert read(words | schema | {"$defs": {"unused": {"not": {}}}}) == {"type": "integer"}


def test_names_are_not_keywords() -> None:
    schema = {"properties": {"not": {"enum": [{"not": 1, "$ref": "#/nowhere"}]}, "description": True}}
    assert read(schema) == schema


def test_references_lead_to_numbered_definitions() -> None:
    tree = {
        "type": "object",
        "properties": {"left": {"$ref": "#/definitions/a~1b%20c"}, "all": {"items": {"$ref": "#"}}},
        "definitions": {"a/b c": True},
    }
    left, all_ = {"$ref": "#/$defs/0"}, {"items": {"$ref": "#/$defs/1"}}
    body = {"type": "object", "properties": {"left": left, "all": all_}}
    assert read(tree) == body | {"$defs": {"0": True, "1": body}}
    assert admits('{"left": 1, "all": [{}, {"all": [{}]}]}', json=tree) and not admits('{"all": [{"all": [1]}]}', json=tree)


def test_definitions_lead_to_definitions() -> None:
    defined = {"a": {"items": {"$ref": "#/$defs/b"}}, "b": {"items": {"$ref": "#/$defs/c"}}, "c": {"const": 3}}
    chain = {"$ref": "#/$defs/a", "$defs": defined}
    assert [*read(chain)["$defs"].values()] == [{"items": {"$ref": "#/$defs/1"}}, {"items": {"$ref": "#/$defs/2"}}, {"const": 3}]
    assert admits("[[3]]", json=chain) and not admits("[[4]]", json=chain)


def nested(depth: int, value: Any, wrap: Any) -> Any:
    for _ in range(depth):
        value = wrap(value)
    return value


@pytest.mark.parametrize("wrap", [lambda value: [value], lambda value: {"a": value}], ids=["lists", "objects"])
def test_constants_are_as_deep_and_texts_as_long_as_their_bounds(wrap: Any) -> None:
    deepest = nested(50, 1, wrap)
    assert read({"const": deepest}) == {"const": deepest}
    with pytest.raises(InvalidRequest, match="nested more than 50 deep"):
        read({"const": wrap(deepest)})
    longest = wrap("x" * 8192)
    assert read({"enum": [longest], "pattern": "y" * 8192}) == {"enum": [longest], "pattern": "y" * 8192}
    for longer in ({"enum": [wrap("x" * 8193)]}, {"pattern": "y" * 8193}):
        with pytest.raises(InvalidRequest, match="text has more than 8192 characters"):
            read(longer)


def test_objects_are_closed_on_request() -> None:
    schema = {"properties": {"a": {"properties": {}}}, "patternProperties": {"b": {"type": "object"}}}
    closed = {
        "properties": {"a": {"properties": {}, "additionalProperties": False}},
        "patternProperties": {"b": {"type": "object"}},
    }
    assert read(schema, closed=True) == closed | {"additionalProperties": False}


@pytest.mark.parametrize(
    ("schema", "error"),
    [
        (5, "|a schema is an object or a boolean"),
        ({"properties": {"a": 5}}, "properties.a|a schema is an object or a boolean"),
        ({"properties": []}, "properties|it is an object of schemas"),
        ({"anyOf": {}}, "anyOf|it is a list of schemas"),
        ({"required": "a"}, "required|it is a list of names"),
        ({"items": [{}, {"if": {}}]}, "items[1]|the keyword 'if' is not supported, leave it out"),
        ({"uniqueItems": True}, "|the keyword 'uniqueItems' is not supported, leave it out"),
        ({"x-guidance": {"lenient": True}}, "|the keyword 'x-guidance' is not supported, leave it out"),
        ({"$ref": "other.json"}, "$ref|only a reference into the schema itself (#/...) is supported"),
        ({"$ref": "#name"}, "$ref|only a reference into the schema itself (#/...) is supported"),
        ({"$ref": "#/$defs/a"}, "$defs.a|the reference '#/$defs/a' leads nowhere"),
        ({"$ref": "#/$defs/a", "$defs": {"a": {"not": {}}}}, "$defs.a|the keyword 'not' is not supported, leave it out"),
        ({"items": {"$id": "a"}}, "items|'$id' is only supported at the top, leave it out"),
        ({"format": "iri"}, "format|the format 'iri' is not supported, use a pattern"),
        ({"multipleOf": 10007}, "multipleOf|only a positive number of at most 10000, without its point, is supported"),
        ({"multipleOf": "a"}, "multipleOf|only a positive number of at most 10000, without its point, is supported"),
        ({"multipleOf": -1}, "multipleOf|only a positive number of at most 10000, without its point, is supported"),
        ({"const": {"a": ["\x01"]}}, "const|a text holds a control character, leave it out"),
        ({"pattern": "a" * 9000}, "pattern|its text has more than 8192 characters, shorten it"),
        ({"enum": ["a" * 9000]}, "enum|a text has more than 8192 characters, shorten it"),
        ({"minProperties": 2, "required": []}, "|'minProperties' is only supported up to one more than 'required'"),
        ({"required": [str(at) for at in range(1001)]}, "|at most 1000 properties in an object and 5000 in all are supported"),
    ],
)
def test_a_keyword_that_cannot_be_kept_is_named(schema: Any, error: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        read(schema)
    assert refused.value.message.startswith(error)


@pytest.mark.parametrize(
    ("schema", "place"),
    [
        ({"properties": {"a": {"items": {"type": "strin"}}}}, "at properties.a.items: Invalid type: strin."),
        (
            {"$ref": "#/$defs/a", "$defs": {"a": {"anyOf": [{"type": "null"}, {"pattern": "(?=a)"}]}}},
            "at $defs.a.anyOf[1]: look-around",
        ),
        ({"items": {"oneOf": [{"minimum": 1}, {"maximum": 3}]}}, "at items: oneOf constraints are not supported"),
        (
            {"items": {"oneOf": [{"$ref": "#/$defs/a"}, {"maximum": 3}]}, "$defs": {"a": {"minimum": 1}}},
            "at items: oneOf constraints are not supported",
        ),
        ({"minItems": 2, "maxItems": 1, "type": "array"}, "cannot be kept: Unsatisfiable schema: minItems (2)"),
    ],
)
def test_what_llguidance_refuses_is_found(schema: Any, place: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        grammar(json=schema)
    assert place in refused.value.message


def test_levels_count_along_references() -> None:
    chain = {"a": {"items": {"$ref": "#/$defs/b"}}, "b": {"items": {"$ref": "#/$defs/c"}}, "c": {"type": "null"}}
    apart = {"a": {"items": {"$ref": "#/$defs/c"}}, "b": {"items": {"$ref": "#/$defs/c"}}, "c": {"type": "null"}}
    assert (_levels({}, chain), _levels({}, apart)) == (9, 6)
