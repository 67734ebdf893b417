"""What --device auto is, for each kind of machine: GPUs that torch was built for, one for each rank, else the CPU and why."""

from __future__ import annotations

import logging
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from vnext.runtime.gpu import auto as device_auto
from vnext.runtime.gpu.auto import resolved_device, why_cpu


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch):
    """Makes torch speak of GPUs: their compute capabilities, and what it was built for."""

    def make(*capabilities: tuple[int, int], built: tuple[str, ...] = ("sm_80", "sm_90", "compute_90")) -> None:
        monkeypatch.setattr(device_auto, "has_gpu", lambda: bool(capabilities))
        monkeypatch.setattr(torch.cuda, "device_count", lambda: len(capabilities))
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: capabilities[index])
        monkeypatch.setattr(torch.cuda, "get_arch_list", lambda: list(built))

    return make


@pytest.mark.parametrize("capability", [(8, 0), (8, 6), (9, 0), (10, 0), (12, 0)])
def test_auto_is_a_gpu_that_torch_was_built_for(gpus, capability: tuple[int, int]) -> None:
    gpus(capability)
    assert resolved_device("auto", 1) == "cuda"


@pytest.mark.parametrize(
    ("capabilities", "built", "ranks", "reason"),
    [
        ([(7, 0)], ("sm_80", "compute_90"), 1, "this torch was built for other GPUs than number 0, which is sm_70"),
        ([(10, 0)], ("sm_80", "sm_90a"), 1, "other GPUs than number 0, which is sm_100"),
        ([(9, 0), (7, 5)], ("sm_90",), 2, "other GPUs than number 1, which is sm_75"),
        ([(9, 0)], ("sm_90",), 2, r"there are 1 GPU\(s\) for 2 ranks"),
    ],
)
def test_auto_is_the_cpu_where_a_gpu_would_not_do_and_says_why(
    gpus, caplog: pytest.LogCaptureFixture, capabilities: list, built: tuple[str, ...], ranks: int, reason: str
) -> None:
    gpus(*capabilities, built=built)
    with caplog.at_level(logging.WARNING):
        assert resolved_device("auto", ranks) == "cpu"
    assert re.search(reason, caplog.text) and "--device cuda insists" in caplog.text
    assert resolved_device("cuda", ranks) == "cuda", "who names it gets it, or a sentence"


def test_without_a_gpu_nothing_is_said(gpus, caplog: pytest.LogCaptureFixture) -> None:
    gpus()
    with caplog.at_level(logging.WARNING):
        assert (resolved_device("auto", 1), resolved_device("cpu", 1)) == ("cpu", "cpu")
    assert why_cpu(1) and not caplog.text


def test_a_rank_on_the_cpu_imports_nothing_of_a_gpu(root: Path) -> None:
    code = (
        "import sys; from vnext.runtime.rank import loading; from vnext.runtime.gpu.auto import resolved_device; "
        "assert resolved_device('auto', 1) in ('cpu', 'cuda'); "
        "assert not {'vnext.runtime.gpu.cuda', 'vnext.runtime.rank.gpu_loading', 'cupy', 'numba'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], cwd=root, check=True)
