"""A pytest plugin for the check on a GPU: it records each outcome at once and limits a device error to one test.

Loaded by `-p perf.gpu.outcomes --findings FILE --part PART --hang-s SECONDS`. After each test the plugin synchronizes
the GPU. An error that would fail every later test of the process (an illegal address, say) is charged to that test and ends the
process. A test that exceeds its time ends the process too. The check then runs the remaining tests in a new process.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Generator
from pathlib import Path

import pytest

from perf.gpu.findings import Findings

ENDED_HERE = 86
"""Exit status of a process whose device is broken or whose test took too long."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--findings", type=Path, help="the file of findings")
    parser.addoption("--part", help="the part of the check that runs these tests")
    parser.addoption("--hang-s", type=float, help="seconds that a test may take")


def pytest_configure(config: pytest.Config) -> None:
    findings = Findings(config.option.findings, config.option.part)
    worker = getattr(config, "workerinput", {}).get("workerid", "")
    config.pluginmanager.register(Outcomes(findings, worker, config.option.hang_s))


class Outcomes:
    """Hooks of the plugin. `worker`: the name of an xdist worker, "" in the controller or a single process."""

    def __init__(self, findings: Findings, worker: str, hang_s: float) -> None:
        self._findings, self._worker, self._hang_s = findings, worker, hang_s

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        if session.items and self._worker in ("", "gw0"):
            self._findings.note(collected=[item.nodeid for item in session.items])

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, bool | None, bool | None]:
        self._findings.note(started=item.nodeid)
        watch = threading.Timer(self._hang_s, self._end, (item.nodeid, f"took longer than {self._hang_s:g} s"))
        watch.daemon = True
        watch.start()
        result = yield
        if error := device_error():
            self._end(item.nodeid, error)
        watch.cancel()
        return result

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if self._worker or not (report.when == "call" or report.failed or report.skipped):
            return  # the xdist controller receives every outcome
        crash = getattr(report.longrepr, "reprcrash", None)
        why = crash.message.splitlines()[0] if crash else "" if report.passed else str(report.longrepr).splitlines()[-1]
        self._findings.note(test=report.nodeid, outcome=report.outcome, why=why[:300])

    def _end(self, test: str, why: str) -> None:
        self._findings.note(test=test, outcome="failed", why=why)
        os._exit(ENDED_HERE)


def device_error() -> str:
    """Synchronize the GPU and return its error; "" if there is none or the GPU was never used."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return ""
    try:
        torch.cuda.synchronize()
    except RuntimeError as error:
        return str(error).splitlines()[0]
    return ""
