"""What a GPU is asked without one: recordings that an error ends, experts and heads that not every card serves."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch

from vnext.kernels.calls import AttentionCall
from vnext.kernels.cuda import attention, experts
from vnext.runtime.gpu.cuda import CudaGraph
from vnext.runtime.gpu.device import recording
from vnext.runtime.gpu.piecewise_graphs import Recorder


class Torchs:
    """torch's graph: `said` is what it was asked; `fails` the name of a call that fails."""

    said: list[str] = []
    fails = ""

    def __init__(self) -> None:
        self._is_open = False

    def capture_begin(self, **_: object) -> None:
        Torchs.said.append("begin")
        if Torchs.fails == "begin":
            raise RuntimeError("out of memory")
        self._is_open = True

    def capture_end(self) -> None:
        Torchs.said.append("end")
        if not self._is_open or Torchs.fails == "end":
            raise RuntimeError("the capture was invalidated")
        self._is_open = False


@pytest.fixture(autouse=True)
def torchs(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Torchs)
    Torchs.said, Torchs.fails = [], ""
    yield
    collected = gc.isenabled()
    gc.enable()
    assert collected, "garbage is collected again"


@pytest.mark.parametrize(("fails", "said"), [("", ["begin", "end"]), ("begin", ["begin"]), ("end", ["begin", "end"])])
def test_a_recording_ends_and_garbage_is_collected_whatever_fails(fails: str, said: list[str]) -> None:
    Torchs.fails = fails
    with pytest.raises(RuntimeError) if fails else pytest.raises(ZeroDivisionError), recording(CudaGraph(None)):
        assert not gc.isenabled()
        if not fails:
            raise ZeroDivisionError
    assert Torchs.said == said and gc.isenabled()


def test_an_error_in_a_step_of_several_recordings_ends_the_last() -> None:
    device = SimpleNamespace(graph=lambda: CudaGraph(None))
    query = torch.zeros(2, 1, 4)

    def body(attend) -> torch.Tensor:
        attend(query, AttentionCall(query, query, 0, 1.0))
        raise MemoryError

    with pytest.raises(MemoryError):
        Recorder(device).record(body)
    assert Torchs.said == ["begin", "end", "begin", "end"] and gc.isenabled()


@pytest.mark.parametrize(
    ("capability", "served"), [((8, 0), False), ((9, 0), True), ((10, 0), True), ((10, 3), True), ((11, 0), False), ((12, 0), False)]
)
def test_experts_are_captured_where_torch_asks_no_host(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], served: bool
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    assert experts.serves(torch.bfloat16, 256, 192) == served


@pytest.mark.parametrize(
    ("dtype", "head_dim", "served"),
    [
        (torch.bfloat16, 128, {99, 163, 227}), (torch.bfloat16, 256, {163, 227}), (torch.float32, 128, {163, 227}),
        (torch.float32, 64, {99, 163, 227}), (torch.float32, 256, {227}),
    ],
)  # fmt: skip
def test_heads_are_served_where_a_block_of_them_fits(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, head_dim: int, served: set[int]
) -> None:
    query, cache = torch.empty(0, 1, head_dim, dtype=dtype), torch.empty(0, 1, 1, head_dim, dtype=dtype)
    found = set()
    for kib in (99, 163, 227):
        monkeypatch.setattr(attention, "shared_memory", lambda device, kib=kib: kib * 1024)
        found |= {kib} if attention.serves(query, cache) else set()
    assert found == served
