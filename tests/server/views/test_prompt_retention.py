"""prompt_cache_retention: "24h" keeps a request for a day in each of OpenAI's APIs, and unknown words are refused."""

from __future__ import annotations

from typing import Any

import pytest
from edge_server import EdgeServer
from fake_engine import RETAINED

from vnext.runtime.protocol.messages import SubmitRequest
from vnext.state.params import ALL_TOKENS

APIS = [
    ("/v1/completions", {"prompt": "say:hi"}),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "say:hi"}], "max_tokens": 3}),
    ("/v1/responses", {"input": "say:hi", "max_output_tokens": 3}),
]


@pytest.mark.parametrize(("path", "body"), APIS)
def test_a_word_is_a_time(server: EdgeServer, path: str, body: dict[str, Any]) -> None:
    for asked, kept in (("24h", ((ALL_TOKENS, 86_400),)), ("5m", ((ALL_TOKENS, 300),)), ("in_memory", ()), ("in-memory", ()), (None, ()), ("", ())):
        assert server.post(path, body | {"prompt_cache_retention": asked})[0] == 200
        assert server.engine.of_kind(SubmitRequest)[-1].sampling.retention == kept


@pytest.mark.parametrize(("path", "body"), APIS)
def test_other_words_are_refused(server: EdgeServer, path: str, body: dict[str, Any]) -> None:
    for asked in ("2m", "-24h", "forever"):
        status, text, _ = server.post(path, body | {"prompt_cache_retention": asked})
        assert status == 400 and text["error"]["message"] == f"prompt_cache_retention is '{asked}': it must be 'in_memory', '5m', '1h' or '24h'."


@pytest.mark.parametrize(("path", "body"), [*APIS, ("/v1/messages", {"messages": [{"role": "user", "content": "say:hi"}], "max_tokens": 3})])
def test_usage_says_what_stays_and_what_gave_way(server: EdgeServer, path: str, body: dict[str, Any]) -> None:
    asked = {"cache_control": {"type": "ephemeral"}} if path == "/v1/messages" else {"prompt_cache_retention": "1h"}
    for more, said in ((asked, RETAINED), ({}, (None, None))):
        status, answer, _ = server.post(path, body | more)
        assert status == 200 and (answer["usage"].get("retained_tokens"), answer["usage"].get("unretained_tokens")) == said
