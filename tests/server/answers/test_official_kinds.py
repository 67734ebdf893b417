"""Every kind of item and of block that the official packages know is read, passed over, or refused by a decision of ours."""

from __future__ import annotations

import re
from typing import Annotated, Any, get_args, get_origin

import pytest
from anthropic.types import ContentBlockParam
from anthropic.types.beta import BetaContentBlock
from edge_server import EdgeServer
from openai.types.responses.response_input_item_param import ResponseInputItemParam
from openai.types.responses.tool_param import ToolParam

from vnext.server.messages.translation import PASSED_OVER as PASSED_BLOCKS
from vnext.server.responses.translation import LEFT_OUT, PASSED_OVER

READ_ITEMS = {"message", "reasoning", "item_reference", "function_call", "custom_tool_call"}
READ_ITEMS |= {"function_call_output", "custom_tool_call_output"}
TELLS_THE_MODEL = {"additional_tools", "configuration_update"}
"""Items that would change the answers behind them."""
READ_BLOCKS = {"text", "thinking", "redacted_thinking", "tool_use", "tool_result", "image", "document", "search_result"}
OFFERED = {"function", "custom", "namespace"}
RUN_ELSEWHERE = {"code_interpreter", "computer", "computer_use_preview", "file_search", "mcp", "programmatic_tool_calling"}
"""Tools on which an answer builds, so that their absence is said."""


def kinds(union: Any) -> set[str]:
    """The values of `type` of all members."""
    if get_origin(union) is Annotated:
        return kinds(get_args(union)[0])
    if not hasattr(union, "__annotations__"):
        return set[str]().union(*map(kinds, get_args(union)))
    return set(re.findall(r"""["'](\w+)["']""", str(union.__annotations__.get("type"))))


def test_every_kind_is_decided() -> None:
    assert kinds(ResponseInputItemParam) - PASSED_OVER == READ_ITEMS | TELLS_THE_MODEL
    assert (kinds(ContentBlockParam) | kinds(BetaContentBlock)) - PASSED_BLOCKS <= READ_BLOCKS | {"compaction"}
    assert kinds(ToolParam) - LEFT_OUT == OFFERED | RUN_ELSEWHERE


@pytest.mark.parametrize("kind", sorted((kinds(ContentBlockParam) | kinds(BetaContentBlock)) - {"tool_result", "tool_use", "image"}))
def test_no_block_of_a_history_ends_a_talk(server: EdgeServer, kind: str) -> None:
    source = {"type": "text", "media_type": "text/plain", "data": "x"}
    block = {"type": kind, "text": "x", "thinking": "x", "data": "x", "title": "x", "content": "x", "source": source}
    body = {"max_tokens": 1, "messages": [{"role": "user", "content": "x"}, {"role": "assistant", "content": [block]}]}
    status, answer, _ = server.post("/v1/messages", body | {"messages": [*body["messages"], body["messages"][0]]})
    assert status == 200 or "content" in answer["error"]["param"], answer
    assert status == 200 or f"{kind!r}" not in answer["error"]["message"], answer


@pytest.mark.parametrize("kind", sorted(kinds(ResponseInputItemParam) & PASSED_OVER))
def test_no_item_of_a_history_ends_a_talk(server: EdgeServer, kind: str) -> None:
    item = {"type": kind, "id": "x", "call_id": "c", "status": "completed"}
    status, answer, _ = server.post("/v1/responses", {"input": [item, {"role": "user", "content": "x"}], "max_output_tokens": 1})
    assert status == 200, answer


@pytest.mark.parametrize("kind", sorted(TELLS_THE_MODEL))
def test_an_item_that_would_change_answers_is_refused_by_name(server: EdgeServer, kind: str) -> None:
    status, answer, _ = server.post("/v1/responses", {"input": [{"type": kind}, {"role": "user", "content": "x"}]})
    assert (status, answer["error"]["param"]) == (400, "input[0].type") and repr(kind) in answer["error"]["message"]
