"""The parts that check: every kernel, Numba's, the engine, the ranks' exchange, and the memory checker over small cases.

Owns which tests and programs a part runs; what they check is theirs. A part whose entry is not in this tree is missing,
a tool that this machine lacks is skipped, and neither counts as passed.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import torch

from perf.gpu.place import CASES, Place, launch_forms, place, use_cases
from perf.gpu.report import FAILED, MISSING, PASSED, ROOT, SKIPPED, Report
from vnext.kernels.cuda import compiled

KERNEL_TESTS = ("attention", "rows", "sampling", "operations")
DRY_KERNEL_TESTS = ("tests/cuda/test_gpu_check.py", "-k", "carried")
ATTENTION_SLACK = 256 * 2.0**-24
"""Of float32 attention on a GPU, as attention_steps.py allows the kernel; the shim's exponential is the CPU's own."""
SUMMARY = re.compile(r"(\d+) (passed|failed|skipped|error|errors)")
SANITIZERS = ("/usr/local/cuda/bin/compute-sanitizer",)
FOUND = 7  # the exit code that the checker is asked for where it finds something
NO_DEVICE = "Device not supported"


def environment(**more: str) -> dict[str, str]:
    """The environment of a program of the tests."""
    paths = os.pathsep.join((str(ROOT), *map(str, CASES), os.environ.get("PYTHONPATH", "")))
    return os.environ | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1"} | more


def ran(*command: str, **more: str) -> subprocess.CompletedProcess[str]:
    """A program in the checkout; what it says goes to this part's log too."""
    done = subprocess.run(command, cwd=ROOT, env=environment(**more), capture_output=True, text=True, check=False)
    print(f"$ {' '.join(command)}\n{done.stdout}{done.stderr}[exit {done.returncode}]\n", flush=True)
    return done


def tests(*arguments: str, **more: str) -> Report:
    """pytest, without the conftest of the whole tree, which asks for more than kernels need."""
    flags = ("-q", "-p", "no:cacheprovider", "--tb=short", "-rfEs")
    done = ran(sys.executable, "-m", "pytest", *flags, *arguments, **more)
    closing = (done.stdout.strip().splitlines() or [""])[-1]
    counts = {what: int(count) for count, what in SUMMARY.findall(closing)}
    if done.returncode:
        return Report(FAILED, last_line(done), details={"tests": counts})
    passed = counts.get("passed", 0)
    return Report(PASSED if passed else FAILED, f"{passed} tests" if passed else "no test ran", details={"tests": counts})


def last_line(done: subprocess.CompletedProcess[str]) -> str:
    """What a program said last: the errors first, if there are any."""
    failed = [line for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
    lines = failed or (done.stdout + done.stderr).strip().splitlines() or ["nothing was said"]
    return f"{(lines[0] if failed else lines[-1])[:160]}{f' and {len(failed) - 1} more' if len(failed) > 1 else ''}"


# ---- kernels -----------------------------------------------------------------------------------------------------


def kernels(dry: bool, folder: Path) -> Report:
    """The tests of tests/cuda with every launch carried to the GPU; the table's operations on the GPU's own tensors, both
    from C++ and from Python."""
    if dry:
        checked = tests("--confcutdir=tests/cuda", *DRY_KERNEL_TESTS)
    else:
        files = [f"tests/cuda/test_cuda_{name}.py" for name in KERNEL_TESTS]
        checked = tests("--confcutdir=tests/cuda", *files, VNEXT_KERNELS_ON="gpu")
    here, forms = place(dry, folder), []
    wrong = [checked.why] if checked.verdict == FAILED else []
    for form in launch_forms(here):
        forms.append(form)
        try:
            on_device(here)
        except AssertionError as error:
            said = error or "a result differs from its reference"
            wrong.append(f"the table's operations on {here.device}, launched {form}: {said}")
    wrong += [] if len(forms) == 2 else [f"launches {compiled.describe()}"]
    why = "; ".join(wrong) or f"{checked.why}, launches {' and '.join(forms)}"
    return Report(FAILED if wrong else PASSED, why, details=checked.details | {"forms": forms})


def on_device(here: Place) -> None:
    """AssertionError where an operation of the table differs from its reference, run to run, by stream or by graph."""
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
    """A captured launch reads what its tensors hold when it is replayed, and torch.compile takes it whole."""
    operations, caches = here.operations, step.caches.nan_to_num(0.0)
    metadata = operations.attention_metadata(step.starts, step.contexts, step.table, 16, 2)
    query = step.query.clone()
    weight = torch.ones(16, dtype=query.dtype, device=here.device)

    def work() -> torch.Tensor:
        seen = operations.paged_attention(query, *caches, metadata, 0.25)
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


def numba(dry: bool, folder: Path) -> Report:
    """The batch's index kernels beside their plain forms and plain Python, through a life of a batch."""
    program = str(ROOT / "tests" / "kernels" / "batch_kernels.py")
    seen = {}
    for seed in ("1",) if dry else ("1", "2", "3"):
        where = ("cpu",) if dry else ("cuda",)
        done = ran(sys.executable, program, "simulate", seed, *where, **({"NUMBA_ENABLE_CUDASIM": "1"} if dry else {}))
        if done.returncode:
            return Report(FAILED, f"seed {seed}: {last_line(done)}")
        seen[seed] = json.loads(done.stdout.splitlines()[-1])
    return Report(PASSED, details={"seen": seen})


def engine(dry: bool, folder: Path) -> Report:
    """Token parity of the engine on CUDA: tests/gpu. A dry run collects them."""
    if not list((ROOT / "tests" / "gpu").glob("test_*.py")):
        return Report(MISSING, "there is no tests/gpu in this tree")
    return collected("tests/gpu") if dry else tests("tests/gpu")


def collected(where: str) -> Report:
    """That the tests can be read, and how many there are."""
    done = ran(sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--collect-only", where)
    count = sum("::" in line for line in done.stdout.splitlines())
    if done.returncode not in (0, 5):
        return Report(FAILED, last_line(done))
    return Report(PASSED, f"{count} tests collected, none run", details={"collected": count})


def ipc(dry: bool, folder: Path) -> Report:
    """The ranks' sums between two processes, on one GPU where there is one: perf/gpu_all_reduce.py."""
    if not (ROOT / "perf" / "gpu_all_reduce.py").is_file():
        return Report(MISSING, "there is no perf/gpu_all_reduce.py in this tree")
    told = folder / "all_reduce.json"
    where = ("--shim", str(folder)) if dry else ()
    done = ran(sys.executable, "-m", "perf.gpu_all_reduce", "--ranks", "2", "--json", str(told), *where)
    findings = json.loads(told.read_text()) if told.is_file() else []
    return Report(
        FAILED if done.returncode else PASSED, last_line(done) if done.returncode else "", details={"findings": findings}
    )


# ---- the memory checker ------------------------------------------------------------------------------------------


class Checked(NamedTuple):
    """A run under the checker: with a planted fault it must find something, without it must not."""

    tool: str
    wish: str


RUNS = (Checked("memcheck", "all"), Checked("memcheck", "overrun"), Checked("racecheck", "all"), Checked("racecheck", "race"))


def sanitize(dry: bool, folder: Path) -> Report:
    """compute-sanitizer over small cases, and over two planted faults; a dry run has AddressSanitizer find the overrun."""
    if dry:
        return sanitize_here(folder)
    tool = shutil.which("compute-sanitizer") or next((path for path in SANITIZERS if Path(path).is_file()), None)
    if tool is None:
        return Report(SKIPPED, "there is no compute-sanitizer here")
    with ThreadPoolExecutor(len(RUNS)) as pool:
        done = list(pool.map(lambda run: ran(*command_of(tool, run, folder)), RUNS))
    if any(NO_DEVICE in each.stdout + each.stderr for each in done):
        return Report(SKIPPED, "compute-sanitizer does not know this device")
    wrong = []
    for run, each in zip(RUNS, done, strict=True):
        wanted = 0 if run.wish == "all" else FOUND
        if each.returncode != wanted or (wanted == 0 and "clean" not in each.stdout):
            wrong.append(f"{run.tool} of {run.wish}: {'found nothing' if wanted else last_line(each)}")
    return Report(FAILED if wrong else PASSED, "; ".join(wrong), details={"runs": [run._asdict() for run in RUNS]})


def sanitize_here(folder: Path) -> Report:
    """AddressSanitizer over the planted overrun, on the host shim."""
    use_cases()
    from test_sanitized import run, sanitizer

    if sanitizer() is None:
        return Report(SKIPPED, "the C++ compiler here has no AddressSanitizer")
    done = run(ROOT, folder, "overrun")
    print(done.stdout, done.stderr, flush=True)
    found = done.returncode != 0 and "heap-buffer-overflow" in done.stderr
    return Report(PASSED, "the planted overrun is found") if found else Report(FAILED, "a planted overrun was not found")


def command_of(tool: str, run: Checked, folder: Path) -> tuple[str, ...]:
    program = (sys.executable, str(ROOT / "tests" / "cuda" / "checked_on_gpu.py"), str(folder), run.wish)
    return (tool, "--tool", run.tool, "--error-exitcode", str(FOUND), *program)
