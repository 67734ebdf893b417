"""Benchmark of the host's cost of a kernel launch: `python -m pytest perf/bench_launches.py`. Needs no GPU, runs no kernel.

Calls the GPU backend's own call sites with CPU tensors: torch's dispatch, allocation, arguments, and the launch through CuPy
or from C++. A library whose cuLaunchKernel returns at once replaces the driver. Two costs of a real GPU are missing: torch's
caching allocator (malloc here), and the lookup of the current stream (torch.cuda.current_stream in Python,
aoti_torch_get_current_cuda_stream in C++), which a torch without CUDA lacks. "door" is the call as models make it, through the
table's function with its contract check.
"""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from vnext.kernels.calls import AttentionCall, AttentionStep, RotaryWrite
from vnext.kernels.cuda import backends, compiled, interface, operations
from vnext.kernels.table import cuda_door

TOKENS, HIDDEN, INNER, HEADS, KV_HEADS, HEAD_DIM, BLOCK_SIZE = 8, 4096, 14336, 32, 8, 128, 16
CONTEXT = 1000
ROUNDS, ITERATIONS = 300, 50
SHARED_BYTES = 227 * 1024
BF16 = torch.bfloat16
NOTHING = "int cuLaunchKernel(void) { return 0; }"


@pytest.fixture(scope="module")
def nothing(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    """Build a driver that does nothing, under the real driver's file name, so that CuPy loads it too."""
    folder = tmp_path_factory.mktemp("driver")
    (folder / "nothing.c").write_text(NOTHING)
    library, compiler = folder / "libcuda.so.1", shutil.which("cc") or shutil.which("gcc")
    command = [compiler, "-O2", "-shared", "-fPIC", "-Wl,-soname,libcuda.so.1", str(folder / "nothing.c"), "-o", str(library)]
    subprocess.run(command, check=True)
    return ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)


@pytest.fixture(scope="module", params=["python", "compiled"])
def form(request: pytest.FixtureRequest, nothing: ctypes.CDLL) -> Iterator[str]:
    """Run CPU tensors through the GPU's kernels, whose launches do nothing."""
    pytest.importorskip("cupy")
    from vnext.kernels.cuda import driver

    driver._bound.device = 0
    module = SimpleNamespace(get_function=lambda name: SimpleNamespace(ptr=1))

    def kernel(source: str, name: str, defines: interface.Defines) -> driver.CudaKernel:
        made = driver.CudaKernel(module, name, 0)
        made._shared_bytes = SHARED_BYTES  # as after the first launch that needed them
        return made

    backend = SimpleNamespace(kernel=kernel)
    with ExitStack() as stack, pytest.MonkeyPatch.context() as patch, torch.inference_mode():
        patch.setattr(torch.cuda, "current_stream", lambda device: SimpleNamespace(cuda_stream=0))
        backends.use("cpu", lambda: backend)
        stack.callback(backends.leave, "cpu")
        if request.param == "compiled":
            launcher = compiled.Launcher(compiled.address_of(nothing.cuLaunchKernel), 0, str)
            stack.enter_context(compiled.serving("cpu", launcher))
        yield request.param


def some(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=BF16)


def caches() -> tuple[torch.Tensor, torch.Tensor]:
    return some(64, KV_HEADS, BLOCK_SIZE, HEAD_DIM), some(64, KV_HEADS, BLOCK_SIZE, HEAD_DIM)


def attention(lengths: list[int]) -> tuple[object, ...]:
    """Return attention arguments: row i has `lengths[i]` queries after CONTEXT tokens."""
    starts, contexts = np.cumsum([0, *lengths]), np.full(len(lengths), CONTEXT)
    table = torch.zeros(len(lengths), -(-CONTEXT // BLOCK_SIZE), dtype=torch.int32)
    metadata = operations.attention_metadata(AttentionStep(starts, contexts, table, BLOCK_SIZE, KV_HEADS))
    metadata.plan(HEADS, HEAD_DIM, 0)
    return some(sum(lengths), HEADS, HEAD_DIM), AttentionCall(*caches(), metadata, HEAD_DIM**-0.5)


def cases() -> dict[str, tuple[str, tuple[object, ...]]]:
    """Return the table's function and its arguments, by name."""
    x, weight = some(TOKENS, HIDDEN), some(HIDDEN)
    qkv, angles = some(TOKENS, (HEADS + 2 * KV_HEADS) * HEAD_DIM), torch.zeros(TOKENS, HEAD_DIM // 2)
    slots = torch.zeros(TOKENS, dtype=torch.int64)
    return {
        "rms_norm": ("rms_norm", (x, weight, 1e-5)),
        "add_rms_norm": ("add_rms_norm", (x, x, weight, 1e-5)),
        "rotary_kv_write": ("rotary_kv_write", (qkv, RotaryWrite(None, None, 1e-5, angles, angles, *caches(), slots))),
        "paged_attention, decodes": ("paged_attention", attention([1] * TOKENS)),
        "paged_attention, mixed": ("paged_attention", attention([1] * TOKENS + [57])),
    }


def operation(name: str, arguments: tuple[object, ...]) -> Callable[[], object]:
    """Return torch's operation alone, with the arguments that the table's function passes."""
    bare = getattr(torch.ops.vnext_cuda, name).default
    if name == "rotary_kv_write":
        qkv, write = arguments
        return lambda: bare(qkv, *write)
    if name != "paged_attention":
        return lambda: bare(*arguments)
    query, (*both, metadata, scale, window, softcap, _, _, _) = arguments
    plan = metadata.plan(HEADS, HEAD_DIM, 0)
    rest = (list(plan[:7]), plan.slot_count, plan.narrow_is_partial, scale, window, softcap)
    return lambda: bare(query, *both, metadata.block_table, *rest)


@pytest.mark.parametrize("name", cases())
def test_an_operation(benchmark, form: str, name: str) -> None:
    measure(benchmark, operation(*cases()[name]))


def test_a_gate(benchmark, form: str) -> None:
    x = some(TOKENS, 2 * INNER)
    measure(benchmark, lambda: operations._gate_and_mul(x, "silu"))


@pytest.mark.parametrize("name", cases())
def test_behind_the_door(benchmark, form: str, name: str) -> None:
    function, arguments = cases()[name]
    behind = cuda_door(getattr(operations, function), form == "compiled")
    measure(benchmark, lambda: behind(*arguments))


def measure(benchmark, work: Callable[[], object]) -> None:
    with torch.inference_mode():
        benchmark.pedantic(work, rounds=ROUNDS, iterations=ITERATIONS, warmup_rounds=2)
