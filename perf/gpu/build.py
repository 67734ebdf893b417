"""The part `build`: the compiled extensions in place, every CUDA source for the present GPU, and all of it loaded.

Owns what is compiled: the forms of the compile gate of tests/cuda and those that the benches ask for. Cubins stay in the
cache, so the other parts compile nothing. A dry run compiles a few forms for sm_90, which needs no GPU, and loads none.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch

from perf.gpu.place import use_cases
from perf.gpu.report import FAILED, PASSED, ROOT, SKIPPED, Report
from vnext.kernels.cuda import compiling
from vnext.kernels.cuda.face import Defines

DRY_ARCH, DRY_FORMS = "sm_90", 2
WORKERS_MAX = 8


def run(dry: bool, folder: Path) -> Report:
    """Extensions, then cubins, then modules."""
    use_cases()
    from test_compile_gate import FORMS, installed

    if not installed():
        why = "NVRTC, CuPy or the headers of the CUDA runtime are not installed"
        return Report(SKIPPED if dry else FAILED, why)
    built = {} if dry else extensions()
    arch = DRY_ARCH if dry else "sm_{}{}".format(*torch.cuda.get_device_capability())
    forms = [(form.source, form.defines) for form in (FORMS[:: len(FORMS) // DRY_FORMS][:DRY_FORMS] if dry else FORMS)]
    begin_s = time.monotonic()
    found = compiled(forms, arch, 1 if dry else min(WORKERS_MAX, len(os.sched_getaffinity(0))))
    details = {"arch": arch, "seconds": round(time.monotonic() - begin_s, 1), "extensions": built, "kernels": found}
    spilled = [kernel["name"] for kernel in found if kernel["spilled_bytes"] or kernel["stack_bytes"]]
    wrong = [f"{', '.join(spilled)} spill"] if spilled else []
    if not dry:
        wrong += loaded(found)
    said = "; ".join(wrong) or f"{len(found)} kernels for {arch}" + (f", launched {built['launches']}" if built else "")
    return Report(FAILED if wrong else PASSED, said, details=details)


def extensions() -> dict[str, Any]:
    """setup.py build_ext in the checkout; a failed one leaves the plain forms to serve, and is told."""
    begin_s = time.monotonic()
    command = (sys.executable, "setup.py", "-q", "build_ext", "--inplace", f"--parallel={WORKERS_MAX}")
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    print(done.stdout, done.stderr, flush=True)
    seconds = round(time.monotonic() - begin_s, 1)
    names = sorted(path.relative_to(ROOT).as_posix().partition(".")[0] for path in (ROOT / "vnext").rglob("*.so"))
    asked = "from vnext.kernels.cuda import operations, compiled; print(compiled.describe())"
    told = subprocess.run((sys.executable, "-c", asked), cwd=ROOT, capture_output=True, text=True, check=False)
    return {"status": done.returncode, "seconds": seconds, "built": names, "launches": told.stdout.strip()}


def compiled(forms: list[tuple[str, Defines]], arch: str, workers: int) -> list[dict[str, Any]]:
    """Every kernel of every form, with what the assembler says of it."""
    if workers == 1:
        return [kernel for form in forms for kernel in compile_form((*form, arch))]
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
        return [kernel for found in pool.map(compile_form, [(*form, arch) for form in forms]) for kernel in found]


def compile_form(form: tuple[str, Defines, str]) -> list[dict[str, Any]]:
    """One source with its macros; its cubin goes to the cache."""
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
    """Each kernel taken from its module on the GPU; what the driver says of it beside what the assembler said."""
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
