"""Chat templates: what they are given, what they may do, and how their refusals reach a client."""

from __future__ import annotations

import pytest

from vnext.runtime.protocol.sampling_params import InvalidRequest
from vnext.text.template import ChatTemplate, TemplateSlow, TemplateUnreadable

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


RUNAWAY = [
    "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "{% for i in (range(99999) | list) * 200 if i < 0 %}{% endfor %}",
    "{% for i in range(99999) %}{% for j in range(99999) %}{% if j %}{% break %}{% endif %}{% endfor %}{% endfor %}" * 9,
    "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
    "{% for i in [[[9] * 99] * 99] * 99 recursive %}{% if i is iterable %}{{ loop(i * 99) }}{% endif %}{% endfor %}",
    "{% macro f() %}{{ caller() }}{% endmacro %}"
    "{% for i in range(99999) %}{% for j in range(99) %}{% call f() %}{{ j }}{% endcall %}{% endfor %}{% endfor %}",
    "{% for i in range(99999) %}{% set x = range(99999) | list %}{% endfor %}",
    "{% for i in range(99999) %}{% generation %}{% for j in range(99999) %}{% endfor %}"
    "{% endgeneration %}{% endfor %}",
]


@pytest.mark.parametrize("source", RUNAWAY)
def test_a_template_that_runs_away_is_ended(source: str) -> None:
    with pytest.raises(TemplateSlow):
        ChatTemplate(source, {}).render(MESSAGES, {"vnext_tick": 5}, limit_s=0.05)


HUGE = [
    "{{ 'a' * 10 ** 9 }}", "{{ 10 ** 9 * 'a' }}", "{{ [1] * 10 ** 9 }}", "{{ ' ' * n }}", "{{ 9 ** (9 ** 9) }}",
    "{% set s = namespace(n=2) %}{% for i in range(99) %}{% set s.n = s.n * s.n %}{% endfor %}",
    "{% set s = namespace(x=messages[0].content) %}{% for i in range(60) %}{% set s.x = s.x ~ s.x %}{% endfor %}",
    "{% set s = namespace(x=messages[0].content) %}{% for i in range(60) %}{% set s.x = s.x + s.x %}{% endfor %}",
    "{% set s = namespace(x='ab') %}{% for i in range(40) %}{% set s.x = s.x | replace('b', s.x) %}{% endfor %}",
    "{% set s = namespace(x='ab') %}{% for i in range(40) %}{% set s.x = s.x.replace('b', s.x) %}{% endfor %}",
    "{% set x = 'a' * 999999 %}{{ x.replace('', x) }}", "{% set x = 'a' * 999999 %}{{ x | replace('', x) }}",
    "{% set x = 'a' * 999999 %}{{ x.join(range(9999) | map('string') | list) }}", "{% set x = 'a' * 999999 %}{{ range(9999) | join(x) }}",
    "{% set x = 'a' * 999999 %}{{ x.join(range(9999) | map('string')) }}", "{{ range(10 ** 9) | list }}", "{{ lipsum(n=n) }}",
    "{{ 'a'.center(n) }}", "{{ 'a'.ljust(n) }}", "{{ 'a'.rjust(n) }}", "{{ 'a'.zfill(n) }}", "{{ 'a' | center(n) }}", "{{ 1 .to_bytes(n) }}",
    "{{ 'a\nb' | indent(n) }}", "{{ {'a': 1} | tojson(indent=n) }}", "{{ '%999999999d' % 1 }}", "{{ '%*d' % (n, 1) }}",
    "{{ '{:>999999999}'.format(1) }}", "{{ '{:>{}}'.format(1, n) }}", "{{ '%999999999d' | format(1) }}", "{{ ('\t' * 9999).expandtabs(n) }}",
    "{% set x = 'a' * 9999999 %}{% for i in range(99999) %}{{ x }}{% endfor %}",
    "{% set x = 'a' * 9999999 %}{{ x ~ x ~ x ~ x }}", "{{ [1, 2] | batch(n, 0) | list }}",
]  # fmt: skip


@pytest.mark.parametrize("source", HUGE)
def test_no_expression_makes_what_holds_the_thread(source: str) -> None:
    """A call in C cannot be ended, so it does not begin."""
    with pytest.raises(InvalidRequest, match="more than 33554432|number beyond|too great a width|Range too big|undefined"):
        render(source, n=10**9)


def test_the_bounds_change_no_text() -> None:
    source = (
        "{{ 'a' * 3 ~ 1 + 2 ~ '%5.1f' % 1.5 ~ '{:>4}'.format('b') }}|{{ ['a', 'b'] | join(', ') }}|{{ '-'.join(['a', 'b']) }}|"
        "{{ 'a b' | replace(' ', '_') | upper }}|{{ (messages | map(attribute='role')) | join('/') }}|{{ ([1] + [2]) | length }}|"
        "{{ 'x'.ljust(3) ~ 'a\nb' | indent(2) }}|{{ 2 ** 10 % 7 }}|{{ messages | selectattr('role', 'equalto', 'user') | list | length }}|"
        "{{ '%s-%d' | format('a', 1) }}|{{ ',a,'.strip(',') }}|{{ messages | tojson | length }}|{{ none ~ true ~ 1.5 }}"
    )
    assert render(source) == "aaa12  1.5   b|a, b|a-b|A_B|user|2|x  a\n  b|2|1|a-1|a|42|NoneTrue1.5"


def test_the_look_at_the_clock_changes_no_text() -> None:
    source = (
        "{% for m in messages if m.role == 'user' %}{{ loop.index }}/{{ loop.length }}{{ loop.last }}{{ loop.previtem }}{% else %}none"
        "{% endfor %}{% for m in [] %}{% else %}empty{% endfor %}{% macro f(x) %}<{{ x }}>{{ caller() }}{% endmacro %}"
        "{% call f(1) %}2{% endcall %}{% for a in [1, [2, [3]]] recursive %}{{ loop(a) if a is iterable else a }}{% endfor %}"
    )
    assert render(source) == "1/1Trueempty<1>2123"


TOOLS = [{"type": "function", "function": {"name": "find", "parameters": {}}}]
PLAIN = "{% for m in messages %}{{ m.role }}:{{ m.content }};{% endfor %}"
WITH_TOOLS = "{% for t in tools %}[{{ t.function.name }}]{% endfor %}{{ messages[0].content }}<tool_call>"


def test_requests_with_tools_have_a_template_of_their_own() -> None:
    template = ChatTemplate(PLAIN, {}, ["<tool_call>"], tool_source=WITH_TOOLS)
    assert template.for_tools(None) is template.for_tools([]) is template
    shown = template.for_tools(TOOLS)
    assert shown.shows_tools and shown.render(shown.with_words(MESSAGES, TOOLS), {"tools": TOOLS}).startswith("[find]")
    assert template.dialect is shown.dialect, "what reads the answers of all"


def test_a_template_without_tools_has_them_in_words() -> None:
    """Calls of a history are objects, as programs have them, or texts, as the API does."""
    template = ChatTemplate(PLAIN, {})
    calls = [{"function": {"name": "find", "arguments": given}} for given in ({"a": 1}, '{"a": 1}')]
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "tool_calls": calls}, {"role": "tool", "content": "x"}]
    text = template.render(template.for_tools(TOOLS).with_words(messages, TOOLS), {"tools": TOOLS})
    assert '{"name": "find", "parameters": {}}' in text and text.count('{"name": "find", "arguments": {"a": 1}}') == 2
    assert "<tool_response>\nx\n</tool_response>" in text
