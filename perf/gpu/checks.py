"""The parts that check: every kernel, Numba's, the engine, the ranks' exchange, and the memory checker over small cases.

Owns the list of tests and programs of each part. A part whose entry point is not in this tree is missing, a part whose tool
this machine lacks is skipped, and neither counts as passed.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from itertools import count
from pathlib import Path
from typing import NamedTuple

import torch

from perf.gpu.findings import Findings, collected, tests_of
from perf.gpu.place import CASES, Place, launch_forms, place, use_cases
from perf.gpu.report import DIED, FAILED, MISSING, PASSED, ROOT, SKIPPED, Verdict
from vnext.kernels.calls import AttentionCall, AttentionStep
from vnext.kernels.cuda import compiled

KERNEL_TESTS = ("test_cuda_attention", "test_cuda_rows", "test_cuda_sampling", "test_cuda_thin", "test_cuda_operations", "steps/test_cuda_few_bits")
DRY_KERNEL_TESTS = ("tests/cuda/test_gpu_check.py", "-k", "carried")
ATTENTION_SLACK = 256 * 2.0**-24
"""For float32 attention on a GPU, as in attention_steps.py; the shim uses the CPU's exponential."""
HANG_S, ENGINE_HANG_S = 30, 100
"""The time limit of a test: a kernel that spins is detected, and the remaining tests run without it."""
PROCESSES_MAX = 40
WORKERS_MAX = 8
SANITIZERS = ("/usr/local/cuda/bin/compute-sanitizer",)
FOUND = 7  # the exit code requested from the checker when it finds an error
NO_DEVICE = "Device not supported"


class Said(NamedTuple):
    """A program's exit status and its whole output."""

    status: int
    text: str


def environment(**more: str) -> dict[str, str]:
    """Return the environment of a test program."""
    paths = os.pathsep.join((str(ROOT), *map(str, CASES), os.environ.get("PYTHONPATH", "")))
    return os.environ | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1"} | more


def ran(*command: str, heard: Callable[[str], None] = lambda line: None, label: str = "", **more: str) -> Said:
    """Run a program in the checkout. Its output goes line by line to the log, after `label`, and to `heard`, so a hang or a
    crash loses none of it."""
    print(f"$ {' '.join(command)}", flush=True)
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "stdin": subprocess.DEVNULL}
    lines = []
    with subprocess.Popen(command, cwd=ROOT, env=environment(**more), text=True, errors="replace", **pipes) as process:
        for line in process.stdout:
            print(f"{label}{line}", end="", flush=True)
            heard(line)
            lines.append(line)
    print(f"[exit {process.returncode}]\n", flush=True)
    return Said(process.returncode, "".join(lines))


def tests(findings: Findings, *arguments: str, hang_s: int = HANG_S, **more: str) -> Verdict:
    """Run pytest without the conftest of the whole tree, which needs more than kernels do.

    A broken device or a hang ends the process and fails the test that ran; the remaining tests run in a new process.
    """
    plugin = ("-p", "perf.gpu.outcomes", "--findings", str(findings.path), "--part", findings.part, "--hang-s", str(hang_s))
    flags = ("-q", "-p", "no:cacheprovider", "--tb=short", "-rfEs", *plugin)
    seen: dict[str, tuple[str, str]] = {}
    for _ in range(PROCESSES_MAX):
        again = (argument for test in seen for argument in ("--deselect", test))
        done = ran(sys.executable, "-m", "pytest", *flags, *arguments, *again, **more)
        lines, before = findings.lines(), len(seen)
        seen = tests_of(lines)
        left = [test for test in collected(lines) if test not in seen]
        if not left or len(seen) == before:
            break
    return checked_events(seen, left, done)


def checked_events(outcomes: dict[str, tuple[str, str]], left: list[str], done: Said) -> Verdict:
    """Return the verdict: failed if a test failed, if some did not run, or if none ran."""
    counts = Counter(outcome for outcome, _ in outcomes.values())
    failed = [f"{test.rpartition('/')[2]}: {why}" for test, (outcome, why) in outcomes.items() if outcome in (FAILED, DIED)]
    if failed:
        return Verdict(FAILED, f"{failed[0][:200]}{f' and {len(failed) - 1} more' if len(failed) > 1 else ''}")
    if left:
        return Verdict(FAILED, f"{len(left)} of {len(left) + len(outcomes)} tests were not run: {last_line(done)}")
    if not counts[PASSED]:
        return Verdict(FAILED, last_line(done) if done.status not in (0, 5) else "no test ran")
    return Verdict(PASSED, f"{counts[PASSED]} tests")


def last_line(done: Said) -> str:
    """Return the last line of a program, from its errors if it has any."""
    lines = done.text.strip().splitlines() or ["nothing was said"]
    failed = [line for line in lines if line.startswith(("FAILED", "ERROR"))]
    return (failed or lines[::-1])[0][:160]


# ---- kernels -----------------------------------------------------------------------------------------------------


def kernels(dry: bool, folder: Path, findings: Findings) -> Verdict:
    """Run the tests of tests/cuda with every launch on the GPU, then the table's operations on GPU tensors, launched both from
    C++ and from Python."""
    if dry:
        checked = tests(findings, "--confcutdir=tests/cuda", *DRY_KERNEL_TESTS)
    else:
        files = [f"tests/cuda/{name}.py" for name in KERNEL_TESTS]
        checked = tests(findings, "--confcutdir=tests/cuda", *workers(), *files, VNEXT_KERNELS_ON="gpu")
    here, forms = place(dry, folder), []
    wrong = [checked.why] if checked.verdict == FAILED else []
    for form in launch_forms(here):
        forms.append(form)
        try:
            on_device(here)
        except AssertionError as error:
            said = error or "a result differs from its reference"
            wrong.append(f"the table's operations on {here.device}, launched {form}: {said}")
        findings.detail(f"the table launched {form}", wrong[-1:] or "agrees")
    wrong += [] if len(forms) == 2 else [f"launches {compiled.describe()}"]
    why = "; ".join(wrong) or f"{checked.why}, launches {' and '.join(forms)}"
    return Verdict(FAILED if wrong else PASSED, why)


def workers() -> tuple[str, ...]:
    """Return pytest's arguments for several processes if xdist is installed; it replaces a process that dies."""
    if find_spec("xdist") is None:
        return ()
    processes = min(WORKERS_MAX, len(os.sched_getaffinity(0)))
    return ("-n", str(processes), "--max-worker-restart", str(PROCESSES_MAX))


def on_device(here: Place) -> None:
    """Raise AssertionError if an operation of the table differs from its reference, between runs, streams or graphs."""
    use_cases()
    from table_cases import agree, attended, mixed_step, shared_step

    slack = 2e-6 if here.is_dry else ATTENTION_SLACK
    agree(here.operations._asdict(), here.plain._asdict(), here.device, slack)
    step = shared_step(here.device)
    given = (here.operations._asdict(), step, step.caches.nan_to_num(0.0), 0.25, 0, 0.0)
    first = attended(*given)
    assert torch.equal(attended(*given), first), "attention differs from run to run"
    if here.is_dry:
        return
    with torch.cuda.stream(side := torch.cuda.Stream(here.device)):
        side.wait_stream(torch.cuda.default_stream(here.device))
        beside = attended(*given)
    torch.cuda.synchronize()
    assert torch.equal(beside, first), "attention on another stream differs"
    captured_agrees(here, mixed_step(here.device, torch.bfloat16))


def captured_agrees(here: Place, step: object) -> None:
    """A replayed launch reads the current contents of its tensors, and torch.compile takes it without a graph break."""
    operations, caches = here.operations, step.caches.nan_to_num(0.0)
    metadata = operations.attention_metadata(AttentionStep(step.starts, step.contexts, step.table, 16, 2))
    query = step.query.clone()
    weight = torch.ones(16, dtype=query.dtype, device=here.device)

    def work() -> torch.Tensor:
        seen = operations.paged_attention(query, AttentionCall(*caches, metadata, 0.25))
        return operations.rms_norm(seen.flatten(0, 1), weight, 1e-6)

    work()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        held = work()
    query.mul_(-0.5)
    graph.replay()
    assert torch.equal(held, work()), "a replayed graph differs from its launches"
    normed = torch.compile(lambda x: torch.ops.vnext_cuda.rms_norm(x, weight, 1e-6) + 1, fullgraph=True, backend="aot_eager")
    flat = query.flatten(0, 1)
    assert torch.equal(normed(flat), operations.rms_norm(flat, weight, 1e-6) + 1), "torch.compile changes a norm"


# ---- Numba, the engine, the exchange -----------------------------------------------------------------------------


def numba(dry: bool, folder: Path, findings: Findings) -> Verdict:
    """Compare the batch's index kernels with torch and plain Python over the life of a batch."""
    program = str(ROOT / "tests" / "kernels" / "batch_kernels.py")
    for seed in ("1",) if dry else ("1", "2", "3"):
        where = ("cpu",) if dry else ("cuda",)
        simulator = {"NUMBA_ENABLE_CUDASIM": "1"} if dry else {}
        done = ran(sys.executable, program, "simulate", seed, *where, heard=noting(findings), **simulator)
        if done.status:
            return Verdict(FAILED, f"seed {seed}: {last_line(done)}")
    return Verdict(PASSED)


def engine(dry: bool, folder: Path, findings: Findings) -> Verdict:
    """Token parity of the engine on CUDA: tests/gpu. A dry run collects them."""
    if not list((ROOT / "tests" / "gpu").glob("test_*.py")):
        return Verdict(MISSING, "there is no tests/gpu in this tree")
    return readable("tests/gpu") if dry else tests(findings, "tests/gpu", hang_s=ENGINE_HANG_S)


def readable(where: str) -> Verdict:
    """Collect the tests and report their number."""
    done = ran(sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--collect-only", where)
    found = sum("::" in line for line in done.text.splitlines())
    if done.status not in (0, 5):
        return Verdict(FAILED, last_line(done))
    return Verdict(PASSED, f"{found} tests collected, none run")


def ipc(dry: bool, folder: Path, findings: Findings) -> Verdict:
    """The ranks' sums between two processes, on one GPU if there is only one: perf/gpu_all_reduce.py."""
    if not (ROOT / "perf" / "gpu_all_reduce.py").is_file():
        return Verdict(MISSING, "there is no perf/gpu_all_reduce.py in this tree")
    where = ("--shim", str(folder)) if dry else ()
    done = ran(sys.executable, "-m", "perf.gpu_all_reduce", "--ranks", "2", *where, heard=noting(findings))
    return Verdict(FAILED, last_line(done)) if done.status else Verdict(PASSED)


def noting(findings: Findings) -> Callable[[str], None]:
    """Return a function that records each line of JSON as a finding."""
    numbers = count(1)

    def heard(line: str) -> None:
        if line.startswith("{"):
            findings.detail(f"finding {next(numbers)}", json.loads(line))

    return heard


# ---- the memory checker ------------------------------------------------------------------------------------------


class Checked(NamedTuple):
    """A run under the checker, which must find an error if and only if a fault is planted."""

    tool: str
    wish: str


RUNS = (Checked("memcheck", "all"), Checked("memcheck", "overrun"), Checked("racecheck", "all"), Checked("racecheck", "race"))


def sanitize(dry: bool, folder: Path, findings: Findings) -> Verdict:
    """Run compute-sanitizer over small cases and two planted faults; in a dry run AddressSanitizer finds the overrun."""
    if dry:
        return sanitize_here(folder)
    tool = shutil.which("compute-sanitizer") or next((path for path in SANITIZERS if Path(path).is_file()), None)
    if tool is None:
        return Verdict(SKIPPED, "there is no compute-sanitizer here")
    with ThreadPoolExecutor(len(RUNS)) as pool:
        done = list(pool.map(lambda run: ran(*command_of(tool, run, folder), label=f"{run.tool} of {run.wish}: "), RUNS))
    if any(NO_DEVICE in each.text for each in done):
        return Verdict(SKIPPED, "compute-sanitizer does not know this device")
    wrong = []
    for run, each in zip(RUNS, done, strict=True):
        wanted = 0 if run.wish == "all" else FOUND
        is_right = each.status == wanted and (wanted or "clean" in each.text)
        findings.detail(f"{run.tool} of {run.wish}", {"status": each.status, "as_it_should": bool(is_right)})
        if not is_right:
            wrong.append(f"{run.tool} of {run.wish}: {'found nothing' if wanted else last_line(each)}")
    return Verdict(FAILED if wrong else PASSED, "; ".join(wrong))


def sanitize_here(folder: Path) -> Verdict:
    """AddressSanitizer over the planted overrun, on the host shim."""
    use_cases()
    from test_sanitized import run, sanitizer

    if sanitizer() is None:
        return Verdict(SKIPPED, "the C++ compiler here has no AddressSanitizer")
    done = run(ROOT, folder, "overrun")
    print(done.stdout, done.stderr, flush=True)
    found = done.returncode != 0 and "heap-buffer-overflow" in done.stderr
    return Verdict(PASSED, "the planted overrun is found") if found else Verdict(FAILED, "a planted overrun was not found")


def command_of(tool: str, run: Checked, folder: Path) -> tuple[str, ...]:
    program = (sys.executable, str(ROOT / "tests" / "cuda" / "checked_on_gpu.py"), str(folder), run.wish)
    return (tool, "--tool", run.tool, "--error-exitcode", str(FOUND), *program)
