"""What one request makes the server compute is bounded, and long work does not run on the event loop."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import msgspec
import pytest

from vnext.runtime.protocol.sampling_params import InvalidRequest
from vnext.server.context.conversation import text_size
from vnext.server.context.openai_types import ChatBody
from vnext.server.context.structure import TOOLS_BYTES_MAX, Grammars, tool_choice_of
from vnext.server.context.text_work import TextWork
from vnext.text.structured.asked import Asked

LONG = "x" * 100_000


def chat(*, message: dict[str, Any] | None = None, **fields: Any) -> ChatBody:
    return msgspec.convert({"messages": [{"role": "assistant", "content": "hi"} | (message or {})]} | fields, ChatBody)


def tool(text: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "f", "description": text}}


@pytest.mark.parametrize(
    "body",
    [
        chat(message={"content": LONG}),
        chat(message={"content": [{"type": "text", "text": LONG}]}),
        chat(message={"reasoning_content": LONG}),
        chat(message={"tool_calls": [{"type": "function", "function": {"name": "f", "arguments": LONG}}]}),
        chat(tools=[tool(LONG)]),
        chat(chat_template_kwargs={"a": [LONG]}),
    ],
)
def test_the_size_of_a_conversation_counts_all_that_a_template_may_write(body: ChatBody) -> None:
    assert text_size(body) > len(LONG)


def test_the_bytes_of_tools_are_bounded() -> None:
    assert tool_choice_of(chat(tools=[tool("x" * (TOOLS_BYTES_MAX // 2))]), knows_tools=True).shown
    with pytest.raises(InvalidRequest, match=f"tools has [0-9]+ bytes: at most {TOOLS_BYTES_MAX} are allowed"):
        tool_choice_of(chat(tools=[tool("x" * TOOLS_BYTES_MAX)]), knows_tools=True)


def test_tools_become_a_grammar_beside_the_event_loop_and_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vnext.server.context.structure.grammar_of", lambda asked, _: asked.value)
    threads = []

    def asked() -> Asked:
        threads.append(threading.current_thread())
        return Asked(kind="grammar", value="calls", path="tools")

    async def ask() -> list[str]:
        work = TextWork(10_000)
        grammars = Grammars(None, work)
        found = [await grammars.made(tools, "client", asked) for tools in ([tool("a")], [tool("a")], [tool("b")])]
        work.close()
        return found

    assert asyncio.run(ask()) == ["calls"] * 3
    assert len(threads) == 2 and threading.main_thread() not in threads
