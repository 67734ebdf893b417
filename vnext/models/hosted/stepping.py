"""Stepping: foreign code that computes in parts, though nothing in it stops.

Its products, its attention and its activations are computed in bands of rows, or of channels, each by a call of its own, so that
what comes out depends on shapes alone. It runs in a thread that waits behind each part of its work until the next one is asked for,
so that one thread computes at a time. A computation that nobody ends is given up, and so is its thread.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from functools import partial
from math import log, prod
from types import MappingProxyType
from typing import NamedTuple, TypeAlias, cast

import torch
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from vnext.models.layers.tower import Parts

PART = 1 << 27
"""Multiplications and additions of a part, and of a band of more than ROWS rows at most: 9 ms of a slow core with AVX2."""
ROWS = 128
"""What a band's rows are a multiple of: with half as many a layer of 768 takes 1.06 times as long, with all at once 0.93 times."""
BENT, SCORE, READ = 128, 48, 512
"""As how many multiplications an element of an activation, a query's share of a key and a number that a processor reads count, by
their time."""
KNOWN = 256
"""Sizes of what was computed, of which the work is known."""
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
        """Compute up to behind the next part, or to the end."""
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
        """Behind a part, in the thread that computes."""
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



# ---- bands -------------------------------------------------------------------------------------------------------

class Work(NamedTuple):
    """Multiplications and additions: by weights, as many more as there are more rows, and of rows by one another."""

    weighed: int = 0
    mutual: int = 0

    @property
    def parts(self) -> int:
        return sum(self) // PART


ATTENTION: Callable[..., torch.Tensor] = functional.scaled_dot_product_attention
Cut: TypeAlias = "Callable[..., torch.Tensor]"
"""As Bands._cut."""


def linear(cut: Cut, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    rows = x.reshape(-1, x.shape[-1])
    flat = cut(lambda band: functional.linear(rows[band], weight, bias), len(rows), Work(weight.numel()))
    found: torch.Tensor = flat.unflatten(0, x.shape[:-1])
    return found


def matmul(cut: Cut, left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    if left.dim() < 2 or right.dim() < 2:
        return torch.matmul(left, right)
    work = max(prod(left.shape[:-2]), prod(right.shape[:-2])) * left.shape[-1] * right.shape[-1]
    return cut(lambda band: torch.matmul(left[..., band, :], right), left.shape[-2], Work(0, work))


def attend(
    cut: Cut, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0, is_causal: bool = False, **how: object,
) -> torch.Tensor:  # fmt: skip
    def of(band: slice) -> torch.Tensor:
        mask = attn_mask if attn_mask is None or attn_mask.shape[-2] == 1 else attn_mask[..., band, :]
        return ATTENTION(query[..., band, :], key, value, mask, dropout_p, is_causal, **how)

    count, work = query.shape[-2], prod(query.shape[:-2]) * key.shape[-2] * (query.shape[-1] + value.shape[-1] + SCORE)
    return of(slice(count)) if is_causal else cut(of, count, Work(0, work))  # a causal mask counts from the first query


def convolve(
    function: Callable[..., torch.Tensor], cut: Cut, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None,
    *how: object, **more: object,
) -> torch.Tensor:  # fmt: skip
    """By channels of what comes out, each of all numbers. `how`: stride, padding, dilation and groups, as modules have them."""
    if more or len(how) != 4 or how[3] != 1:
        return function(x, weight, bias, *how, **more)

    def of(band: slice) -> torch.Tensor:
        return function(x, weight[band], None if bias is None else bias[band], *how)

    channel = 1 - weight.dim()
    places = x.numel() // x.shape[channel] // prod(cast("tuple[int, ...]", how[0]))
    return cut(of, len(weight), Work(weight[0].numel() * places), channel)


def bend(function: Callable[..., torch.Tensor], cut: Cut, x: torch.Tensor, **how: object) -> torch.Tensor:
    """An activation."""
    if x.dim() < 2:
        return function(x, **how)
    return cut(lambda band: function(x[..., band, :], **how), x.shape[-2], Work(BENT * x.numel() // max(x.shape[-2], 1)))


CUTS: Mapping[object, Callable[..., torch.Tensor]] = MappingProxyType(
    {
        functional.linear: linear, torch.matmul: matmul, torch.bmm: matmul, torch.Tensor.matmul: matmul, torch.Tensor.bmm: matmul,
        ATTENTION: attend, **{each: partial(convolve, each) for each in (torch.conv1d, torch.conv2d, torch.conv3d)},
    }
)  # fmt: skip
"""Functions of torch of two tensors or more -> what computes them in bands."""
BENDS = frozenset((functional.gelu, functional.silu, torch.sigmoid, torch.tanh))
"""Of one."""


class Bands(TorchFunctionMode):
    """While it is entered, what CUTS and BENDS name is computed in bands. `work`: how much until now. `counts`: of each only the
    first row is computed and stands for all, which tells the work."""

    def __init__(self, counts: bool = False) -> None:
        super().__init__()
        self.work, self._counts = Work(), counts

    def __torch_function__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        how = kwargs or {}
        if func in CUTS and len(args) > 1 and "out" not in how:
            return CUTS[func](self._cut, *args, **how)
        is_bent = func in BENDS and len(args) == 1 and not ("out" in how or how.get("inplace"))
        return bend(func, self._cut, *args, **how) if is_bent else func(*args, **how)

    def _cut(self, compute: Callable[[slice], torch.Tensor], rows: int, each: Work, axis: int = -2) -> torch.Tensor:
        """What is computed of `rows` (along an axis), each of which is so much work."""
        size, found = max(PART // max(sum(each), 1) // ROWS, 1) * ROWS, list[torch.Tensor]()
        if self._counts:
            self._add(rows, each)
            return compute(slice(1)).repeat_interleave(rows, axis)
        for first in range(0, max(rows, 1), size):
            found.append(compute(slice(first, first + size)))
            before = self.work.parts
            self._add(min(size, rows - first), each)
            for _ in range(self.work.parts - before):
                stop()
        return found[0] if len(found) == 1 else torch.cat(found, axis)

    def _add(self, rows: int, each: Work) -> None:
        self.work = Work(*(sofar + rows * more for sofar, more in zip(self.work, each)))


def stop() -> None:
    """Wait, where one computes in parts, until the next one is asked for."""
    turns: Turns | None = getattr(_own, "turns", None)
    if turns is not None:
        turns.stop()


class Stepped:
    """Computations of one kind, each in bands. The work of those before tells how many parts the next one has."""

    def __init__(self) -> None:
        self._known = dict[int, Work]()

    def has(self, size: int) -> bool:
        """Whether one of this size was computed, or counted."""
        return size in self._known

    def work(self, size: int) -> Work:
        """That of a computation, by the one of the nearest size: each kind as a power of the size, which the one of the most unlike
        size tells. Alone it is taken to be of rows that all see each other."""
        near = min(self._known, key=lambda known: abs(known - size), default=0)
        if not near:
            return Work()
        far, powers = max(self._known, key=lambda known: abs(log(known / near))), [1.0, 2.0]
        if far != near:
            pairs = zip(self._known[near], self._known[far])
            powers = [min(max(log(max(one, 1) / max(other, 1)) / log(near / far), 0), 2) for one, other in pairs]
        return Work(*(round(each * (size / near) ** power) for each, power in zip(self._known[near], powers)))

    def whole(self, compute: Callable[[], torch.Tensor], size: int, counts: bool = False) -> torch.Tensor:
        """What `compute` returns, without a stop; nothing of use where it only `counts`. `size`: the numbers that it is given."""
        with Bands(counts) as bands:
            found = compute()
        self._known.pop(size, None)
        self._known[size] = bands.work
        if len(self._known) > KNOWN:
            self._known.pop(next(iter(self._known)))
        return found

    def parts(self, compute: Callable[[], torch.Tensor], size: int) -> Parts:
        """The same, in parts: of a size that nobody had before, in as many as `work` tells. Before these come those of what
        it took to read so many numbers, in which nothing is computed."""
        count, read, turns = self.work(size).parts, 1 + READ * size // PART, Turns(lambda: self.whole(compute, size))
        try:
            for _ in range(read):
                yield read + count
            for _ in range(count):
                turns.go_on()
                yield read + count
            return turns.end()
        finally:
            turns.give_up()
