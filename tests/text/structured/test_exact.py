"""Integers that float64 does not hold are kept to the digit, wherever a schema or a tool names them."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest
from judging import Judge
from llguidance import LLMatcher
from test_grammar import admits, grammar, vocabulary
from test_tool_schemas import kept

from vnext.runtime.protocol.sampling_params import InvalidRequest
from vnext.text.structured.grammar import LIMITS

N = 1234567890123456789
ID = {"enum": [N]}
CASES: list[tuple[Any, list[Any], list[Any]]] = [  # a schema, values that it admits, and some that it does not
    ({"const": N}, [N], [N - 1, N + 1, 1234567890123456768, str(N), None]),
    ({"enum": [N, 7, "x", None, -N]}, [N, 7, "x", None, -N], [N + 11, 8, "y", -N - 1]),
    ({"enum": [N, 7, "x"], "type": "integer"}, [N, 7], ["x"]),
    ({"enum": ["x", -(2**63)], "type": "integer"}, [-(2**63)], ["x", -(2**63) + 1]),
    ({"type": ["integer", "null"], "enum": [2**63, 2**64 - 1, None]}, [2**63, 2**64 - 1, None], [2**63 - 1]),
    ({"anyOf": [{"const": N}, {"type": "null"}]}, [N, None], [N - 21, 0]),
    ({"oneOf": [{"const": N, "title": "a"}, {"const": 2**53 + 1}]}, [N, 2**53 + 1], [2**53, 2**53 + 2]),
    ({"type": "array", "items": ID}, [[], [N], [N, N]], [[N - 1], N]),
    ({"type": "array", "items": ID, "minItems": 1, "maxItems": 2}, [[N], [N, N]], [[], [N, N, N]]),
    ({"type": "array", "items": ID, "maxItems": 1}, [[], [N]], [[N, N]]),
    ({"type": "array", "items": ID, "maxItems": 0}, [[]], [[N]]),
    ({"items": ID}, [[N], "x", 5], [[5]]),
    ({"type": "object", "properties": {"id": ID}, "required": ["id"], "additionalProperties": False}, [{"id": N}], [{}, {"id": 1}, {"id": N, "b": 1}]),
    ({"type": "object", "properties": {"id": ID}}, [{}, {"id": N}, {"id": N, "b": [1]}, {"b": 1}], [{"id": 5}, {"b": 1, "id": 5}]),
    ({"type": "object", "properties": {"a": {"type": "integer"}, "id": ID, "b": {"type": "string"}}, "required": ["b"],
      "additionalProperties": False}, [{"b": "x"}, {"a": 1, "id": N, "b": "x"}, {"id": N, "b": "y"}], [{"a": 1}, {"a": 1, "id": N}]),
    ({"type": "object", "additionalProperties": ID}, [{}, {"any": N}, {"a": N, "b": N}], [{"a": 1}]),
    ({"type": "object", "required": ["x"], "additionalProperties": ID}, [{"x": N}], [{}, {"x": 3}]),
    ({"type": ["object", "null"], "properties": {"id": ID}, "required": ["id"]}, [None, {"id": N}], [5]),
    ({"$ref": "#/$defs/node", "$defs": {"node": {"type": "object", "properties": {"id": ID, "next": {"$ref": "#/$defs/node"}},
      "required": ["id"], "additionalProperties": False}}}, [{"id": N}, {"id": N, "next": {"id": N}}], [{"id": N, "next": {"id": N + 1}}]),
    ({"type": "integer", "minimum": 2**53 + 1}, [2**53 + 1, 2**53 + 3, 10**30], [2**53, 2**53 - 1, 0, -N]),
    ({"type": "integer", "minimum": -(2**63), "maximum": 2**63 - 1}, [-(2**63), 0, 2**63 - 1], [-(2**63) - 1, 2**63, 10**30]),
    ({"type": ["integer", "null"], "exclusiveMinimum": -0.5, "maximum": N}, [0, N, None], [-1, N + 1, 0.5]),
    ({"type": "number", "exclusiveMinimum": N, "maximum": N + 2}, [N + 1, N + 2], [N, N + 3]),
    ({"maximum": -N}, [-N, -N - 1, "x", None, []], [-N + 1, 0, 1]),
    ({"type": ["number", "integer"], "exclusiveMaximum": N}, [-5, 0.5, N - 1], [N, N + 1]),
    ({"type": "object", "properties": {"id": {"type": "integer", "minimum": 0, "maximum": 2**64 - 1}}, "required": ["id"]},
      [{"id": 2**64 - 1}], [{"id": 2**64}, {"id": -1}]),
    ({"type": "object", "properties": {'a "b"\n': ID, "const": ID}, "required": ["const"]}, [{'a "b"\n': N, "const": N}], [{"const": 3}]),
]  # fmt: skip


@pytest.mark.parametrize(("schema", "good", "bad"), CASES, ids=lambda each: str(each)[:40])
def test_they_are_kept_to_the_digit(schema: Any, good: list[Any], bad: list[Any]) -> None:
    judge = Judge(schema)
    for value in good:
        for text in (json.dumps(value), json.dumps(value, indent=2), json.dumps(value, indent=4), json.dumps(value, separators=(",", ":"))):
            assert admits(text, json=schema) and not judge.error(text), text
        assert admits(json.dumps(value, separators=(",", ":")), json=schema, disable_any_whitespace=True)
    for value in bad:
        assert not admits(json.dumps(value), json=schema), value
    assert not admits(json.dumps(good[0]) + "  ", json=schema) and not admits("", json=schema)


@pytest.mark.parametrize(
    "schema",
    [
        {"enum": [N], "minimum": 0}, {"enum": [1, [N]]}, {"const": {"a": N}}, {"allOf": [ID, {"type": "integer"}]},
        {"type": "array", "prefixItems": [ID]}, {"patternProperties": {"x": ID}}, {"oneOf": [ID, {"type": "null"}]}, {"const": 10**2_000},
        {"type": "integer", "minimum": N, "multipleOf": 2}, {"type": "number", "minimum": 0.5, "maximum": N}, {"$ref": "#/$defs/a", "maximum": N, "$defs": {"a": {}}},
        {"allOf": [{"type": "integer", "minimum": N}, {"maximum": 2**62}]},
    ],
    ids=str,
)  # fmt: skip
def test_where_they_cannot_be_kept_they_are_refused(schema: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest, match=r"structured_outputs.json cannot be kept.*beyond 2\*\*53.*: make "):
        grammar(json=schema)


def test_a_refusal_names_what_stands_beside_the_number() -> None:
    with pytest.raises(InvalidRequest, match="only kept beside 'type', not beside multipleOf: make it a string"):
        grammar(json={"type": "integer", "minimum": N, "multipleOf": 2})
    with pytest.raises(InvalidRequest, match="only kept beside 'type', not beside each other: make it a string"):
        grammar(json={"enum": [N], "minimum": 0})


def test_what_admits_none_of_them_is_refused() -> None:
    for schema in ({"enum": [N], "type": "string"}, {"items": ID, "type": "array", "minItems": 2, "maxItems": 1}):
        with pytest.raises(InvalidRequest, match="no answer satisfies it"):
            grammar(json=schema)


@pytest.mark.parametrize("strict", [(), ("f",)])
def test_a_tool_keeps_them_strict_or_not(strict: tuple[str, ...]) -> None:
    schema = {"type": "object", "properties": {"id": ID, "n": {"type": "integer"}}, "required": ["id"], "additionalProperties": False}
    assert kept(schema, *strict) == schema


def test_of_a_tool_that_is_not_strict_only_what_stands_in_the_way_is_dropped() -> None:
    found = kept({"type": "object", "properties": {"id": ID | {"multipleOf": 3}, "b": {"type": "integer"}}, "required": ["id", "b"]})
    assert admits(f'{{"id": {N}, "b": 2}}', json=found) and not admits(f'{{"id": {N}, "b": "x"}}', json=found)
    assert not admits('{"id": 5, "b": 2}', json=found)


@pytest.mark.parametrize("seed", range(3))
def test_random_numbers_and_their_neighbours(seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(8):
        numbers = [rng.choice((-1, 1)) * rng.randrange(2**53, 2 ** rng.choice((54, 60, 63, 64, 80))) for _ in range(3)]
        schema = {"type": "object", "properties": {"id": {"enum": numbers}}, "required": ["id"]}
        for number in (each + by for each in numbers for by in (-256, -2, -1, 0, 1, 2, 256)):
            assert admits(json.dumps({"id": number}), json=schema) == (number in numbers), (numbers, number)


@pytest.mark.parametrize("seed", range(6))
def test_random_bounds_admit_what_exact_decimals_admit_and_nothing_else(seed: int) -> None:
    """`Judge` knows nothing of the patterns; each number is at or near a bound, where a digit rolls over, or far away."""
    rng = random.Random(seed)
    for _ in range(12):
        low, high = sorted(rng.choice((-1, 1)) * rng.randrange(2 ** rng.choice((1, 20, 54, 63, 90, 127))) for _ in range(2))
        bounds = {rng.choice(("minimum", "exclusiveMinimum")): low, rng.choice(("maximum", "exclusiveMaximum")): high}
        bounds.pop(rng.choice((*bounds, "none")), None)
        schema = {"type": rng.choice(("integer", "number"))} | bounds
        if not any(abs(each) > 2**53 for each in bounds.values()):
            continue
        judge, values = Judge(schema), {0, low, high}
        values |= {each + by for each in (low, high) for by in (-(10**5), -10, -1, 1, 10, 99, 2**60)} | {(low + high) // 2}
        values |= {sign * 10**size + by for size in (5, 16, 20, 40) for by in (-1, 0) for sign in (-1, 1)}
        texts = {str(each) for each in values}
        texts |= {f"{text}{tail}" for text in texts for tail in (".0", ".5", ".001")} if schema["type"] == "number" else set()
        matcher = LLMatcher(vocabulary(), grammar(json=schema), limits=LIMITS, log_level=0)
        for text in sorted(texts):
            matcher.reset()
            is_taken = matcher.try_consume_tokens(list(text.encode())) == len(text) and matcher.is_accepting()
            assert is_taken == (not judge.error(text)), (schema, text)


def test_bounds_of_parts_that_stay_schemas_and_of_great_numbers_are_refused() -> None:
    for field in ({"json": {"type": "integer", "minimum": 2**200}}, {"structural_tag": TAG}):
        with pytest.raises(InvalidRequest, match=r"it cannot be kept exactly, since it is beyond 2\*\*53: name a nearer bound"):
            grammar(**field)


TAG = {
    "structures": [{"begin": "<a>", "schema": {"type": "integer", "maximum": 2**60 + 1}, "end": "</a>"}], "triggers": ["<a"],
}  # fmt: skip


def test_a_schema_beside_such_a_number_is_indented_as_the_whole() -> None:
    inner = {"type": "object", "properties": {"c": {"type": "integer"}}, "additionalProperties": False}
    schema = {"type": "object", "properties": {"id": ID, "b": inner}, "required": ["id", "b"], "additionalProperties": False}
    assert admits(json.dumps({"id": N, "b": {"c": 1}}, indent=4), json=schema)
    assert not admits(f'{{"id": {N}, "b": {{\n         "c": 1}}}}', json=schema)
