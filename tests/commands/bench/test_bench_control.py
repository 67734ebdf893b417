"""The control plane measured alone: two broadcasts that make the same batch, and the price of deciding."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from vnext.commands.bench.cli import main
from vnext.commands.bench.control.comm import ROUNDS_MAX, _decode, arrays_of, batches_of, incremental, whole_message
from vnext.commands.bench.control.sched import costs
from vnext.commands.bench.control.steady import advance, planned, steady_decode
from vnext.runtime.protocol.settings import SettingsError
from vnext.state.events import StepPlanned
from vnext.state.reduce import reduce


def test_both_broadcasts_build_the_same_batch() -> None:
    """In every step of more than a block, so that pages change."""
    form = incremental(state := steady_decode(5))
    for _ in range(state.config.block_size + 3):
        events = form.next()
        before = form.receive(form.encode(events))
        forward = form.build(before).forward
        for event in events:
            state = reduce(state, event)
        found = arrays_of(_decode(whole_message(state)), state.config.block_size)
        assert np.array_equal(found.tokens, forward.token_ids) and np.array_equal(found.positions, forward.positions)
        assert np.array_equal(found.slots, forward.slots)
        seen = -(-forward.context_lengths // state.config.block_size)
        for row, count in enumerate(seen.tolist()):
            assert np.array_equal(found.table[row, :count], forward.block_table[row, :count])


def test_a_full_broadcast_grows_with_the_batch_and_an_incremental_one_does_not(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    report = tmp_path / "comm.json"
    assert main(["comm", "--batches", "8,32", "--rounds", "4", "--json", str(report), "--assert", "bytes_incremental_32<400"]) == 0
    runs = json.loads(report.read_text())["runs"]
    sizes = {(run["form"], run["batch"]): run["bytes"] for run in runs}
    assert sizes["full", 32] > 3.9 * sizes["full", 8] > 32 * 512 and sizes["incremental", 32] < sizes["incremental", 8] + 8 * 32
    assert all(run[name] > 0 for run in runs for name in ("encode_us", "channel_us", "receipt_us", "build_us"))
    assert "bytes/step" in capsys.readouterr().out


def test_a_step_is_the_expected_one_behind_a_million_tokens() -> None:
    """Its event is no larger than behind a thousand, and its pages are all of the prompt's and no more."""
    for length in (1_000, 1_000_000):
        state = steady_decode(1, length)
        for _ in range(2 * state.config.block_size):
            assert planned(state) == StepPlanned(step=state.planned)
            state = advance(state)
        computed = int(state.rows.computed[0])
        assert computed > length + 2 * state.config.block_size - 1
        assert np.count_nonzero(state.pool.ref) == -(-computed // state.config.block_size)


def test_ranks_wait_for_what_a_step_does_not_hide() -> None:
    hidden, late = costs(100, 300.0, 100.0, 1000.0, 3.6), costs(100, 1200.0, 300.0, 1000.0, 3.6)
    assert hidden["idle_share"] == pytest.approx(400 / 1400, abs=1e-4) and hidden["idle_share_ahead"] == 0
    assert late["idle_share_ahead"] == pytest.approx(500 / 1500, abs=1e-4)
    # 3.6 dollars an hour are 0.001 a second: 1,000 tokens are ten steps
    assert float(hidden["price"]) == pytest.approx(14e-6) and float(late["price_ahead"]) == pytest.approx(15e-6)
    assert float(hidden["price_ahead"]) == pytest.approx(10e-6)


def test_sched_measures_and_holds_to_bounds(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["sched", "--batches", "4", "--rounds", "4", "--step-ms", "1000", "--assert", "idle_share_ahead_4<=0"]) == 0
    assert "schedule us" in capsys.readouterr().out
    assert main(["sched", "--batches", "4", "--rounds", "4", "--step-ms", "0.001", "--assert", "idle_share_ahead_4<=0"]) == 1
    assert "does not hold" in capsys.readouterr().err


def test_batches_are_numbers() -> None:
    assert batches_of("1,4096") == [1, 4096] and ROUNDS_MAX > 500
    for wrong in ("", "0", "a", "8,5000"):
        with pytest.raises(SettingsError, match="write numbers from 1 to 4096"):
            batches_of(wrong)
