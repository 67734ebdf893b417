"""Schemas of tools: a strict one is kept whole or refused by its name; of another, what cannot be kept is dropped and no more."""

from __future__ import annotations

import logging
import time
from typing import Any

import pytest
from test_grammar import admits

from vnext.runtime.protocol.sampling_params import InvalidRequest, StructuredOutputsParams
from vnext.text.structured.tools import kept_tools

A, B = {"type": "string"}, {"type": "integer"}
OPTIONS = StructuredOutputsParams()


def with_a(**more: Any) -> dict[str, Any]:
    return {"type": "object", "properties": {"a": A, "b": B}, "required": ["a"], **more}


def kept(schema: Any, *strict: str) -> Any:
    [tool] = kept_tools([{"type": "function", "function": {"name": "f", "parameters": schema}}], strict, OPTIONS)
    return tool["function"]["parameters"]


EITHER = [{"required": ["a"]}, {"required": ["b"]}]
DEEP: dict[str, Any] = {"type": "null"}
for _ in range(80):
    DEEP = {"type": "array", "items": DEEP}
DROPPED = [  # a schema, a text that what is kept of it admits, and one that it does not
    (with_a(oneOf=EITHER), '{"a": "x", "b": 1}', '{"a": 1}'),
    (with_a(uniqueItems=True), '{"a": "x"}', '{"b": 1}'),
    (with_a(propertyNames={"pattern": "^a"}), '{"a": "x"}', "{}"),
    (with_a(dependentRequired={"b": ["a"]}), '{"a": "x"}', "{}"),
    (with_a(**{"not": {"required": ["b"]}}), '{"a": "x", "b": 1}', "{}"),
    (with_a(minProperties=5), '{"a": "x"}', "{}"),
    (with_a(required="a"), '{"a": "x"}', '{"a": 1}'),
    (with_a(maxProperties=1), '{"a": "x"}', '{"a": 1}'),
    (with_a(allOf=[{"type": "array"}]), '{"a": "x"}', "[]"),
    (with_a(patternProperties={"(?=x)": A}), '{"a": "x"}', '{"a": 1}'),
    ({"type": "object", "properties": {"a": {"type": "string", "pattern": "^(?=.*x)"}}}, '{"a": "y"}', '{"a": 1}'),
    ({"type": "object", "properties": {"a": {"type": "string", "pattern": "(", "maxLength": 2}}}, '{"a": "y"}', '{"a": "yyy"}'),
    ({"type": "object", "properties": {"a": {"type": "rain"}, "b": B}}, '{"a": [], "b": 1}', '{"b": "x"}'),
    ({"type": "object", "properties": {"a": 5, "b": B}}, '{"a": [], "b": 1}', '{"b": "x"}'),
    ({"type": "object", "properties": {"a": {"$ref": "https://x"}, "b": B}}, '{"a": [], "b": 1}', '{"b": "x"}'),
    ({"type": "object", "properties": {"a": {"enum": ["x"], "minLength": 3}, "b": B}, "required": ["a"]}, '{"a": "x", "b": 1}',
     '{"a": "x", "b": "x"}'),
    ({"type": "object", "properties": {"a": {"items": {"oneOf": [{"minimum": 1}, {"maximum": 3}]}}, "b": B}}, '{"a": [2], "b": 1}', "[]"),
    ({"type": "object", "properties": {"a": {"$ref": "#/$defs/t"}}, "$defs": {"t": {"not": A, "type": "array"}}}, '{"a": [1]}', '{"a": 1}'),
    ({"type": "object", "properties": {"a": DEEP, "b": B}}, '{"a": [[]], "b": 1}', '{"a": [[]], "b": "x"}'),
    ({"type": "object", "properties": {f"p{at}": B for at in range(400)}}, '{"p1": 1, "other": "x"}', "[]"),
    ({"type": "object", "$ref": "#/nowhere"}, '{"a": 1}', "1"),
    ({"type": "rain"}, '{"a": 1}', "1"),
    (with_a(required=["a", "b"], properties={"a": A, "b": False}), '{"a": "x"}', '{"a": 1}'),
    (with_a(required=["a", "b"], properties={"a": A, "b": {"$ref": "#/properties/b"}}), '{"a": "x", "b": 1}', '{"a": 1}'),
    ({"type": "object", "properties": {"a": {"type": "string", "minLength": 2**40}}}, '{"a": "y"}', '{"a": 1}'),
    ({"type": "array", "properties": {"a": B}}, '{"a": 1}', "[]"),
]  # fmt: skip


@pytest.mark.parametrize(("schema", "fine", "wrong"), DROPPED, ids=lambda each: str(each)[:40])
def test_what_cannot_be_kept_is_dropped_where_nobody_asked_for_it(
    schema: Any, fine: str, wrong: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.DEBUG, "vnext.server"):
        found = kept(schema)
    assert "of the schema of tool 'f'" in caplog.text
    assert admits(fine, json=found) and not admits(wrong, json=found)
    with pytest.raises(InvalidRequest, match="^tools: the parameters of the strict tool 'f' cannot be kept") as refused:
        kept(schema, "f")
    assert refused.value.param == "tools" and "coerce" not in refused.value.message
    assert kept(found) is found, "what is kept can be kept"


IDLE: list[dict[str, Any]] = [
    {"propertyNames": {"type": "string"}}, {"propertyNames": True}, {"propertyNames": {}}, {"dependentRequired": {}},
    {"dependentRequired": {"a": []}}, {"dependentSchemas": {"b": True}}, {"dependencies": {}}, {"uniqueItems": False},
    {"uniqueItems": True, "maxItems": 1}, {"not": False}, {"not": {"not": {}}}, {"unevaluatedProperties": True}, {"unevaluatedItems": {}},
    {"contains": A, "minContains": 0}, {"minContains": 2}, {"maxContains": 2}, {"if": A}, {"then": A}, {"if": A, "then": True},
]  # fmt: skip


@pytest.mark.parametrize("keywords", IDLE, ids=str)
def test_keywords_that_constrain_nothing_are_kept_everywhere(
    keywords: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    schema = with_a(**keywords)
    with caplog.at_level(logging.DEBUG, "vnext.server"):
        for strict in ((), ("f",)):
            assert kept(schema, *strict) == schema
    assert not caplog.text
    assert admits('{"a": "x", "b": 1}', json=schema) and not admits('{"b": 1}', json=schema)


@pytest.mark.parametrize("never", [{"not": {}}, {"not": True}])
def test_what_admits_nothing_forbids_a_property(never: Any) -> None:
    schema = {"type": "object", "properties": {"a": A, "b": never}, "required": ["a"]}
    for each in (schema, kept(schema), kept(schema, "f")):
        assert admits('{"a": "x"}', json=each) and not admits('{"a": "x", "b": 1}', json=each)


def test_usual_tools_cost_nothing_more() -> None:
    tool = {"type": "function", "function": {"name": "f", "parameters": with_a()}}
    many = [tool] * 1_000
    assert kept_tools(many, (), OPTIONS) == many and kept_tools(many, ("f",), OPTIONS) == many


def test_what_is_slow_to_search_goes_at_once() -> None:
    hard = {"allOf": [{"anyOf": [{"required": [f"{at} {by}"]} for by in range(4)]} for at in range(10)]}
    began_s = time.thread_time()
    assert kept({"type": "object", **hard}) == {"type": "object", "additionalProperties": True}
    assert time.thread_time() - began_s < 60
