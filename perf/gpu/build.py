"""The part `build`: the compiled extensions in place, every CUDA source for the present GPU, and all of it loaded.

Owns the list of compiled variants: those of the compile gate of tests/cuda, and the small ones of its other tests. Cubins stay in
the cache, so the other parts compile nothing. A dry run compiles a few variants for sm_90, which needs no GPU, and loads none.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch

from perf.gpu.findings import Findings
from perf.gpu.place import use_cases
from perf.gpu.report import FAILED, PASSED, ROOT, SKIPPED, Verdict
from vnext.kernels.cuda import compiling
from vnext.kernels.cuda.interface import Defines

DRY_ARCH, DRY_FORMS = "sm_90", 2
WORKERS_MAX = 8


def build(dry: bool, folder: Path, findings: Findings) -> Verdict:
    """Extensions, then cubins, then modules."""
    use_cases()
    from test_compile_gate import FORMS, TEST_FORMS, installed

    if not installed():
        why = "NVRTC, CuPy or the headers of the CUDA runtime are not installed"
        return Verdict(SKIPPED if dry else FAILED, why)
    built = {} if dry else extensions()
    findings.detail("extensions", built)
    arch = DRY_ARCH if dry else "sm_{}{}".format(*torch.cuda.get_device_capability())
    asked = FORMS[:: len(FORMS) // DRY_FORMS][:DRY_FORMS] if dry else [*FORMS, *TEST_FORMS]
    begin_s, found = time.monotonic(), []
    workers = 1 if dry else min(WORKERS_MAX, len(os.sched_getaffinity(0)))
    for kernel in compiled([(form.source, form.defines) for form in asked], arch, workers):
        findings.detail(f"compiled {kernel['source']} {kernel['name']} {kernel['defines']}", kernel)
        found.append(kernel)
    findings.detail("compiled", {"arch": arch, "kernels": len(found), "seconds": round(time.monotonic() - begin_s, 1)})
    spilled = [kernel["name"] for kernel in found if kernel["spilled_bytes"] or kernel["stack_bytes"]]
    wrong = [f"{', '.join(spilled)} spill"] if spilled else []
    if not dry:
        wrong += loaded(found)
        findings.detail("loaded", found)
    said = "; ".join(wrong) or f"{len(found)} kernels for {arch}" + (f", launched {built['launches']}" if built else "")
    return Verdict(FAILED if wrong else PASSED, said)


def extensions() -> dict[str, Any]:
    """Run setup.py build_ext in the checkout. After a failure, which is reported, the plain implementations serve."""
    begin_s = time.monotonic()
    command = (sys.executable, "setup.py", "-q", "build_ext", "--inplace", f"--parallel={WORKERS_MAX}")
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    print(done.stdout, done.stderr, flush=True)
    seconds = round(time.monotonic() - begin_s, 1)
    names = sorted(path.relative_to(ROOT).as_posix().partition(".")[0] for path in (ROOT / "vnext").rglob("*.so"))
    asked = "from vnext.kernels.cuda import operations, compiled; print(compiled.describe())"
    reported = subprocess.run((sys.executable, "-c", asked), cwd=ROOT, capture_output=True, text=True, check=False)
    return {"status": done.returncode, "seconds": seconds, "built": names, "launches": reported.stdout.strip()}


def compiled(forms: list[tuple[str, Defines]], arch: str, workers: int) -> Iterator[dict[str, Any]]:
    """Yield every kernel of every variant as it is compiled, with the assembler's figures."""
    given = [(*form, arch) for form in forms]
    if workers == 1:
        yield from (kernel for form in given for kernel in compile_form(form))
        return
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
        yield from (kernel for found in pool.map(compile_form, given) for kernel in found)


def compile_form(form: tuple[str, Defines, str]) -> list[dict[str, Any]]:
    """Compile one source with its macros; the cubin goes to the cache."""
    use_cases()
    from test_compile_gate import uses

    source, defines, arch = form
    begin_s = time.monotonic()
    made = compiling.compile_source(source, defines, arch)
    seconds = round(time.monotonic() - begin_s, 2)
    try:
        compiling.keep(compiling.cubin_path(source, defines, arch), made.cubin)
    except OSError as error:
        print(f"the cubin cache is not writable: {error}", flush=True)
    return [
        {"source": source, "defines": list(map(list, defines)), "name": name, "seconds": seconds} | use._asdict()
        for name, use in uses(made.log).items()
    ]


def loaded(found: list[dict[str, Any]]) -> list[str]:
    """Load each kernel on the GPU; compare the driver's figures with the assembler's."""
    from cupy.cuda import driver

    from vnext.kernels.cuda.driver import CudaBackend

    wrong, backend = [], CudaBackend()
    for kernel in found:
        defines = tuple((name, value) for name, value in kernel["defines"])
        ready = backend.kernel(kernel["source"], kernel["name"], defines)
        kernel["registers_loaded"] = ready.attribute(driver.CU_FUNC_ATTRIBUTE_NUM_REGS)
        kernel["local_bytes_loaded"] = ready.attribute(driver.CU_FUNC_ATTRIBUTE_LOCAL_SIZE_BYTES)
        if kernel["local_bytes_loaded"]:
            wrong.append(f"{kernel['name']} has {kernel['local_bytes_loaded']} bytes of local memory a thread")
    return wrong
