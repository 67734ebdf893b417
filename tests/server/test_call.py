"""A call's one way through the server: what admits it, what it carries, and how many functions that takes."""

from __future__ import annotations

import sys
from concurrent.futures import ThreadPoolExecutor
from types import FrameType
from typing import Any

import pytest
from edge_server import EdgeServer
from fake_engine import wait_until

from perf.steady_edge import SteadyEdge
from vnext.runtime.protocol.messages import AdapterFiles
from vnext.runtime.protocol.sampling_params import InvalidRequest
from vnext.server.answers import beams
from vnext.server.call import SHARED, Call, Checks
from vnext.server.context.identity import TICKET_HEADER
from vnext.server.context.openai_types import CompletionBody, StreamOptions, UsageShown
from vnext.server.views import completions

FUNCTIONS_MAX, FILES_MAX = 105, 23
"""Of server/, that a warm streamed completion runs: a ratchet, lowered by whoever lowers one."""


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[Call]:
    """The whole calls of completions, as they go to the engine."""
    found: list[Call] = []

    def generation_of(call: Call) -> Any:
        found.append(call)
        return beams.generation_of(call)

    monkeypatch.setattr(completions, "generation_of", generation_of)
    return found


def test_a_call_is_one_value(server: EdgeServer, calls: list[Call]) -> None:
    body = {"prompt": ["say:a", "say:b"], "max_tokens": 3, "n": 2, "cache_salt": "s", "request_id": "mine"}
    assert server.post("/v1/completions", body)[0] == 200
    [call] = calls
    assert call.client == "127.0.0.1" and call.id == call.names and call.id.startswith("cmpl-mine-")
    assert call.asked is call.body and call.params.n == 2 and call.params.max_tokens == 3 and call.constraint is None
    assert [server.context.tokenizer.decode(prompt) for prompt in call.prompts] == ["say:a", "say:b"]
    assert (call.seed, call.last, call.ticket, call.usage) == (None, None, "", UsageShown(False, False))


def test_a_stream_has_a_seed_and_says_where_its_usage_stands(server: EdgeServer, calls: list[Call]) -> None:
    for options, shown in ((None, (False, False)), ({"include_usage": True}, (True, False)),
                           ({"include_usage": True, "continuous_usage_stats": True}, (True, True)), ({"continuous_usage_stats": True}, (False, False))):
        [*server.openai().completions.create(model="toy", prompt="say:a", stream=True, stream_options=options)]
        assert calls[-1].usage == shown and calls[-1].seed is not None
    assert len({call.seed for call in calls}) == len(calls)


def test_a_ticket_counts_only_where_it_is_taken(server: EdgeServer, calls: list[Call]) -> None:
    with EdgeServer(takes_tickets=True) as decode:
        for each in (server, decode):
            assert each.post("/v1/completions", {"prompt": "say:a"}, **{TICKET_HEADER: "there"})[0] == 200
        assert decode.post("/v1/completions", {"prompt": "say:a"}, **{TICKET_HEADER: "\xff"})[0] == 200
    assert [call.ticket for call in calls] == ["", "there", ""]


def test_only_the_checks_of_given_fields_are_made(server: EdgeServer) -> None:
    made: list[str] = []
    checks = Checks({name: lambda body, context, name=name: made.append(name) for name in ("suffix", "priority", "echo")})
    checks.check(CompletionBody(prompt="x"), server.context)
    assert made == []
    checks.check(CompletionBody(prompt="x", echo=False, priority=0), server.context)
    assert made == ["priority", "echo"]


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({"prompt_logprobs": 0, "stream": True}, "prompt_logprobs"),
        ({"stream_options": StreamOptions()}, "stream_options"),
        ({"return_routed_experts": True}, "return_routed_experts"),
        ({"beam_width": 2}, "beam_width"),
        ({"length_penalty": 0.5}, "length_penalty"),
        ({"priority": 2**31}, "priority"),
        ({"cache_salt": "x" * 257}, "cache_salt"),
    ],
)
def test_each_shared_check_refuses_by_name(server: EdgeServer, fields: dict[str, Any], name: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        Checks(SHARED).check(CompletionBody(prompt="x", **fields), server.context)
    assert refused.value.param == name and name in refused.value.message
    assert server.context.limiter.live_count == 0


def test_a_warm_streamed_completion_runs_few_functions() -> None:
    """Those of each of three: timers run in some of them."""
    visits: list[set[tuple[str, str]]] = []

    def note(frame: FrameType, event: str, _: object) -> None:
        place = frame.f_code.co_filename.rpartition("/vnext/")[2]
        if event == "call" and place.startswith("server/"):
            visits[-1].add((place, frame.f_code.co_qualname))

    with SteadyEdge(0) as edge:
        edge.visit(1)
        for _ in range(3):
            visits.append(set())
            sys.setprofile(note)
            edge.visit(1)
            sys.setprofile(None)
    found = set.intersection(*visits)
    assert 50 < len(found) <= FUNCTIONS_MAX
    assert len({place for place, _ in found}) <= FILES_MAX


@pytest.mark.parametrize("searches", [False, True])
def test_a_call_holds_its_adapter_to_its_end(server: EdgeServer, monkeypatch: pytest.MonkeyPatch, searches: bool) -> None:
    """Beams too: an adapter that a search uses is not unloaded."""
    adapters, live = server.context.adapters, server.context.adapters._live
    adapters._files["", "mine"] = AdapterFiles(name="mine", digest="0" * 32, path="/a")
    body = {"model": "mine", "prompt": "x", "max_tokens": 3} | ({"use_beam_search": True, "beam_width": 1} if searches else {})
    server.engine.running.clear()
    with ThreadPoolExecutor() as pool:
        asked = pool.submit(server.post, "/v1/completions", body)
        wait_until(lambda: live["", "mine"] == 1)
        server.engine.running.set()
        status, answer, _ = asked.result()
    assert (status, live["", "mine"]) == (200, 0), answer
