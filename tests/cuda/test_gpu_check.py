"""The check on a GPU, as far as it goes without one: its dry run, what it does with parts that fail, and carried tensors."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import torch
from attention_steps import Range, Shape, attend, check, make_sequences
from carried import CarriedBackend, HostMemory
from host_shim import HostBackend, KernelError
from rows_cases import draw

from vnext.kernels import references
from vnext.kernels.calls import RotaryWrite
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
    found = rows.rotary_kv_write(joined, RotaryWrite(None, None, 1e-6, None, None, *caches, slots))
    assert torch.equal(found, references.rotary_kv_write(joined.clone(), RotaryWrite(None, None, 1e-6, None, None, *expected, slots)))
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
    ran = run_check(root, tmp_path / "out", "--dry-run", "--only", "bench", "step")
    assert ran.returncode == 0, ran.stdout + ran.stderr
    (path,) = (tmp_path / "out").glob("*.json")
    record = json.loads(path.read_text())
    assert record["dry_run"] and "dry-run" in path.name
    assert {name: part["verdict"] for name, part in record["parts"].items()} == {"bench": "passed", "step": "passed"}
    figures = [figure for part in record["parts"].values() for figure in part["figures"]]
    assert len([figure for figure in figures if figure["target"]]) == 18
    assert all(figure["value"] is None and figure["met"] is None for figure in figures)
    details = [reported for part in record["parts"].values() for reported in part["details"].values()]
    errors = [reported["error"] for reported in details if "error" in reported]
    assert len(errors) == 7 and all(0 < error < 0.02 for error in errors)
    peers = [reported["peers"] for reported in details if "peers" in reported]
    assert [set(each) >= {"varlen", "flex"} for each in peers] == [True] * 5
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
    "lacks": "return Verdict(MISSING, 'not here')",
}


@pytest.fixture
def check_on_gpu(root: Path, monkeypatch: pytest.MonkeyPatch) -> object:
    monkeypatch.syspath_prepend(str(root))
    from perf.gpu import __main__

    return __main__


@pytest.fixture
def harmed(check_on_gpu, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> object:
    """The check with parts that find one thing and then do what their names say, in place of its own."""
    parts = "".join(
        f"\ndef {name}(dry, folder, findings):\n    findings.figures(figure('seen', 3.0, 'us', at_most=4))\n"
        f"    print('heard', flush=True)\n    {act}\n"
        for name, act in HARMS.items()
    )
    program = "import os, time\nfrom perf.gpu import part\nfrom perf.gpu.report import MISSING, Verdict, figure\n"
    program += f"{parts}\npart.NAMES = {tuple(HARMS)}\npart.part = lambda name: globals()[name]\npart.main()\n"
    (tmp_path / "harmed.py").write_text(program)
    monkeypatch.setattr(check_on_gpu, "PROGRAM", (sys.executable, str(tmp_path / "harmed.py")))
    return check_on_gpu


def test_a_part_that_dies_hangs_or_fails_stops_no_other_and_loses_nothing(harmed, tmp_path: Path) -> None:
    said = {name: harmed.run_part(name, True, tmp_path, 4 if name == "hangs" else 20).report for name in HARMS}
    assert {name: report.verdict for name, report in said.items()} == {
        "dies": "failed", "hangs": "failed", "fails": "failed", "lacks": "missing",
    }  # fmt: skip
    assert "status -9" in said["dies"].why and "longer than 4 s" in said["hangs"].why
    assert said["fails"].why == "ValueError: no such thing"
    assert [[(each.name, each.value, each.met) for each in report.figures] for report in said.values()] == [
        [("seen", 3.0, True)]
    ] * len(HARMS)
    assert (tmp_path / harmed.LOG).read_text().count("heard\n") == len(HARMS)


TESTS = {
    "good": "assert True",
    "bad": "assert 1 == 2",
    "sticky": "sys.modules['torch'] = SimpleNamespace(cuda=SimpleNamespace(is_initialized=lambda: True, synchronize=broken))",
    "later": "assert True",
    "stuck": "time.sleep(600)",
    "dead": "os.kill(os.getpid(), 9)",
    "last": "assert True",
}
"""`sticky` passes and leaves a device on which all that follows would fail, in its process."""


def some_tests(folder: Path, names: tuple[str, ...]) -> Path:
    path = folder / "test_some.py"
    head = "import os, sys, time\nfrom types import SimpleNamespace\n\ndef broken():\n    raise RuntimeError('CUDA error: an illegal address')\n"
    path.write_text(head + "".join(f"\ndef test_{name}():\n    {TESTS.get(name, name)}\n" for name in names))
    return path


QUICK = {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}


@pytest.mark.parametrize("processes", [(), ("-p", "xdist", "-n", "2", "--max-worker-restart", "9")], ids=["one process", "two"])
def test_a_broken_device_a_hang_and_a_death_cost_one_test_each(check_on_gpu, tmp_path: Path, processes: tuple[str, ...]) -> None:
    from perf.gpu import checks
    from perf.gpu.findings import Findings
    from perf.gpu.report import by_kernel

    findings = Findings(tmp_path / "found.jsonl", "kernels")
    path = some_tests(tmp_path, tuple(TESTS))
    verdict = checks.tests(findings, "--confcutdir", str(tmp_path), *processes, str(path), hang_s=5, **QUICK)
    outcomes = {test.partition("::test_")[2]: reported for test, reported in findings.report("").tests.items()}
    assert {name: outcome for name, (outcome, _) in outcomes.items() if outcome != "passed"} == {
        "bad": "failed", "sticky": "failed", "stuck": "failed", "dead": "died" if not processes else "failed",
    }  # fmt: skip
    assert set(outcomes) == set(TESTS)
    assert "illegal address" in outcomes["sticky"][1] and "longer than 5 s" in outcomes["stuck"][1]
    assert verdict.verdict == "failed" and verdict.why.endswith("and 3 more")
    assert by_kernel(findings.report(""))["some: sticky"] == {"failed": 1, "why": "CUDA error: an illegal address"}


def test_tests_that_fail_or_do_not_run_are_no_pass(check_on_gpu, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from perf.gpu import checks
    from perf.gpu.findings import Findings

    said = {}
    for name in ("good", "bad", "import pytest; pytest.skip('no GPU')"):
        findings, path = Findings(tmp_path / f"{len(said)}.jsonl", "kernels"), some_tests(tmp_path, (name,))
        path.write_text(path.read_text().replace(f"test_{name}", f"test_{len(said)}"))
        said[name.partition(" ")[0]] = checks.tests(findings, "--confcutdir", str(tmp_path), str(path), **QUICK)
    assert {name: verdict.verdict for name, verdict in said.items()} == {"good": "passed", "bad": "failed", "import": "failed"}
    assert said["good"].why == "1 tests" and "test_1: " in said["bad"].why and said["import"].why == "no test ran"
    (tmp_path / "tests" / "gpu").mkdir(parents=True)
    monkeypatch.setattr(checks, "ROOT", tmp_path)
    for part in (checks.engine, checks.ipc):
        assert part(False, tmp_path, findings).verdict == "missing"


def test_the_parts_end_within_nine_minutes_and_the_last_ones_pay_for_the_first(check_on_gpu) -> None:
    names = list(check_on_gpu.NAMES)
    assert list(check_on_gpu.SHARES) == names and check_on_gpu.TOTAL_S <= 9 * 60 - 10
    assert sum(share.expected_s for share in check_on_gpu.SHARES.values()) <= check_on_gpu.TOTAL_S
    left_s = check_on_gpu.TOTAL_S
    for place, name in enumerate(names):  # every part takes all that it may
        given_s = check_on_gpu.limit(name, names[place + 1 :], left_s)
        assert given_s >= min(check_on_gpu.SHARES[name].least_s, left_s) and given_s <= max(left_s, 1.0)
        left_s -= given_s


def test_wheels_are_taken_for_what_a_python_lacks(root: Path, tmp_path: Path) -> None:
    """A package that is here is not replaced by a wheel of it; one that is not here is found beside it."""
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    for name in ("msgspec", "vnext_probe"):
        metadata = f"{name}-9.9.dist-info"
        with zipfile.ZipFile(wheels / f"{name}-9.9-py3-none-any.whl", "w") as wheel:
            wheel.writestr(f"{name}.py", "print('from the wheel')\n")
            wheel.writestr(f"{metadata}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 9.9\n")
            wheel.writestr(f"{metadata}/WHEEL", "Wheel-Version: 1.0\nGenerator: t\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
            wheel.writestr(f"{metadata}/RECORD", "")
    script = (root / "scripts" / "gpu_check.sh").read_text().rpartition('"$PYTHON" -m perf.gpu')[0]
    (tmp_path / "scripts").mkdir()
    (tmp_path / "vnext").mkdir()
    (tmp_path / "scripts" / "check.sh").write_text(script + '"$PYTHON" -c "import msgspec, vnext_probe; msgspec.json"\n')
    environment = os.environ | {"WHEELS": str(wheels), "PYTHON": sys.executable}
    ran = subprocess.run(
        ["bash", str(tmp_path / "scripts" / "check.sh")], env=environment, capture_output=True, text=True, timeout=100, check=False
    )
    assert (ran.returncode, ran.stdout) == (0, "from the wheel\n"), ran.stderr
