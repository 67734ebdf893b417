"""LLM with adapters and drafts: drafts change no answer, and a rank that computes with another adapter is named."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from engine_here import engines_here
from test_llm_adapters import BLOCKS, GREEDY, SEEDED, TINY, answers

from vnext.api.llm import LLM
from vnext.replay.cli.main import main as replay
from vnext.runtime.client.output_stream import EngineDead
from vnext.runtime.protocol.lora_request import LoRARequest
from vnext.runtime.rank.adapters import AdapterSlots, Resident


@pytest.fixture(scope="module")
def undrafted(adapters: list[LoRARequest]) -> dict[int, list[tuple[list[int], Any]]]:
    return {ranks: mixed(adapters, tensor_parallel_size=ranks, log="off") for ranks in (1, 2)}


def mixed(adapters: list[LoRARequest], **settings: Any) -> list[tuple[list[int], Any]]:
    """The answers to prompts that repeat themselves, greedy and seeded, each with another adapter or none."""
    asked = {"enable_lora": True, "max_loras": 2, "max_lora_rank": 16, "dtype": "float32", "threads": 1, "num_blocks_override": BLOCKS}
    prompts = [f"one two {place} one two {place} one two" for place in range(24)]
    params = [(GREEDY, SEEDED)[place % 2] for place in range(24)]
    with LLM(**asked | settings) as llm:
        return answers(llm.generate(prompts, params, False, ([None, *adapters] * 4)))


@pytest.mark.parametrize(
    ("ranks", "settings"),
    [(1, {}), (1, TINY), (1, {"async_scheduling": False, "enable_prefix_caching": False}), (2, {}), (2, TINY)],
    ids=["usual", "preempted", "in step", "two ranks", "two ranks, preempted"],
)
def test_drafts_change_no_answer_of_an_adapter(
    undrafted: dict[int, list], adapters: list[LoRARequest], ranks: int, settings: dict[str, Any], tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    drafts = {"speculative_config": {"method": "ngram", "num_speculative_tokens": 4, "row_cost": 0}, "log": "full", "log_dir": str(tmp_path)}
    checks = {"check_laws": True, "digest_interval": 1}
    assert mixed(adapters, tensor_parallel_size=ranks, **drafts, **checks, **settings) == undrafted[ranks]
    (log,) = tmp_path.iterdir()
    assert replay(["verify", "--laws", str(log)]) == 0 and capsys.readouterr()
    assert replay(["show", "--json", str(log)]) == 0
    counters = json.loads(capsys.readouterr().out)["state"]["counters"]
    assert counters["accepted_tokens"] > 0 and (counters["preempted"] > 0) == (settings is TINY)


def swapped_slots(slots: AdapterSlots, slot: int) -> Resident:
    return slots._residents.get(1 - slot, slots._residents[slot])


def late_eviction(slots: AdapterSlots, slot: int) -> Resident:
    """The first adapter stays in its slot for ever."""
    return slots.__dict__.setdefault("first", {}).setdefault(slot, slots._residents[slot])


@pytest.mark.parametrize("fault", [swapped_slots, late_eviction])
def test_a_rank_that_computes_with_another_adapter_is_named(
    adapters: list[LoRARequest], fault: Callable[..., Resident], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(AdapterSlots, "resident", fault)
    with engines_here(), pytest.raises(EngineDead, match=r"rank 0 has drifted: its batch digest differs at step \d+ \(adapters\)"):
        mixed(adapters, executor="inproc", log_dir=str(tmp_path), digest_interval=1, max_restarts=0)
