"""Chat templates: what they are given, what they may do, and how their refusals reach a client."""

from __future__ import annotations

import pytest

from vnext.sampling_params import InvalidRequest
from vnext.server.text.template import ChatTemplate, TemplateUnreadable

MESSAGES = [{"role": "user", "content": "<b>hi</b>"}]


def render(source: str, **variables: object) -> str:
    return ChatTemplate(source, {"bos_token": "<s>"}).render(MESSAGES, variables)


def test_what_templates_of_checkpoints_use() -> None:
    assert render("{{ bos_token }}{{ messages[0].content }}") == "<s><b>hi</b>"
    assert render("{{ {'a': '<é>'} | tojson }}") == '{"a": "<é>"}'
    assert render("{{ [1] | tojson(indent=2) }}") == "[\n  1\n]"
    assert render("{% for m in messages %}{% if loop.first %}{% continue %}{% endif %}x{% endfor %}") == ""
    assert render("{% generation %}a{{ 1 }}{% endgeneration %}b") == "a1b"
    assert render("{% if tools %}t{% endif %}{{ add_generation_prompt }}{{ style }}", style="s") == "Trues"
    assert len(render("{{ strftime_now('%Y-%m-%d') }}")) == 10
    assert render("  {% if true %}\n  x\n  {% endif %}\n") == "  x\n"


@pytest.mark.parametrize(
    ("source", "word"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ messages[0].content + 1 }}", "str"),
        ("{{ nothing.at.all }}", "undefined"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{{ messages.append(1) }}", "unsafe|not safely callable"),
        ("{{ 1 / 0 }}", "division"),
    ],
)
def test_failures_are_the_clients_to_see(source: str, word: str) -> None:
    with pytest.raises(InvalidRequest, match=word) as caught:
        render(source)
    assert caught.value.param == "messages"


def test_a_broken_source_names_its_line() -> None:
    with pytest.raises(TemplateUnreadable, match="line 2"):
        ChatTemplate("ok\n{% if %}", {})
