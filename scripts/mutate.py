"""Mutate: change one place of the product's source at a time and check whether a test fails.

    python scripts/mutate.py --sample 200 --seed 1 --out perf/records/mutation.json
    python scripts/mutate.py --paths vnext/state/pool.py --sample 0          every mutation of one file

Modules and tests are imported once. Each mutant is a forked process in which the changed function has its new code. It runs
the simulator, then the tests of its folder (KILLERS), most effective first. A mutant is killed if a test fails or hangs. A
mutant that passes every test survives: it needs a stricter test, or a reason why the change has no effect.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import random
import resource
import signal
import sys
import time
from collections import Counter
from pathlib import Path
from types import CodeType, FunctionType, ModuleType

import pytest
from mutations import Mutation, mutated, mutations

ROOT = Path(__file__).resolve().parents[1]
PATHS = ("vnext/state", "vnext/state/store", "vnext/log", "vnext/sched", "vnext/runtime/transport/ring/memory_plain.py")
"""Not mutated by default: the simulator judges mutants, and tests/sim/planted tests it. --paths selects it."""
SEEDS = (5, 13, 4, 45, 48, 12, 1, 2, 3, 21, 6, 7, 29, 50, 32)
"""Scenarios of the simulator: plain and compiled implementations, tight and roomy arenas, every policy."""
SIMULATOR = "the simulator"
STATE = [
    "tests/log/test_snapshot.py",
    *(f"tests/state/{name}.py" if "/" in name else f"tests/state/test_{name}.py"
    for name in ("pool", "committing", "store/test_extents", "store/test_names", "store/test_versions",
                 "illegal_events", "refusal", "digest_view", "laws_break", "store/test_columns", "tenants_wall"))
]  # fmt: skip
SCHED = [
    f"tests/sched/test_{name}.py"
    for name in ("preemption_order", "admission_order", "prefix_sharing", "pipeline", "policies", "turn")
]
RECORDING = [f"tests/runtime/record/test_{name}.py" for name in ("recorder", "packing", "stamps")]
LOG = ["tests/log/test_log.py", "tests/log/test_log_forms.py", "tests/replay/reading/test_log_strides.py", *RECORDING]
SHAPE = [f"tests/log/test_{name}.py" for name in ("shape", "log_tails", "snapshot")] + ["tests/state/test_tenants_wall.py"]
LAWS = ["tests/state/test_laws_break.py", "tests/sim/test_snapshots.py"]
CONSTRAINTS = [
    "tests/sampling/test_constraint.py",
    "tests/sampling/test_token_lists.py",
    "tests/runtime/batch/test_constraints.py",
    "tests/replay/rerun/test_grammars.py",
]
STRUCTURED = [f"tests/text/structured/test_{name}.py" for name in ("grammar", "json_schema", "hostile_grammars")]
KILLERS: tuple[tuple[str, bool, list[str]], ...] = (
    ("vnext/runtime/transport/ring", False, [f"tests/runtime/transport/test_ring{name}.py" for name in ("", "_framing", "_twins")]),
    ("vnext/log/timestamps", False, ["tests/runtime/record/test_stamps.py"]),
    ("vnext/log/compression", False, ["tests/runtime/record/test_packing.py"]),
    ("vnext/log/snapshot", True, ["tests/log/test_snapshot.py", "tests/log/test_shape.py"]),
    ("vnext/log/redact", False, SHAPE),
    ("vnext/log/pseudonyms", False, SHAPE),
    ("vnext/log/open_blocks", False, SHAPE),
    ("vnext/log", False, [*LOG, "tests/log/test_shape.py"]),
    ("vnext/state/digest", True, ["tests/state/test_digest_view.py", "tests/replay/test_old_logs.py"]),
    ("vnext/replay/reading/state_view", False, ["tests/state/test_digest_view.py"]),
    ("vnext/sched/explain", False, ["tests/sched/test_explain.py"]),
    ("vnext/sim", True, [*LAWS, "tests/sim/planted/test_planted.py"]),
    ("vnext/state/laws", True, LAWS),
    ("vnext/state", True, [*STATE, *SCHED]),
    ("vnext/sched", True, [*SCHED, *STATE]),
    ("vnext/sampling/constraint", True, CONSTRAINTS),
    ("vnext/runtime/batch/masks", False, CONSTRAINTS),
    ("vnext/text/structured", False, STRUCTURED),
)
"""(path prefix, whether the simulator runs, the tests); the first matching row applies."""


def main() -> int:
    options = parsed()
    os.environ.pop("PYTEST_ADDOPTS", None)
    os.chdir(ROOT)
    sys.path[:0] = [str(ROOT), str(ROOT / "tests")]
    tests = sorted({test for file in files_of(options.paths) for test in killers_of(file)[2] if Path(test).is_file()})
    arguments = ["-s", "-p", "no:cacheprovider", "-p", "no:xdist", "-p", "no:terminal", f"--timeout={options.test_s}", *tests]
    mutating = Mutating(options)
    pytest.main(arguments, plugins=[mutating])
    return 0 if mutating.results else 2


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Change one place of the source at a time; print the changes no test notices.")
    parser.add_argument("--paths", nargs="*", default=PATHS, help="files or folders to change (default: " + " ".join(PATHS) + ")")
    parser.add_argument("--sample", type=int, default=200, help="how many mutations, in a random order (default 200; 0: all)")
    parser.add_argument("--seed", type=int, default=0, help="which ones (default 0)")
    parser.add_argument("--only", nargs="*", default=[], help="mutations by name, as they are printed")
    parser.add_argument("--jobs", type=int, default=1, help="processes at a time (default 1)")
    parser.add_argument("--cpu-s", type=int, default=120, help="computing time after which a mutant counts as killed (default 120)")
    parser.add_argument("--test-s", type=int, default=120, help="time after which one test counts as red (default 120)")
    parser.add_argument("--slow-s", type=float, default=2.0, help="leave out tests that take longer unchanged (default 2)")
    parser.add_argument("--out", type=Path, help="write the outcome of every mutation into this file")
    return parser.parse_args()


def files_of(paths: list[str]) -> list[Path]:
    found = [file for path in map(Path, paths) for file in ([path] if path.is_file() else sorted(path.glob("*.py")))]
    return [file for file in found if file.name != "__init__.py"]


def killers_of(file: Path) -> tuple[str, bool, list[str]]:
    return next(group for group in KILLERS if str(file).startswith(group[0]))


def name_of(file: Path, mutation: Mutation) -> str:
    return f"{file}:{mutation.line}:{mutation.place}:{mutation.kind}"


# ---- one mutant --------------------------------------------------------------------------------------------------


def changed_functions(file: Path, mutation: Mutation) -> list[tuple[FunctionType, CodeType]]:
    """Return the functions whose code the mutation changes; none if the change is outside all functions."""
    module = importlib.import_module(".".join(file.with_suffix("").parts))
    source = file.read_text()
    before = dict(codes(compile(source, str(file), "exec")))
    after = dict(codes(compile(mutated(source, mutation), str(file), "exec")))
    changed = {name for name in before.keys() & after.keys() if before[name] != after[name]}
    return [(function, after[name]) for name, function in functions_of(module) if name in changed]


def codes(code: CodeType):
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield constant.co_qualname, constant
            yield from codes(constant)


def functions_of(module: ModuleType):
    """Yield (qualified name, function) for the functions of a module and the methods of its classes."""
    for name, value in vars(module).items():
        if isinstance(value, type) and value.__module__ == module.__name__:
            for each in vars(value).values():
                inner = getattr(each, "fget", None) or getattr(each, "__func__", each)
                if isinstance(inner, FunctionType):
                    yield inner.__qualname__, inner
        inner = getattr(value, "__wrapped__", value)
        if isinstance(inner, FunctionType) and inner.__module__ == module.__name__:
            yield name, inner


def simulate() -> None:
    from tests.sim.seeds import run_seed

    for seed in SEEDS:
        run_seed(seed, 30)


# ---- all of them -------------------------------------------------------------------------------------------------


class Mutating:
    """A pytest plugin that replaces the loop over the tests. Mutable: it learns which tests kill."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options, self.results, self.failed = options, [], ""
        self.kills: Counter[str] = Counter()
        self.seconds: dict[str, float] = {}

    def pytest_runtest_logreport(self, report) -> None:
        if report.failed:
            self.failed = self.failed or report.nodeid

    def pytest_runtestloop(self, session) -> bool:
        self.session, self.tell = session, open(os.dup(1), "w", buffering=1)
        files = files_of(self.options.paths)
        everything = [(file, mutation) for file in files for mutation in mutations(file.read_text())]
        chosen = random.Random(self.options.seed).sample(everything, len(everything))[: self.options.sample or None]
        chosen = [each for each in chosen if not self.options.only or name_of(*each) in self.options.only]
        print(f"{len(chosen)} of {len(everything)} mutations in {len(files)} files", file=self.tell)
        for group in dict.fromkeys(killers_of(file)[0] for file, _ in chosen):
            self.measure(next(each for each in KILLERS if each[0] == group))
        self.run_all(chosen)
        counts = Counter(result["outcome"] for result in self.results)
        print(", ".join(f"{count} {how}" for how, count in counts.most_common()), file=self.tell)
        return True

    def measure(self, group: tuple[str, bool, list[str]]) -> None:
        """Time each test without a mutation. Raises SystemExit if one fails, because it could prove nothing."""
        read, write = os.pipe()
        if not (pid := os.fork()):
            silence()
            times = {}
            for name in self.names_of(group):
                began = time.process_time()
                self.run_one(name)
                times[name] = time.process_time() - began
            os.write(write, json.dumps([self.failed, times]).encode())
            os._exit(0)
        os.close(write)
        reported = b"".join(iter(lambda: os.read(read, 1 << 16), b""))
        os.close(read), os.waitpid(pid, 0)
        failed, times = json.loads(reported)
        self.seconds |= times
        slow = sum(seconds > self.options.slow_s for seconds in times.values())
        print(f"{group[0]}: {len(times)} tests, {sum(times.values()):.0f} s, {slow} left out", file=self.tell)
        if failed:
            raise SystemExit(f"{failed} fails without a mutation: mend it first")

    def names_of(self, group: tuple[str, bool, list[str]]) -> list[str]:
        """Return the simulator and the tests of a group: the likeliest killers first, then the fastest."""
        found = [SIMULATOR] * group[1] + [item.nodeid for item in self.session.items if item.nodeid.split("::")[0] in group[2]]
        wanted = [name for name in found if name == SIMULATOR or self.seconds.get(name, 0.0) <= self.options.slow_s]
        return sorted(wanted, key=lambda name: (-self.kills[name], self.seconds.get(name, 0.0)))

    def run_one(self, name: str) -> None:
        if name == SIMULATOR:
            try:
                simulate()
            except Exception:  # any exception kills the mutant
                self.failed = self.failed or SIMULATOR
            return
        item = next(item for item in self.session.items if item.nodeid == name)
        item.config.hook.pytest_runtest_protocol(item=item, nextitem=None)

    def live(self, file: Path, mutation: Mutation, write: int) -> None:
        """Apply the mutation in a child process, run the killers until one fails, and report its name."""
        silence()
        resource.setrlimit(resource.RLIMIT_CPU, (self.options.cpu_s, self.options.cpu_s + 5))
        swaps = changed_functions(file, mutation)
        for function, code in swaps:
            function.__code__ = code
        for name in self.names_of(killers_of(file)) if swaps else ():
            self.run_one(name)
            if self.failed:
                break
        os.write(write, (self.failed or ("survived" if swaps else "outside")).encode())
        os._exit(0)

    def run_all(self, chosen: list[tuple[Path, Mutation]]) -> None:
        waiting, running = list(reversed(chosen)), {}
        while waiting or running:
            while waiting and len(running) < self.options.jobs:
                each, (read, write) = waiting.pop(), os.pipe()
                if not (pid := os.fork()):
                    os.setpgid(0, 0)
                    self.live(*each, write)
                os.close(write)
                running[pid] = (*each, read, time.monotonic())
            pid, _ = os.wait()
            self.took(*running.pop(pid), len(chosen))
            try:
                os.killpg(pid, signal.SIGKILL)  # processes that a test started and did not end
            except ProcessLookupError:
                pass

    def took(self, file: Path, mutation: Mutation, read: int, began: float, total: int) -> None:
        said = os.read(read, 1 << 16).decode()
        os.close(read)
        known = said in ("survived", "outside")
        self.kills[said] += not known
        outcome = said if known else "killed" if said else "endless or crashed"
        self.results.append({
            "name": name_of(file, mutation), "before": mutation.before[:160], "after": mutation.after[:160], "outcome": outcome,
            "by": "" if known else said, "seconds": round(time.monotonic() - began, 1),
        })  # fmt: skip
        if outcome == "survived":
            print(f"SURVIVED {name_of(file, mutation)}\n    {mutation.before}\n    {mutation.after}", file=self.tell)
        if len(self.results) % 20 == 0:
            print(f"{len(self.results)} of {total}: {Counter(result['outcome'] for result in self.results)}", file=self.tell)
        if self.options.out:
            lines = ",\n".join(json.dumps(result) for result in self.results)
            self.options.out.write_text(f"[\n{lines}\n]\n")


def silence() -> None:
    nothing = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nothing, 1), os.dup2(nothing, 2)


if __name__ == "__main__":
    sys.exit(main())
