"""Figures, workloads and reports of vnext-bench: arithmetic that a reader can check by hand."""

from __future__ import annotations

import asyncio
import json
import time
from pathlib import Path

import msgspec
import pytest

from vnext.commands.bench.client_watch import LoopWatch, busy_notes, client_notes
from vnext.commands.bench.figures import rates, server_figures, spread_ms
from vnext.commands.bench.load.events import Piece, Stream
from vnext.commands.bench.load.generator import Timeline
from vnext.commands.bench.report import Report, Result, make_report, text, write_report
from vnext.commands.bench.workload import Workload, params, prompts
from vnext.commands.machine import machine
from vnext.text.tokenizer import Tokenizer


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.load(Path(__file__).resolve().parents[3] / "vnext" / "demo_model")


def workload(**changes) -> Workload:
    return Workload(**({"prompt_count": 3, "input_length": 40, "output_length": 5} | changes))


@pytest.mark.parametrize("random", [False, True])
def test_prompts_have_their_lengths_and_their_shared_beginning(tokenizer: Tokenizer, random: bool) -> None:
    batch = prompts(workload(shared_length=16, random=random), tokenizer)
    assert [len(prompt) for prompt in batch] == [40, 40, 40]
    assert len({tuple(prompt[:16]) for prompt in batch}) == 1
    assert len({tuple(prompt[16:]) for prompt in batch}) == 3
    assert all(0 <= token < tokenizer.vocab_size for prompt in batch for token in prompt)


def test_one_seed_gives_one_workload(tokenizer: Tokenizer) -> None:
    assert prompts(workload(seed=4), tokenizer) == prompts(workload(seed=4), tokenizer)
    assert prompts(workload(seed=4), tokenizer) != prompts(workload(seed=5), tokenizer)


def test_random_prompts_hold_no_special_tokens(tokenizer: Tokenizer) -> None:
    (prompt,) = prompts(workload(prompt_count=1, input_length=2000, random=True), tokenizer)
    assert all(tokenizer.decode([token]) for token in set(prompt))


def test_answers_have_their_whole_length() -> None:
    asked = params(workload())
    assert (asked.max_tokens, asked.ignore_eos, asked.temperature) == (5, True, 0.0)


def test_rates() -> None:
    figures = rates(requests=10, input_tokens=300, output_tokens=100, elapsed_s=2.0)
    assert (figures["requests_per_s"], figures["output_tokens_per_s"], figures["total_tokens_per_s"]) == (5.0, 50.0, 200.0)


def test_spread() -> None:
    figures = spread_ms([0.001 * value for value in range(1, 102)], "gap")
    assert figures == {"gap_mean_ms": 51.0, "gap_p50_ms": 51.0, "gap_p90_ms": 91.0, "gap_p99_ms": 100.0}
    assert spread_ms([], "gap") == {}


def timeline(*pieces: tuple[float, int | None], **fields) -> Timeline:
    usual = {"intended_s": 1.0, "sent_s": 1.0, "input_tokens": 10, "output_tokens": sum(count or 1 for _, count in pieces)}
    return Timeline(pieces=tuple(Piece(*piece) for piece in pieces), **(usual | fields))


def test_server_figures_leave_failures_out() -> None:
    figures = server_figures([timeline((1.5, 1), (1.6, 1), (1.8, 1)), timeline(error="HTTP status 500")], elapsed_s=2.0)
    assert (figures["requests"], figures["failed"], figures["output_tokens"]) == (1, 1, 3)
    assert figures["ttft_p50_ms"] == pytest.approx(500)
    assert figures["itl_mean_ms"] == pytest.approx(150)
    assert figures["e2e_p50_ms"] == pytest.approx(800)


def test_latencies_count_from_the_time_that_was_intended() -> None:
    late = timeline((5.0, 1), (5.5, 1), intended_s=1.0, sent_s=4.0)
    figures = server_figures([late], elapsed_s=5.0, rate=2.0, begin_s=0.5)
    assert (figures["ttft_p50_ms"], figures["e2e_p50_ms"], figures["unsent_p50_ms"]) == (4000, 4500, 3000)
    assert figures["tpot_p50_ms"] == 500, "waiting to be sent is no part of what a token takes"
    assert (figures["rate_asked_per_s"], figures["rate_reached_per_s"]) == (2.0, round(1 / 3.5, 3))


def test_tokens_that_come_together_share_the_time_before_them() -> None:
    """Four tokens in a read after 0.4 s, one after 0.1 s: five times 0.1 s, where reads would give 0.4 and 0.1."""
    figures = server_figures([timeline((1.1, 2), (1.5, 4), (1.6, 1))], elapsed_s=1.0)
    assert figures["itl_mean_ms"] == pytest.approx(100) and figures["itl_p99_ms"] == pytest.approx(100)
    assert figures["read_gap_p50_ms"] == pytest.approx(250)
    assert figures["tpot_mean_ms"] == pytest.approx(500 / 6, abs=0.001)


def test_no_times_between_tokens_that_nobody_counted() -> None:
    figures = server_figures([timeline((1.1, None), (1.5, None), output_tokens=9)], elapsed_s=1.0)
    assert "itl_mean_ms" not in figures and figures["tpot_mean_ms"] == pytest.approx(50)


def sse(*chunks: dict) -> bytes:
    return b"".join(b"data: " + json.dumps(chunk).encode() + b"\n\n" for chunk in chunks)


def text_chunk(**more) -> dict:
    return {"choices": [{"text": "a"}], **more}


USAGE = {"choices": [], "usage": {"completion_tokens": 5}}


@pytest.mark.parametrize(
    ("reads", "counts"),
    [
        ([sse(text_chunk(usage={"completion_tokens": 2})), sse(text_chunk(usage={"completion_tokens": 5})), sse(USAGE)], [2, 3]),
        ([sse(text_chunk(), text_chunk()), sse(text_chunk()), sse(text_chunk(), text_chunk(), USAGE)], [2, 1, 2]),
        ([sse(text_chunk(), text_chunk()), sse(text_chunk(), USAGE)], [None, None]),
        ([sse(text_chunk(usage={"completion_tokens": 5})), sse(text_chunk(usage={"completion_tokens": 5}), USAGE)], [5]),
    ],
)
def test_tokens_are_counted_by_what_the_server_says(reads: list[bytes], counts: list[int | None]) -> None:
    stream = Stream()
    for at_s, data in enumerate(reads):
        stream.read(data, at_s)
    assert [piece.tokens for piece in stream.pieces()] == counts and stream.token_count == 5


def test_a_line_that_comes_in_two_reads_is_one() -> None:
    stream, data = Stream(), sse(text_chunk(usage={"completion_tokens": 1})) + b"data: [DONE]\n\n"
    for place in range(len(data)):
        stream.read(data[place : place + 1], place)
    assert [piece.tokens for piece in stream.pieces()] == [1]


def test_a_message_counts_what_the_cache_had() -> None:
    """Anthropic's input_tokens leave out the tokens that were read from the cache."""
    stream = Stream()
    usage = {"input_tokens": 3, "cache_read_input_tokens": 40, "cache_creation_input_tokens": None, "output_tokens": 0}
    events = [
        {"type": "message_start", "message": {"usage": usage}},
        {"type": "content_block_delta", "delta": {"type": "thinking_delta", "thinking": "a"}},
        {"type": "content_block_delta", "delta": {"type": "text_delta", "text": "b"}},
        {"type": "content_block_delta", "delta": {"type": "signature_delta", "signature": "s"}},
        {"type": "message_delta", "delta": {"stop_reason": "end_turn"}, "usage": {"output_tokens": 2}},
    ]  # fmt: skip
    for at_s, event in enumerate(events):
        stream.read(b"data: " + json.dumps(event).encode() + b"\n\n", at_s)
    assert (stream.prompt_tokens, stream.token_count, stream.text) == (43, 2, "ab")
    assert stream.pieces() == (Piece(1, 1), Piece(2, 1))


def test_a_busy_machine_and_a_slow_client_get_a_word() -> None:
    assert busy_notes(0.1) == [] and "kept 1.5 of" in busy_notes(1.5)[0]
    assert client_notes({"client_late_p99_ms": 1.0, "client_cores": 0.3}) == []
    assert "did not keep up" in client_notes({"client_late_p99_ms": 90.0, "client_cores": 0.3})[0]
    assert "took 0.99 of a core" in client_notes({"client_late_p99_ms": 1.0, "client_cores": 0.99})[0]


def test_the_watch_sees_a_loop_that_does_not_turn() -> None:
    async def blocked() -> dict[str, float]:
        watch = LoopWatch()
        for _ in range(3):
            await asyncio.sleep(0.02)
            time.sleep(0.3)
        await asyncio.sleep(0.02)
        return watch.stop()

    assert asyncio.run(blocked())["client_late_p99_ms"] > 200


def test_a_report_names_its_machine_and_reads_back(tmp_path: Path) -> None:
    here = machine()
    found = Result(figures={"requests": 3}, workload={}, load={"request_rate": 4.0}, notes=("others were at work",))
    report = make_report(name="throughput", command="vnext-bench throughput", before=(here, 0.0), after=here, result=found)
    write_report(report, tmp_path / "deep" / "report.json")
    data = (tmp_path / "deep" / "report.json").read_bytes()
    assert msgspec.json.decode(data, type=Report) == report
    assert len(json.loads(data)["machine"]["load"]) == 3
    assert text(report).splitlines()[1].split() == ["requests", "3"]
    assert text(report).splitlines()[2] == "note: others were at work"
