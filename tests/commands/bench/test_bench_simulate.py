"""The scheduler on modelled step times: times that can be counted by hand, and a GPU's bounds."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from vnext import LLM, SamplingParams
from vnext.commands.bench.cli import main
from vnext.commands.bench.control.roofline import DEVICES, SHAPES, Roofline, form_of
from vnext.commands.bench.control.simulate import Asked, Clock, config_of, simulated
from vnext.runtime.protocol.settings import SettingsError

TICK = Clock(step_s=lambda scheduled: 0.01, cache_tokens=100_000)


def test_a_request_takes_as_many_steps_as_it_has_tokens() -> None:
    asked = Asked(count=3, rate=0.1, input=50, output=7)
    for each in simulated(asked, config_of(asked, TICK, 8, 64), TICK.step_s):
        assert each.ttft_s == pytest.approx(0.01) and each.e2e_s == pytest.approx(0.07) and each.output_tokens == 7


def test_prompts_wait_for_tokens_of_a_step_and_for_places() -> None:
    asked = Asked(count=4, rate=1e6, input=64, output=2)
    whole = simulated(asked, config_of(asked, TICK, 8, 64), TICK.step_s)
    assert max(each.ttft_s for each in whole) > 0.035, "64 tokens a step are one prompt"
    one = simulated(asked, config_of(asked, TICK, 1, 256), TICK.step_s)
    assert max(each.e2e_s for each in one) == pytest.approx(0.08, abs=1e-3)


def test_shared_prefixes_are_hits() -> None:
    counted: list[int] = []
    clock = Clock(step_s=lambda scheduled: counted.append(scheduled.tokens) or 0.01, cache_tokens=100_000)  # type: ignore[func-returns-value]
    for shared in (0, 480):
        asked = Asked(count=6, rate=1.0, input=512, output=1, shared=shared)
        simulated(asked, config_of(asked, clock, 8, 8192), clock.step_s)
    assert sum(counted[:6]) == 6 * 512 and sum(counted[6:]) == 512 + 5 * 32


def test_a_decode_step_reads_the_weights_once() -> None:
    form, h100 = SHAPES["70b"], DEVICES["h100"]
    assert form.parameters == pytest.approx(70.6e9, rel=0.01) and SHAPES["8b"].parameters == pytest.approx(8.03e9, rel=0.01)
    four, eight = (Roofline(form, h100, ranks) for ranks in (4, 8))
    step_s = four.seconds(1, 100, 100)
    assert 141e9 / 4 / 3.35e12 < step_s < 2 * 141e9 / 4 / 3.35e12 and eight.seconds(1, 100, 100) < step_s
    assert four.seconds(8192, 8192, 8192**2 / 2) > 2 * 70e9 * 8192 / 4 / 989e12
    assert Roofline(form, h100, 1).cache_tokens == 0 and four.cache_tokens == pytest.approx((288e9 - 141.1e9) / 327_680, rel=0.01)


def test_simulate_finds_the_knee(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = tmp_path / "simulated.json"
    argv = ["simulate", "70b", "--device", "h100", "-tp", "4", "--num-prompts", "24", "--output-len", "8", "--goodput", "ttft:200"]
    assert main([*argv, "--rates", "1,1000", "--json", str(report), "--assert", "knee_request_rate>=1"]) == 0
    low, high = json.loads(report.read_text())["runs"]
    assert high["output_tokens_per_s"] > low["output_tokens_per_s"] and high["price"] < low["price"]
    shown = capsys.readouterr().out
    assert "<- knee" in shown and "nothing was run" in shown
    assert main(["simulate", "70b", "--device", "l4"]) == 2 and "do not fit on 1 such devices" in capsys.readouterr().err
    assert main(["simulate", "70b", "--device", "h1"]) == 2 and "known are a100" in capsys.readouterr().err


def test_a_model_is_named() -> None:
    with pytest.raises(SettingsError, match="a shape: 8b, 70b"):
        form_of("")


def test_steps_of_a_log_are_learnt(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with LLM(executor="inproc", threads=1, log="shape", log_dir=str(tmp_path / "log")) as llm:
        for count in range(1, 5):
            params = SamplingParams(max_tokens=40, ignore_eos=True, temperature=0)
            llm.generate([[5 + at, 6, 7 + count] for at in range(count)], params, use_tqdm=False)
        log = llm.log_dir
    argv = ["simulate", "8b", "--num-prompts", "4", "--output-len", "8", "--rates", "1"]
    assert main([*argv, "--from-log", log, "--json", str(tmp_path / "a.json")]) == 0
    assert main([*argv, "--json", str(tmp_path / "b.json")]) == 0
    learnt, modelled = (json.loads((tmp_path / f"{name}.json").read_text()) for name in "ab")
    assert learnt["figures"]["tpot_p50_ms"] != modelled["figures"]["tpot_p50_ms"]
    assert len(learnt["notes"]) == 1 + ("busy before" in learnt["notes"][0]), "a whole log"
    assert "half the errors are below" in learnt["notes"][-1] and "nothing was run" in modelled["notes"][-1]
    assert main([*argv, "--from-log", str(tmp_path / "none")]) == 2 and "--from-log" in capsys.readouterr().err
    (segment,) = Path(log).glob("*.vnextlog")
    data = bytearray(segment.read_bytes())
    data[-len(data) // 4] ^= 1
    segment.write_bytes(data)
    assert main([*argv, "--from-log", log]) == 0
    assert re.search(rf"note: --from-log {log} gave \d+ steps up to where it is whole; damaged at frame \d+", capsys.readouterr().out)
