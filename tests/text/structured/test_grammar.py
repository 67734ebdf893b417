"""Each kind admits the texts that it should and no others; what cannot be kept is refused with its place."""

from __future__ import annotations

import json
from itertools import count
from types import SimpleNamespace
from typing import Any

import pytest
from llguidance import LLMatcher
from toy_tokenizers import byte_level

from vnext.runtime.protocol.sampling_params import InvalidRequest, StructuredOutputsParams
from vnext.text.structured import grammar as module
from vnext.text.structured.asked import asked_of
from vnext.text.structured.grammar import LIMITS, depth_of, grammar_of, vocabulary

TOKENIZER = byte_level()
POINT = {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]}
TAG = {"begin": "<f=go>", "schema": POINT, "end": "</f>"}
TAGS = {"structures": [TAG], "triggers": ["<f="]}


def grammar(**fields: Any) -> str:
    return grammar_of(asked_of(StructuredOutputsParams(**fields)), TOKENIZER)


def admits(text: str, **fields: Any) -> bool:
    """Whether the text is a whole answer."""
    matcher = LLMatcher(vocabulary(), grammar(**fields), limits=LIMITS, log_level=0)
    return matcher.try_consume_tokens(list(text.encode())) == len(text.encode()) and matcher.is_accepting()


@pytest.mark.parametrize(
    ("fields", "good", "bad"),
    [
        ({"json": POINT}, '{"x": 1}', '{"x": "a"}'),
        ({"json": json.dumps(POINT)}, '{\n "x": 1, "y": []}', "{}"),
        ({"json": POINT, "disable_any_whitespace": True}, '{"x":1}', '{"x": 1}'),
        ({"json": POINT, "whitespace_pattern": "[ ]?"}, '{ "x" : 1 }', '{"x":  1}'),
        ({"json": POINT, "whitespace_pattern": r"\s"}, '{"x":\n1}', '{"x":\n\n1}'),
        ({"json": POINT, "disable_additional_properties": True}, '{"x": 1}', '{"x": 1, "y": 2}'),
        ({"json": POINT}, '{\n    "x": 1\n}', '{"x":  1}'),
        ({"json_object": True}, '{"a": [1, null]}', "[1]"),
        ({"regex": r"\d{3}-[a-z]+"}, "123-abc", "123-"),
        ({"regex": "^a|b$"}, "a", "ab"),
        ({"choice": ["yes", 'no "really"', "näh\n", ""]}, 'no "really"', "y"),
        ({"choice": ["yes", 'no "really"', "näh\n", ""]}, "näh\n", "yesyes"),
        ({"grammar": 'start: "a" start | "b"'}, "aab", "aa"),
        ({"grammar": 'root ::= "a" root | "b"'}, "aab", "aa"),
        ({"grammar": 'start: "call " %json {"type": "integer"}'}, "call 12", "call 1.5"),
        ({"structural_tag": TAGS}, 'I think <f=go>{"x": 1}</f> is fine', "I think <f=go>1</f>"),
        ({"structural_tag": json.dumps(TAGS)}, "nothing at all", "<f=stop>"),
    ],
)
def test_a_kind_admits_what_it_should(fields: dict[str, Any], good: str, bad: str) -> None:
    assert admits(good, **fields) and not admits(bad, **fields)


def test_a_name_cannot_pass_for_another_by_its_escapes() -> None:
    """JSON may write x as \\u0078. A grammar that let it would take it for a name that nothing is known of."""
    assert not admits('{"x": 1, "\\u0078": "a"}', json=POINT)


def test_a_special_token_triggers_a_tag() -> None:
    special = TOKENIZER.special_id("<|eos|>")
    tags = {"structures": [{"begin": "<|eos|>go", "schema": True, "end": ""}], "triggers": ["<|eos|>"]}
    matcher = LLMatcher(vocabulary(TOKENIZER), grammar(structural_tag=tags), limits=LIMITS, log_level=0)
    assert matcher.consume_tokens([*TOKENIZER.encode("he"), special, *TOKENIZER.encode("go[]")]) and matcher.is_accepting()
    assert TOKENIZER.special_id("he") is None and TOKENIZER.special_id("nothing") is None


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({}, "structured_outputs has none of its kinds: set exactly one of json, regex, choice, grammar, json_object, structural_tag."),
        ({"regex": "a", "json": {}}, "structured_outputs has json and regex: set exactly one of"),
        ({"json": {}, "whitespace_pattern": "x*"}, "whitespace_pattern must be a short pattern of blanks"),
        ({"json": {}, "whitespace_pattern": " ", "disable_any_whitespace": True}, "contradicts disable_any_whitespace"),
        ({"json": '{"a"'}, "structured_outputs.json cannot be kept: it is no valid JSON (Input data was truncated)."),
        ({"json": '"\\ud800"'}, "structured_outputs.json cannot be kept: it is no valid JSON"),
        ({"json": {"const": "\ud800"}}, "structured_outputs.json cannot be kept: a text in it holds half a character"),
        ({"json": {"type": "integer", "minimum": float("inf")}}, "it holds a number that JSON cannot write."),
        ({"json": {"const": object()}}, "structured_outputs.json cannot be kept: it cannot be written as JSON"),
        ({"json": "false"}, "structured_outputs.json cannot be kept: no answer satisfies it."),
        ({"json": {"$ref": "#"}}, "structured_outputs.json cannot be kept: no answer satisfies it."),
        ({"regex": "(a"}, "structured_outputs.regex cannot be kept: unclosed group."),
        ({"regex": r"(a)\1"}, "structured_outputs.regex cannot be kept: backreferences are not supported."),
        ({"regex": r"\bfoo"}, "look-around in a pattern is not supported, leave it out."),
        ({"regex": "a\ud800"}, "structured_outputs.regex cannot be kept: a text in it holds half a character"),
        ({"choice": []}, "structured_outputs.choice cannot be kept: it is an empty list, name at least one answer."),
        ({"grammar": "what is this"}, "structured_outputs.grammar cannot be kept: it is neither Lark with a rule 'start' nor GBNF"),
        ({"grammar": 'root ::= "a\\'}, "neither Lark with a rule 'start' nor GBNF"),
        ({"grammar": "start: a"}, "structured_outputs.grammar cannot be kept: unknown name"),
        ({"grammar": "start: start"}, "structured_outputs.grammar cannot be kept: no answer satisfies it."),
        ({"grammar": "start: <|what|>"}, "unknown special token"),
        ({"grammar": 'start: %json {"not": {"type": "null"}}'}, "structured_outputs.grammar cannot be kept: the keyword 'not' is not supported"),
        ({"grammar": "start: %json {"}, "structured_outputs.grammar cannot be kept at %json: a JSON schema follows it"),
        ({"structural_tag": {"format": {}}}, "structured_outputs.structural_tag cannot be kept: it is an object with 'structures'"),
        ({"structural_tag": {"structures": [TAG], "triggers": ["<g="]}}, "at structures[0]: none of the triggers is how it begins."),
        ({"structural_tag": {"structures": [{"begin": "<f="}], "triggers": ["<f="]}}, "at structures[0]: it has begin, schema and end."),
        (
            {"structural_tag": {"structures": [TAG | {"schema": {"items": {"not": {"type": "null"}}}}], "triggers": ["<f="]}},
            "at structures[0].schema.items: the keyword 'not' is not supported, leave it out.",
        ),
    ],
)  # fmt: skip
def test_what_cannot_be_kept_is_refused_with_its_cause(fields: dict[str, Any], sentence: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        grammar(**fields)
    message = refused.value.message
    assert sentence in message and message.endswith(".") and "\n" not in message and len(message) < 600


@pytest.mark.parametrize("limit", ["COMPILING_S_MAX", "STEP_S_MAX"])
def test_what_takes_long_to_compile_is_refused_as_a_whole(monkeypatch: pytest.MonkeyPatch, limit: str) -> None:
    """Ranks compile it again, within a step, and compute its masks."""
    monkeypatch.setattr(module, limit, -1.0)
    for fields in ({"json": POINT}, {"regex": "a+"}):
        with pytest.raises(InvalidRequest, match="takes more than 0.5 s of computing, or 0.1 s for one token, simplify it"):
            grammar(**fields)


def test_a_step_is_slow_that_is_so_with_its_token(monkeypatch: pytest.MonkeyPatch) -> None:
    """The mask by itself is not, nor is the whole compilation."""
    clock = count(0, 0.051)
    monkeypatch.setattr(module, "time", SimpleNamespace(thread_time=lambda: next(clock)))
    with pytest.raises(InvalidRequest, match="or 0.1 s for one token"):
        grammar(regex="a+")


def test_rules_behind_a_schema_are_counted_too() -> None:
    many = " | ".join(["A"] * 502)
    for texts in (("", "", many), ("", many, ""), (many, "", "")):
        rules = "".join(f"\nr{at}: {text or 'A'}\ns{at}: %json {{}}" for at, text in enumerate(texts))
        with pytest.raises(InvalidRequest, match="more than 500 alternatives"):
            grammar(grammar=f'start: s0 s1 s2 r0 r1 r2\nA: "a"{rules}')


FLAT = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"enum": ["x"]}}, "required": ["a"], "additionalProperties": False}
TREE = {"type": "object", "properties": {"of": {"type": "array", "items": {"$ref": "#/$defs/t"}}}, "additionalProperties": False}


@pytest.mark.parametrize(
    ("schema", "value", "widest"),
    [
        (FLAT, {"a": 1, "b": "x"}, 4),
        ({"properties": {"a": {}}, "type": "object", "required": ["a"]}, {"a": 1, "more": [2]}, 32),
        (FLAT | {"additionalProperties": True}, {"a": 1, "more": [2]}, 8),
        ({"type": "array", "items": FLAT}, [{"a": 1}], 8),
        ({"type": "array", "items": {"type": "array", "items": {"type": "array", "items": FLAT}}}, [[[{"a": 1}]]], 16),
        ({"anyOf": [{"type": "null"}, {"$ref": "#/$defs/f"}], "$defs": {"f": FLAT}}, {"a": 1}, 4),
        ({"$ref": "#/$defs/t", "$defs": {"t": TREE}}, {"of": [{"of": [{}]}]}, 32),
        ({"type": "object"}, {"a": [{"b": [{"c": {}}]}]}, 32),
        ({"const": {"a": [1]}}, {"a": [1]}, 8),
        ({}, [[[1]]], 32),
    ],
)
def test_a_line_is_indented_as_deep_as_the_values_lie(schema: Any, value: Any, widest: int) -> None:
    for indent in (None, 0, 2, 4):
        assert admits(json.dumps(value, indent=indent), json=schema)
    text = json.dumps(value)
    for gap in (" ", "\n", "\n" + " " * widest, "\r\n" + "\t" * widest):
        assert admits(text[0] + gap + text[1:], json=schema), gap
    for gap in ("  ", "\t", "\n\n", " \n", "\n" + " " * (widest + 1)):
        assert not admits(text[0] + gap + text[1:], json=schema), gap


def test_the_depth_of_a_wide_schema_is_found_at_once() -> None:
    """Definitions that refer to each other 100 times each: 100^8 paths."""
    wide = {name: {"type": "object", "additionalProperties": False, "properties": {f"p{at}": {"$ref": f"#/$defs/{name + 1}"} for at in range(100)}} for name in range(7)}
    found = {str(name): each for name, each in wide.items()} | {"7": {"anyOf": [{"$ref": "#/$defs/7"}, {"type": "null"}]}}
    assert depth_of({"$ref": "#/$defs/0", "$defs": found}, 8) == 7
