"""`vnext-bench serve`: the options and the result file that users of `vllm bench serve` know."""

from __future__ import annotations

import asyncio
import codecs
import json
import math
import os
import re
import signal
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from edge_server import EdgeServer
from load_server import load_server
from log_drive import record
from test_bench_cli import Backend

from vnext.commands.bench.cli import main
from vnext.commands.bench.datasets import (
    RandomLengths,
    agent_samples,
    agent_traces,
    custom_samples,
    dataset_path,
    random_samples,
    sharegpt_samples,
)
from vnext.commands.bench.load.events import Piece, Stream
from vnext.commands.bench.load.generator import Timeline, ramp
from vnext.commands.bench.serve import log_samples
from vnext.commands.bench.vllm_figures import Wanted, details_of, result_of, table, wanted_of
from vnext.log.codec import Frame
from vnext.replay.answers.convert import convert
from vnext.replay.reading.source import open_log
from vnext.runtime.protocol.settings import SettingsError
from vnext.state.events import RequestArrived, unpack_tokens
from vnext.text.tokenizer import Tokenizer

DEMO_MODEL = Path(__file__).resolve().parents[3] / "vnext" / "demo_model"
SMALL = ["--num-prompts", "4", "--random-input-len", "6", "--random-output-len", "2"]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.load(DEMO_MODEL)


class Both(Backend):
    """Completions and chats; of these the first is refused."""

    def __init__(self, refusals: int = 0) -> None:
        super().__init__()
        self.refusals = refusals
        self.app.add_routes([web.post("/v1/chat/completions", self.complete)])

    async def complete(self, request: web.Request) -> web.StreamResponse:
        self.refusals -= 1
        if self.refusals >= 0:
            await request.read()
            return web.Response(status=429, text="later")
        return await super().complete(request)


def served(backend: Backend, *argv: str) -> int:
    async def serve() -> int:
        async with TestServer(backend.app) as server:
            return await asyncio.to_thread(main, ["serve", "--base-url", str(server.make_url("")), *SMALL, *argv])

    return asyncio.run(serve())


def result(folder: Path) -> dict:
    (path,) = folder.glob("*.json")
    return json.loads(path.read_text()) | {"name": path.name}


def test_the_result_file_has_vllms_names(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    backend = Both()
    more = ["--percentile-metrics", "ttft,tpot,itl,e2el", "--metric-percentiles", "50,99.9", "--goodput", "ttft:60000", "e2el:60000"]
    assert served(backend, "--save-result", "--result-dir", str(tmp_path), "--metadata", "machine=mine", *more) == 0
    found = result(tmp_path)
    names = {
        "date", "endpoint_type", "backend", "label", "model_id", "tokenizer_id", "num_prompts", "request_rate", "burstiness",
        "max_concurrency", "duration", "completed", "failed", "total_input_tokens", "total_output_tokens", "request_throughput",
        "request_goodput", "output_throughput", "total_token_throughput", "max_output_tokens_per_s", "max_concurrent_requests",
        "confidence_95",
    }  # fmt: skip
    spread = {f"{kind}_{name}_ms" for kind in ("mean", "median", "std", "p50", "p99.9") for name in ("ttft", "tpot", "itl", "e2el")}
    assert names | spread | {"machine", "name"} == found.keys()
    assert (found["completed"], found["total_input_tokens"], found["total_output_tokens"]) == (4, 24, 8)
    assert (found["request_rate"], found["max_concurrency"], found["model_id"], found["machine"]) == ("inf", None, "m", "mine")
    assert found["request_goodput"] == found["request_throughput"]
    assert found["name"].startswith("openai-infqps-m-")
    intervals = found["confidence_95"]
    assert intervals.keys() == {name for name in spread if name[:4] not in ("mean", "std_") and "itl" not in name}, "one read each"
    assert intervals["median_ttft_ms"] == [None, None] and intervals["p99.9_ttft_ms"][1] is None
    shown = capsys.readouterr().out
    assert " Serving Benchmark Result " in shown and "P99.9 E2EL (ms):" in shown
    assert {(len(body["prompt"]), body["max_tokens"], body["ignore_eos"]) for body in backend.bodies} == {(6, 2, True)}


def test_details_of_each_request(tmp_path: Path) -> None:
    more = ["--save-result", "--save-detailed", "--result-filename", "mine.json", "--request-rate", "500", "--max-concurrency", "3"]
    assert served(Both(refusals=1), "--result-dir", str(tmp_path), *more) == 0
    found = result(tmp_path)
    assert found["name"] == "mine.json" and (found["completed"], found["failed"]) == (3, 1)
    assert sorted(found["generated_texts"]) == ["", "ab", "ab", "ab"] and sorted(found["output_lens"]) == [0, 2, 2, 2]
    assert [error for error in found["errors"] if error] == ["HTTP status 429: later"]
    assert len(found["ttfts"]) == len(found["itls"]) == 4 and found["input_lens"] == [6] * 4


def test_a_chat_has_messages_of_text_and_warm_ups_are_not_counted(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    backend = Both()
    assert served(backend, "--backend", "openai-chat", "--num-warmups", "2", "--json", str(tmp_path / "report.json")) == 0
    assert len(backend.bodies) == 6
    assert all(isinstance(body["messages"][0]["content"], str) and body["max_completion_tokens"] == 2 for body in backend.bodies)
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["figures"]["requests"] == 4 and report["workload"]["random_input_len"] == 6


@pytest.mark.parametrize("backend", ["openai-chat", "openai-responses", "anthropic"])
def test_every_api_that_streams_says_its_tokens(backend: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a server of ours, with one event a token: the counts, and a time for each token behind the first read. The engine goes on
    behind its first token when that one has been read."""
    read = Stream.read

    def read_and_go_on(stream: Stream, *given: Any) -> None:
        read(stream, *given)
        if stream.pieces():
            server.engine.running.set()

    monkeypatch.setattr(Stream, "read", read_and_go_on)
    with EdgeServer() as server:
        server.engine.hold()
        more = ["--backend", backend, "--json", str(tmp_path / "r.json"), "--save-result", "--save-detailed", "--result-dir", str(tmp_path)]
        argv = ["serve", "--base-url", server.url, *SMALL, "--random-output-len", "5", "--result-filename", "d.json", *more]
        assert main(argv) == 0
    figures, found = (json.loads((tmp_path / name).read_text()) for name in ("r.json", "d.json"))
    assert figures["figures"]["failed"] == 0 and figures["figures"]["output_tokens"] == 20
    assert found["generated_texts"] == ["xxxxx"] * 4 and found["output_lens"] == [5] * 4
    assert "itl_p50_ms" in figures["figures"] and 1 <= sum(map(len, found["itls"])) and all(len(gaps) <= 4 for gaps in found["itls"])
    assert found["total_input_tokens"] > 24, "as the server counts them: a template adds some"


@pytest.mark.parametrize(("backend", "path"), [("openai-embeddings", "/v1/embeddings"), ("vllm-rerank", "/v1/rerank")])
def test_answers_that_are_no_streams_have_a_time_too(backend: str, path: str, tmp_path: Path) -> None:
    bodies = []

    async def answer(request: web.Request) -> web.Response:
        bodies.append(await request.json())
        return web.json_response({"usage": {"prompt_tokens": 9}}) if len(bodies) > 1 else web.Response(status=400, text="no")

    server = Both()
    server.app.add_routes([web.post(path, answer)])
    assert served(server, "--backend", backend, "--percentile-metrics", "e2el", "--json", str(tmp_path / "report.json")) == 0
    figures = json.loads((tmp_path / "report.json").read_text())["figures"]
    assert (figures["requests"], figures["failed"], figures["input_tokens"], figures["output_tokens"]) == (3, 1, 27, 0)
    assert figures["e2e_p50_ms"] > 0 and "stream" not in bodies[0]
    if backend == "vllm-rerank":
        assert all(body["documents"][0].startswith(body["query"]) for body in bodies)
    else:
        assert all(len(body["input"]) == 6 for body in bodies)


@pytest.mark.parametrize("privacy", ["full", "shape"])
def test_a_recorded_log_comes_again_with_its_lengths_and_times(tmp_path: Path, tokenizer: Tokenizer, privacy: str, capsys) -> None:
    """Also as a file of `vnext-replay convert`; prompts of a log without texts share what they shared."""
    log_dir = record(tmp_path / "log", privacy, arrivals=12, timestamped=True)
    events = [event for item in open_log(log_dir).items() if isinstance(item, Frame) for event in item.events]
    arrivals = [event for event in events if isinstance(event, RequestArrived)]
    found = log_samples(log_dir, 1000, tokenizer)
    assert [each.input_tokens for each in found] == [len(event.prompt) // 4 for event in arrivals]
    assert [round(each.due_s * 1e9) for each in found] == [event.arrival_ns - arrivals[0].arrival_ns for event in arrivals]
    prompts = [unpack_tokens(event.prompt).tolist() for event in arrivals]
    assert [one[:2] == other[:2] for one, other in pairwise(each.prompt for each in found)] == [
        one[:2] == other[:2] for one, other in pairwise(prompts)
    ]
    assert max(max(each.prompt) for each in found) < tokenizer.vocab_size
    backend = Both()
    assert served(backend, "--from-log", str(log_dir), "--log-speed", "1000000") == 0
    assert "where it is whole" not in capsys.readouterr().out
    assert sorted(len(body["prompt"]) for body in backend.bodies) == sorted(each.input_tokens for each in found[:4])
    assert {body["max_tokens"] for body in backend.bodies} <= {each.output_tokens for each in found}
    assert convert(log_dir, tmp_path / "trace.jsonl", "mooncake", None).requests == 12
    again = log_samples(tmp_path / "trace.jsonl", 5, tokenizer)
    assert [each.input_tokens for each in again] == [each.input_tokens for each in found[:5]]
    segment = next(log_dir.glob("*.vnextlog"))
    segment.write_bytes(segment.read_bytes()[:-40] + bytes(40))
    assert served(Both(), "--from-log", str(log_dir), "--log-speed", "1000000") == 0
    assert f"note: --from-log {log_dir} gave 4 requests up to where it is whole; damaged at frame " in capsys.readouterr().out


@pytest.mark.parametrize("strategy", ["linear", "exponential"])
def test_the_rate_of_a_ramp_rises(strategy: str, tmp_path: Path) -> None:
    times_s = ramp(2000, (10.0, 90.0), strategy == "exponential", 3)
    meant_s = 2000 * (math.log(90 / 10) / 80 if strategy == "linear" else (1 / 10 - 1 / 90) / math.log(90 / 10))
    assert times_s == sorted(times_s) == ramp(2000, (10.0, 90.0), strategy == "exponential", 3)
    assert times_s[-1] == pytest.approx(meant_s, rel=0.01)
    early, late = 200 / times_s[199], 200 / (times_s[-1] - times_s[-201])
    assert 9 < early < 16 and 70 < late < 100
    assert ramp(1, (5.0, 9.0), True, 0) == [pytest.approx(0.2)]
    more = ["--ramp-up-strategy", strategy, "--ramp-up-start-rps", "50", "--ramp-up-end-rps", "500"]
    assert served(Both(), "--save-result", "--result-dir", str(tmp_path), *more) == 0
    found = result(tmp_path)
    assert (found["ramp_up_strategy"], found["ramp_up_start_rps"], found["ramp_up_end_rps"]) == (strategy, 50.0, 500.0)


TRACE = [
    {"role": "system", "content": "You repair programs."}, {"role": "user", "content": "The test fails."},
    {"role": "assistant", "content": None, "tool_calls": [
        {"id": "a", "type": "function", "function": {"name": "read", "arguments": '{"path": "add.py"}'}}]},
    {"role": "tool", "tool_call_id": "a", "content": "def add(a, b): return a - b", "delay_s": 0.2},
    {"role": "assistant", "content": "The sign is wrong."}, {"role": "user", "content": "Then repair it."},
    {"role": "assistant", "content": "It is repaired."},
]  # fmt: skip


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_a_trace_of_an_agent_comes_turn_by_turn(tokenizer: Tokenizer, tmp_path: Path, kind: str) -> None:
    """Each turn has all messages before an answer of the trace, with the tools' results, and comes behind the answer before it."""
    path, session = tmp_path / f"agents.{kind}", {"messages": TRACE, "tools": [{"type": "function", "function": {"name": "read"}}]}
    if kind == "jsonl":
        path.write_text(2 * f"{json.dumps(session)}\n")
    else:
        arrow = pytest.importorskip("pyarrow")
        pytest.importorskip("pyarrow.parquet").write_table(arrow.Table.from_pylist([session, session]), path)
    found = agent_traces(path, 8, tokenizer, 0)
    assert [each.follows for each in found] == [False, True, True, False, True, True, False, True]
    assert [each.delay_s for each in found[:3]] == [0.0, 0.2, 0.0]
    assert [len(each.prompt) for each in found[:3]] == [2, 4, 6] and "delay_s" not in found[1].prompt[3]
    assert found[0].output_tokens == len(tokenizer.encode('{"path": "add.py"}', add_special_tokens=False))
    backend, chat = Both(), ["--backend", "openai-chat", "--dataset-name", "agent", "--dataset-path", str(path)]
    assert served(backend, *chat, "--num-prompts", "6", "--max-concurrency", "1", "--json", str(tmp_path / "report.json")) == 0
    assert [len(body["messages"]) for body in backend.bodies] == [2, 4, 6, 2, 4, 6]
    assert backend.bodies[1]["messages"][2]["tool_calls"] == TRACE[2]["tool_calls"] and backend.bodies[0]["tools"] == session["tools"]
    assert json.loads((tmp_path / "report.json").read_text())["figures"]["elapsed_s"] >= 0.4, "two tools took 0.2 s each"


def test_agents_of_random_tokens(tokenizer: Tokenizer) -> None:
    lengths = RandomLengths(input=20, output=5, prefix=10)
    found = agent_samples(7, lengths, 3, 8, tokenizer, 0, is_chat=False)
    assert [each.input_tokens for each in found] == [len(each.prompt) for each in found] == [30, 43, 56, 30, 43, 56, 30]
    assert found[1].prompt[:30] == found[0].prompt and found[3].prompt[:10] == found[0].prompt[:10]
    assert found[3].prompt[:30] != found[0].prompt and [each.follows for each in found[:4]] == [False, True, True, False]
    chat = agent_samples(3, lengths, 3, 8, tokenizer, 0, is_chat=True)
    assert [message["role"] for message in chat[2].prompt] == ["user", "assistant", "tool", "assistant", "tool"]
    backend = Both()
    assert served(backend, "--dataset-name", "agent", "--agent-turns", "2", "--request-rate", "200") == 0
    assert sorted(len(body["prompt"]) for body in backend.bodies) == [6, 6, 264, 264]


def test_failures_are_noted_by_kind(capsys: pytest.CaptureFixture[str]) -> None:
    assert served(Both(refusals=2)) == 0
    said = capsys.readouterr()
    assert "note: 2 requests failed (HTTP status 429), the first with: HTTP status 429: later" in said.out and not said.err
    assert served(Both(refusals=3)) == 1
    said = capsys.readouterr()
    assert re.fullmatch(r"vnext-bench: 3 of 4 requests to \S+ failed, the first with: .* later; the figures are of the others\n", said.err)
    assert f"note: {said.err[13:].strip()}" in said.out and "Successful requests:                     1" in said.out


@pytest.mark.parametrize(
    ("body", "kind", "words"),
    [("<html>data: none</html>", "text/html", "the answer has no token (it is text/html)"),
     ('data: {"choices": [{"text": "a"}]}\n\n', "text/event-stream", "the stream ended without its last event")],
)  # fmt: skip
def test_answers_of_status_200_that_are_none_have_failed(capsys: pytest.CaptureFixture[str], body: str, kind: str, words: str) -> None:
    """A page of a proxy, and a stream whose server died behind one."""

    class Proxy(Backend):
        async def complete(self, request: web.Request) -> web.StreamResponse:
            await request.read()
            return web.Response(text=body, content_type=kind)

    assert served(Proxy()) == 1
    said = capsys.readouterr().err
    assert re.fullmatch(rf"vnext-bench: All 4 requests to \S+ failed, the first with: {re.escape(words)}\n", said)


class Interrupting(Both):
    """Answers two requests; the third one has Ctrl-C pressed, and its answer never ends."""

    async def complete(self, request: web.Request) -> web.StreamResponse:
        if len(self.bodies) < 2:
            return await super().complete(request)
        os.kill(os.getpid(), signal.SIGINT)
        await asyncio.sleep(60)
        raise AssertionError


@pytest.mark.parametrize("command", ["serve", "throughput", "sweep"])
def test_ctrl_c_keeps_what_had_ended(command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    saved = ["--json", str(tmp_path / "report.json")]
    asked = {
        "serve": [*SMALL, "--max-concurrency", "1", "--save-result", "--result-dir", str(tmp_path / "own")],
        "throughput": ["--num-prompts", "4", "--input-len", "6", "--output-len", "2", "--max-concurrency", "1"],
        "sweep": [*SMALL, "--num-prompts", "1", "--concurrencies", "1,2,4"],
    }
    with load_server(Interrupting().app) as url:
        assert main([command, "--url" if command == "throughput" else "--base-url", url, *asked[command], *saved]) == 130
    said, report = capsys.readouterr(), json.loads((tmp_path / "report.json").read_text())
    if command == "sweep":
        assert said.err == "vnext-bench: the sweep ended at 4: interrupted\n" and [run["load"] for run in report["runs"]] == [1, 2]
        return
    assert said.err == "vnext-bench: interrupted: 2 of 4 requests had ended, and the figures are of these\n"
    assert (report["figures"]["requests"], report["figures"]["failed"]) == (2, 0)
    if command == "serve":
        assert result(tmp_path / "own")["completed"] == 2 and f"note: {said.err[13:]}" in said.out


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--percentile-metrics", "ttft,speed"], "--percentile-metrics has 'speed'"),
        (["--metric-percentiles", "50,101"], "--metric-percentiles is '50,101'"),
        (["--goodput", "itl:5"], "--goodput has 'itl:5'"),
        (["--goodput", "ttft:soon"], "--goodput has 'ttft:soon'"),
        (["--metadata", "alone"], "--metadata has 'alone'"),
        (["--dataset-name", "sharegpt"], "--dataset-name sharegpt needs its file"),
        (["--dataset-name", "custom", "--dataset-path", "/none.jsonl"], "--dataset-path /none.jsonl cannot be read"),
        (["--dataset-path", "/none.jsonl"], "--dataset-name random has no file: take --dataset-path out"),
        (["--from-log", "/none", "--dataset-path", "/none.jsonl"], "--from-log brings its own requests: take --dataset-path out"),
        (["--from-log", "/none"], "--from-log: /none cannot be read"),
        (["--log-speed", "0"], "--log-speed is 0"),
        (["--burstiness", "0"], "--burstiness is 0"),
        (["--random-range-ratio", "1"], "--random-range-ratio is 1"),
        (["--dataset-name", "sonnet"], "--dataset-name is 'sonnet'"),
        (["--dataset-name", "agent", "--dataset-path", "/none"], "are a chat's: add --backend openai-chat"),
        (["--dataset-name", "agent", "--backend", "anthropic"], "has no form for --backend anthropic: take openai-chat"),
        (["--ramp-up-strategy", "linear"], "--ramp-up-strategy needs --ramp-up-start-rps"),
        (["--ramp-up-strategy", "linear", "--request-rate", "3"], "says what --request-rate would"),
        (["--ramp-up-start-rps", "5"], "--ramp-up-start-rps has no effect without --ramp-up-strategy"),
        (["--save-detailed"], "--save-detailed has no effect without --save-result"),
        (["--ramp-up-strategy", "wild"], "--ramp-up-strategy is 'wild'"),
        (["--base-url", "http://127.0.0.1:1"], "is it running?"),
        *[(["--base-url", url], f"'{url}' is no server's URL: write it as") for url in ("ftp://a", "http://a:99999", "http://a?b=c", "http://:80")],
    ],
)
def test_what_cannot_be_served_is_one_sentence(capsys: pytest.CaptureFixture[str], argv: list[str], words: str) -> None:
    try:
        status = main(["serve", *SMALL, *argv])
    except SystemExit as ended:
        status = ended.code
    said = capsys.readouterr().err
    assert status == 2 and words in said and len(said.splitlines()) == 1


def timeline(intended_s: float, *pieces: tuple[float, int], ended_s: float, error: str = "") -> Timeline:
    return Timeline(
        intended_s=intended_s, sent_s=intended_s, pieces=tuple(Piece(*each) for each in pieces), input_tokens=10,
        output_tokens=sum(count for _, count in pieces), ended_s=ended_s, error=error,
    )  # fmt: skip


def test_figures_that_a_reader_can_check_by_hand() -> None:
    """Two answers of three tokens, the second twice as slow, and a failure beside both."""
    timelines = [
        timeline(0.0, (0.1, 1), (0.2, 2), ended_s=0.2), timeline(0.0, (0.2, 1), (0.4, 2), ended_s=0.4),
        timeline(0.0, ended_s=0.3, error="no"),
    ]  # fmt: skip
    found = result_of(timelines, 2.0, wanted_of("ttft,tpot,e2el", "50", ["ttft:150"]))
    assert (found["completed"], found["failed"], found["total_output_tokens"], found["output_throughput"]) == (2, 1, 6, 3.0)
    assert (found["request_throughput"], found["request_goodput"]) == (1.0, 0.5)
    assert found["mean_ttft_ms"] == pytest.approx(150) and found["std_ttft_ms"] == pytest.approx(50)
    assert found["median_tpot_ms"] == pytest.approx(75) and found["p50_e2el_ms"] == pytest.approx(300)
    assert (found["max_concurrent_requests"], found["max_output_tokens_per_s"]) == (3, 6.0)
    assert "mean_itl_ms" not in found and [len(gaps) for gaps in details_of(timelines)["itls"]] == [2, 2, 0]
    assert "request_goodput" in result_of(timelines, 2.0, Wanted()) and result_of(timelines, 2.0, Wanted())["request_goodput"] is None
    assert "Request goodput (req/s):                 0.50" in table(found, wanted_of("ttft", "50", []))


def test_random_lengths_stay_in_their_range(tokenizer: Tokenizer) -> None:
    lengths = RandomLengths(input=100, output=20, prefix=8, range_ratio=0.5)
    found = random_samples(200, lengths, tokenizer, seed=1)
    assert found == random_samples(200, lengths, tokenizer, seed=1) != random_samples(200, lengths, tokenizer, seed=2)
    assert {tuple(each.prompt[:8]) for each in found} == {tuple(found[0].prompt[:8])}
    read, written = [each.input_tokens - 8 for each in found], [each.output_tokens for each in found]
    assert 50 <= min(read) < 60 and 140 < max(read) <= 150 and 10 <= min(written) < 12 and 28 < max(written) <= 30
    assert all(len(each.prompt) == each.input_tokens for each in found)


def test_prompts_of_a_folder_and_of_the_hub(tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All Parquet below a folder by its names, whatever else is there; a data set of the hub is such a folder."""
    parquet, arrow = pytest.importorskip("pyarrow.parquet"), pytest.importorskip("pyarrow")
    (tmp_path / "set" / "split=b").mkdir(parents=True)
    for name, prompts in (("split=b/0.parquet", ["three"]), ("a.parquet", ["one", "two"])):
        parquet.write_table(arrow.Table.from_pylist([{"prompt": prompt} for prompt in prompts]), tmp_path / "set" / name)
    (tmp_path / "set" / "README.md").write_text("no rows")
    found = custom_samples(tmp_path / "set", 4, tokenizer, 0)
    assert [each.prompt for each in found] == ["one", "two", "three", "one"]
    (tmp_path / "none").mkdir()
    with pytest.raises(SettingsError, match="none is a folder without Parquet: name a file"):
        sharegpt_samples(tmp_path / "none", 4, tokenizer, 0, 0)
    asked = []
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda *names, **more: asked.append((names, more)) or tmp_path / "set")
    assert dataset_path("owner/set.v1") == tmp_path / "set"
    assert asked == [(("owner/set.v1",), {"repo_type": "dataset", "allow_patterns": "*.parquet"})]
    assert [dataset_path(name) for name in ("a/b.jsonl", "./a/b", "file")] == [Path("a/b.jsonl"), Path("a/b"), Path("file")]
    monkeypatch.undo()
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(SettingsError, match="owner/set is no file, nor a data set that the hub gives"):
        dataset_path("owner/set")


def test_prompts_of_files(tokenizer: Tokenizer, tmp_path: Path) -> None:
    long = "def add(first, second): return first + second"
    talk = [{"conversations": [{"from": "human", "value": long}, {"from": "gpt", "value": long}]}, {"conversations": [{"value": "a"}]}]
    (tmp_path / "talks.json").write_text(json.dumps(talk))
    count = len(tokenizer.encode(long, add_special_tokens=False))
    found = sharegpt_samples(tmp_path / "talks.json", 3, tokenizer, 0, 0)
    assert [(each.prompt, each.input_tokens, each.output_tokens) for each in found] == [(long, count, count)] * 3
    (tmp_path / "lines.jsonl").write_text(f'{json.dumps({"prompt": long})}\n{json.dumps({"prompt": "b", "output_tokens": 7})}\n')
    assert [each.output_tokens for each in custom_samples(tmp_path / "lines.jsonl", 3, tokenizer, 0)] == [256, 7, 256]
    assert [each.output_tokens for each in custom_samples(tmp_path / "lines.jsonl", 2, tokenizer, 9)] == [9, 9]
    windows = (tmp_path / "lines.jsonl").read_bytes().replace(b"\n", b"\r\n\r\n")
    (tmp_path / "windows.jsonl").write_bytes(codecs.BOM_UTF8 + windows)
    assert custom_samples(tmp_path / "windows.jsonl", 3, tokenizer, 0) == custom_samples(tmp_path / "lines.jsonl", 3, tokenizer, 0)
    (tmp_path / "wrong.jsonl").write_bytes(windows + b'{"text": "a"}')
    with pytest.raises(SettingsError, match=r"a prompt each \(line 5: Object missing required field `prompt`\)"):
        custom_samples(tmp_path / "wrong.jsonl", 3, tokenizer, 0)
    parquet, arrow = pytest.importorskip("pyarrow.parquet"), pytest.importorskip("pyarrow")
    parquet.write_table(arrow.Table.from_pylist(talk), tmp_path / "talks.parquet")
    assert sharegpt_samples(tmp_path / "talks.parquet", 3, tokenizer, 0, 0) == found
    rows = [{"id": 1, "prompt": long, "output_tokens": None}, {"id": 2, "prompt": "b", "output_tokens": 7}]
    parquet.write_table(arrow.Table.from_pylist(rows), tmp_path / "lines.parquet")
    lines = (custom_samples(tmp_path / f"lines.{kind}", 3, tokenizer, 0) for kind in ("jsonl", "parquet"))
    assert next(lines) == next(lines)
    (tmp_path / "other.parquet").write_bytes(b"PAR1 and no more")
    for read in (lambda path: custom_samples(path, 3, tokenizer, 0), lambda path: sharegpt_samples(path, 3, tokenizer, 0, 0)):
        for name in ("other.parquet", "none.parquet"):
            with pytest.raises(SettingsError, match=rf"{name} cannot be read as Parquet of (conversations|output_tokens, prompt) \("):
                read(tmp_path / name)
    (tmp_path / "empty.json").write_text("[]")
    with pytest.raises(SettingsError, match="has no prompt of a usable length"):
        sharegpt_samples(tmp_path / "empty.json", 3, tokenizer, 0, 0)
