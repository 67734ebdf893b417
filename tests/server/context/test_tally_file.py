"""Rows of several processes: sums, successors of processes that were killed, and files that are full."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from vnext.server.context import tallies
from vnext.server.context.metrics import ServerMetrics
from vnext.server.context.tallies import TallyFile


def test_rows_are_summed_over_processes(tmp_path: Path) -> None:
    first, second = (TallyFile(str(tmp_path), place, 3) for place in range(2))  # the third has not started
    first.row("both", 3)[:] = memoryview(bytearray(24)).cast("d")
    first.row("both", 3)[1] += 2
    second.row("alone", 1)[0] += 0.5
    second.row("both", 3)[1] += 3
    second.row("both", 3)[2] -= 1
    assert first.sums() == second.sums() == {"both": [0, 5, -1], "alone": [0.5]}


def test_a_successor_goes_on_with_the_rows_of_a_process_that_was_killed(tmp_path: Path) -> None:
    if not (pid := os.fork()):
        row = TallyFile(str(tmp_path), 1, 2).row('["requests","GET ü"]', 1)
        for _ in range(7):
            row[0] += 1
        os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(pid, 0)
    other, successor = TallyFile(str(tmp_path), 0, 2), TallyFile(str(tmp_path), 1, 2)
    assert other.sums() == successor.sums() == {'["requests","GET ü"]': [7]}
    successor.row('["requests","GET ü"]', 1)[0] += 1
    assert other.sums() == {'["requests","GET ü"]': [8]}


def test_half_a_record_does_not_count(tmp_path: Path) -> None:
    file = TallyFile(str(tmp_path), 0, 2)
    file.row("a", 1)[0] = 1
    used = file._memory[0]
    file.row("b", 2)[1] = 5
    file._memory[0] = used  # as if it had been killed before
    again = TallyFile(str(tmp_path), 0, 2)
    assert again.sums() == {"a": [1]}
    assert list(again.row("c", 2)) == [0, 0], "what was left there is gone"


def test_a_full_file_takes_no_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tallies, "SIZE_BYTES", 4096)
    file, other = (TallyFile(str(tmp_path), place, 2) for place in range(2))
    for number in range(200):
        file.row(f"row {number}", 1)[0] += number
    assert file.sums() == {f"row {number}": [number] for number in range(200)}
    assert 100 < len(other.sums()) < 200 and other.sums().items() <= file.sums().items()


def test_metrics_of_two_processes_are_summed(tmp_path: Path) -> None:
    first, second = (ServerMetrics("toy", 100, [], TallyFile(str(tmp_path), place, 2)) for place in range(2))
    first.times.request.observe(0.01)
    second.times.request.observe(1.5, 2)
    first.http_request("GET", "/health", 200)
    second.http_request("GET", "/health", 200)
    second.http_request("GET", "/health", 503)
    assert first.text() == second.text()
    text = first.text().decode()
    labels = 'engine="all",model_name="toy"'
    assert f"vnext_e2e_request_latency_seconds_sum{{{labels}}} 3.01" in text
    assert f"vnext_e2e_request_latency_seconds_count{{{labels}}} 3.0" in text
    assert 'vnext_http_requests_total{engine="all",method="GET",model_name="toy",route="/health",status="200"} 2.0' in text
    assert 'status="503"} 1.0' in text
