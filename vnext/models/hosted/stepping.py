"""Stepping: foreign code that computes in parts, though nothing in it stops.

It runs in a thread that waits behind each of its layers until the next part is asked for, so that one thread computes at a time and
what comes out is what the code makes of its own. A computation that nobody ends is given up, and so is its thread.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

import torch
from torch import nn

from vnext.models.layers.tower import Parts

_own = threading.local()


class GivenUp(BaseException):
    """Nobody asks for the rest. No error of the code that is stopped, which may catch those."""


class Turns:
    """One computation, in a thread of its own. Mutable."""

    def __init__(self, compute: Callable[[], torch.Tensor]) -> None:
        """Has not begun."""
        self._compute, self._go, self._stopped = compute, threading.Semaphore(0), threading.Semaphore(0)
        self.is_done = self._is_free = self._is_over = False
        self.found: torch.Tensor | BaseException = GivenUp()
        threading.Thread(target=self._run, name="tower", daemon=True).start()

    def go_on(self) -> None:
        """Compute up to behind the next layer, or to the end."""
        if not self.is_done:
            self._go.release()
            self._stopped.acquire()

    def end(self) -> torch.Tensor:
        """What is computed. Raises what the code raises."""
        self._is_free = True
        self.go_on()
        if isinstance(self.found, BaseException):
            raise self.found
        return self.found

    def give_up(self) -> None:
        """Let the thread end, without a wait: at the end of a process it runs no more."""
        self._is_over = True
        self._go.release()

    def stop(self) -> None:
        """Behind a layer, in the thread that computes."""
        if not (self._is_free or self._is_over):
            self._stopped.release()
            self._go.acquire()
        if self._is_over:
            raise GivenUp

    def _run(self) -> None:
        _own.turns = self
        try:
            self._go.acquire()
            if self._is_over:
                raise GivenUp
            with torch.inference_mode():
                self.found = self._compute()
        except GivenUp:
            pass
        except BaseException as error:  # it is raised where it is waited for
            self.found = error
        self.is_done = True
        self._stopped.release()


class Stepped:
    """A module whose computations stop behind layers. `stops`: as often as the first one has."""

    def __init__(self, model: nn.Module) -> None:
        """Layers are the members of its lists of modules, whichever of those lie in others aside."""
        self.stops, chosen = 0, list[str]()
        for name, module in model.named_modules():
            if isinstance(module, nn.ModuleList) and len(module) > 1 and not any(name.startswith(f"{each}.") for each in chosen):
                chosen.append(name)
                for layer in module:
                    layer.register_forward_hook(self._behind)

    def _behind(self, *_: object) -> None:
        turns: Turns | None = getattr(_own, "turns", None)
        if turns is None:
            self.stops += 1
        else:
            turns.stop()

    def parts(self, compute: Callable[[], torch.Tensor]) -> Parts:
        """What `compute` returns, in a part for each layer and one for what comes before."""
        turns, count = Turns(compute), 1 + self.stops
        try:
            yield count
            for _ in range(self.stops):
                turns.go_on()
                yield count
            return turns.end()
        finally:
            turns.give_up()
