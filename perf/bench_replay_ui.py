"""Benchmark of the log's page on a log of a million steps: first paint, any step, and the server's memory.

`python -m pytest perf/bench_replay_ui.py`, after `python scripts/make_log.py build/replay-1000000 --steps 1000000 --batch 8`.
A headless Chromium (Debian's, driven by Selenium) queries a server started as `vnext-replay ui LOG`, whose index and overview
exist already. A seek is measured in the page: from the change of address until the step, its tables and its block map are
drawn (`seek`), and until the lanes of the steps around it are drawn too (`lanes`).
"""

from __future__ import annotations

import json
import random
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from scripts.make_log import make_log
from vnext.commands.bench.load.blocking import BlockingClient

webdriver = pytest.importorskip("selenium.webdriver", reason="selenium is not installed (pip install -e .[dev])")
from selenium.common.exceptions import TimeoutException  # noqa: E402

ROOT = Path(__file__).resolve().parents[1]
LONG_STEPS = 1_000_000
LONG = ROOT / "build" / f"replay-{LONG_STEPS}"
BROWSER, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking", "--window-size=1400,1800",
    "--disable-ipc-flooding-protection",  # Chromium allows 200 address changes in ten seconds; the benchmark exceeds that
)  # fmt: skip
SEEKS = 200
WAIT_S, SCRIPT_S = 120, 20
COUNT = """
const fetched = window.fetch;
window.asked = 0;
window.fetch = (...what) => { window.asked += 1; return fetched(...what).finally(() => { window.asked -= 1; }); };
"""
SEEK = """
const [step, done] = arguments, before = performance.now(), log = document.querySelector('.log');
let seek = 0;
const look = () => {
  if (!seek && log.dataset.step === step) seek = performance.now() - before;
  if (seek && window.asked === 0) done([seek, performance.now() - before]); else setTimeout(look, 1);
};
location.hash = `#step=${step}`;
look();
"""
STUCK = "return [location.hash, document.querySelector('.log').dataset.step, document.getElementById('error').textContent, window.asked]"
PAINT = "return performance.getEntriesByType('paint').filter(e => e.name === 'first-contentful-paint').map(e => e.startTime)[0]"
SHOWN = "return (document.querySelector('.log') || {dataset: {}}).dataset.step"

needs_browser = pytest.mark.skipif(not (BROWSER and DRIVER), reason="no browser: install Debian's chromium and chromium-driver")


class Server:
    """`vnext-replay ui` of the long log."""

    def __init__(self) -> None:
        if not any(LONG.glob("*.vnextlog")):
            make_log(LONG, LONG_STEPS, 8)
        command = [sys.executable, "-m", "vnext.replay", "ui", str(LONG), "--json"]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT)
        self.address = json.loads(self.process.stdout.readline())["address"]
        self._client = BlockingClient(self.address, timeout_s=WAIT_S)

    def ask(self, name: str) -> dict:
        return self._client.ask(f"/api/{name}", None, dict)

    def ready(self) -> Server:
        """Wait for the overview and the index; the first segment's index is built on the first request for one of its steps."""
        while not (found := self.ask("logs")).get("logs") or not found["logs"][0]["overview"]["done"]:
            time.sleep(0.2)
        while "indexing" in self.ask("step?step=1"):
            time.sleep(0.2)
        return self

    def memory_mib(self, name: str) -> float:
        """Return VmHWM or VmRSS of the server."""
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        return round(int(next(line for line in status.splitlines() if line.startswith(name)).split()[1]) / 1024, 1)

    def close(self) -> None:
        self.process.terminate()
        self.process.wait(20)


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    running = Server()
    try:
        yield running.ready()
    finally:
        running.close()


@pytest.fixture(scope="module")
def browser() -> Iterator[object]:
    options = webdriver.ChromeOptions()
    options.binary_location = BROWSER
    for flag in FLAGS:
        options.add_argument(flag)
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(DRIVER))
    driver.set_script_timeout(SCRIPT_S)
    yield driver
    driver.quit()


def spread(benchmark, times_ms: list[float], name: str) -> None:
    found = sorted(times_ms)
    benchmark.extra_info[f"{name}_median_ms"] = round(found[len(found) // 2], 1)
    benchmark.extra_info[f"{name}_p95_ms"] = round(found[int(0.95 * len(found))], 1)
    benchmark.extra_info[f"{name}_most_ms"] = round(found[-1], 1)


@needs_browser
def test_first_paint(benchmark, server, browser) -> None:
    """Load the page at any step; `shown`: until the step is drawn."""
    rng, paints = random.Random(1), []

    def open_page(step: int) -> None:
        opened(browser, server, step)
        paints.append(browser.execute_script(PAINT))

    benchmark.pedantic(open_page, setup=lambda: ((rng.randrange(LONG_STEPS),), {}), rounds=12)
    spread(benchmark, paints, "first_paint")
    benchmark.extra_info["shown_median_ms"] = round(benchmark.stats["median"] * 1e3, 1)


def seek_in(browser, step: int) -> tuple[float, float]:
    """Return the milliseconds until the step is drawn, and until its lanes are."""
    try:
        return tuple(browser.execute_async_script(SEEK, str(step)))
    except TimeoutException:
        raise AssertionError(f"step {step} is not shown: {browser.execute_script(STUCK)}") from None


def opened(browser, server: Server, step: int) -> None:
    browser.get("about:blank")
    browser.get(f"{server.address}#step={step}")
    while browser.execute_script(SHOWN) != str(step):
        time.sleep(0.002)


@needs_browser
def test_seek(benchmark, server, browser) -> None:
    """Seek to any step in the page."""
    rng, seeks = random.Random(2), []
    opened(browser, server, 1)
    browser.execute_script(COUNT)
    benchmark.pedantic(
        lambda step: seeks.append(seek_in(browser, step)), setup=lambda: ((rng.randrange(LONG_STEPS),), {}), rounds=SEEKS
    )
    spread(benchmark, [each[0] for each in seeks], "seek")
    spread(benchmark, [each[1] for each in seeks], "lanes")
    benchmark.extra_info["server_peak_mib"] = server.memory_mib("VmHWM")


@needs_browser
def test_step_on(benchmark, server, browser) -> None:
    """Go one step further repeatedly, as with a key held down."""
    places, steps = iter(range(500_001, 600_000)), []
    opened(browser, server, 500_000)
    browser.execute_script(COUNT)
    benchmark.pedantic(lambda: steps.append(seek_in(browser, next(places))), rounds=SEEKS)
    spread(benchmark, [each[0] for each in steps], "step_on")
    spread(benchmark, [each[1] for each in steps], "lanes")


def test_step_answer(benchmark, server) -> None:
    """The server alone: any step as JSON."""
    rng = random.Random(3)
    benchmark.pedantic(
        lambda step: server.ask(f"step?step={step}"), setup=lambda: ((rng.randrange(LONG_STEPS),), {}), rounds=SEEKS
    )
    times = sorted(benchmark.stats.stats.data)
    benchmark.extra_info["p95_ms"] = round(times[int(0.95 * len(times))] * 1e3, 1)
    benchmark.extra_info["server_peak_mib"] = server.memory_mib("VmHWM")
    benchmark.extra_info["server_now_mib"] = server.memory_mib("VmRSS")


def test_with_what_is_there(benchmark) -> None:
    """From the start of the command to its first answer, with index and overview on disk."""

    def start() -> Server:
        return Server().ready()

    servers = []
    benchmark.pedantic(lambda: servers.append(start()), rounds=3)
    benchmark.extra_info["server_mib"] = servers[-1].memory_mib("VmHWM")
    for each in servers:
        each.close()
