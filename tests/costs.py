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

FOLDER_S, FILE_S = 10.0, 10.0
"""Of a folder, and of a file, that its table does not name."""
FOLDERS_S: dict[str, float] = {
    "models": 190, "replay": 160, "runtime": 140, "server": 120, "sim": 115, "arm": 115, "cuda": 105, "recovery": 105, "e2e": 105,
    "media": 95, "commands": 65, "loose files": 60, "collection": 50, "hosts": 45, "rollouts": 40, "state": 40, "text": 35,
    "run": 35, "kernels": 30, "sampling": 25, "api": 20, "gateway": 20, "log": 20, "stages": 15, "options": 15, "sched": 15,
}  # fmt: skip
"""Folder of tests/ -> CPU seconds of a sampled run on two quiet cores of a Xeon (family 6 model 207), where an EPYC (Zen 5) takes
two thirds of them."""
FILES_S: dict[str, float] = {
    "tests/api/test_examples.py": 12, "tests/arm/test_arm.py": 120, "tests/commands/bench/test_bench_all_reduce.py": 15,
    "tests/commands/test_real_model.py": 40, "tests/cuda/steps/test_cuda_adapters.py": 15,
    "tests/cuda/steps/test_cuda_few_bits.py": 12, "tests/cuda/steps/test_cuda_graphs.py": 20,
    "tests/cuda/steps/test_drafted_graphs.py": 20, "tests/cuda/steps/test_short_device.py": 40, "tests/cuda/test_cuda_attention.py": 15,
    "tests/cuda/test_cuda_exchange.py": 15, "tests/cuda/test_gpu_check.py": 40, "tests/cuda/test_planted_kernel_bugs.py": 15,
    "tests/e2e/test_agent.py": 20, "tests/e2e/test_client_packages.py": 15, "tests/e2e/test_drafted_adapters.py": 15,
    "tests/e2e/test_llm_adapters.py": 15, "tests/e2e/test_mtp_layer.py": 15, "tests/e2e/test_served_adapters.py": 25,
    "tests/e2e/test_server_life.py": 25, "tests/gateway/test_router_process.py": 15, "tests/hosts/test_on_ray.py": 40,
    "tests/media/test_heard_again.py": 30, "tests/media/test_real_sounds.py": 15, "tests/media/test_served_hearing.py": 12,
    "tests/media/test_served_sounds.py": 15, "tests/media/test_sound_lives.py": 25,
    "tests/models/families/towers/test_hearing.py": 12, "tests/models/families/towers/test_kept_inputs.py": 12,
    "tests/models/families/towers/test_seeing.py": 20, "tests/models/families/towers/test_seeing_films.py": 12,
    "tests/models/layers/test_hybrid_engine.py": 15, "tests/models/layers/test_hybrid_mtp.py": 20,
    "tests/models/layers/test_latent_engine.py": 15, "tests/models/loading/test_dummy.py": 20,
    "tests/models/test_model_invariance.py": 15, "tests/options/test_option_sources.py": 15,
    "tests/recovery/test_encode_apart.py": 20, "tests/recovery/test_restart.py": 25, "tests/recovery/test_several_engines.py": 35,
    "tests/recovery/test_streams_survive.py": 20, "tests/replay/answers/test_replay_trace.py": 15,
    "tests/replay/futures/test_auto.py": 15, "tests/replay/futures/test_intervals.py": 12,
    "tests/replay/futures/test_replay_shrink.py": 15, "tests/replay/futures/test_replay_what_if.py": 15,
    "tests/replay/rerun/test_replayed_adapters.py": 20, "tests/replay/rerun/test_replayed_weights.py": 15,
    "tests/replay/tables/test_report.py": 12, "tests/replay/test_guide.py": 15, "tests/replay/test_times_of.py": 15,
    "tests/replay/ui/test_ui_browser.py": 20, "tests/rollouts/test_guidance.py": 12, "tests/rollouts/test_scores.py": 15,
    "tests/run/test_benchmarks.py": 20, "tests/run/test_changed.py": 15, "tests/runtime/processes/test_killed_ranks.py": 35,
    "tests/runtime/rank/test_without_torch.py": 15, "tests/runtime/record/test_packing.py": 15,
    "tests/runtime/transport/test_exchange_killing.py": 15, "tests/runtime/transport/test_shared_group.py": 15,
    "tests/sched/test_policies.py": 20, "tests/server/responses/test_responses.py": 15, "tests/sim/planted/test_planted.py": 15,
    "tests/sim/planted/test_planted_stories.py": 20, "tests/sim/planted/test_shrink.py": 15, "tests/sim/test_crashes.py": 15,
    "tests/sim/test_faults.py": 15, "tests/sim/test_simulator.py": 15, "tests/sim/test_walk.py": 20,
    "tests/stages/test_stage_processes.py": 15, "tests/state/store/test_columns.py": 15, "tests/test_control_plane.py": 12,
    "tests/test_packaging.py": 15, "tests/test_tidy.py": 30,
}  # fmt: skip
"""File -> its seconds, and a half more, because what a run takes of it differs; of all its tests, where a run takes all or none."""
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
