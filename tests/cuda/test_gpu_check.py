"""The check on a GPU, as far as it goes without one: its dry run, what it does with parts that fail, and carried tensors."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from attention_steps import Range, Shape, attend, check, make_sequences
from carried import CarriedBackend, HostMemory
from host_shim import HostBackend, KernelError
from rows_cases import draw

from vnext.kernels import references
from vnext.kernels.cuda import backends, rows


@pytest.fixture
def carried(shim: HostBackend) -> CarriedBackend:
    """The shim's kernels over tensors that were carried elsewhere."""
    backend = CarriedBackend(shim, HostMemory())
    backends.use("cpu", lambda: backend)
    yield backend
    backends.use("cpu", lambda: shim)


def test_carried_tensors_give_what_they_give_where_they_are(carried: CarriedBackend) -> None:
    """Strided views, two views of one storage that a kernel writes, storages of no bytes; whole launches of attention."""
    wide, weight = draw(4, 700), draw(500)
    assert torch.allclose(
        rows.rms_norm(wide[:, 100:600], weight, 1e-6), references.rms_norm(wide[:, 100:600], weight, 1e-6), atol=1e-5
    )
    joined, slots = draw(5, 4 * 16), torch.arange(5)
    caches, expected = torch.zeros(2, 2, 2, 1, 5, 16)
    found = rows.rotary_kv_write(joined, None, None, 1e-6, None, None, *caches, slots)
    assert torch.equal(found, references.rotary_kv_write(joined.clone(), None, None, 1e-6, None, None, *expected, slots))
    assert torch.equal(caches, expected) and caches.any()
    sequences = make_sequences([300, 20], Shape(4, 2, 64, 16), torch.bfloat16)
    given = [Range(0, 299, 300), Range(1, 0, 20)]
    for result, one in zip(attend(sequences, given), given, strict=True):
        check(result, sequences, one)


def test_the_shim_refuses_what_a_gpu_refuses(shim: HostBackend) -> None:
    x = draw(1, 8)
    arguments = (x, x, torch.zeros(1, dtype=torch.int64))
    kernel = shim.kernel("rows.cu", "gather_rows", rows.macros(x))
    for grid, block, shared in (((1, 70_000), (32,), 0), ((0,), (32,), 0), ((1,), (2048,), 0), ((1,), (32,), 2**18)):
        with pytest.raises(KernelError, match="no GPU"):
            kernel(grid, block, arguments, shared_mem=shared)


def run_check(root: Path, out: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"OUT": str(out), "PYTHON": sys.executable, "OMP_NUM_THREADS": "1"}
    command = [str(root / "scripts" / "gpu_check.sh"), *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=200, check=False)


def test_a_dry_run_makes_every_call_and_claims_no_time(root: Path, libraries: Path, tmp_path: Path) -> None:
    ran = run_check(root, tmp_path / "out", "--dry-run", "--only", "bench")
    assert ran.returncode == 0, ran.stdout + ran.stderr
    (path,) = (tmp_path / "out").glob("*.json")
    record = json.loads(path.read_text())
    bench = record["parts"]["bench"]
    assert record["dry_run"] and "dry-run" in path.name and bench["verdict"] == "passed"
    targets = [figure for figure in bench["figures"] if figure["target"]]
    assert len(targets) == 14 and all(figure["value"] is None and figure["met"] is None for figure in bench["figures"])
    errors = [told["error"] for told in bench["details"].values() if "error" in told]
    assert len(errors) == 4 and all(0 < error < 0.02 for error in errors)
    peers = [told["peers"] for told in bench["details"].values() if "peers" in told]
    assert [set(each) >= {"varlen", "flex"} for each in peers] == [True] * 3
    assert all("not_compared" not in each["flex"] for each in peers), "flex attention agrees with ours, also on a CPU"
    assert "no times" in ran.stdout and "bench     passed" in ran.stdout


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_without_a_gpu_it_says_so(root: Path, tmp_path: Path) -> None:
    ran = run_check(root, tmp_path, "--only", "kernels")
    assert ran.returncode == 2 and "torch sees no GPU here; --dry-run" in ran.stderr
    ran = run_check(root, tmp_path, "--only", "everything")
    assert ran.returncode == 2 and "invalid choice: 'everything'" in ran.stderr


HARMS = {
    "dies": "os.kill(os.getpid(), 9)",
    "hangs": "time.sleep(600)",
    "fails": "raise ValueError('no such thing')",
    "lacks": "",
}


@pytest.fixture
def harmed(root: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> object:
    """The check with parts that do what their names say, in place of its own."""
    monkeypatch.syspath_prepend(str(root))
    from perf.gpu import __main__ as check_on_gpu

    parts = "".join(
        f"\ndef {name}(dry, folder):\n    {act or 'pass'}\n    return Report(MISSING, 'not here')\n"
        for name, act in HARMS.items()
    )
    (tmp_path / "perf").mkdir()
    program = f"import os, time\nfrom perf.gpu import part\nfrom perf.gpu.report import MISSING, Report\n{parts}\n"
    program += "part.NAMES = ('dies', 'hangs', 'fails', 'lacks')\npart.part = lambda name: globals()[name]\npart.main()\n"
    (tmp_path / "harmed.py").write_text(program)
    monkeypatch.setattr(check_on_gpu, "PROGRAM", (sys.executable, str(tmp_path / "harmed.py")))
    monkeypatch.setattr(check_on_gpu, "LIMITS_S", dict.fromkeys(HARMS, 20) | {"hangs": 4})
    return check_on_gpu


def test_a_part_that_dies_hangs_or_fails_stops_no_other(harmed, tmp_path: Path) -> None:
    said = {name: harmed.run_part(name, True, tmp_path).report for name in HARMS}
    assert {name: report.verdict for name, report in said.items()} == {
        "dies": "failed", "hangs": "failed", "fails": "failed", "lacks": "missing",
    }  # fmt: skip
    assert "status -9" in said["dies"].why and "longer than 4 s" in said["hangs"].why
    assert said["fails"].why == "ValueError: no such thing"


def test_tests_that_fail_or_do_not_run_are_no_pass(root: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.syspath_prepend(str(root))
    from perf.gpu import checks

    path = tmp_path / "test_some.py"
    said = {}
    for name, body in {"good": "pass", "bad": "assert 1 == 2", "idle": "import pytest; pytest.skip('no GPU')"}.items():
        path.write_text(f"def test_{name}():\n    {body}\n")
        said[name] = checks.tests("--confcutdir", str(tmp_path), str(path), PYTEST_DISABLE_PLUGIN_AUTOLOAD="1")
    assert {name: report.verdict for name, report in said.items()} == {"good": "passed", "bad": "failed", "idle": "failed"}
    assert said["good"].why == "1 tests" and "test_bad" in said["bad"].why and said["idle"].why == "no test ran"
    (tmp_path / "tests" / "gpu").mkdir(parents=True)
    monkeypatch.setattr(checks, "ROOT", tmp_path)
    for part in (checks.engine, checks.ipc):
        assert part(False, tmp_path).verdict == "missing"


def test_the_parts_end_within_nine_minutes(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(root))
    from perf.gpu import __main__ as check_on_gpu

    assert tuple(check_on_gpu.LIMITS_S) == check_on_gpu.NAMES and sum(check_on_gpu.LIMITS_S.values()) <= 9 * 60 - 10
