"""Fixtures that every room's tests may use, the options of the test run, and how it uses all cores."""

from __future__ import annotations

import gc
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import suppress
from functools import cache
from importlib import import_module
from pathlib import Path

import msgspec
import pytest
from chromium import start_browser
from costs import Costs
from sampled import sample, seed_of
from walking import WALKED, Walked, summary

ROOT = Path(__file__).resolve().parents[1]
os.environ["HYPOTHESIS_NO_PLUGINS"] = "1"  # trio's alone, which searches all that is collected for garbage
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # each of a hundred processes that tests start would compile all of vnext
for package in ("httpx", "httpx2"):  # each client of a test would read the world's certificates: 26 ms
    with suppress(ImportError):
        transports = import_module(f"{package}._transports.default")
        transports.create_ssl_context = cache(transports.create_ssl_context)
sys.dont_write_bytecode = False  # else every run rewrites the asserts of all tests anew: half of what it takes to collect them


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--walk-events", type=int, default=1_000_000, help="events of the seeded simulation in tests/sim (default 1000000)"
    )
    parser.addoption("--long", action="store_true", help="every case, also of long files that are otherwise sampled")
    parser.addoption("--sample-seed", default="", help="which cases of long files a run takes (default: the commit)")
    parser.addoption("--rewrite", action="store_true", help="write the traces of tests/golden anew, to be reviewed as a diff")


def pytest_configure(config: pytest.Config) -> None:
    """Engines of tests compute on the CPU, also where --device auto would find a GPU; tests/gpu is run by its own name. A process
    that crashes ends the run, and the report names its test: another one would begin the same file with the same test. What tests
    start heeds SIGINT, which a shell's background jobs inherit as ignored."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if config.pluginmanager.hasplugin("xdist") and config.option.maxworkerrestart is None:
        config.option.maxworkerrestart = "0"
    config.pluginmanager.register(Costs(), "costs")
    config.option.sample_seed = config.workerinput["sample_seed"] if hasattr(config, "workerinput") else seed_of(config)
    if not any("gpu" in Path(argument).parts for argument in config.args):
        os.environ["CUDA_VISIBLE_DEVICES"] = ""


@pytest.hookimpl(hookwrapper=True)
def pytest_collection() -> Iterator[None]:
    """What is collected lives as long as the process: to search it for garbage takes a quarter of the time of collecting it, and a
    second for every full collection afterwards."""
    gc.disable()
    yield
    gc.freeze()
    gc.enable()


@pytest.fixture(scope="session")
def documented_policies(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The code of docs/policies.md as an importable module; its name."""
    parts = (ROOT / "docs" / "policies.md").read_text().split("```python\n")[1:]
    folder = tmp_path_factory.mktemp("documented")
    (folder / "house_policies.py").write_text("\n\n".join(part.split("```")[0] for part in parts))
    sys.path.insert(0, str(folder))
    yield "house_policies"
    sys.path.remove(str(folder))


@pytest.fixture(scope="session")
def browser() -> Iterator[object]:
    """A real one, skipped where there is none (chromium.py)."""
    driver = start_browser()
    yield driver
    driver.quit()


# ---- all cores ---------------------------------------------------------------------------------------------------


SPREAD = ("tests/sim/test_walk.py", "tests/sim/planted/test_planted_stories.py")
"""Files whose tests share nothing and are long: any process takes any of them. Other files stay in one process."""
FIRST = (
    "tests/arm/test_arm.py", "tests/hosts/test_on_ray.py", "tests/cuda/test_gpu_check.py", "tests/test_docs.py", "tests/sim/test_walk.py",
    "tests/runtime/processes/test_killed_ranks.py", "tests/e2e/test_served_adapters.py", "tests/test_peers.py", "tests/test_tidy.py",
    "tests/cuda/steps/test_cuda_graphs.py", "tests/cuda/test_planted_kernel_bugs.py", "tests/e2e/test_server_life.py",
    "tests/e2e/test_agent.py", "tests/hosts/test_two_hosts.py", "tests/cuda/test_cuda_attention.py",
    "tests/recovery/test_streams_survive.py", "tests/runtime/rank/test_without_torch.py", "tests/cuda/test_sanitized.py",
)  # fmt: skip
"""The longest files, so that no process is left alone with one at the end."""
LAST = "tests/sim/planted/test_planted_stories.py"
"""Tests of a blink each that any process takes: they fill the end."""


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """What a run takes of long files; where several processes share the work, the order in which they take it."""
    if seed := config.option.sample_seed:
        items[:], left_out = sample(items, seed)
        config.hook.pytest_deselected(items=left_out)
    if hasattr(config, "workerinput"):
        turns = {file: turn for turn, file in enumerate(FIRST)} | {LAST: len(FIRST) + 1}
        items.sort(key=lambda item: turns.get(item.nodeid.split("::")[0], len(FIRST)))


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: object) -> None:
    """The other processes' options are read anew from the command line; what a run samples by is not there."""
    node.workerinput["sample_seed"] = node.config.option.sample_seed


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> object:
    from xdist.scheduler import LoadScopeScheduling

    class ByFile(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = nodeid.split("::")[0]
            return nodeid if file in SPREAD else file

    config.option.loadscopereorder = False  # by the number of tests, which says nothing here
    return ByFile(config, log)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    if seed := config.option.sample_seed:
        terminalreporter.write_line(f"long files: a sample, by --sample-seed {seed}; scripts/test_long.sh runs every case")
        for line in config.pluginmanager.get_plugin("costs").lines():
            terminalreporter.write_line(line)
    reports = (report for kind in ("passed", "failed") for report in terminalreporter.getreports(kind))
    walked = [msgspec.convert(value, Walked) for report in reports for name, value in report.user_properties if name == WALKED]
    if walked:
        terminalreporter.write_line(summary(walked))


# ------------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def root() -> Path:
    """The checkout."""
    return ROOT


@pytest.fixture(scope="session")
def stories_path() -> Path:
    """A trained toy model in the format of Hugging Face; tests that need it are skipped where it is missing."""
    for folder in (ROOT / "shared", ROOT.parent / "shared"):
        path = folder / "models" / "stories260k"
        if (path / "model.safetensors").is_file():
            return path
    pytest.skip("the model stories260k is not here: put it into ../shared/models/stories260k to run this test")
