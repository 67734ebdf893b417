"""The thread team: threads come, go, sleep and survive a fork; calls from several threads at once are safe."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
from cpu_levels import draw, needs_native, using

from vnext.kernels.cpu import linear as products, native

pytestmark = needs_native


@pytest.fixture
def case() -> tuple[torch.Tensor, products.PackedLinear, torch.Tensor]:
    """x, a packed weight and their product with one thread."""
    x, packed = draw(64, 256, dtype=torch.bfloat16), products.pack(draw(512, 256, dtype=torch.bfloat16))
    return x, packed, products.linear(x, packed)


@pytest.mark.parametrize("spin_us", [0, 1000])
def test_a_team_works_after_it_slept(spin_us: int, case: tuple) -> None:
    x, packed, expected = case
    try:
        for threads in (4, 1, 2, 3):
            native.start(threads, spin_us)
            assert native.kernels.team_size() == threads
            for pause_s in (0.0, 0.0, 0.02, 0.0):
                time.sleep(pause_s)
                assert torch.equal(products.linear(x, packed), expected)
    finally:
        native.start(1, 0)


def test_several_callers_at_once(case: tuple) -> None:
    """The product is long enough for the interpreter's lock to be given away."""
    big = draw(700, 1024, dtype=torch.bfloat16)
    packed = products.pack(draw(2048, 1024, dtype=torch.bfloat16))
    expected, wrong = products.linear(big, packed), []

    def call() -> None:
        for _ in range(3):
            if not torch.equal(products.linear(big, packed), expected):
                wrong.append(threading.get_ident())

    with using(native.level(), threads=2):
        callers = [threading.Thread(target=call) for _ in range(3)]
        for caller in callers:
            caller.start()
        for caller in callers:
            caller.join()
    assert wrong == []


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_a_child_process_works_alone_and_with_a_team_of_its_own(case: tuple) -> None:
    x, packed, expected = case
    with using(native.level(), threads=2):
        products.linear(x, packed)
        child = os.fork()
        if child == 0:
            good = native.kernels.team_size() == 1 and torch.equal(products.linear(x, packed), expected)
            native.start(2, 200)
            good = good and torch.equal(products.linear(x, packed), expected)
            os._exit(0 if good else 1)
        assert os.waitpid(child, 0)[1] == 0


def test_a_missing_level_is_named() -> None:
    with pytest.raises(ValueError, match=r"the best it has is"):
        missing = len(native.Level)
        native.kernels.set_level(missing) or native.set_level(type("", (int,), {"name": "NEXT"})(missing))


WITHOUT_TILES = """
import ctypes
class Stack(ctypes.Structure):
    _fields_ = [("at", ctypes.c_void_p), ("flags", ctypes.c_int), ("size", ctypes.c_size_t)]
room = ctypes.create_string_buffer(4096)
ctypes.CDLL(None, use_errno=True).sigaltstack(ctypes.byref(Stack(ctypes.addressof(room), 0, len(room))), None)
from vnext.kernels.cpu import native
print(native.best_level().name, native.level().name)
"""


def test_an_intel_without_tiles_does_without_the_dot_product_of_pairs() -> None:
    """Linux refuses tiles to a process whose signal stack could not hold them."""
    machine = Path("/proc/cpuinfo").read_text() if sys.platform == "linux" else ""
    ran = subprocess.run([sys.executable, "-c", WITHOUT_TILES], capture_output=True, text=True, check=True, timeout=60)
    best, fastest = ran.stdout.split()
    assert best == ("AVX512_BF16" if native.best_level() is native.Level.AMX else native.best_level().name)
    assert fastest == ("AVX512" if best == "AVX512_BF16" and "GenuineIntel" in machine else best)


def test_a_wrong_number_of_arguments_is_an_error() -> None:
    with pytest.raises(TypeError, match="1 arguments given where 2 are needed"):
        native.kernels.configure_team(1)
    with pytest.raises(TypeError):
        native.kernels.configure_team("two", 1)
