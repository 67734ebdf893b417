"""vnext-bench: measures an engine and a server end to end, and says what is wrong in one sentence."""

from __future__ import annotations

import asyncio
import io
import json
import re
import sys
from functools import partial
from pathlib import Path

import msgspec
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from vnext.commands.bench import report, running
from vnext.commands.bench.cli import main
from vnext.commands.bench.running import without_key
from vnext.commands.bench.serve import save
from vnext.commands.bench.server_runs import Load, Measured, MeasurementFailed, ServerUnusable, measure_server
from vnext.commands.bench.workload import Workload

SMALL_ENGINE = ["--executor", "inproc", "--threads", "1", "--log", "off"]
WORKLOAD = Workload(prompt_count=4, input_length=3, output_length=2)


class Backend:
    """A server of streams: two pieces and the usage, or `status` for every request."""

    def __init__(self, status: int = 200) -> None:
        self.status = status
        self.bodies: list[dict] = []
        self.live, self.live_max = 0, 0
        self.app = web.Application()
        self.app.add_routes([web.get("/v1/models", self.models), web.post("/v1/completions", self.complete)])

    async def models(self, request: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "m"}]})

    async def complete(self, request: web.Request) -> web.StreamResponse:
        self.bodies.append(await request.json())
        if self.status != 200:
            return web.Response(status=self.status, text="no")
        self.live += 1
        self.live_max = max(self.live_max, self.live)
        await asyncio.sleep(0)
        chunks = [{"choices": [{"text": "a"}]}, {"choices": [{"text": "b"}]}, {"choices": [], "usage": {"completion_tokens": 2}}]
        self.live -= 1
        body = b"".join(b"data: " + msgspec.json.encode(chunk) + b"\n\n" for chunk in chunks)
        return web.Response(body=body + b"data: [DONE]\n\n")


async def measured(backend: Backend, workload: Workload = WORKLOAD, **load) -> Measured:
    batch = [[5, 6, 7]] * workload.prompt_count
    async with TestServer(backend.app) as server:
        return await measure_server(Load(url=str(server.make_url("")).rstrip("/"), **load), workload, batch)


def test_a_server_is_measured() -> None:
    backend = Backend()
    figures = asyncio.run(measured(backend, concurrency=1, rate=10_000.0)).figures
    assert (figures["requests"], figures["failed"], figures["input_tokens"], figures["output_tokens"]) == (4, 0, 12, 8)
    assert {"ttft_p99_ms", "tpot_p50_ms", "e2e_mean_ms"} <= figures.keys()
    assert backend.live_max == 1, "concurrency bounds what is sent at once"
    assert {body["model"] for body in backend.bodies} == {"m"}
    assert [(body["prompt"], body["max_tokens"], body["ignore_eos"], body["stream"]) for body in backend.bodies] == [
        ([5, 6, 7], 2, True, True)
    ] * 4


class SlowBackend(Backend):
    """Answers one request at a time, each in ANSWER_S and none before `crowd` have come: what is asked of it faster waits."""

    ANSWER_S = 0.05

    def __init__(self, crowd: int = 0) -> None:
        super().__init__()
        self._turn, self._crowd, self._is_crowded = asyncio.Lock(), crowd, asyncio.Event()
        self.waiting, self.waiting_max = 0, 0

    async def complete(self, request: web.Request) -> web.StreamResponse:
        self.waiting += 1
        self.waiting_max = max(self.waiting_max, self.waiting)
        if self.waiting_max >= self._crowd:
            self._is_crowded.set()
        await asyncio.wait_for(self._is_crowded.wait(), 60)
        async with self._turn:
            await asyncio.sleep(self.ANSWER_S)
        self.waiting -= 1
        return await super().complete(request)


SLOW = Workload(prompt_count=40, input_length=3, output_length=2)  # 2 s of answers


def test_what_clients_waited_for_a_server_that_cannot_keep_up_is_in_the_latencies() -> None:
    """200 a second asked of a server that does 20: the last client waits 1.8 s, though each request that is sent takes at most 4
    times 50 ms. Waiting is longer on a slow machine, never shorter."""
    found = asyncio.run(measured(SlowBackend(), SLOW, concurrency=4, rate=200.0)).figures
    assert found["ttft_p99_ms"] > 1500 and found["e2e_p99_ms"] > 1500
    assert found["unsent_p99_ms"] > 1000, "most of it before the request was sent"
    assert found["rate_asked_per_s"] == 200.0 and found["rate_reached_per_s"] < 40


def test_nothing_bounds_how_many_ask_at_once_unless_it_is_asked_for() -> None:
    backend = SlowBackend(crowd=SLOW.prompt_count)
    found = asyncio.run(measured(backend, SLOW, rate=400.0)).figures
    assert backend.waiting_max == SLOW.prompt_count and found["failed"] == 0
    assert found["ttft_p99_ms"] > 1500


def test_so_many_clients_ask_again_when_they_are_answered() -> None:
    """Without a rate it is the answers that bring the next requests: no request was to be sent before there was room."""
    backend = SlowBackend()
    found = asyncio.run(measured(backend, SLOW, concurrency=2)).figures
    assert backend.waiting_max == 2 and found["unsent_p99_ms"] == 0.0
    assert "rate_asked_per_s" not in found


def test_rate_concurrency_and_notes_are_in_the_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    async def reported() -> dict:
        async with TestServer(Backend().app) as server:
            argv = ["throughput", "--url", str(server.make_url("")), "--num-prompts", "3", "--input-len", "4", "--output-len", "9"]
            more = ["--request-rate", "1000", "--max-concurrency", "2", "--api-key", "secret", "--json", str(tmp_path / "report.json")]
            assert await asyncio.to_thread(main, [*argv, *more]) == 0
        return json.loads((tmp_path / "report.json").read_text())

    report = asyncio.run(reported())
    assert report["load"] == {"concurrency": 2, "request_rate": 1000.0}
    assert "--api-key ... --json" in report["command"] and "secret" not in json.dumps(report)
    assert without_key(["--api-key=secret", "a"]) == ["--api-key=...", "a"]
    assert report["cores_busy_before"] >= 0 and isinstance(report["notes"], list)
    shown = capsys.readouterr().out
    assert "rate_asked_per_s" in shown and "rate_reached_per_s" in shown and "load before" in shown and ", after" in shown


def test_a_server_that_fails_every_request_is_no_measurement() -> None:
    with pytest.raises(MeasurementFailed, match="All 4 requests .* HTTP status 500: no"):
        asyncio.run(measured(Backend(status=500)))


def test_a_server_that_wants_a_key_says_so() -> None:
    class Locked(Backend):
        async def models(self, request: web.Request) -> web.Response:
            return web.Response(status=401, text="The API key is missing.")

    with pytest.raises(ServerUnusable, match="does not say what it serves: HTTP status 401: The API key is missing."):
        asyncio.run(measured(Locked()))


def test_a_page_and_a_server_without_tls_are_no_address_of_an_engine() -> None:
    class Pages(Backend):
        async def models(self, request: web.Request) -> web.Response:
            return web.Response(text="\n<!doctype html>", content_type="text/html")

    with pytest.raises(ServerUnusable, match=r"\(its answer is a page of HTML\): is this its address\?"):
        asyncio.run(measured(Pages()))

    async def without_tls() -> None:
        async with TestServer(Backend().app) as server:
            await measure_server(Load(url=str(server.make_url("")).replace("http", "https")), WORKLOAD, [])

    with pytest.raises(ServerUnusable, match=r"\(TLS: [a-z ]+\): is this its address\?"):
        asyncio.run(without_tls())


def status(argv: list[str]) -> int:
    """What the process would end with."""
    try:
        return main(argv)
    except SystemExit as ended:
        return int(ended.code or 0)


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["throughput", "--url", "http://127.0.0.1:1"], "(Connection refused): is it running?"),
        (["throughput", "--url", "http://nowhere.invalid:1"], "nowhere.invalid:1 does not answer as an OpenAI server does ("),
        (["throughput", "--url", "http://127.0.0.1:1", "--block-size", "3"], "--block-size configures an engine"),
        (["throughput", "--num-prompts", "0"], "--num-prompts is 0"),
        (["latency", "--repeats", "0"], "--repeats is 0"),
        (["latency", "--shared-len", "9", "--input-len", "8"], "--shared-len is 9"),
        (["latency", "--input-len", "5000", *SMALL_ENGINE], "5000 in the prompt"),
        (["latency", "no/such/folder"], "no/such/folder"),
    ],
)
def test_what_cannot_be_measured_is_one_sentence(
    capsys: pytest.CaptureFixture[str], argv: list[str], words: str
) -> None:
    assert status(argv) == 2
    said = capsys.readouterr().err
    assert words in said and len(said.splitlines()) == 1


@pytest.mark.parametrize("argv", [
    ["serve", "--assert", "foo<1"], ["serve", "--assert", "rate_reached_per_s>1"], ["sweep", "--assert", "knee_concurrency>1"],
    ["sweep", "--concurrencies", "1,2", "--assert", "knee_request_rate>1"], ["sweep", "--rates", "1", "--assert", "good_share>1"],
    ["throughput", "--assert", "ttft.p99<1s"], ["latency", "--assert", "ttft.p99<1s"], ["startup", "--assert", "failed<=0"],
    ["cache", "--hit-rates", "0,50", "--assert", "gain_75>1"], ["allreduce", "--ranks", "2", "--assert", "switch_kib_4>1"],
    ["comm", "--batches", "8,32", "--assert", "bytes_full_64<9"], ["sched", "--assert", "schedule_us<9"],
    ["overlap", "--assert", "hidden_share_2>0"], ["size", "8b", "--slo", "ttft.p99<1s", "--assert", "knee_request_rate>1"],
    ["size", "8b", "--slo", "knee_request_rate>1"], ["simulate", "8b", "--assert", "client_cores<1"],
])  # fmt: skip
def test_a_figure_that_a_command_has_not_is_refused_before_it_begins(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, argv: list[str]
) -> None:
    measures = dict.fromkeys(running.MEASURES, lambda given: pytest.fail("it was measured"))
    monkeypatch.setattr(running, "MEASURES", measures | ({} if "--slo" in argv else {argv[0]: measures["serve"]}))
    assert main(argv) == 2
    said = capsys.readouterr().err
    figure = re.split("[<>.]", argv[-1])[0]
    assert f"{argv[0]} has no figure {figure}" in said and len(said.splitlines()) == 1 and ", --" not in said
    assert main(["serve", "--assert", "ttft_p99<500"]) == 2 and "figure ttft_p99 here: did you mean ttft_p99_ms?\n" in capsys.readouterr().err


@pytest.mark.parametrize("argv", [
    ["serve", "--request-rate", "3", "--assert", "rate_reached_per_s>1", "client_late.p99<9ms"],
    ["sweep", "--goodput", "ttft:5", "--assert", "good_share>1", "knee_request_rate>0", "itl.mean<1s"],
    ["throughput", "--url", "http://127.0.0.1:1", "--assert", "ttft.p99<1s"], ["throughput", "--assert", "total_tokens_per_s>1"],
    ["latency", "--assert", "step.median<1s"], ["startup", "--assert", "first_token.p90<9s", "first_start_ms<1"],
    ["cache", "--hit-rates", "0, 75", "--assert", "gain_75>1"], ["allreduce", "--ranks", "2,4", "--assert", "one_shot_us_4_128<9"],
    ["size", "8b", "--slo", "ttft.p99<1s", "--assert", "gpus<1"], ["simulate", "8b", "--assert", "price<1"],
])  # fmt: skip
def test_a_figure_that_a_command_has_is_measured(monkeypatch: pytest.MonkeyPatch, argv: list[str]) -> None:
    def begun(given: object) -> None:
        raise MeasurementFailed("begun")

    monkeypatch.setattr(running, "MEASURES", {argv[0]: begun})
    assert main(argv) == 1


@pytest.mark.parametrize("argv", [["comm", "--rounds", "0"], ["sched", "--rounds", "0"], ["allreduce", "--rounds", "0"]])
def test_no_rounds_are_no_measurement(capsys: pytest.CaptureFixture[str], argv: list[str]) -> None:
    assert status(argv) == 2 and "--rounds is 0: it must lie between 1" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("argv", "sentence"),
    [
        (["sched", "--step-ms", "nan"], "--step-ms is nan: it must be a number."),
        (["sched", "--gpu-price", "inf"], "--gpu-price is inf: it must be a number."),
        (["throughput", "--request-rate", "3"], "--request-rate has no effect without --url: leave it out, or name a server."),
        (["throughput", "--concurrency", "2"], "--concurrency has no effect without --url: leave it out, or name a server."),
        (["latency", "--input-len", "999999999"], "--input-len is 999999999: it must lie between 1 and 16777216."),
        (["serve", "--random-prefix-len", "999999999"], "--random-prefix-len is 999999999: it must lie between 0 and 16777216."),
    ],
)
def test_odd_numbers_are_one_sentence(capsys: pytest.CaptureFixture[str], argv: list[str], sentence: str) -> None:
    assert status(argv) == 2 and capsys.readouterr().err.replace(f" {argv[0]}", "") == f"vnext-bench: {sentence}\n"


@pytest.mark.parametrize("word, words", [("serv", "did you mean serve?"), ("whatever", "choose from serve, ")])
def test_a_misspelt_command_is_told_what_was_meant(capsys: pytest.CaptureFixture[str], word: str, words: str) -> None:
    assert status([word]) == 2 and f"vnext-bench: there is no command {word}: {words}" in capsys.readouterr().err


@pytest.mark.parametrize("argv", [["--json"], ["--save-result", "--result-dir"]])
def test_a_file_that_cannot_be_written_is_refused_before_the_first_request(
    capsys: pytest.CaptureFixture[str], argv: list[str], tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    assert main(["serve", "--base-url", "http://127.0.0.1:1", *argv, str(tmp_path / "file" / "r.json")]) == 2
    said = capsys.readouterr().err
    assert f"{argv[-1]} {tmp_path}/file/r.json cannot be written" in said and len(said.splitlines()) == 1
    assert main(["serve", "--base-url", "http://127.0.0.1:1", *argv, str(tmp_path / "new")]) == 2
    assert "is it running?" in capsys.readouterr().err and not [each for each in tmp_path.rglob("*") if each.name != "file" and each.is_file()]


def test_what_was_measured_is_printed_where_its_file_finds_no_room(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["sched", "--batches", "4", "--rounds", "2", "--json", "/dev/full"]) == 1
    said = capsys.readouterr()
    assert said.err == "vnext-bench: /dev/full cannot be written (No space left on device): what was measured is printed alone.\n"
    assert "batch" in said.out
    values = {"result_dir": "/dev/full", "result_filename": "r.json"}
    result = {"max_concurrency": None, "model_id": "m", "backend": "openai", "request_rate": "inf", "date": "now"}
    assert save(values, result).startswith("/dev/full/r.json cannot be written (")
    assert save(values | {"result_dir": str(tmp_path)}, result) == "" and (tmp_path / "r.json").stat().st_size


@pytest.mark.parametrize(
    ("argv", "words"), [(["--concurrencies", "1,1.5"], "whole numbers"), (["--rates", "1", "--concurrencies", "2"], "leave one of the two")]
)
def test_a_sweep_of_odd_loads_is_refused(capsys: pytest.CaptureFixture[str], argv: list[str], words: str) -> None:
    assert main(["sweep", "--base-url", "http://127.0.0.1:1", *argv]) == 2 and words in capsys.readouterr().err


@pytest.mark.parametrize(
    ("argv", "what"),
    [
        (["throughput", "--num-prompts", "3"], "answers: .* 0/3"), (["latency", "--repeats", "2"], "batches: .* 1/2"),
        (["startup", "--repeats", "1"], "starts: .* 1/1"), (["cache", "--hit-rates", "0,50", "--num-prompts", "2"], "batches: .* 1/2"),
    ],
)  # fmt: skip
def test_a_terminal_shows_how_far_it_is_and_a_file_does_not(monkeypatch: pytest.MonkeyPatch, argv: list[str], what: str) -> None:
    terminal = io.StringIO()
    monkeypatch.setattr(report, "tqdm", partial(report.tqdm, mininterval=0))
    short = [] if argv[0] == "startup" else ["--input-len", "20", "--output-len", "2"]
    for is_terminal in (True, False):
        terminal.truncate(0)
        monkeypatch.setattr(terminal, "isatty", lambda shows=is_terminal: shows, raising=False)
        monkeypatch.setattr(sys, "stderr", terminal)
        assert main([*argv, *short, *SMALL_ENGINE]) == 0
        assert bool(re.search(what, terminal.getvalue())) == is_terminal, terminal.getvalue()


def test_throughput_of_an_engine(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "report.json"
    argv = ["throughput", "--num-prompts", "3", "--input-len", "20", "--output-len", "4", "--json", str(output)]
    assert main([*argv, *SMALL_ENGINE]) == 0
    report = json.loads(output.read_text())
    assert (report["figures"]["requests"], report["figures"]["output_tokens"]) == (3, 12)
    assert report["command"].startswith("vnext-bench throughput --num-prompts 3")
    assert "output_tokens_per_s" in capsys.readouterr().out


def test_latency_of_an_engine(capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["latency", "--batch-size", "2", "--repeats", "2", "--input-len", "20", "--output-len", "4", "--random"]
    assert main([*argv, *SMALL_ENGINE]) == 0
    said = capsys.readouterr().out
    figures = {name: float(value.replace(",", "")) for name, value in re.findall(r"^  (\w+) +([\d.,]+)$", said, re.M)}
    weights_ms = figures["weights_mb_a_step"] / figures["memory_read_gb_per_s"]
    assert figures["weights_mb_a_step"] == 7.4, "the demo model's weights in bfloat16, each shard filled up"
    assert abs(figures["share_of_memory_bound"] - weights_ms / figures["step_p50_ms"]) < 0.01
