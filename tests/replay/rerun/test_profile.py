"""profile: every operation of every recorded step is measured once, for the work that it had."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from model_logs import record

from vnext.kernels.cpu import native
from vnext.replay.causes.ledger import ledger
from vnext.replay.reading.folding import Folded, fold
from vnext.replay.reading.info import info
from vnext.replay.reading.source import Log, open_log
from vnext.replay.tables import profile as profiling

if not native.is_built():
    pytest.skip("the CPU kernels are not compiled", allow_module_level=True)

from vnext.kernels.cpu.linear import linear, pack
from vnext.kernels.cpu.traced import CALL, Operation, traced
from vnext.replay.cli.main import main
from vnext.replay.rerun.calls import ELSEWHERE, Part, parts_of


@pytest.fixture(scope="module")
def log(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return record(checkpoint, tmp_path_factory.mktemp("logs") / "log", requests=8)


@pytest.mark.parametrize("command", ["exec", "profile", "bisect"])
def test_people_read_of_records_and_not_of_a_complete_log(log, capsys, command):
    """Whether the engine has closed the log is said in the line that says how it ends."""
    assert main([command, str(log)]) == 0
    said = capsys.readouterr().out
    assert "every record is whole" in said and "complete" not in said


def test_each_operation_is_measured_for_its_work(log, answer, checkpoint):
    config = json.loads((checkpoint / "config.json").read_text())
    code, found = answer("profile", log, "--threads", "1")
    assert (code, found["end"], found["left_out"], found["skipped"]) == (0, "complete", 0, 0)
    seen = info(open_log(log))
    folded = [item for item in fold(open_log(log)) if isinstance(item, Folded)]
    planned = sum(item.after.in_flight[-1].tokens for item in folded if item.plan is not None)
    assert (found["steps"], found["tokens"]) == (seen.steps, planned)
    parts = {each["name"]: each for each in found["operations"]}
    assert found["total_ms"] == pytest.approx(sum(each["ms"] for each in parts.values()))
    assert sum(each["share"] for each in parts.values()) == pytest.approx(1)
    layers, hidden = config["num_hidden_layers"], config["hidden_size"]
    head_dim = hidden // config["num_attention_heads"]
    joined = (config["num_attention_heads"] + 2 * config["num_key_value_heads"]) * head_dim
    products = parts[f"product {hidden} to {joined}"]
    assert products["calls"] == layers * found["steps"] == parts["rotation, cache write"]["calls"]
    silent = sum(not item.after.in_flight[-1].samples.any() for item in folded if item.plan is not None)
    assert parts["norm"]["calls"] == (2 * layers + 1) * found["steps"] - 2 * silent
    work = products["gflops"] * products["ms"] * 1e6
    assert work == pytest.approx(2 * hidden * joined * layers * found["tokens"])
    head = parts[f"product {hidden} to {config['vocab_size']}"]
    assert head["gflops"] * head["ms"] * 1e6 == pytest.approx(2 * hidden * config["vocab_size"] * seen.sampled_tokens)
    assert parts[ELSEWHERE]["calls"] == found["steps"] and found["slowest"][0]["ms"] >= found["ms"] > 0


def test_experts_and_recurrent_layers(tmp_path, answer):
    from family_cases import save_case
    from hybrids import save_hybrid

    save_case(tmp_path / "experts", "mixtral_window")
    _, found = answer("profile", record(tmp_path / "experts", tmp_path / "one", requests=4, page_count=120), "--threads", "1")
    assert {"experts' rows", "choice of experts", "attention"} <= {each["name"] for each in found["operations"]}
    save_hybrid(tmp_path / "hybrid", "qwen3_5")
    log = record(tmp_path / "hybrid", tmp_path / "two", requests=4, state_pages=20, snapshot_interval=16)
    _, found = answer("profile", log, "--threads", "1", "--tp", "2")
    assert {"recurrence", "convolution", "attention"} <= {each["name"] for each in found["operations"]}


def test_the_timeline_has_the_log_and_the_operations_of_each_step(log, answer, tmp_path):
    _, found = answer("profile", log, "--steps", "4:12", "--threads", "1", "-o", tmp_path / "timeline.json")
    events = json.loads((tmp_path / "timeline.json").read_text())["traceEvents"]
    slices = [each for each in events if each["ph"] == "X"]
    assert {each["pid"] for each in slices} == {1, 2, 3} and found["timeline"] == str(tmp_path / "timeline.json")
    again = [each for each in slices if each["pid"] == 3]
    steps = [each for each in again if each["name"].startswith("step ")]
    assert [each["name"] for each in steps] == [f"step {number}" for number in range(4, 12)]
    assert all(one["ts"] + one["dur"] <= other["ts"] + 0.01 for one, other in zip(steps, steps[1:]))
    held = Counter(
        step["name"]
        for step in steps
        for each in again
        if each is not step and step["ts"] <= each["ts"] + 0.01 and each["ts"] + each["dur"] <= step["ts"] + step["dur"] + 0.01
    )
    assert sum(held.values()) == len(again) - len(steps) and min(held.values()) > 10
    assert any(each["args"].get("GFLOP/s", 0) > 0 for each in again)
    drawn = {each["name"] for each in slices if each["pid"] == 1 and each["name"].startswith("step ")}
    assert {f"step {number}" for number in range(4, 12)} <= drawn and len(drawn) <= 14


@pytest.mark.parametrize("steps", ["4:12", "7", "20:", ":3"])
def test_of_a_long_log_only_the_steps_asked_for_are_read(log, answer, monkeypatch, steps):
    whole = {entry.step: entry.us for entry in ledger(open_log(log)).entries}
    read: list[int] = []

    def counted(part: Log):
        found = ledger(part)
        read.extend(entry.step for entry in found.entries)
        return found

    monkeypatch.setattr(profiling, "ledger", counted)
    _, found = answer("profile", log, "--steps", steps, "--threads", "1")
    asked = {step["step"]: step["recorded_ms"] for step in found["slowest"]}
    assert len(read) <= found["steps"] + 8 < len(whole)
    assert all(us == pytest.approx(1e3 * asked[step], abs=1.5) for step, us in whole.items() if step in asked and step)


def call(operation: Operation, began: int, ended: int, thread: int = 0, work: int = 0) -> tuple[int, ...]:
    return (operation, thread, began, ended, 1, 8, 4, work, 0)


def test_what_another_call_holds_is_not_its_own():
    calls = np.array([
        call(Operation.LAYER, 0, 100), call(Operation.EXPERTS, 10, 60), call(Operation.PRODUCT, 20, 40, work=64),
        call(Operation.ATTENTION, 25, 95, thread=1), call(Operation.NORM, 60, 70), call(Operation.SAMPLE, 100, 130),
    ], dtype=CALL)  # fmt: skip
    assert dict(parts_of(calls)) == {
        "product 8 to 4": Part(1, 20, 64), "experts' rows": Part(1, 30), "norm": Part(1, 10), "sums, copies": Part(1, 40),
        "attention": Part(1, 70), "sampling": Part(1, 30),
    }  # fmt: skip


def test_tracing_changes_no_bit_and_counts_what_it_has_no_room_for():
    x, weight = torch.randn(5, 64), torch.randn(96, 64)
    packed = pack(weight)
    record = np.zeros(2, dtype=CALL)
    results, calls, more = traced(lambda: [linear(x, packed) for _ in range(3)], record)
    assert all(torch.equal(each, linear(x, packed)) for each in results) and (len(calls), more) == (2, 1)
    assert calls["work"].tolist() == [2 * 5 * 64 * 96] * 2 and (calls["ended_ns"] > calls["began_ns"]).all()
    with pytest.raises(ZeroDivisionError):
        traced(lambda: 1 // 0, record)
    record[:] = 0
    linear(x, packed)
    assert not record["operation"].any()  # nobody asks any more


def test_what_cannot_be_measured(log, sentence, tmp_path):
    assert "only compiled kernels" in sentence("profile", log, "--kernels", "torch")
    assert "no step" in sentence("profile", log, "--steps", "9000:")
    assert "cannot be written" in sentence("profile", log, "--steps", "0:2", "-o", tmp_path / "gone" / "timeline.json")
