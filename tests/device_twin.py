"""A device's twin on the CPU, for tests of everything above `vnext/runtime/device.py`: late and strict on purpose.

    copies     arrive when the work joins them and not before: until then their target holds POISON
    fetches    arrive when they are waited for, or seen to be there, which is never at the first look
    graphs     record torch's operations with their tensors, as a GPU does: a replay knows addresses and recorded values,
               no Python. What recording computed is spoiled at its end; to ask for a value while recording is an error
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from vnext.runtime.device import Mark, Memory

POISON = 0x5A
WAITS = ("_local_scalar_dense", "nonzero", "bincount", "equal", "repeat_interleave")
"""Operations whose result the host must read, or whose shape it must: a capture cannot hold them."""


class CaptureError(RuntimeError):
    """Something that no GPU can capture."""


class TwinMark:
    """Reached when it is waited for, joined, or looked at twice."""

    def __init__(self, arrive: Callable[[], None] = lambda: None) -> None:
        self._arrive: Callable[[], None] | None = arrive
        self._looked = False

    def is_reached(self) -> bool:
        if self._looked:
            self.wait()
        self._looked = True
        return self._arrive is None

    def wait(self) -> None:
        if self._arrive is not None:
            arrive, self._arrive = self._arrive, None
            with torch.inference_mode():
                arrive()


class TwinDevice:
    """The CPU as a late device. `replays` counts what graphs did."""

    def __init__(self, total_bytes: int = 2**30, free_bytes: int = 2**29) -> None:
        self.torch_device = torch.device("cpu")
        self.replays = 0
        self._sizes = total_bytes, free_bytes

    def host_buffer(self, size_bytes: int) -> torch.Tensor:
        return torch.full((size_bytes,), POISON, dtype=torch.uint8)

    def copy_in(self, target: torch.Tensor, source: torch.Tensor, after: Mark | None) -> TwinMark:
        if after is not None:
            after.wait()
        target.fill_(POISON)
        return TwinMark(lambda: target.copy_(source))

    def join(self, mark: Mark) -> None:
        mark.wait()

    def mark(self) -> TwinMark:
        return TwinMark()

    def fetch(self, tensors: Sequence[torch.Tensor]) -> tuple[list[torch.Tensor], TwinMark]:
        values = [tensor.clone() for tensor in tensors]
        targets = [torch.empty_like(value).view(torch.uint8).fill_(POISON).view(value.dtype) for value in values]

        def arrive() -> None:
            for target, value in zip(targets, values):
                target.copy_(value)

        return targets, TwinMark(arrive)

    def upload(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.clone()

    def graph(self) -> TwinGraph:
        return TwinGraph(self)

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
        if any(name in func.name() for name in WAITS):
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
