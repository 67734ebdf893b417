"""/metrics and the load line: names, labels, what is counted when, and the times of an answer's parts."""

from __future__ import annotations

import asyncio
import http.client
import json
import logging
import re
import time
from types import SimpleNamespace

import msgspec
import pytest
from edge_server import EdgeServer
from fake_engine import wait_until

from vnext.runtime.protocol.messages import EngineStats, SubmitRequest
from vnext.runtime.protocol.operations import Residence
from vnext.runtime.protocol.stats import AdapterStats, CacheLosses, ExpertStats, LayerLoad
from vnext.server import load_line
from vnext.server.context import metrics as metrics_module
from vnext.server.context.metrics import ServerMetrics, Stopwatch, _lengths_up_to
from vnext.server.load_line import Load
from vnext.server.run import set_log_levels
from vnext.server.settings import ServerSettings

VLLM_NAMES = (
    "num_requests_running num_requests_waiting kv_cache_usage_perc prefix_cache_queries_total prefix_cache_hits_total "
    "num_preemptions_total prompt_tokens_total generation_tokens_total request_success_total request_prompt_tokens_count "
    "request_generation_tokens_count time_to_first_token_seconds_count inter_token_latency_seconds_count "
    "request_time_per_output_token_seconds_count e2e_request_latency_seconds_count request_queue_time_seconds_count "
    "request_inference_time_seconds_count request_prefill_time_seconds_count request_decode_time_seconds_count"
).split()


def samples(text: str) -> dict[str, float]:
    """Values by name and by what labels there are besides the model and the engine."""
    found = {}
    for line in text.splitlines():
        if not line.startswith("#"):
            name, labels, value = re.fullmatch(r"(\w+){(.*)} (\S+)", line).groups()
            assert 'engine="0"' in labels and 'model_name="toy"' in labels, line
            others = re.sub(r'(engine|model_name)="[^"]*",?', "", labels).strip(",")
            found[f"{name}{{{others}}}" if others else name] = float(value)
    return found


def test_metrics() -> None:
    with EdgeServer() as server:
        server.openai().completions.create(model="toy", prompt="say:abc", n=2)
        server.openai().completions.create(model="toy", prompt="xy", max_tokens=3)
        server.get("/nowhere/at/all")
        wait_until(lambda: "vnext_num_requests_running" in server.get("/metrics")[1])
        found = samples(server.get("/metrics")[1])
    assert not [
        name
        for name in VLLM_NAMES
        if f"vnext_{name}" not in found and f'vnext_{name}{{finished_reason="stop"}}' not in found
    ]
    assert found["vnext_engine_up"] == 1 and found["vnext_num_requests_running"] == 7 and found["vnext_kv_cache_usage_perc"] == 1
    assert found["vnext_generation_tokens_total"] == 7 and found["vnext_step_seconds_total"] == 1.5
    assert found["vnext_time_to_first_token_seconds_count"] == 3
    assert found["vnext_inter_token_latency_seconds_count"] == 8
    for name in (
        "e2e_request_latency",
        "request_queue_time",
        "request_prefill_time",
        "request_decode_time",
        "request_inference_time",
    ):
        assert found[f"vnext_{name}_seconds_count"] == 3
    assert found['vnext_request_success_total{finished_reason="stop"}'] == 2
    assert found['vnext_request_success_total{finished_reason="length"}'] == 1
    assert found["vnext_request_generation_tokens_sum"] == 4 + 4 + 3 and found["vnext_request_prompt_tokens_sum"] == 7 + 7 + 2
    assert found['vnext_http_requests_total{method="POST",route="/v1/completions",status="200"}'] == 2
    assert found['vnext_http_requests_total{method="GET",route="other",status="404"}'] == 1


@pytest.mark.parametrize("stream", [False, True])
def test_what_a_client_leaves_or_the_server_ends_is_an_abort(stream: bool) -> None:
    with EdgeServer() as server:
        server.engine.running.clear()
        client = http.client.HTTPConnection("127.0.0.1", server.port)
        body = json.dumps({"prompt": "a", "n": 2, "stream": stream})
        client.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
        server.engine.wait_for(lambda: len(server.engine.of_kind(SubmitRequest)) == 2)
        client.close()
        assert len(server.engine.wait_aborts("client")) == 2
        wait_until(lambda: 'finished_reason="abort"' in server.get("/metrics")[1])
        found = samples(server.get("/metrics")[1])
    assert found['vnext_request_success_total{finished_reason="abort"}'] == 2
    assert found["vnext_e2e_request_latency_seconds_count"] == found["vnext_request_queue_time_seconds_count"] == 0


def test_a_stop_string_is_a_stop() -> None:
    with EdgeServer() as server:
        server.openai().completions.create(model="toy", prompt="say:abcdef", stop="d")
        found = samples(server.get("/metrics")[1])
    assert found['vnext_request_success_total{finished_reason="stop"}'] == 1
    assert 'vnext_request_success_total{finished_reason="abort"}' not in found


def metrics() -> ServerMetrics:
    return ServerMetrics("toy", 100, [SimpleNamespace(stats=None, death=None, trouble=None, recoveries=0, recovery_seconds=0.0)])


def test_the_parts_of_an_answer_s_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Body at 0, submitted at 10, first step at 13, tokens at 20, 24 and two at 30, over at 31."""
    clock = SimpleNamespace(now_s=10.0)
    monkeypatch.setattr(metrics_module, "time", SimpleNamespace(monotonic=lambda: clock.now_s))
    reported = metrics()
    watch = Stopwatch(reported, 0.0, 5)
    clock.now_s = 20.0
    watch.queue_s = 3.0
    watch.tokens(1)
    clock.now_s = 24.0
    watch.tokens(1)
    clock.now_s = 30.0
    watch.tokens(2)
    clock.now_s = 31.0
    watch.end("stop")
    found = samples(reported.text().decode())
    sums = {
        "time_to_first_token": 20.0, "inter_token_latency": 10.0, "request_time_per_output_token": 10 / 3,
        "e2e_request_latency": 31.0, "request_queue_time": 3.0, "request_prefill_time": 7.0, "request_decode_time": 10.0,
        "request_inference_time": 17.0,
    }  # fmt: skip
    assert {name: found[f"vnext_{name}_seconds_sum"] for name in sums} == pytest.approx(sums)
    assert found["vnext_inter_token_latency_seconds_count"] == 3 and found["vnext_request_generation_tokens_sum"] == 4


def test_half_an_answer_has_no_times() -> None:
    reported = metrics()
    watch = Stopwatch(reported, 0.0, 5)
    watch.tokens(1)
    watch.end("abort")
    found = samples(reported.text().decode())
    assert found["vnext_time_to_first_token_seconds_count"] == 1 and found["vnext_e2e_request_latency_seconds_count"] == 0
    assert found['vnext_request_success_total{finished_reason="abort"}'] == 1


def test_the_engine_s_word_about_waiting_reaches_the_histogram() -> None:
    with EdgeServer() as server:
        output = server.engine._output

        def late(name: str, request: SubmitRequest, tokens: list[int]) -> object:
            first = len(tokens) == 3
            return msgspec.structs.replace(output(name, request, tokens), queue_seconds=7.0 if first else 0.0)

        server.engine._output = late
        server.openai().completions.create(model="toy", prompt="say:ab")
        found = samples(server.get("/metrics")[1])
    assert found["vnext_request_queue_time_seconds_sum"] == 7.0


def test_lengths_are_told_up_to_the_longest_request() -> None:
    assert _lengths_up_to(100) == (1, 2, 5, 10, 20, 50, 100)
    assert _lengths_up_to(131072)[-4:] == (20000, 50000, 100000, 131072) and _lengths_up_to(1) == (1,)


def stats(**figures: object) -> EngineStats:
    numbers = dict.fromkeys(EngineStats.__struct_fields__, 0) | {"stalled": "", "recovering": "", "adapters": None, "tier": None, "pins": None, "states": None, "experts": None, "blocks_total": 200}
    return EngineStats(**numbers | {"residence": Residence(), "lost": CacheLosses()} | figures)


def test_adapters_have_metrics_where_an_engine_has_slots() -> None:
    held = AdapterStats(slots=2, resident=1, loads=5, evictions=4, requests_waiting=3, running=("fr", "sql"), waiting=("de",))
    with EdgeServer() as server:
        server.engine.say(stats())
        wait_until(lambda: "vnext_num_requests_running" in server.get("/metrics")[1])
        assert "lora" not in server.get("/metrics")[1]
        server.engine.say(stats(adapters=held))
        wait_until(lambda: "vnext_lora_slots" in server.get("/metrics")[1])
        found = samples(server.get("/metrics")[1])
    figures = {name.removeprefix("vnext_lora_"): value for name, value in found.items() if "lora" in name}
    (info,) = (name for name in figures if name.startswith("requests_info"))
    assert info == 'requests_info{max_lora="2",running_lora_adapters="fr,sql",waiting_lora_adapters="de"}'
    assert abs(figures.pop(info) - time.time()) < 60
    assert figures == {"slots": 2, "resident": 1, "requests_waiting": 3, "loads_total": 5, "evictions_total": 4}


def experts(*layers: tuple[int, int, int, int]) -> ExpertStats:
    return ExpertStats(8, 2, tuple(LayerLoad(*each) for each in layers))


def test_experts_have_metrics_where_their_load_is_measured() -> None:
    with EdgeServer() as server:
        server.engine.say(stats())
        wait_until(lambda: "vnext_num_requests_running" in server.get("/metrics")[1])
        assert "expert" not in server.get("/metrics")[1]
        server.engine.say(stats(experts=experts((1, 800, 300, 500), (2, 800, 100, 400))))
        wait_until(lambda: "vnext_experts" in server.get("/metrics")[1])
        found = samples(server.get("/metrics")[1])
    names = {"tokens": (800, 800), "busiest_tokens": (300, 100), "busiest_rank_tokens": (500, 400)}
    layers = {f'vnext_expert_{name}_total{{layer="{at}"}}': value for name, two in names.items() for at, value in enumerate(two, 1)}
    assert {name: value for name, value in found.items() if "expert" in name} == {"vnext_experts": 8} | layers


def test_the_load_line_names_the_busiest_expert() -> None:
    load = Load()
    first, second = experts((1, 800, 100, 400), (3, 800, 300, 500)), experts((1, 1600, 300, 800), (3, 1600, 450, 900))
    assert load.line(stats(running=1, experts=first), 10.0).endswith("Busiest expert: 3.0 times the mean of layer 3")
    assert load.line(stats(running=1, experts=second), 10.0).endswith("Busiest expert: 2.0 times the mean of layer 1")
    assert "expert" not in load.line(stats(running=1, experts=second), 10.0), "no token came"


def test_the_load_line_says_what_happened_since_the_last() -> None:
    load = Load()
    assert load.line(stats(), 10.0) is None, "idle from the start"
    assert load.line(
        stats(
            running=3,
            waiting=1,
            prompt_tokens=500,
            generated_tokens=1234,
            blocks_held=50,
            prefix_queried_tokens=500,
            prefix_hit_tokens=50,
        ),
        10.0,
    ) == (
        "Engine 000: Avg prompt throughput: 50.0 tokens/s, Avg generation throughput: 123.4 tokens/s, Running: 3 reqs, Waiting: 1 reqs, "
        "KV cache usage: 25.0%, Prefix cache hit rate: 10.0%"
    )
    after = stats(prompt_tokens=500, generated_tokens=1334, prefix_queried_tokens=500, prefix_hit_tokens=50)
    assert "generation throughput: 20.0 tokens/s, Running: 0 reqs" in load.line(after, 5.0), "the rest, when it has ended meanwhile"
    assert load.line(after, 10.0) is None and load.line(after, 10.0) is None
    assert "Waiting: 2 reqs" in load.line(msgspec.structs.replace(after, waiting=2), 10.0), "waiting is no idleness"


@pytest.mark.parametrize("disabled", [False, True])
def test_the_load_line_comes_while_the_server_works(caplog: pytest.LogCaptureFixture, disabled: bool) -> None:
    settings = {"disable_log_stats": disabled, "log_stats_interval_s": 0.05}
    with caplog.at_level("INFO", "vnext.load"), EdgeServer(**settings) as server:
        server.in_loop(asyncio.sleep(0.2))
        assert caplog.text == ""
        server.openai().completions.create(model="toy", prompt="say:abc")
        if disabled:
            server.in_loop(asyncio.sleep(0.2))
        else:
            wait_until(lambda: "Running: 7 reqs" in caplog.text)
    assert not disabled or caplog.text == ""


@pytest.mark.parametrize(("level", "comes"), [("debug", True), ("info", True), ("warning", True), ("error", False)])
def test_the_load_line_comes_at_every_level_but_error(level: str, comes: bool) -> None:
    before = load_line.log.level
    try:
        set_log_levels(ServerSettings(log_level=level))
        assert load_line.log.isEnabledFor(logging.INFO) == comes
    finally:
        load_line.log.setLevel(before)
