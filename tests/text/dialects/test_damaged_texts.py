"""Damaged texts: calls as models really write them. A call that is given out as complete has arguments that are valid JSON."""

from __future__ import annotations

import json
import random

import pytest
from cutting import cuttings, parts_of, shown
from hypothesis import given, settings, strategies as st

from vnext.text.dialects.table import NAMES

KINDS = {
    "text": {"type": "string"},
    "count": {"type": "integer"},
    "on": {"type": "boolean"},
    "list": {"type": "array"},
    "map": {"$ref": "#/$defs/map"},
    "nothing": {"type": "null"},
    "maybe": {"anyOf": [{"type": "string"}, {"type": "null"}]},
    "level": {"enum": ["1", "2"]},
    "any": {},
}
TOOLS = [
    {"type": "function", "function": {"name": "f", "parameters": {"properties": KINDS, "$defs": {"map": {"type": "object"}}}}},
    {"type": "function", "function": {"name": "now"}},
]


def qwen(key: str, value: str, close: str = "\n</parameter>") -> str:
    return f"<tool_call>\n<function=f>\n<parameter={key}>\n{value}{close}\n</function>\n</tool_call>"


def hermes(arguments: str) -> str:
    return f'<tool_call>{{"name": "f", "arguments": {arguments}}}</tool_call>'


VALUES = [  # of an argument that is written as bare text: its kind, what the model writes, what it means
    ("text", "None", "None"), ("text", "12", "12"), ("text", "['a']", "['a']"), ("text", "a\\b \"c\"", 'a\\b "c"'),
    ("count", "12", 12), ("count", "1_000", 1000), ("count", "twelve", "twelve"), ("on", "True", True), ("on", "false", False),
    ("on", "TRUE", True), ("list", "['a', None, (1, 2)]", ["a", None, [1, 2]]), ("list", '["a"]', ["a"]), ("list", "[a]", "[a]"),
    ("map", "{'a': True}", {"a": True}), ("map", '{"a": [1,]}', {"a": [1]}), ("map", "{'a'}", "{'a'}"), ("nothing", "None", None),
    ("nothing", "NULL", None), ("maybe", "None", None), ("maybe", "null", None), ("maybe", "5", "5"), ("maybe", "True", "True"),
    ("level", "1", "1"), ("any", "True", True), ("any", "['a']", "['a']"), ("any", '["a"]', ["a"]), ("other", "None", None),
    ("count", "NaN", "NaN"), ("list", "[NaN]", "[NaN]"), ("list", "[" * 5_000, "[" * 5_000),
]  # fmt: skip


@pytest.mark.parametrize(("key", "text", "value"), VALUES, ids=lambda each: str(each)[:20])
def test_a_bare_value_is_read_as_its_schema_wants_it(key: str, text: str, value: object) -> None:
    glm = f"<tool_call>f\n<arg_key>{key}</arg_key>\n<arg_value>{text}</arg_value>\n</tool_call>"
    for name, written in (("qwen3_coder", qwen(key, text)), ("glm45", glm)):
        for pieces in ([written], list(written)):
            [call] = shown(parts_of(NAMES[name], pieces, TOOLS))
            assert call[0] == "f" and json.loads(call[1]) == {key: value} and type(json.loads(call[1])[key]) is type(value)


TEXTS = [  # dialect, text, what it means
    ("qwen3_coder", qwen("text", "<b></parameter></b> </parameter> x"), [("f", {"text": "<b></parameter></b> </parameter> x"})]),
    ("qwen3_coder", qwen("text", "a <parameter=x> b"), [("f", {"text": "a <parameter=x> b"})]),
    ("qwen3_coder", qwen("text", "f</function> g"), [("f", {"text": "f</function> g"})]),
    ("qwen3_coder", qwen("text", "a", ""), [("f", {"text": "a"})]),
    ("qwen3_coder", qwen("count", "1", "\n<parameter=text>\nb\n</parameter>"), [("f", {"count": 1, "text": "b"})]),
    ("qwen3_coder", qwen("count", "1", "\n<parameter=text>\nb"), [("f", {"count": 1, "text": "b"})]),
    ("qwen3_coder", "<tool_call><function=f><parameter=text>\na\n</tool_call>", [("f", {"text": "a"})]),
    ("qwen3_coder", "<function=f>\n<parameter=text>a</parameter>\n</function>\nSo.", [("f", {"text": "a"}), "So."]),
    ("qwen3_coder", f"{qwen('text', 'a', '')}{qwen('count', '2')}", [("f", {"text": "a"}), ("f", {"count": 2})]),
    ("glm45", "<tool_call>f\n<arg_key>text</arg_key>\n<arg_value>a</arg_value> b</arg_value>\n</tool_call>",
     [("f", {"text": "a</arg_value> b"})]),
    ("glm45", "<tool_call>f\n<arg_key>count</arg_key>\n<arg_value>1\n<arg_key>text</arg_key>\n<arg_value>b</arg_value>\n</tool_call>",
     [("f", {"count": 1, "text": "b"})]),
    ("glm45", "<tool_call>f\n<arg_key>text</arg_key>\n<arg_value>a\n</tool_call>", [("f", {"text": "a\n"})]),
    ("hermes", hermes('{"a": [1, 2,], "b": {"c": 3,},}'), [("f", {"a": [1, 2], "b": {"c": 3}})]),
    ("hermes", hermes('{"a": [ ], "b": { }}'), [("f", {"a": [], "b": {}})]),
    ("hermes", hermes('{"a": True, "b": None, "c": +1, "d": .5}'), [("f", {"a": True, "b": None, "c": 1, "d": 0.5})]),
    ("hermes", hermes("{'a': 'it\\'s \"x\"', \"b\": \"it\\'s\"}"), [("f", {"a": 'it\'s "x"', "b": "it's"})]),
    ("hermes", hermes(r'{"a": "C:\users\d+\."}'), [("f", {"a": r"C:\users\d+\."})]),
    ("hermes", hermes('{"a": 1}')[:-13] + "</tool_call>", [("f", {"a": 1})]),
    ("hermes", hermes('{"a": 1}')[:-13], [("f", {"a": 1})]),
    ("hermes", hermes('{"a": 1}}')[:-12] + " }\n</tool_call> so", [("f", {"a": 1}), "so"]),
    ("hermes", "<tool_call>{'name': 'f', 'arguments': {'a': 1},}</tool_call>", [("f", {"a": 1})]),
    ("hermes", '<tool_call>{"arguments": {"a": True,}, "name": "f"}</tool_call>', [("f", {"a": True})]),
    ("hermes", '<tool_call>{"name": "f", "arguments": "{\'a\': [1,]}"}</tool_call>', [("f", {"a": [1]})]),
    ("llama3_json", '{"name": "f", "parameters": {"a": True, "b": False}}', [("f", {"a": True, "b": False})]),
    ("json", '[{"name": "f", "arguments": {"a": None}}, {"name": "now", "arguments": {}},]', [("f", {"a": None}), ("now", {})]),
    ("mistral", "[TOOL_CALLS]f[ARGS]{'a': 1,}", [("f", {"a": 1})]),
    ("openai", '<|channel|>commentary to=functions.f<|message|>{"a": True,}<|call|>', [("f", {"a": True})]),
    ("pythonic", """[f(a="x " 'y' "z", b=1)]""", [("f", {"a": "x yz", "b": 1})]),
    ("pythonic", """[f(a=("x"\n "y"), b=(1), c=((1, 2)), d=(), e=(1,), f=((), 2))]""",
     [("f", {"a": "xy", "b": 1, "c": [1, 2], "d": [], "e": [1], "f": [[], 2]})]),
    ("pythonic", '[f(a="""it\'s "x"\\n""", b={"c" "d": ""})]', [("f", {"a": "it's \"x\"\n", "b": {"cd": ""}})]),
]  # fmt: skip


def meant(parts: list[object]) -> list[object]:
    """Calls with their arguments read; a call that broke off stays as it is."""
    return [(each[0], json.loads(each[1])) if isinstance(each, tuple) and None not in each else each for each in parts]


@pytest.mark.parametrize("holds", [False, True])
@pytest.mark.parametrize(("name", "text", "expected"), TEXTS, ids=lambda each: str(each)[:50])
def test_damage_whose_meaning_is_clear(name: str, text: str, expected: list[object], holds: bool) -> None:
    for pieces in cuttings(text, 60):
        assert meant(shown(parts_of(NAMES[name], pieces, TOOLS, holds=holds))) == expected, pieces


BROKEN = [  # dialect, text, what a stream gives out
    ("hermes", hermes('{"a": [1, 2}'), [("f", '{"a": [1, 2', None), "}}</tool_call>"]),
    ("hermes", hermes('{"a": b}'), [("f", '{"a": ', None), "b}}</tool_call>"]),
    ("hermes", hermes('{"a": 1 + 2}'), [("f", '{"a": 1 ', None), "+ 2}}</tool_call>"]),
    ("hermes", hermes('{"a": NaN}'), [("f", '{"a": ', None), "NaN}}</tool_call>"]),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": "b', [("f", '{"a": "b', None)]),
    ("pythonic", "[f(a=b)]", [("f", '{"a": ', None), "b)]"]),
    ("openai", '<|channel|>commentary to=functions.f<|message|>{"a" 1}<|call|>', [("f", '{"a" ', None), "1}<|call|>"]),
    ("qwen3_coder", "<function=f><parameter=text>a</parameter>\nwell", [("f", "", None)]),
]


@pytest.mark.parametrize(("name", "text", "streamed"), BROKEN, ids=lambda each: str(each)[:50])
def test_a_call_that_cannot_be_read_is_text_unless_it_has_been_sent(name: str, text: str, streamed: list[object]) -> None:
    for pieces in cuttings(text, 60):
        assert shown(parts_of(NAMES[name], pieces, TOOLS)) == streamed, pieces
        assert shown(parts_of(NAMES[name], pieces, TOOLS, holds=True)) == [text], pieces


SAMPLES = {
    "hermes": hermes('{"a": "b", "c": [1, true]}') * 2,
    "llama3_json": '{"name": "f", "parameters": {"a": "b", "c": [1, true]}}; {"name": "now", "parameters": {}}',
    "json": '[{"name": "f", "arguments": {"a": {"b": null}}}, {"name": "now"}]',
    "granite": '<|tool_call|>[{"name": "f", "arguments": {"a": "b"}}]',
    "phi4_mini_json": 'functools[{"name": "f", "arguments": {"a": "b"}}]<|/tool_call|>',
    "gemma": 'So.\n```json\n{"name": "f", "arguments": {"a": "b"}}\n```',
    "mistral": '[TOOL_CALLS]f[CALL_ID]abcdefghi[ARGS]{"a": "b"}[TOOL_CALLS]now[ARGS]{}',
    "mistral_list": '[TOOL_CALLS][{"name": "f", "arguments": {"a": "b"}}, {"name": "now"}]',
    "deepseek_v3": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n{\"a\": 1}\n```<｜tool▁call▁end｜>\n"
    "<｜tool▁call▁begin｜>function<｜tool▁sep｜>now\n```json\n{}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    "deepseek_v31": '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>{"a": 1}<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
    "kimi_k2": '<|tool_calls_section_begin|><|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{"a": 1}'
    "<|tool_call_end|><|tool_calls_section_end|>",
    "qwen3_coder": qwen("text", "a", "\n</parameter>\n<parameter=list>\n['b', 1]\n</parameter>") + qwen("count", "1"),
    "glm45": "<tool_call>f\n<arg_key>text</arg_key>\n<arg_value>a</arg_value>\n<arg_key>on</arg_key>\n<arg_value>True</arg_value>\n"
    "</tool_call>",
    "pythonic": "[f(a='b', c=[1, True], d={'e': None}), now()]",
    "lfm2": "So. <|tool_call_start|>[f(a='b', c=(1, True))]<|tool_call_end|>",
    "functiongemma": "<start_function_call>call:f{a:<escape>b<escape>,c:[1,true]}<end_function_call>",
    "gemma4": '<|tool_call>call:f{a:<|"|>b<|"|>,c:{d:null}}<tool_call|>',
    "openai": '<|channel|>analysis<|message|>a<|end|><|start|>assistant<|channel|>commentary to=functions.f<|message|>{"a": 1}<|call|>',
}  # fmt: skip
DAMAGE = [
    "",
    '"',
    "'",
    "\\",
    ",",
    "{",
    "}",
    "[",
    "]",
    "(",
    ")",
    "True",
    "None",
    "NaN",
    "\n",
    " ",
    "<",
    ">",
    "\\u12",
    "x",
    "0",
    "é",
    "</",
]


def test_each_dialect_has_a_sample() -> None:
    assert set(SAMPLES) == {dialect.name for dialect in NAMES.values()}
    for name, text in SAMPLES.items():
        assert complete(shown(parts_of(NAMES[name], [text], TOOLS)))[-1][0] in ("f", "now"), name


def complete(parts: list[object]) -> list[object]:
    return [each for each in parts if isinstance(each, tuple) and None not in each and each[0] != "reasoning"]


@pytest.mark.parametrize("name", sorted(SAMPLES))
@settings(max_examples=60, deadline=None)
@given(st.data(), st.booleans(), st.randoms(use_true_random=False))
def test_any_damage_leaves_valid_calls_and_the_same_in_every_cutting(
    name: str, data: st.DataObject, cut: bool, rng: random.Random
) -> None:
    text = SAMPLES[name]
    for _ in range(data.draw(st.integers(0, 3))):
        start = data.draw(st.integers(0, len(text)))
        stop = min(len(text), start + data.draw(st.integers(0, 3)))
        text = text[:start] + data.draw(st.sampled_from(DAMAGE)) + text[stop:]
    text = text[: data.draw(st.integers(0, len(text)))] if data.draw(st.booleans()) else text
    found = []
    for holds in (False, True):
        whole = shown(parts_of(NAMES[name], [text], TOOLS, holds=holds, cut=cut))
        for _ in range(3):
            places = sorted(rng.choices(range(len(text) + 1), k=4))
            pieces = [text[start:stop] for start, stop in zip([0, *places], [*places, len(text)])]
            assert shown(parts_of(NAMES[name], pieces, TOOLS, holds=holds, cut=cut)) == whole
        assert shown(parts_of(NAMES[name], list(text), TOOLS, holds=holds, cut=cut)) == whole
        for call in complete(whole):
            assert isinstance(json.loads(call[1], parse_constant=pytest.fail), dict)
        broken = [each for each in whole if isinstance(each, tuple) and None in each]
        assert not broken or not holds or (cut and broken == whole[-1:])
        found.append(complete(whole))
    assert found[0] == found[1]


@pytest.mark.parametrize("holds", [False, True])
@pytest.mark.parametrize("name", sorted(SAMPLES))
def test_a_text_that_is_cut_behind_its_calls_shows_no_mark(name: str, holds: bool) -> None:
    """From where all arguments are complete on."""
    text = SAMPLES[name]
    whole = shown(parts_of(NAMES[name], [text], TOOLS))
    for size in range(len(text) - 1, 0, -1):
        found = shown(parts_of(NAMES[name], list(text[:size]), TOOLS, holds=holds, cut=True))
        if len(complete(found)) < len(complete(whole)):
            break
        assert found == whole, text[:size]
    else:
        pytest.fail("no call was cut")
