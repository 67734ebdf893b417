"""Costs: what each test file costs a run in CPU seconds, beside what it may cost.

Owns the budgets. A run of all tests ends with a table by folder, and names the files that are over theirs; it never fails for them:
seconds differ between machines. A file's seconds are those of its tests, their fixtures and the processes that these waited for.
"""

from __future__ import annotations

import resource
import time
from collections import Counter
from collections.abc import Iterator, Mapping

import pytest

FOLDER_S, FILE_S = 10.0, 8.0
"""Of a folder, and of a file, that its table does not name."""
FOLDERS_S: dict[str, float] = {}
"""Folder of tests/ -> CPU seconds of a sampled run on a quiet machine with AVX-512, and a quarter more."""
FILES_S: dict[str, float] = {}
"""File -> its seconds, and a half more: what a run happens to take of it differs."""
COLLECTION, LOOSE = "collection", "loose files"
Seconds = tuple[float, float]
"""(CPU, wall)."""


class Costs:
    """A plugin of pytest: adds up what tests take in this process and in those that share its work."""

    def __init__(self) -> None:
        self._cpu: Counter[str] = Counter()
        self._wall: Counter[str] = Counter()

    def _charge(self, name: str) -> Iterator[None]:
        cpu_s, wall_s = cpu_seconds(), time.monotonic()
        yield
        self._cpu[name] += cpu_seconds() - cpu_s
        self._wall[name] += time.monotonic() - wall_s

    @pytest.hookimpl(hookwrapper=True, tryfirst=True)
    def pytest_collection(self) -> Iterator[None]:
        yield from self._charge(COLLECTION)

    @pytest.hookimpl(hookwrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        yield from self._charge(item.nodeid.partition("::")[0])

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if hasattr(session.config, "workeroutput"):
            session.config.workeroutput["costs"] = [dict(self._cpu), dict(self._wall)]

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: object) -> None:
        cpu, wall = getattr(node, "workeroutput", {}).get("costs", ({}, {}))
        self._cpu.update(cpu)
        self._wall.update(wall)

    def lines(self) -> list[str]:
        return table({name: (self._cpu[name], self._wall[name]) for name in self._cpu})


def cpu_seconds() -> float:
    """Of this process and of all processes that it has waited for, user and system."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(each.ru_utime + each.ru_stime for each in used)


def table(costs: Mapping[str, Seconds]) -> list[str]:
    """A line for each folder, the most expensive first, with `>` where it is over its budget; one for each file that is over its own."""
    folders: dict[str, Seconds] = {}
    for file, spent in costs.items():
        cpu_s, wall_s = folders.get(folder_of(file), (0.0, 0.0))
        folders[folder_of(file)] = (cpu_s + spent[0], wall_s + spent[1])
    rows = [(name, *spent, FOLDERS_S.get(name, FOLDER_S)) for name, spent in sorted(folders.items(), key=lambda each: -each[1][0])]
    rows.append(("all", *map(sum, zip(*costs.values(), strict=True)), sum(row[3] for row in rows)))
    lines = [f"{'CPU seconds of tests':<24}{'today':>7}{'budget':>9}{'wall':>8}"]
    lines += [f"{name:<24}{cpu_s:>7.0f}{'>' if cpu_s > budget_s else ' ':>2}{budget_s:>7.0f}{wall_s:>8.0f}" for name, cpu_s, wall_s, budget_s in rows]
    over = [(cpu_s - budget, file, cpu_s, budget) for file, (cpu_s, _) in costs.items() if cpu_s > (budget := file_budget_s(file))]
    return lines + [f"over its budget: {file} took {cpu_s:.0f} of {budget:.0f} CPU seconds" for _, file, cpu_s, budget in sorted(over, reverse=True)]


def folder_of(file: str) -> str:
    """tests/runtime/gpu/test_words.py counts for runtime."""
    _, *rest = file.split("/")
    return rest[0] if len(rest) > 1 else LOOSE if rest else file


def file_budget_s(file: str) -> float:
    return FOLDERS_S.get(COLLECTION, FOLDER_S) if file == COLLECTION else FILES_S.get(file, FILE_S)
