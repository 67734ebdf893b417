"""The table of dialects: which one a template teaches, and the names that override it."""

from __future__ import annotations

import pytest
from toy_tokenizers import byte_level

from vnext.server.context.server_context import template_of
from vnext.server.settings import ServerSettings
from vnext.text import reasoning
from vnext.text.dialects.table import DETECTED, NAMES, dialect_of
from vnext.text.template import ChatTemplate, TemplateUnreadable

TEMPLATES = [
    ("{{ messages }}", None),
    ("{% if tools %}<tools>{{ tools }}</tools> return <tool_call>{\"name\": ..}</tool_call>", "hermes"),
    ("{% if tools %}reply <tool_call>\n<function=example>\n<parameter=a>", "qwen3_coder"),
    ("{% if tools %}<tool_call>{function-name}\n<arg_key>{key}</arg_key>", "glm45"),
    ("{% if tools is not none %}{{ tools }}", "json"),
    ("{% if tools %}Respond with {\"name\": function, \"parameters\": ..}{% endif %}{% if message.role == 'ipython' %}", "llama3_json"),
    ("{% if tools %}[AVAILABLE_TOOLS]{% endif %}{{ '[TOOL_CALLS]' + name + '[ARGS]' + arguments }}", "mistral"),
    ("{% if tools %}[AVAILABLE_TOOLS]{% endif %}{{ '[TOOL_CALLS] [' + call + ']' }}", "mistral_list"),
    ("{% for tool in tools %}{{ '<｜tool▁call▁begin｜>' + name + '<｜tool▁sep｜>' + arguments }}", "deepseek_v31"),
    ("{% for tool in tools %}{{ '<｜tool▁call▁begin｜>function<｜tool▁sep｜>' + name + '\\n```json\\n' }}", "deepseek_v3"),
    ("{% if tools %}<|im_system|>{% endif %}<|tool_calls_section_begin|>", "kimi_k2"),
    ("{% if tools %}<|start_of_role|>tools<|end_of_role|>{% endif %}write <|tool_call|> and a list", "granite"),
    ("{% if message['tools'] %}<|tool|>{{ tools }}<|/tool|>", "phi4_mini_json"),
    ("{% if tools %}{{ '<|start|>assistant<|channel|>analysis<|message|>' }}{{ '<|call|>' }}", "openai"),
    ("{% if tools %}<start_function_declaration><start_function_call>call:<start_of_turn>", "functiongemma"),
    ("{% if tools %}<|tool_call>call:{}<tool_call|>", "gemma4"),
    ("{% if tools %}<|tool_list_start|>{{ tools }}<|tool_call_start|>", "lfm2"),
    ("{% if tools %}reply [func_name1(params_name1=params_value1)]{% if message.role == 'ipython' %}", "pythonic"),
    ("{{ bos_token }}{{ tools }}<start_of_turn>model", "gemma"),
]  # fmt: skip


@pytest.mark.parametrize(("template", "name"), TEMPLATES)
def test_the_template_shows_the_dialect(template: str, name: str | None) -> None:
    found = dialect_of(template)
    assert (found and found.name) == name


def test_every_dialect_is_detected_in_a_test() -> None:
    assert {dialect.name for dialect, _ in DETECTED} == {name for _, name in TEMPLATES if name}


def test_a_mark_may_be_a_token_only() -> None:
    assert dialect_of("{{ tools }}", {"[TOOL_CALLS]": 9, "[ARGS]": 32}) is NAMES["mistral"]


def test_a_name_overrides_the_template() -> None:
    assert dialect_of("{{ messages }}", (), "mistral") is NAMES["mistral"]
    with pytest.raises(ValueError, match="--tool-call-parser is 'parrot': it must be one of .*hermes"):
        dialect_of("", (), "parrot")


@pytest.mark.parametrize("name", sorted(NAMES))
def test_a_parser_s_name_overrides_the_template(name: str) -> None:
    template = ChatTemplate("{% if tools %}<tool_call>{% endif %}", {}, (), tool_parser=name)
    assert template.dialect is NAMES[name] and template.shows_tools and template.marks is None


@pytest.mark.parametrize("name", sorted(reasoning.NAMES))
def test_a_reasoning_parser_s_name_overrides_the_template(name: str) -> None:
    assert reasoning.marks_of("[THINK][/THINK]", name) is reasoning.NAMES[name]
    assert ChatTemplate("{{ messages }}", {}, (), reasoning_parser=name).marks.open == reasoning.NAMES[name].open


@pytest.mark.parametrize(("settings", "sentence"), [
    ({"tool_call_parser": "my_own"}, "--tool-call-parser is 'my_own': it must be one of .*hermes.*, or be left out."),
    ({"reasoning_parser": "my_own"}, "--reasoning-parser is 'my_own': it must be one of .*qwen3.*, or be left out."),
])  # fmt: skip
def test_an_unknown_parser_is_refused_before_a_model_is_loaded(settings: dict[str, str], sentence: str) -> None:
    with pytest.raises(TemplateUnreadable, match=sentence):
        template_of(byte_level("{{ messages }}"), ServerSettings(**settings))
