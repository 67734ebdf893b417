"""A whole engine whose rank computes on the device's twin: with drafts it gives the answers of an engine on the CPU without."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import draft_heads
import msgspec
import pytest
from device_twin import compute_on_twins
from engine_here import engines_here
from heads.saved import right_head, save_mimo, save_target
from test_drafted_tokens import METHODS, Answer, answers, undrafted

from vnext.replay.cli.main import main as replay

ON_DEVICE = {"device": "cuda", "executor": "inproc", "enforce_eager": True, "num_blocks_override": 600, "digest_interval": 16}
WAYS: dict[str, dict[str, Any]] = {
    "scheduled ahead": {}, "in step": {"async_scheduling": False}, "preempted": {"num_blocks_override": 60, "max_model_len": 512},
    "in chunks": {"max_num_batched_tokens": 64, "max_num_seqs": 40},
}  # fmt: skip


@pytest.fixture
def expected(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Answer]]:
    """The answers of an engine on the CPU. From then on, engines with device "cuda" compute on the twin, by the CPU's kernels."""
    found = undrafted()
    compute_on_twins(monkeypatch)
    with engines_here():
        yield found


@pytest.mark.parametrize(("method", "way"), [*zip(("ngram", "suffix", "grammar", "draft model"), WAYS, strict=True)])
def test_an_engine_on_a_device_answers_as_one_on_the_cpu_without_drafts(
    expected: list[Answer], tmp_path: Path, capsys: pytest.CaptureFixture[str], method: str, way: str
) -> None:
    """48 requests that ask for much, log-probabilities too. The log verifies, laws and grammars."""
    settings = {**ON_DEVICE, **WAYS[way], "log": "full", "log_dir": str(tmp_path)}
    assert answers(speculative_config=METHODS[method], **settings) == expected
    (log,) = tmp_path.iterdir()
    assert replay(["verify", "--laws", "--grammar", str(log)]) == 0 and capsys.readouterr()
    assert replay(["show", "--json", str(log)]) == 0
    counters = msgspec.json.decode(capsys.readouterr().out)["state"]["counters"]
    assert counters["draft_tokens"] > 0 and (counters["preempted"] > 0) >= (way == "preempted")


@pytest.mark.parametrize("method", ["eagle3", "mtp"])
def test_heads_on_a_device_change_no_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], method: str
) -> None:
    """The engine preempts. The log verifies, and drafts are kept."""
    model = save_mimo(tmp_path / "model") if method == "mtp" else save_target(tmp_path / "model")
    head = {} if method == "mtp" else {"model": str(right_head(tmp_path / "head", model))}
    plain, logs = draft_heads.answers(model, log="off"), tmp_path / "logs"
    compute_on_twins(monkeypatch)
    settings = {**ON_DEVICE, "num_blocks_override": 40, "log": "full", "log_dir": str(logs)}
    with engines_here():
        asked = {"method": method, "num_speculative_tokens": 4, "row_cost": 0} | head
        assert draft_heads.answers(model, speculative_config=asked, **settings) == plain
    draft_heads.require_right(logs, capsys, preempts=True)
