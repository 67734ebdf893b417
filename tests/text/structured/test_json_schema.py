"""A client's schema becomes one that holds only what constrains; a keyword that cannot be kept is named with its place."""

from __future__ import annotations

import random
import re
from decimal import Decimal
from typing import Any

import pytest
from judging import Judge
from llguidance import LLMatcher
from test_grammar import LIMITS, admits, grammar, vocabulary

from vnext.runtime.protocol.sampling_params import InvalidRequest
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
        ({"enum": 1}, "enum|it is a list of values"),
        ({"items": {"enum": "ab"}}, "items.enum|it is a list of values"),
        ({"type": 1}, "type|it is the name of a type, or a list of them"),
        ({"anyOf": [{"type": ["string", None]}]}, "anyOf[0].type|it is the name of a type, or a list of them"),
        ({"items": [{}, {"if": {}, "then": False}]}, "items[1]|the keyword 'if' is not supported, leave it out"),
        ({"uniqueItems": True}, "|the keyword 'uniqueItems' is not supported, leave it out"),
        ({"x-guidance": {"lenient": True}}, "|the keyword 'x-guidance' is not supported, leave it out"),
        ({"$ref": "other.json"}, "$ref|only a reference into the schema itself (#/...) is supported"),
        ({"$ref": "#name"}, "$ref|only a reference into the schema itself (#/...) is supported"),
        ({"$ref": "#/$defs/a"}, "$defs.a|the reference '#/$defs/a' leads nowhere"),
        ({"$ref": "#/$defs/a", "$defs": {"a": {"not": False, "if": {}, "else": {"not": {}}}}}, "$defs.a|the keyword 'if' is not supported, leave it out"),
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
            "at $defs.a.anyOf[1]: look-around in a pattern is not supported",
        ),
        ({"items": {"oneOf": [{"minimum": 1}, {"maximum": 3}]}}, "at items: 'oneOf' is only supported where no answer fits two of its schemas, use 'anyOf'."),
        (
            {"items": {"oneOf": [{"$ref": "#/$defs/a"}, {"maximum": 3}]}, "$defs": {"a": {"minimum": 1}}},
            "at items: 'oneOf' is only supported where no answer fits two of its schemas, use 'anyOf'.",
        ),
        ({"minLength": 2**32}, "at minLength: no answer is longer than 2147483648 characters"),
        ({"minItems": 2, "maxItems": 1, "type": "array"}, "cannot be kept: no answer satisfies it: minItems (2) is greater than maxItems (1)."),
    ],
)
def test_what_llguidance_refuses_is_found(schema: Any, place: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        grammar(json=schema)
    assert place in refused.value.message


def object_of(schema: Any, *required: str) -> dict[str, Any]:
    return {"type": "object", "properties": {"x": schema, "y": {"type": "null"}}, "required": [*required]}


AROUND: dict[str, Any] = {"a": {"$ref": "#/$defs/b"}, "b": {"anyOf": [{"$ref": "#/$defs/c"}]}, "c": {"allOf": [{"$ref": "#/$defs/a"}]}}


@pytest.mark.parametrize(
    ("schema", "place"),
    [
        (object_of({"$ref": "#/properties/x"}, "x"), "properties.x"),
        (object_of({"$ref": "#/properties/x"}), "properties.x"),
        (object_of({"$ref": "#"}, "x"), "properties.x"),
        (object_of({"$ref": "#/$defs/a"}, "x") | {"$defs": AROUND}, "$defs.a"),
        ({"type": "array", "minItems": 1, "items": {"$ref": "#"}}, "items"),
        ({"anyOf": [object_of({"$ref": "#"}, "x"), {"type": "array", "minItems": 2, "items": {"$ref": "#"}}]}, "anyOf[0].properties.x"),
    ],
    ids=str,
)
def test_values_that_would_contain_themselves_for_ever_are_none(schema: Any, place: str) -> None:
    with pytest.raises(InvalidRequest, match=f"cannot be kept at {re.escape(place)}: no answer satisfies it"):
        grammar(json=schema)


@pytest.mark.parametrize(
    ("schema", "text"),
    [
        (object_of({"$ref": "#"}), '{"x": {"x": {}}}'),
        (object_of({"anyOf": [{"$ref": "#"}, {"type": "null"}]}, "x"), '{"x": {"x": null}}'),
        ({"type": "array", "items": {"$ref": "#"}}, "[[], [[]]]"),
        (object_of({"$ref": "#/$defs/0"}, "x") | {"$defs": {str(at): {"$ref": f"#/$defs/{at + 1}"} for at in range(200)} | {"200": {}}}, '{"x": 1}'),
        ({"type": "string", "maxLength": 10**18}, '"a"'),
    ],
    ids=lambda each: str(each)[:60],
)
def test_values_that_may_end_and_texts_of_any_length_are_kept(schema: Any, text: str) -> None:
    assert admits(text, json=schema)


def test_levels_count_along_references() -> None:
    chain = {"a": {"items": {"$ref": "#/$defs/b"}}, "b": {"items": {"$ref": "#/$defs/c"}}, "c": {"type": "null"}}
    apart = {"a": {"items": {"$ref": "#/$defs/c"}}, "b": {"items": {"$ref": "#/$defs/c"}}, "c": {"type": "null"}}
    assert (_levels({}, chain), _levels({}, apart)) == (9, 6)


BOUNDS = (0, 1, -1, 2, 0.5, -0.5, 1.5, 0.25, 0.001, -0.001, 10, 9.99, 1e-9, 0.1, -0.3, 1000, 12.75, 10**7, 2**53 + 1, -(2**53) - 3, 2**60 + 1)
NEAR = ("0", "0.1", "-0.1", "0.001", "-0.001", "0.0000000001", "-0.0000000001", "1", "-1", "2", "-2", "1025", "-1025")


def spellings(bound: float | None) -> set[str]:
    """Numbers at and near a bound, each written in several ways, with a negative zero."""
    plain = {"0", "-0", "0.0", "-0.0"} | {format(Decimal(str(bound)) + Decimal(each), "f") for each in NEAR if bound is not None}
    return plain | {f"{each}{'0' if '.' in each else '.0'}" for each in plain} | {each.rstrip("0").rstrip(".") for each in plain if "." in each}


@pytest.mark.parametrize("seed", range(12))
def test_no_number_beyond_its_bounds_passes(seed: int) -> None:
    """`Judge` compares exact decimals; the bounds stand in one schema, in two that are joined, or beside a reference."""
    rng = random.Random(seed)
    for _ in range(25):
        low, high = sorted(rng.sample(BOUNDS, 2))
        lower = {rng.choice(("minimum", "exclusiveMinimum")): low}
        upper = {rng.choice(("maximum", "exclusiveMaximum")): high}
        kind = {"type": rng.choice(("number", "integer"))}
        form = rng.randrange(4)
        schema = {0: kind | lower | upper, 1: {"allOf": [kind | lower, upper]}, 2: {"$ref": "#/$defs/a"} | upper, 3: kind | lower}[form]
        schema |= {"$defs": {"a": kind | lower}} if form == 2 else {}
        try:
            text = grammar(json=schema)
        except InvalidRequest:
            continue  # nothing satisfies it
        judge, matcher = Judge(schema), LLMatcher(vocabulary(), text, limits=LIMITS, log_level=0)
        for number in spellings(low) | spellings(high):
            matcher.reset()
            is_taken = matcher.try_consume_tokens(list(number.encode())) == len(number) and matcher.is_accepting()
            assert not is_taken or not judge.error(number), (schema, number)


@pytest.mark.parametrize(
    ("schema", "good", "bad"),
    [
        ({"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 0.5}, "0.25", "0"),
        ({"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 1e-9}, "0.0000000005", "0"),
        ({"type": "number", "exclusiveMinimum": -0.5, "exclusiveMaximum": 0}, "-0.25", "-0"),
        ({"type": "number", "exclusiveMinimum": 0, "minimum": 0.25}, "0.25", "0.2"),
        ({"exclusiveMinimum": 0}, "7", "0.0"),
        ({"type": "integer", "exclusiveMinimum": 0}, "1", "0"),
        ({"type": "integer", "minimum": 1, "maximum": 2**63 - 1}, "1234567890123456789", "9223372036854775808"),
        ({"const": 2**60}, str(2**60), str(2**60 + 1)),
    ],
)
def test_bounds_are_kept(schema: Any, good: str, bad: str) -> None:
    assert admits(good, json=schema) and not admits(bad, json=schema)


@pytest.mark.parametrize("value", [1234567890123456789, -(2**53) - 1, 2**63, 10**400])
@pytest.mark.parametrize("wrap", [lambda value: {"const": value}, lambda value: {"enum": [1, [value]]}, lambda value: {"items": {"const": {"id": value}}}])
def test_an_integer_that_would_be_rounded_is_refused(value: int, wrap: Any) -> None:
    with pytest.raises(InvalidRequest, match=r"cannot be kept exactly, since it is beyond 2\*\*53: make it a string"):
        read(wrap(value))
