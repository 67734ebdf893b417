"""Dialects: the outputs of each model family give the same parts wherever the pieces of a text end."""

from __future__ import annotations

import pytest
from cutting import cuttings, parts_of, shown

from vnext.text.dialects.table import NAMES

CITY = {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}}
TOOLS = [
    {"type": "function", "function": {"name": "weather", "parameters": CITY}},
    {"type": "function", "function": {"name": "now"}},
]
KOLN = ("weather", '{"city": "Köln"}')
NOW = ("now", "{}")
ASKED = '<tool_call>\n{"name": "weather", "arguments": {"city": "Köln"}}\n</tool_call>'
DEEPSEEK_V31 = (
    '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>weather<｜tool▁sep｜>{"city": "Köln"}<｜tool▁call▁end｜>'
    "<｜tool▁call▁begin｜>now<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>"
)
DEEPSEEK_V3 = (
    '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>weather\n```json\n{"city": "Köln"}\n```'
    "<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>now\n```json\n{}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>"
)
KIMI = (
    '<|tool_calls_section_begin|><|tool_call_begin|>functions.weather:0<|tool_call_argument_begin|>{"city": "Köln"}'
    "<|tool_call_end|><|tool_call_begin|>functions.now:1<|tool_call_argument_begin|>{}<|tool_call_end|><|tool_calls_section_end|>"
)
QWEN = (
    "So.\n<tool_call>\n<function=weather>\n<parameter=city>\n12\n</parameter>\n<parameter=days>\n3\n</parameter>\n"
    "<parameter=note>\na < b\n\n</parameter>\n</function>\n</tool_call>\n<tool_call>\n<function=now>\n</function>\n</tool_call>"
)
GLM = (
    "So.\n<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>12</arg_value>\n<arg_key>days</arg_key>\n"
    "<arg_value>3</arg_value>\n</tool_call>\n<tool_call>now\n</tool_call>"
)
HARMONY = (
    "<|channel|>analysis<|message|>Look\nit up.<|end|><|start|>assistant<|channel|>commentary<|message|>I look.<|end|>"
    '<|start|>assistant<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{"city": "Köln"}<|call|>'
)
TEXTS = [
    ("hermes", "no call < here", ["no call < here"]),
    ("hermes", ASKED, [KOLN]),
    ("hermes", f"I look. \n\n{ASKED}\n\n{ASKED} \n", ["I look.", KOLN, KOLN]),
    ("hermes", f'{ASKED}<tool_call>{{"name": "now"}}</tool_call> so.  ', [KOLN, NOW, "so.  "]),
    ("hermes", f"{ASKED[:-12]}", [KOLN]),
    ("hermes", "<tool_call>{broken</tool_call> and <tool_call> on", ["<tool_call>{broken</tool_call> and <tool_call> on"]),
    ("hermes", f"a <tool_call> <tool_call>{ASKED}", ["a <tool_call> <tool_call>", KOLN]),
    ("hermes", '<tool_call>{"name": "now", "arguments": {"a": [1, 2}}</tool_call>', [("now", '{"a": [1, 2', None), "}}</tool_call>"]),
    ("hermes", '<tool_call>{"name": "now", "arguments": {"a": "\n', [("now", '{"a": "\\n', None)]),
    ("hermes", '<tool_call>{"arguments": {"a": 1.5e3}, "name": "now"}</tool_call>', [("now", '{"a": 1.5e3}')]),
    ("hermes", '<tool_call>[{"name": "now"}, {"name": "now"}]</tool_call>', [NOW, NOW]),
    ("hermes", '<tool_call>{"name": "now", "arguments": {"a": tru}}', [("now", '{"a": ', None), "tru}}"]),
    ("hermes", "spaces at the end  \n", ["spaces at the end  \n"]),
    ("llama3_json", "  words first, {}", ["  words first, {}"]),
    ("llama3_json", '{"name": "weather", "parameters": {"city": "Köln"}}', [KOLN]),
    ("json", ' [{"name": "weather", "arguments": {"city": "Köln"}}, {"name": "now", "arguments": {}}]\n', [KOLN, NOW]),
    ("llama3_json", '{"name": "now"}; {"name": "now", "arguments": "{}"}', [NOW, NOW]),
    ("llama3_json", '{"name": "now"} and', [NOW, "and"]),
    ("json", '{"answer": 42}', ['{"answer": 42}']),
    ("json", '{"name": 5}', ['{"name": 5}']),
    ("json", '{"name": "Ada", "age": 5}', ['{"name": "Ada", "age": 5}']),
    ("json", "[1, 2", ["[1, 2"]),
    ("granite", f"So: <|tool_call|>[{ASKED[12:-13]}]", ["So:", KOLN]),
    ("granite", ASKED, [KOLN]),
    ("phi4_mini_json", f"<|tool_call|>[{ASKED[12:-13]}]<|/tool_call|>", [KOLN]),
    ("phi4_mini_json", f"functools[{ASKED[12:-13]}]", [KOLN]),
    ("gemma", f"I look.\n```json\n{ASKED[12:-13]}\n```\n", ["I look.", KOLN]),
    ("gemma", '```json\n{"a": 1}\n```', ['```json\n{"a": 1}\n```']),
    ("mistral", 'Well.[TOOL_CALLS]weather[ARGS]{"city": "Köln"}[TOOL_CALLS]now[CALL_ID]abcdefghi[ARGS]{}',
     ["Well.", KOLN, ("now", "{}", "abcdefghi")]),
    ("mistral", 'Well.[TOOL_CALLS]weather{"city": "Köln"}', ["Well.", KOLN]),
    ("mistral", f"[TOOL_CALLS] [{ASKED[12:-13]}]", [KOLN]),
    ("mistral_list", f"[TOOL_CALLS][{ASKED[12:-13]}]", [KOLN]),
    ("mistral", "the mark [TOOL_CALLS] begins calls", ["the mark [TOOL_CALLS] begins calls"]),
    ("deepseek_v31", f"I look.{DEEPSEEK_V31}", ["I look.", KOLN, NOW]),
    ("deepseek_v3", f"I look.{DEEPSEEK_V3}", ["I look.", KOLN, NOW]),
    ("deepseek_v31", "<｜tool▁calls▁begin｜>what", ["<｜tool▁calls▁begin｜>what"]),
    ("qwen3_coder", QWEN, ["So.", ("weather", '{"city": "12", "days": 3, "note": "a < b\\n"}'), NOW]),
    ("qwen3_coder", QWEN[:-13], ["So.", ("weather", '{"city": "12", "days": 3, "note": "a < b\\n"}'), NOW]),
    ("qwen3_coder", ASKED, [KOLN]),
    ("qwen3_coder", "<function=now>\n</function>\n</tool_call>", [NOW]),
    ("qwen3_coder", "a <tool_call> b <function=", ["a <tool_call> b <function="]),
    ("qwen3_coder", "<tool_call><function=now><parameter=a>1", [("now", "", None)]),
    ("qwen3_coder", "Use <function=now> to know.", ["Use <function=now> to know."]),
    ("glm45", GLM, ["So.", ("weather", '{"city": "12", "days": 3}'), NOW]),
    ("glm45", "a <tool_call> b", ["a <tool_call> b"]),
    ("pythonic", '[weather(city="Köln"), now()]', [KOLN, NOW]),
    ("pythonic", "<|python_start|>[weather(city='K\\xf6ln',), now( )]<|python_end|>\n", [KOLN, NOW]),
    ("pythonic", "[now(a=[1, -2.5, 1_000, (True, None,), {'k': {}, \"l\": []}], b=0x1f, c='')]",
     [("now", '{"a": [1, -2.5, 1000, [true, null], {"k": {}, "l": []}], "b": 31, "c": ""}')]),
    ("pythonic", r"[now(a='it\'s \"x\" \n\t\101\u00e9 \q', b=.5)]", [("now", r'{"a": "it' "'" r's \"x\" \n\tA\u00e9 \\q", "b": 0.5}')]),
    ("pythonic", "[weather(**{'city': 'Köln'})]", [KOLN]),
    ("pythonic", "[see](url) for it", ["[see](url) for it"]),
    ("pythonic", "[other(a=1)]", ["[other(a=1)]"]),
    ("pythonic", "[now(a=1, b=unknown)]", [("now", '{"a": 1, "b": ', None), "unknown)]"]),
    ("pythonic", "[1, 2]", ["[1, 2]"]),
    ("lfm2", 'So. <|tool_call_start|>[weather(city="Köln")]<|tool_call_end|> on', ["So.", KOLN, "on"]),
    ("functiongemma", "<start_function_call>call:weather{city:<escape>Köln<escape>}<end_function_call>"
     "<start_function_call>call:now{}<end_function_call>", [KOLN, NOW]),
    ("functiongemma", 'I look.<start_function_call>call:now{a:[1,<escape>x < "y"\\n<escape>,true],b:{c:null}}<end_function_call>',
     ["I look.", ("now", r'{"a": [1, "x < \"y\"\\n", true], "b": {"c": null}}')]),
    ("functiongemma", "a <start_function_call>what{", ["a <start_function_call>what{"]),
    ("functiongemma", '<start_function_call>call:weather{"city": "Köln"}', [KOLN]),
    ("gemma4", '<|tool_call>call:weather{city:<|"|>Köln<|"|>}<tool_call|>', [KOLN]),
    ("openai", HARMONY, [("reasoning", "Look\nit up."), "I look.", KOLN]),
    ("openai", "<|channel|>final<|message|>It rains.<|return|>", ["It rains."]),
    ("openai", "<|start|>assistant to=functions.now<|channel|>commentary json<|message|>{}<|call|>", [NOW]),
    ("openai", "<|start|>assistant<|channel|>analysis to=functions.now code<|message|>{}<|call|>", [NOW]),
    ("openai", "<|channel|>final <|constrain|>json<|message|>{}", ["{}"]),
    ("openai", "<|channel|>analysis<|message|>a<|start|>assistant<|channel|>final<|message|>b", [("reasoning", "a"), "b"]),
    ("openai", "no channel at all", ["no channel at all"]),
    ("openai", "<|channel|>what is this", ["<|channel|>what is this"]),
    ("openai", "<|channel|>commentary to=functions.now<|message|>x = 1<|call|>",
     ["<|channel|>commentary to=functions.now<|message|>x = 1<|call|>"]),
    ("openai", '<|channel|>commentary to=functions.now<|message|>{"a": [}<|call|>', [("now", '{"a": [', None), "}<|call|>"]),
    ("kimi_k2", f"I look. {KIMI}", ["I look.", (*KOLN, "functions.weather:0"), (*NOW, "functions.now:1")]),
    ("kimi_k2", f"I look. {KIMI[:-43]}", ["I look.", (*KOLN, "functions.weather:0"), (*NOW, "functions.now:1")]),
]  # fmt: skip


@pytest.mark.parametrize(("name", "text", "expected"), TEXTS)
def test_the_parts_of_a_text_do_not_depend_on_its_pieces(name: str, text: str, expected: list[object]) -> None:
    for pieces in cuttings(text):
        assert shown(parts_of(NAMES[name], pieces, TOOLS)) == expected, pieces


def test_arguments_come_as_the_model_writes_them() -> None:
    parser, sizes = NAMES["hermes"].parser(TOOLS), []
    for character in ASKED:
        sizes += [len(part.text) for part in parser.push(character) if hasattr(part, "text")]
    assert len(sizes) > 10
