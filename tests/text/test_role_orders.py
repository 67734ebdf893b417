"""Turns: what a template takes is found out, and messages that it would refuse reach it in an order that it takes."""

from __future__ import annotations

import re
from typing import Any

import pytest

from vnext.text.template import ChatTemplate

ANY_ORDER = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
SYSTEM_FIRST = (
    "{% for m in messages %}{% if m.role == 'system' and not loop.first %}{{ raise_exception('system first') }}{% endif %}"
    "<{{ m.role }}>{{ m.content }}{% endfor %}"
)
IN_TURNS = (
    "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('turns') }}{% endif %}"
    "<{{ m.role }}>{{ m.content }}{% endfor %}"
)
SYSTEM_AS_ASSISTANT = "{% for m in messages %}<{{ 'user' if m.role == 'user' else 'model' }}>{{ m.content }}{% endfor %}"
DROPS_SYSTEM = "{% for m in messages if m.role != 'system' %}<{{ m.role }}>{{ m.content }}{% endfor %}"
RESULTS_THEN_ASSISTANT = (
    "{% set before = namespace(role='') %}{% for m in messages %}"
    "{% if before.role == 'tool' and m.role == 'user' %}{{ raise_exception('an answer first') }}{% endif %}"
    "{% set before.role = m.role %}<{{ m.role }}>{{ m.content }}{% for c in m.tool_calls %}{{ c.function.name }}{% endfor %}"
    "{% endfor %}"
)


def said(*pairs: str) -> list[dict[str, Any]]:
    """Messages from "role:words"."""
    return [{"role": role, "content": words} for role, _, words in (pair.partition(":") for pair in pairs)]


@pytest.mark.parametrize(
    ("source", "messages", "text"),
    [
        (ANY_ORDER, ("user:a", "user:b", "system:s", "user:c"), "<user>a<user>b<system>s<user>c"),
        (SYSTEM_FIRST, ("user:a", "user:b", "system:s", "user:c"), "<system>s<user>a<user>b<user>c"),
        (SYSTEM_FIRST, ("system:r", "user:a", "assistant:b", "system:s"), "<system>r\n\ns<user>a<assistant>b"),
        (SYSTEM_FIRST, ("system:r", "system:s", "user:a"), "<system>r\n\ns<user>a"),
        (SYSTEM_FIRST, ("system:r", "user:a"), "<system>r<user>a"),
        (IN_TURNS, ("user:a", "user:b", "assistant:c", "assistant:d"), "<user>a\n\nb<assistant>c\n\nd"),
        (IN_TURNS, ("system:s", "user:a", "user:b"), "<user>s\n\na\n\nb"),
        (IN_TURNS, ("user:a", "system:s", "user:b"), "<user>s\n\na\n\nb"),
        (IN_TURNS, ("system:s",), "<user>s"),
        (SYSTEM_AS_ASSISTANT, ("user:a", "system:s", "user:b"), "<model>s<user>a<user>b"),
        (DROPS_SYSTEM, ("system:s", "user:a"), "<user>s\n\na"),
        (RESULTS_THEN_ASSISTANT, ("user:a", "tool:r", "tool:t", "user:b"), "<user>a<tool>r<tool>t\n\nb"),
        ("{% for m in messages %}{{ m.content }}{% endfor %}", ("user:a", "system:s", "user:b"), "asb"),
        ("{{ raise_exception('no') if messages | length != 9 }}", ("user:a",) * 9, ""),
    ],
)
def test_the_order_is_one_that_the_template_takes(source: str, messages: tuple[str, ...], text: str) -> None:
    template = ChatTemplate(source, {})
    assert template.render(template.arranged(said(*messages)), {}) == text


def test_a_joined_turn_keeps_calls_and_reasoning() -> None:
    call, other = ({"id": name, "type": "function", "function": {"name": name, "arguments": {}}} for name in ("f", "g"))
    turns = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "", "thinking": "one", "tool_calls": [call]},
        {"role": "assistant", "content": "b", "thinking": "two", "tool_calls": [other]},
    ]
    joined = {"role": "assistant", "content": "b", "thinking": "one\n\ntwo", "tool_calls": [call, other]}
    assert ChatTemplate(IN_TURNS, {}).arranged(turns) == [turns[0], joined]


CALLS = "{% for c in m.tool_calls %}({{ c.id }}:{{ c.function.name }}){% endfor %}"
ONE_CALL = (
    "{% for m in messages %}{% if m.tool_calls and m.tool_calls | length > 1 %}{{ raise_exception('single calls only') }}{% endif %}"
    "<{{ m.role }}{% if m.tool_call_id %} {{ m.tool_call_id }}{% endif %}>{{ m.content }}" + CALLS + "{% endfor %}"
)
NINE = (
    "{% for m in messages %}{% for c in m.tool_calls %}{% if c.id | length != 9 %}{{ raise_exception('nine') }}{% endif %}{% endfor %}"
    "<{{ m.role }}{% if m.tool_call_id %} {{ m.tool_call_id }}{% endif %}>{{ m.content }}" + CALLS + "{% endfor %}"
)
PARALLEL = [
    {"role": "user", "content": "u"},
    {"role": "assistant", "content": "w", "tool_calls": [{"id": id_, "function": {"name": "f"}} for id_ in ("call_a", "b12345678")]},
    {"role": "tool", "content": "rb", "tool_call_id": "b12345678"},
    {"role": "tool", "content": "ra", "tool_call_id": "call_a"},
]


def test_a_template_of_single_calls_gets_them_with_their_results() -> None:
    template = ChatTemplate(ONE_CALL, {})
    text = template.render(template.arranged(PARALLEL), {})
    assert text == "<user>u<assistant>w(call_a:f)<tool call_a>ra<assistant>(b12345678:f)<tool b12345678>rb"
    assert ChatTemplate(ANY_ORDER, {}).arranged(PARALLEL) == PARALLEL


def test_ids_of_other_servers_become_those_that_the_template_takes() -> None:
    template = ChatTemplate(NINE, {})
    text = template.render(template.arranged(PARALLEL), {})
    ids = re.findall(r"\((\w+):f\)", text)
    assert ids[1] == "b12345678" and re.fullmatch("[0-9a-f]{9}", ids[0])
    assert text == f"<user>u<assistant>w({ids[0]}:f)({ids[1]}:f)<tool {ids[1]}>rb<tool {ids[0]}>ra"
