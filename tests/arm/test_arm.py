"""The compiled modules of aarch64: cross-compiled, run under qemu, and compared with what this processor computes.

Emulation shows that instructions are right. It shows no speed, and no missing memory barrier: memory keeps the order of x86.
Skipped, with the reason, where scripts/arm.sh finds no cross compiler, no qemu or no Python for aarch64.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from vnext.base.compiled import load

if load("vnext.kernels.cpu._native") is None or sys.platform != "linux" or os.uname().machine != "x86_64":
    pytest.skip("compares aarch64 with compiled kernels on Linux for x86-64", allow_module_level=True)

from kernel_calls import PRODUCTS, product_inputs

LACKING = 3
ALL, PLAIN_NEON = "max", "cortex-a72"
HERE = Path(__file__).parent
Results = dict[str, np.ndarray]


def script(root: Path, *arguments: str, cpu: str = ALL) -> str:
    """Runs scripts/arm.sh; its output. Skips the test where this machine lacks its tools."""
    environment = os.environ | {"VENV": sys.prefix, "ARM_CPU": cpu}
    command = [str(root / "scripts" / "arm.sh"), *arguments]
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if ran.returncode == LACKING:
        pytest.skip(ran.stderr.strip())
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return ran.stdout


@pytest.fixture(scope="session")
def arm(root: Path) -> Callable[..., str]:
    """Runs a program of this folder on aarch64, in the copy that was built."""
    script(root, "build")
    return lambda name, *arguments, cpu=ALL: script(root, "python", f"tests/arm/{name}", *arguments, cpu=cpu)


def here(name: str, *arguments: str) -> str:
    environment = os.environ | {"PYTHONPATH": str(HERE.parents[1])}
    command = [sys.executable, str(HERE / name), *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout


def results_of(run: Callable[..., str], path: Path, *levels: str) -> tuple[list[str], Results]:
    """The level that was chosen and all that are there, then LEVEL/operation -> its result."""
    said = run("kernel_calls.py", str(path), *levels).split()
    with np.load(path) as file:
        return said, dict(file)


def of_level(results: Results, level: str) -> dict[str, bytes]:
    return {name.partition("/")[2]: array.tobytes() for name, array in results.items() if name.startswith(f"{level}/")}


def differing(some: dict[str, bytes], others: dict[str, bytes]) -> set[str]:
    assert some.keys() == others.keys() and len(some) > 80
    return {name for name in some if some[name] != others[name]}


def to_odd(value: np.ndarray, error: np.ndarray) -> np.ndarray:
    """value + error, both float64, the error below value's last bit, rounded to odd: float32, as float64."""
    near = value.astype(np.float32)
    left = np.where(value != near, value - near, error)
    bits = near.view(np.uint32) - ((left != 0) & (np.signbit(left) != np.signbit(near)))
    return (bits | (left != 0)).astype(np.uint32).view(np.float32).astype(np.float64)


def sum_to_odd(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    total = a + b
    a_part = total - b
    return to_odd(total, (a - a_part) + (b - (total - a_part)))


def product_by_pairs(x: np.ndarray, weight: np.ndarray) -> np.ndarray:
    """x [rows, inputs] @ weight [outputs, inputs].T as linear_dots.h describes it; without denormal numbers."""
    if x.shape[1] % 2:
        x, weight = (np.pad(each, ((0, 0), (0, 1))) for each in (x, weight))
    wide_x, wide_weight = x.astype(np.float64), weight.astype(np.float64)
    total = np.zeros((len(x), len(weight)))
    for k in range(0, x.shape[1], 2):
        pair = [wide_x[:, None, k + i] * wide_weight[None, :, k + i] for i in (0, 1)]
        total = sum_to_odd(total, sum_to_odd(*pair))
    return total.astype(np.float32)


@pytest.fixture(scope="session")
def on_x86(tmp_path_factory: pytest.TempPathFactory) -> Results:
    return results_of(here, tmp_path_factory.mktemp("x86") / "results.npz")[1]


@pytest.fixture(scope="session")
def on_arm(arm: Callable[..., str], tmp_path_factory: pytest.TempPathFactory) -> tuple[list[str], Results]:
    return results_of(arm, tmp_path_factory.mktemp("arm") / "results.npz")


def test_the_portable_level_gives_the_bits_of_x86(on_x86: Results, on_arm: tuple[list[str], Results]) -> None:
    assert not differing(of_level(on_arm[1], "PORTABLE"), of_level(on_x86, "PORTABLE"))


def test_neon_gives_the_bits_of_avx2(on_x86: Results, on_arm: tuple[list[str], Results]) -> None:
    if not of_level(on_x86, "AVX2"):
        pytest.skip("this processor has no AVX2")
    assert not differing(of_level(on_arm[1], "NEON"), of_level(on_x86, "AVX2"))


def test_bf16_has_an_order_of_its_own_for_products_alone(on_arm: tuple[list[str], Results]) -> None:
    """Which is that of the plain sums above; x and weights are exact in bfloat16, products of two in float32."""
    said, found = on_arm
    assert said == ["NEON_BF16", "PORTABLE", "NEON", "NEON_BF16"]
    own = differing(of_level(found, "NEON_BF16"), of_level(found, "NEON"))
    assert own and all(name.startswith("product bfloat16") for name in own)
    for outputs, inputs, shards in PRODUCTS:
        if shards > 1:
            continue
        name = f"NEON_BF16/product bfloat16 {outputs}x{inputs} plain float32"
        assert np.array_equal(found[name], product_by_pairs(*product_inputs(outputs, inputs, "bfloat16")))


def test_a_processor_without_bf16_gets_neon(arm: Callable[..., str], on_arm: tuple[list[str], Results], tmp_path: Path) -> None:
    said, found = results_of(partial(arm, cpu=PLAIN_NEON), tmp_path / "results.npz", "NEON")
    assert said == ["NEON", "PORTABLE", "NEON"]
    assert not differing(of_level(found, "NEON"), of_level(on_arm[1], "NEON"))


def test_an_engine_at_neon_answers_as_one_at_avx2(arm: Callable[..., str], on_x86: Results) -> None:
    """Its processes, its ring, its rank and its kernels, from text to text."""
    if not of_level(on_x86, "AVX2"):
        pytest.skip("this processor has no AVX2")
    found, expected = json.loads(arm("engine_calls.py", "neon")), json.loads(here("engine_calls.py", "avx2"))
    assert (found["kernels"], expected["kernels"]) == ("NEON", "AVX2")
    assert found["tokens"] == expected["tokens"] and all(len(tokens) == 24 for answers in found["tokens"] for tokens in answers)


def test_engines_logs_rings_and_sums_are_those_of_x86(arm: Callable[..., str]) -> None:
    assert json.loads(arm("module_calls.py")) == json.loads(here("module_calls.py"))
