"""Watches steps on a device's twin, whose tensors and the host's lie in one memory, for what would make a GPU's host wait.

    reading     item, tolist, numpy, int() and the like of a tensor of the device
    shapes      operations whose shape depends on values: nonzero, masks as an index, repeat_interleave without a size
    copying     tensors of the host sent other than through the device's face, or mixed with those of the device
    waiting     for a mark that is not reached

`watch_steps` watches every step that a test runs. The host's are what `from_numpy`, factories without a device and the face's
buffers gave while it watches, and what was made of them; all others are the device's. Numbers (0-dim) of the host are arguments
of a launch, as they are on a GPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from device_twin import SHAPED_BY_VALUES, TwinDevice, WaitingError, tensors_of
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from vnext.kernels.cuda import plan
from vnext.runtime.gpu.steps import DeviceSteps, PendingStep
from vnext.state.state import State

READS = {"item", "tolist", "numpy", "__array__", "__bool__", "__int__", "__float__", "__index__", "cpu", "__contains__"}
SENDS = {"tensor", "as_tensor", "asarray", "new_tensor", "cuda"}
INDEXING = {"__getitem__", "__setitem__"}


class Watch:
    """Finds the waits of a block of code. `looks`: how many calls were looked at."""

    def __init__(self, device: TwinDevice) -> None:
        self.device = device
        self._host: dict[int, torch.UntypedStorage] = {}  # kept alive, so that no other gets its number
        self.looks = 0

    @contextmanager
    def watching(self) -> Iterator[None]:
        self.device.is_watched = True
        try:
            with Calls(self), Kernels(self):
                yield
        finally:
            self.device.is_watched = False
            self._host.clear()

    @property
    def is_off(self) -> bool:
        """Whether the face itself is at work."""
        self.looks += 1
        return self.device.at_work > 0

    def note(self, tensor: torch.Tensor) -> torch.Tensor:
        """It is the host's."""
        storage = tensor.untyped_storage()
        self._host[storage._cdata] = storage
        return tensor

    def is_host(self, tensor: torch.Tensor) -> bool:
        storage = tensor.untyped_storage()
        return storage._cdata in self._host or storage.data_ptr() in self.device.host_addresses


def watch_steps(monkeypatch: pytest.MonkeyPatch) -> list[Watch]:
    """From here on every launch of a step is watched; the watches of those that were. For steps of one thread."""
    launch, from_numpy, on_device, watches = DeviceSteps.launch, torch.from_numpy, plan.on_device, []

    def watched(steps: DeviceSteps, state: State) -> PendingStep:
        watches.append(Watch(steps._device))
        with watches[-1].watching():
            return launch(steps, state)

    def reported(array: np.ndarray) -> torch.Tensor:
        tensor = from_numpy(array)
        device = watches[-1].device if watches else None
        return watches[-1].note(tensor) if device and device.is_watched and not device.at_work else tensor

    def sent(parts: tuple[np.ndarray, ...], device: torch.device) -> list[torch.Tensor]:
        """By pinned memory and without waiting: what this function is for on a GPU."""
        return watches[-1].device.run(on_device, parts, device) if watches else on_device(parts, device)

    monkeypatch.setattr(DeviceSteps, "launch", watched)
    monkeypatch.setattr(torch, "from_numpy", reported)
    monkeypatch.setattr(plan, "on_device", sent)
    return watches


class Calls(TorchFunctionMode):
    """Of Python: reads and sends that no kernel shows."""

    def __init__(self, watch: Watch) -> None:
        super().__init__()
        self._watch = watch

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        watch, kwargs, name = self._watch, kwargs or {}, getattr(func, "__name__", "")
        if name == "__get__" or watch.is_off:  # an attribute
            return func(*args, **kwargs)
        given = tensors_of((args, kwargs))
        if name in READS and not watch.is_host(args[0]):
            raise WaitingError(f"{name} reads a tensor of the device")
        if name in INDEXING and not watch.is_host(args[0]):
            self._look_at_index(args[1])
            if name == "__setitem__" and not isinstance(args[2], torch.Tensor) and args[0][args[1]].dim() == 0:
                raise WaitingError("an element is set to a number of the host, which torch copies there")
        if name in SENDS and kwargs.get("device") is not None or name in ("new_tensor", "cuda"):
            raise WaitingError(f"{name} sends something of the host")
        if name == "to" and watch.is_host(args[0]) and any(is_place(part) for part in (*args[1:], *kwargs.values())):
            raise WaitingError("to sends something of the host")
        out = func(*args, **kwargs)
        if not given and isinstance(out, torch.Tensor) and kwargs.get("device") is None:
            watch.note(out)
        return out

    def _look_at_index(self, index: Any) -> None:
        for part in index if isinstance(index, tuple) else (index,):
            if isinstance(part, (list, np.ndarray)):
                raise WaitingError("an index of the host")
            if isinstance(part, torch.Tensor) and part.dtype in (torch.bool, torch.uint8):
                raise WaitingError("a mask as an index")


class Kernels(TorchDispatchMode):
    """Of torch: every operation, with what a composed one is made of."""

    def __init__(self, watch: Watch) -> None:
        super().__init__()
        self._watch = watch

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        watch, kwargs = self._watch, kwargs or {}
        if watch.is_off:
            return func(*args, **kwargs)
        given, name = tensors_of((args, kwargs)), func.name()
        host = [tensor for tensor in given if watch.is_host(tensor)]
        if len(host) < len(given):
            sized = kwargs.get("output_size") is not None
            if any(part in name for part in SHAPED_BY_VALUES) and not sized:
                raise WaitingError(f"{name} waits for values of the device")
            if "masked_fill" in name and isinstance(args[2], torch.Tensor) and not watch.is_host(args[2]):
                raise WaitingError(f"{name} reads the value it fills with")
            if any(tensor.dim() for tensor in host) or (host and "copy" in name):
                raise WaitingError(f"{name} of tensors of the host and of the device")
        out = func(*args, **kwargs)
        if given and len(host) == len(given):
            for tensor in tensors_of(out):
                watch.note(tensor)
        return out


def is_place(value: Any) -> bool:
    return isinstance(value, (torch.device, str))
