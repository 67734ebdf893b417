"""A plugin of pytest that runs benchmarks once each, small, in the place of pytest-benchmark: do they still run?

The first case of each function, with the sizes of SMALL; times and what is made of them mean nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from vnext.runtime.processes.launch import DEMO_MODEL

FEW = 3_000
SMALL: dict[str, dict[str, object]] = {
    "bench_replay": {"LONG_STEPS": FEW, "STEPS": {8: 300, 64: 100, 256: 50}},
    "bench_replay_whole": {"LONG_STEPS": FEW},
    "bench_replay_tools": {"LONG_STEPS": FEW, "FUTURES": 2, "MINUTES_10_STEPS": 300, "TINY_STEPS": 100, "TRACED": {8: 500}},
    "bench_log": {"LOG_BYTES": 2**19, "COLD_BYTES": 2**20, "WARMUP": 2},
    "bench_engine": {"ROUNDS": 1},
    "bench_step_overhead": {"STEPS": 20, "checkpoint": lambda shape, seed: DEMO_MODEL},
}
"""Module -> what decides how long it takes. Each name must be there."""


class Once:
    """In the place of the fixture `benchmark`."""

    def __init__(self) -> None:
        self.extra_info: dict[str, object] = {}
        self.stats = Stats([0.0])

    def __call__(self, target: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
        return self.pedantic(target, arguments, named)

    def pedantic(
        self, target: Callable[..., Any], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None,
        setup: Callable[[], Any] | None = None, rounds: int = 1, warmup_rounds: int = 0, iterations: int = 1,
    ) -> Any:  # fmt: skip
        for _ in range(warmup_rounds + 1):
            args, kwargs = (setup and setup()) or (args, kwargs)
            began_s = time.perf_counter()
            found = target(*args, **(kwargs or {}))
            self.stats = Stats([time.perf_counter() - began_s])
        return found


class Stats(dict[str, float]):
    """Of one round, as pytest-benchmark gives them."""

    def __init__(self, data: list[float]) -> None:
        super().__init__(dict.fromkeys(("min", "max", "mean", "median"), data[0]))
        self.stats = SimpleNamespace(data=data, **self)


@pytest.fixture
def benchmark() -> Once:
    return Once()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    folder, first = Path(config.getoption("basetemp")), dict[str, pytest.Item]()
    for item in items:
        first.setdefault(item.nodeid.partition("[")[0], item)
    items[:] = first.values()
    for module in {item.module for item in items}:
        numbers = SMALL.get(module.__name__.rpartition(".")[2], {})
        assert numbers.keys() <= vars(module).keys(), f"{module.__name__} has no {numbers.keys() - vars(module).keys()}"
        vars(module).update(numbers)
        if "LONG" in vars(module):
            module.LONG = folder.parent / "long"
