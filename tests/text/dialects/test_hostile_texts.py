"""Hostile texts: marks in any order, broken and nested calls, deep and huge JSON. Nothing is lost and every cutting agrees."""

from __future__ import annotations

import random

import pytest
from cutting import parts_of, shown
from hypothesis import given, settings, strategies as st

from vnext.text.dialects.table import NAMES

TOOLS = [{"type": "function", "function": {"name": "now"}}]
DIALECTS = sorted({dialect.name: dialect for dialect in NAMES.values()}.items())
PIECES = sorted({mark for _, dialect in DIALECTS for mark in dialect.opens}) + [
    "<|channel|>", "<|message|>", "<|start|>assistant", " to=functions.now", "analysis", "<|end|>", "now(", "a=", ")", "'", "call:now{", "a:",
    "<escape>",
    '{"name": "now", "arguments": ', "{", "}", "[", "]", '"', "\\", "now", "</tool_call>", "<function=now>", "<parameter=a>", "</parameter>",
    "</function>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>", "[ARGS]", "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "function\n",
    "<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>", " ", "\n", "<", "ü", "\x00", '"a": 1', ",", "```",
]  # fmt: skip

CALLS = (
    "<tool_call>\n<function=now>\n<parameter=a>\n5\n</parameter>\n</function>\n</tool_call>",
    "<tool_call>now\n<arg_key>a</arg_key>\n<arg_value>5</arg_value>\n</tool_call>",
    '<tool_call>{"name": "now", "arguments": {"a": 5}}</tool_call>', "[now(a=5)]", "call:now{a:5}",
)  # fmt: skip
HARMONY = '<|channel|>commentary to=functions.now<|message|>{"a": '


@pytest.mark.parametrize("name", [name for name, _ in DIALECTS])
@settings(max_examples=60, deadline=None)
@given(st.lists(st.sampled_from(PIECES), max_size=14), st.randoms(use_true_random=False))
def test_every_cutting_of_any_text_agrees(name: str, pieces: list[str], rng: random.Random) -> None:
    text = "".join(pieces)
    whole = shown(parts_of(NAMES[name], [text], TOOLS))
    assert shown(parts_of(NAMES[name], list(text), TOOLS)) == whole
    places = sorted(rng.choices(range(len(text) + 1), k=4))
    cut = [text[start:stop] for start, stop in zip([0, *places], [*places, len(text)])]
    assert shown(parts_of(NAMES[name], cut, TOOLS)) == whole
    if all(isinstance(each, str) for each in whole) and not NAMES[name].is_whole:
        assert "".join(whole) == text


def test_two_thousand_calls() -> None:
    text = '<tool_call>{"name": "now", "arguments": {"a": [1]}}</tool_call>\n' * 2_000
    assert shown(parts_of(NAMES["hermes"], list(text), TOOLS)) == [("now", '{"a": [1]}')] * 2_000


@pytest.mark.parametrize(
    ("name", "before"), [("pythonic", "[now(a="), ("functiongemma", "<start_function_call>call:now{a:"), ("openai", HARMONY)]
)
@pytest.mark.parametrize("inner", ["[" * 100_000, '"' + "a" * 300_000])
def test_deep_and_huge_literals_are_passed_on(name: str, before: str, inner: str) -> None:
    text = before + inner
    pieces = [text[place : place + 7] for place in range(0, len(text), 7)]
    assert shown(parts_of(NAMES[name], pieces, TOOLS)) == [("now", '{"a": ' + inner, None)]


@pytest.mark.parametrize("inner", ["[" * 100_000, '{"a":' * 50_000, '"' + "a" * 300_000, '"' + "\\n" * 50_000])
def test_deep_and_huge_arguments_are_passed_on(inner: str) -> None:
    text = '<tool_call>{"name": "now", "arguments": {"a": ' + inner
    pieces = [text[place : place + 7] for place in range(0, len(text), 7)]
    assert shown(parts_of(NAMES["hermes"], pieces, TOOLS)) == [("now", '{"a": ' + inner, None)]


@pytest.mark.parametrize("name", [name for name, dialect in DIALECTS if dialect.opens])
def test_thousands_of_marks_without_a_call(name: str) -> None:
    text = NAMES[name].opens[0] * 5_000 + "<" * 50_000
    assert shown(parts_of(NAMES[name], list(text), TOOLS)) == [text]


CIRCLE = {"anyOf": [{"$ref": "#/$defs/a"}] * 10, "oneOf": [{"$ref": "#/$defs/b"}]}
ODD_SCHEMAS = [
    {"properties": {"a": {"$ref": "#/$defs/a"}}, "$defs": {"a": CIRCLE, "b": {"allOf": [CIRCLE, {"$ref": "#/$defs/b"}]}}},
    {"properties": {"a": {"enum": 1}}}, {"properties": {"a": {"type": 1}}}, {"properties": {"a": {"anyOf": 5, "oneOf": {}, "$ref": 7}}},
    {"properties": ["a"]}, {"properties": {"a": 3}}, {"properties": {"a": {"$ref": "#/properties/a"}}}, {"type": 1},
]  # fmt: skip


@pytest.mark.parametrize("schema", ODD_SCHEMAS, ids=range(len(ODD_SCHEMAS)))
@pytest.mark.parametrize("name", [name for name, _ in DIALECTS])
def test_a_call_is_read_whatever_its_schema_says(name: str, schema: dict[str, object]) -> None:
    """A circle of ten references is followed once, not ten times ten times ten."""
    tools = [{"type": "function", "function": {"name": "now", "parameters": schema}}]
    for text in CALLS:
        assert parts_of(NAMES[name], [text], tools)
