"""The GPUs that a load takes: answers that can be counted by hand, bounds that hold, and one sentence where there is no answer."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from vnext.commands.bench.bounds import bounds_of, broken
from vnext.commands.bench.cli import main
from vnext.commands.bench.control import size
from vnext.commands.bench.control.roofline import DEVICES, SHAPES, Roofline
from vnext.commands.bench.control.simulate import Asked
from vnext.commands.bench.control.size import BATCHES, REPLICAS_MAX, Found, Load, fewest, held, least, seen

ARGV = ["size", "8b", "--device", "h100", "--gpus-each", "1,2", "--num-prompts", "60", "--input-len", "64", "--output-len", "16"]
SLO = ["--slo", "ttft.p99<200ms,itl.p99<30ms"]


class Ticking(Roofline):
    """Steps of 10 ms, whatever is in them."""

    def step_s(self, scheduled: object) -> float:
        return 0.01


def test_replicas_are_as_few_as_hold() -> None:
    """A step of 10 ms serves 8 tokens of prompts, so a replica reads 12.5 prompts of 64 tokens a second: 100 take 9 or more, and with
    the first tokens bounded to 0.3 s not many more."""
    load = Load(Asked(count=100, rate=100, input=64, output=1), bounds_of(["ttft.p99<300ms"]), 8)
    room = Ticking(SHAPES["8b"], DEVICES["h100"], 1)
    found = fewest(load, room)
    assert found is not None and 9 <= found.replicas <= 24
    assert held(load, room, found.replicas) is not None and held(load, room, found.replicas - 1) is None
    assert fewest(load._replace(bounds=bounds_of(["ttft.p99<5ms"])), room) is None, "a first token takes 80 ms"


def searched(load: Load, room: Roofline) -> Found | None:
    """The plain search: doubled from one on, then halved, with every batch."""

    def tried(replicas: int) -> Found | None:
        for batch in BATCHES:
            figures, most = seen(load, room, replicas, batch)
            if not broken(load.bounds, figures):
                return Found(replicas, min(batch, 1 << (most - 1).bit_length()), figures)
        return None

    low, high = 0, 1
    while (best := tried(high)) is None:
        low, high = high, 2 * high
        if high > REPLICAS_MAX:
            return None
    while best.replicas - low > 1:
        half = (low + best.replicas) // 2
        if (found := tried(half)) is None:
            low = half
        else:
            best = found
    return best


@pytest.mark.parametrize(("shape", "ranks", "rate", "slo"), [
    ("8b", 1, 3.0, "ttft.p99<100ms"), ("8b", 1, 900.0, "ttft.p99<100ms,itl.p99<20ms"), ("8b", 2, 4000.0, "itl.p99<9ms"),
    ("70b", 4, 400.0, "ttft.p99<300ms"), ("8b", 1, 4000.0, "ttft.p99<1000s"), ("8b", 1, 100.0, "itl.p99<1us"),
])  # fmt: skip
def test_a_search_from_the_bound_finds_what_the_plain_one_does(
    shape: str, ranks: int, rate: float, slo: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where a bound so lax holds that queues grow to the end, and where none holds."""
    simulations: list[int] = []
    plain = size.simulated
    monkeypatch.setattr(size, "simulated", lambda asked, *rest: simulations.append(asked.count) or plain(asked, *rest))
    load = Load(Asked(count=40, rate=rate, input=48, output=12, shared=16), bounds_of(slo.split(",")), 2048)
    room = Roofline(SHAPES[shape], DEVICES["h100"], ranks)
    found, took = fewest(load, room), sum(simulations)
    assert found == searched(load, room)
    if found is not None and found.replicas > 2:
        assert took < 0.8 * (sum(simulations) - took), "requests simulated"


def test_what_the_work_takes_alone_is_near_what_holds() -> None:
    """A little above it where a short load ends before its queue is too long."""
    for rate in (1.0, 300.0, 3000.0):
        load = Load(Asked(count=40, rate=rate, input=256, output=32), bounds_of(["ttft.p99<200ms"]), 8192)
        room = Roofline(SHAPES["8b"], DEVICES["h100"], 1)
        found = fewest(load, room)
        assert found is not None and 0.5 <= least(load, room) / found.replicas <= 1.25


def test_a_smaller_batch_where_a_large_one_is_too_slow() -> None:
    class Growing(Roofline):
        def step_s(self, scheduled: object) -> float:
            return 0.001 * len(scheduled.ids)  # type: ignore[attr-defined]

    load = Load(Asked(count=100, rate=1e4, input=4, output=8), bounds_of(["itl.p99<33ms"]), 8192)
    found = held(load, Growing(SHAPES["8b"], DEVICES["h100"], 1), 1)
    assert found is not None and found.max_num_seqs == 32


def test_an_answer_has_gpus_blocks_batch_and_memory(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = tmp_path / "size.json"
    assert main([*ARGV, *SLO, "--request-rate", "5", "--json", str(report), "--assert", "gpus<=1"]) == 0
    found = json.loads(report.read_text())
    assert [run["gpus_each"] for run in found["runs"]] == [1, 2] and found["figures"]["replicas"] == 1
    assert found["figures"]["blocks"] == pytest.approx((0.9 * 80e9 - 16.06e9) / 131072 / 16, rel=0.01)
    shown = capsys.readouterr().out
    assert shown.startswith("1 x h100: 1 times vnext serve MODEL -tp 1 --max-num-seqs ")
    assert "<- fewest" in shown and "16.10" in shown and "kept free GB" in shown and "nothing was run" in shown


def test_more_requests_take_more_replicas(tmp_path: Path) -> None:
    counts = []
    for rate in ("5", "2000"):
        assert main([*ARGV, *SLO, "--request-rate", rate, "--json", str(tmp_path / "r.json")]) == 0
        counts.append(json.loads((tmp_path / "r.json").read_text())["figures"]["gpus"])
    assert counts[0] == 1 < counts[1]


@pytest.mark.parametrize(("argv", "sentence"), [
    ([], "name what must hold: --slo"),
    (["--slo", "ttft"], "--slo has 'ttft': write a figure and its bound"),
    (["--slo", "itl.p98<5ms"], "--slo itl.p98<5ms: of a time there are mean, p50, p90, p99."),
    (["--slo", "itl.p99<1us"], "holds with no number of replicas up to 256: itl.p99<1us does not hold: itl_p99_ms is"),
    ([*SLO, "--request-rate", "0"], "--request-rate is 0.0: give the requests"),
    ([*SLO, "--device", "abacus"], "known are a100"),
    ([*SLO, "--gpus-each", "0"], "write numbers from 1 to 64"),
])  # fmt: skip
def test_bad_input_is_one_sentence(argv: list[str], sentence: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*ARGV, *argv]) == 2
    assert sentence in (error := capsys.readouterr().err) and error.count("\n") == 1


def test_weights_that_fit_nowhere(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["size", "405b", "--device", "l4", "--gpus-each", "1,8", *SLO]) == 2
    assert "GB of weights do not fit on 8 x l4: give more --gpus-each." in capsys.readouterr().err


def test_vnext_size_is_the_same_command() -> None:
    ran = subprocess.run(
        [sys.executable, "-m", "vnext.commands.cli", *ARGV, *SLO], capture_output=True, text=True, timeout=100, check=True
    )
    assert "1 x h100" in ran.stdout
