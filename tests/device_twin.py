"""A device's twin on the CPU, for tests of everything above `vnext/runtime/gpu/device.py`: late and strict on purpose.

    copies     arrive when the work joins them and not before: until then their target holds POISON; memory that is copied to for
               the first time may have been another tensor's a moment ago, so that comes after all work that was asked for
    fetches    arrive when they are waited for, or seen to be there, which is never at the first look
    graphs     record torch's operations with their tensors, as a GPU does: a replay knows addresses and recorded values,
               no Python. What recording computed is spoiled at its end; to ask for a value while recording is an error

`device_watch.py` looks for more that waits, in steps that are not recorded.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from vnext.kernels.table import operations
from vnext.runtime.gpu.device import Mark, Memory
from vnext.runtime.rank import gpu_loading
from vnext.sampling.logits import adjust_rows, keep_allowed
from vnext.sampling.sampling import sampler_for

POISON = 0x5A
SHAPED_BY_VALUES = (
    "_local_scalar_dense", "nonzero", "bincount", "equal", "repeat_interleave", "masked_select", "unique", "is_nonzero",
)  # fmt: skip
"""Operations whose result the host must read, or whose shape it must: a capture cannot hold them."""


class CaptureError(RuntimeError):
    """Something that no GPU can capture."""


class OrderError(RuntimeError):
    """Work and copies that a GPU may do in another order."""


class WaitingError(AssertionError):
    """A step waited for the device."""


class TwinMark:
    """Reached when it is waited for, joined, or looked at twice."""

    def __init__(self, device: TwinDevice, arrive: Callable[[], None] = lambda: None) -> None:
        self._device, self._arrive = device, arrive
        self._looked = False

    def is_reached(self) -> bool:
        if self._looked:
            self.wait()
        self._looked = True
        return self._arrive is None

    def wait(self) -> None:
        if self._arrive is not None:
            if self._device.is_watched and not self._device.at_work:
                raise WaitingError("a step waits for a mark that is not reached")
            arrive, self._arrive = self._arrive, None
            with torch.inference_mode():
                arrive()


def at_work(method: Callable[..., Any]) -> Callable[..., Any]:
    """A method of the device, by which it may do what steps may not."""

    @wraps(method)
    def marked(self: TwinDevice, *arguments: Any) -> Any:
        self.at_work += 1
        try:
            return method(self, *arguments)
        finally:
            self.at_work -= 1

    return marked


class TwinDevice:
    """The CPU as a late device. `replays` counts what graphs did; `is_watched`: whether a step must not wait now."""

    def __init__(self, total_bytes: int = 2**30, free_bytes: int = 2**29) -> None:
        self.torch_device = torch.device("cpu")
        self.replays = self.at_work = 0
        self.is_watched = False
        self.host_addresses: dict[int, torch.Tensor] = {}
        self._known: dict[int, torch.Tensor] = {}
        self._newest = TwinMark(self)
        self._sizes = total_bytes, free_bytes

    @at_work
    def host_buffer(self, size_bytes: int) -> torch.Tensor:
        buffer = torch.full((size_bytes,), POISON, dtype=torch.uint8)
        self.host_addresses[buffer.data_ptr()] = buffer
        return buffer

    @at_work
    def copy_in(self, target: torch.Tensor, source: torch.Tensor, after: Mark | None) -> TwinMark:
        address = target.untyped_storage().data_ptr()
        if address not in self._known and after is not self._newest:
            raise OrderError("a copy to new memory may come before work that still uses what was there")
        self._known[address] = target
        if after is not None:
            after.wait()
        target.fill_(POISON)
        return TwinMark(self, lambda: target.copy_(source))

    @at_work
    def beside(self, copy: Callable[[], object], after: Mark | None) -> TwinMark:
        if after is None:
            raise OrderError("copies beside the work may come before work that still uses their targets")
        after.wait()
        return TwinMark(self, copy)

    @at_work
    def join(self, mark: Mark) -> None:
        mark.wait()

    def mark(self) -> TwinMark:
        self._newest = TwinMark(self)
        return self._newest

    @at_work
    def fetch(self, tensors: Sequence[torch.Tensor]) -> tuple[list[torch.Tensor], TwinMark]:
        values = [tensor.clone() for tensor in tensors]
        targets = [torch.empty_like(value).view(torch.uint8).fill_(POISON).view(value.dtype) for value in values]

        def arrive() -> None:
            for target, value in zip(targets, values):
                target.copy_(value)

        return targets, TwinMark(self, arrive)

    @at_work
    def upload(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.clone()

    @at_work
    def run(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """A function that is the device's own business."""
        return function(*arguments)

    def graph(self) -> TwinGraph:
        return TwinGraph(self)

    def free_unused(self) -> None:
        pass

    def begin_peak(self) -> None:
        pass

    def memory(self) -> Memory:
        return Memory(*self._sizes, cached=2**20, peak=2**20)


class TwinGraph(TorchDispatchMode):
    """The operations between `begin` and `end`, done again over the same tensors."""

    def __init__(self, device: TwinDevice) -> None:
        super().__init__()
        self._device = device
        self._steps: list[tuple[Any, tuple[Any, ...], dict[str, Any], Any]] = []

    def begin(self) -> None:
        self.__enter__()

    def end(self) -> None:
        self.__exit__(None, None, None)
        for _, args, kwargs, out in self._steps:
            known = {leaf.untyped_storage().data_ptr() for leaf in tensors_of((args, kwargs))}
            for tensor in tensors_of(out):
                if tensor.untyped_storage().data_ptr() not in known and tensor.numel():
                    tensor.view(-1).view(torch.uint8).fill_(0xFF)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if any(name in func.name() for name in SHAPED_BY_VALUES):
            raise CaptureError(f"{func.name()} waits for the device")
        out = func(*args, **(kwargs or {}))
        self._steps.append((func, args, kwargs or {}, out))
        return out

    def replay(self) -> None:
        self._device.replays += 1
        for func, args, kwargs, out in self._steps:
            for old, new in zip(tensors_of(out), tensors_of(func(*args, **kwargs)), strict=True):
                if old.data_ptr() != new.data_ptr() and old.numel():
                    if old.shape != new.shape:
                        raise CaptureError(f"{func.name()} gave {list(new.shape)} in place of {list(old.shape)}")
                    old.copy_(new)


def tensors_of(tree: Any) -> list[torch.Tensor]:
    """The tensors among an operation's arguments or results."""
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


class Roomy(TwinDevice):
    """4 GiB, of which others hold one and this process half of one."""

    def memory(self) -> Memory:
        return Memory(total=2**32, free=2**31 + 2**29, cached=2**29, peak=2**28)


def compute_on_twins(monkeypatch: pytest.MonkeyPatch) -> None:
    """From here on engines of this process with device "cuda" compute on the device's twin, by the CPU's kernels."""
    monkeypatch.setattr(gpu_loading, "open_device", lambda rank: Roomy())
    monkeypatch.setattr(gpu_loading, "operations", lambda device_type: operations("cpu"))
    monkeypatch.setattr(gpu_loading, "sampler_for", lambda device_type: sampler_for("cpu"))
    monkeypatch.setattr(gpu_loading, "logits_processor_for", lambda device_type: adjust_rows)
    monkeypatch.setattr(gpu_loading, "masking_for", lambda device_type: keep_allowed)
