"""Figures, workloads and reports of vnext-bench: arithmetic that a reader can check by hand."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest

from vnext.bench.figures import Timeline, rates, server_figures, spread_ms
from vnext.bench.report import Report, make_report, text, write_report
from vnext.bench.workload import Workload, params, prompts
from vnext.machine import machine
from vnext.server.text.tokenizer import Tokenizer


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.load(Path(__file__).resolve().parents[2] / "vnext" / "demo_model")


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


def test_server_figures_leave_failures_out() -> None:
    good = Timeline(sent_s=1.0, pieces_s=(1.5, 1.6, 1.8), input_tokens=10, output_tokens=3)
    bad = Timeline(sent_s=1.0, pieces_s=(), input_tokens=10, output_tokens=0, error="HTTP status 500")
    figures = server_figures([good, bad], elapsed_s=2.0)
    assert (figures["requests"], figures["failed"], figures["output_tokens"]) == (1, 1, 3)
    assert figures["ttft_p50_ms"] == pytest.approx(500)
    assert figures["itl_mean_ms"] == pytest.approx(150)
    assert figures["e2e_p50_ms"] == pytest.approx(800)


def test_a_report_names_its_machine_and_reads_back(tmp_path: Path) -> None:
    here = machine()
    report = make_report(
        name="throughput", command="vnext-bench throughput", before=here, after=here, workload={}, figures={"requests": 3}
    )
    write_report(report, tmp_path / "deep" / "report.json")
    data = (tmp_path / "deep" / "report.json").read_bytes()
    assert msgspec.json.decode(data, type=Report) == report
    assert len(json.loads(data)["machine"]["load"]) == 3
    assert text(report).splitlines()[1].split() == ["requests", "3"]
