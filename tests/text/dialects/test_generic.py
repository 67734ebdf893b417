"""Chat templates that know no tools: tools, calls and results stand in the words of the messages, and answers' calls are read."""

from __future__ import annotations

from typing import Any

import pytest

from vnext.server.context.conversation import prompt_text
from vnext.server.context.openai_types import ChatBody, ChatMessage, FunctionCall, ToolCall
from vnext.text.dialects.table import GENERIC
from vnext.text.parts import CallArguments, CallBegun
from vnext.text.template import ChatTemplate

PLAIN = "{% for message in messages %}[{{ message.role }}]{{ message.content }}{% endfor %}"
WITH_SYSTEM = "{# system #}" + PLAIN
TOOLS: list[dict[str, Any]] = [{"type": "function", "function": {"name": "rain", "description": "Köln's"}}]
LINE = '{"name": "rain", "description": "Köln\'s"}'
CALL = ToolCall(function=FunctionCall(name="rain", arguments='{"in":  "Köln"}'), id="a")
TURNS = [
    ChatMessage(role="assistant", content="I look.", tool_calls=[CALL, CALL]),
    ChatMessage(role="tool", content="wet", tool_call_id="a"),
]
WRITTEN = '<tool_call>\n{"name": "rain", "arguments": {"in":  "Köln"}}\n</tool_call>'


def prompt(source: str, messages: list[ChatMessage], tools: list[dict[str, Any]] | None = TOOLS) -> str:
    return prompt_text(ChatTemplate(source, {}), ChatBody(messages=messages), tools, 1.0)


@pytest.mark.parametrize(
    ("source", "messages", "order"),
    [
        (WITH_SYSTEM, [ChatMessage(role="user", content="Rain?")], ("[system]", LINE, "[user]Rain?")),
        (WITH_SYSTEM, [ChatMessage(role="system", content="Brief."), *TURNS], ("[system]Brief.", LINE, "[assistant]I look.")),
        (PLAIN, [ChatMessage(role="user", content="Rain?")], ("[user]", LINE, "Rain?")),
        (PLAIN, TURNS, ("[user]", LINE, "[assistant]I look.")),
    ],
)
def test_the_tools_stand_before_what_is_asked(source: str, messages: list[ChatMessage], order: tuple[str, ...]) -> None:
    text = prompt(source, messages)
    places = [text.index(each) for each in order]
    assert places == sorted(places) and text.count(LINE) == 1 and '{"name": "NAME", "arguments": {}}' in text


def test_earlier_calls_are_what_the_model_wrote_and_results_are_a_user_s() -> None:
    text = prompt(PLAIN, TURNS, None)
    assert text == f"[assistant]I look.\n{WRITTEN}\n{WRITTEN}[user]<tool_response>\nwet\n</tool_response>"
    parser = GENERIC.parser(TOOLS)
    parts = parser.push(f"I look.\n{WRITTEN}") + parser.finish()
    assert [part.name for part in parts if isinstance(part, CallBegun)] == ["rain"]
    assert "".join(part.text for part in parts if isinstance(part, CallArguments)) == '{"in":  "Köln"}'


def test_a_chat_without_tools_and_a_template_with_them_stay_as_they_are() -> None:
    assert prompt(PLAIN, [ChatMessage(role="user", content="a")], None) == "[user]a"
    template = ChatTemplate("{{ tools }}<tool_call>" + PLAIN, {})
    assert template.shows_tools and LINE not in prompt("{{ tools }}<tool_call>" + PLAIN, [ChatMessage(role="user", content="a")])
