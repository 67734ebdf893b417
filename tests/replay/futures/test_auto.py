"""what-if --auto: it finds the setting against a trouble that was made, judges it like any other, and prints the serve line."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from threading import Timer

import pytest
from log_drive import small_config, started

from tests.replay.log_answers import answer
from vnext.replay.cli.main import main
from vnext.replay.console.commands import in_processes
from vnext.replay.futures import auto
from vnext.replay.futures.auto import Changes, sought
from vnext.replay.futures.what_if import serve_line
from vnext.replay.futures.what_if_score import RunScore
from vnext.replay.reading.objective import Objective

sys.path.append(str(Path(__file__).resolve().parents[1] / "causes"))

import incidents  # noqa: E402  (needs the path above)

NO_GAIN = RunScore(
    changes="", ttft_ms=(1, 1), itl_ms=(1, 1), tokens_s=1, met=0.5, good_s=1, requests=1, refused=0, steps=1, larger=0,
    preemptions=0, hit_rate=0, seconds=1,
)  # fmt: skip


@pytest.mark.parametrize(
    ("incident", "objective", "setting"),
    [("noisy", "ttft=1s", "policy=fair"), ("slow_client", "ttft=1s", "")],
)
def test_what_helps_is_found(tmp_path, capsys, incident, objective, setting) -> None:
    incidents.record(tmp_path, incident)
    code, found = answer(capsys, "what-if", tmp_path / incident, "--auto", "--slo", objective)
    assert code == int(bool(setting)) and setting in found["recommended"] and bool(found["recommended"]) == bool(setting)
    assert len({each["changes"] for each in found["runs"]}) == len(found["runs"]) <= 3
    best = max([each["met"] for each in found["runs"]], default=1.0)
    assert best >= found["unchanged"]["met"]
    assert found["serve"].startswith("vnext serve example-8b --" if setting else "")
    assert bool(found["serve"]) == bool(setting)


def test_orders_against_waiting_are_tried_where_first_tokens_are_bounded() -> None:
    """Deadlines as long as the objective; weights of the lightest clients, once clients take turns."""
    def tried(policy: str, objective: Objective, clients: tuple[str, ...] = ("a", "b", "c")) -> list[dict[str, object]]:
        found = list[dict[str, object]]()

        def scores_of(changes: Sequence[Changes]) -> list[RunScore]:
            found.extend(map(dict, changes))
            return [NO_GAIN] * len(changes)

        sought(scores_of, small_config(policy=policy), lambda changes: True, objective, clients)
        return [each for each in found if set(each) & {"policy", "weight:a", "weight:b", "weight:c"}]

    first = Objective(ttft_us=700_000)
    assert {"policy": "deadline:700"} in tried("fcfs", first) and {"policy": "deadline:700"} not in tried("fcfs", Objective(itl_us=5e4))
    weights = [{f"weight:{client}": weight} for client in "ab" for weight in (3, 10)]
    assert [each for each in tried("fair", first) if "policy" not in each] == weights
    for policy, objective, clients in (("fcfs", first, ("a", "b")), ("fair", Objective(itl_us=5e4), ("a", "b")), ("fair", first, ("a",))):
        assert all("policy" in each for each in tried(policy, objective, clients))


def test_a_weight_is_found_and_the_file_of_keys_named(tmp_path, capsys, monkeypatch) -> None:
    monkeypatch.setattr(auto, "ROUNDS", 1)  # the first one finds it
    incidents.record(tmp_path, "guest", incidents.guest())
    code, found = answer(capsys, "what-if", tmp_path / "guest", "--auto", "--slo", "ttft=500ms")
    assert code == 1 and "weight:7b96e3145ad8f02c=10" in found["recommended"]
    assert found["serve"].endswith("  # in the file of keys `weight: 10` for the client 7b96e3145ad8f02c")


def test_the_line_has_the_options_of_serve() -> None:
    line = serve_line(started(small_config()), "policy=fair prefix_caching=False chunked_prefill=True max_num_seqs=64")
    options = "--scheduling-policy fair --no-enable-prefix-caching --enable-chunked-prefill --max-num-seqs 64"
    assert line == f"vnext serve toy {options}" and serve_line(started(small_config()), "") == ""


def test_without_an_objective_there_is_nothing_to_seek(tmp_path, capsys) -> None:
    incidents.record(tmp_path, "slow_client")
    assert main(["what-if", str(tmp_path / "slow_client"), "--auto"]) == 2
    assert "--auto seeks the settings that meet an objective" in capsys.readouterr().err


def test_ctrl_c_ends_the_processes_without_a_word_of_theirs(capfd: pytest.CaptureFixture[str]) -> None:
    """It reaches all processes of a terminal, this one too. They ignore it, and would sleep on."""
    with ProcessPoolExecutor(2, multiprocessing.get_context("spawn")) as pool:
        assert all(signal.SIGINT in blocked for blocked in in_processes(pool, partial(signal.pthread_sigmask, signal.SIG_BLOCK), [(), ()]))
        workers = list(pool._processes)
        Timer(0.2, lambda: [os.kill(each, signal.SIGINT) for each in (*workers, os.getpid())]).start()
        with pytest.raises(KeyboardInterrupt):
            in_processes(pool, time.sleep, [300, 300])
    assert capfd.readouterr().err == ""
