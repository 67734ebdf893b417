"""What a loader has made, in the order in which it did, so that another load of the same model fills the same memory.

Graphs, described steps, adapters and draft heads refer to that memory: after a refill they compute with the new weights. One
tensor at a time exists twice. Knows no files.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np

from vnext.kernels.arrays import Array
from vnext.kernels.cpu.linear import PackedLinear
from vnext.kernels.cpu.stack import Stack
from vnext.models.layers.sharding import Target
from vnext.models.loading.packed_file import PackedFile

Progress = Callable[[int, int], None]
"""Called with (bytes dealt with, bytes of all files) as loading goes on; the last call has both equal."""
PLAIN = (int, float, str, type(None), np.dtype)


class Tie(NamedTuple):
    """The embedding that config.json takes for a head, and whether the head is it: the file has no other one."""

    embedding: str
    is_equal: bool


class Kept:
    """What a load has beside its checkpoint, and what it leaves: its products, weights as operations take them. `progress` hears
    how far it is. `packed_file`, on the host: weights that it has are not made again, and it gets those that it lacks; a refill
    leaves both alone. `targets`: the weights that adapters may change. `codes`: by format, the files' bytes of those that stay of
    few bits. `names`: the checkpoint's tensors, with their whole shapes; `stored`: of weights in formats the dtypes under their own
    names, "" for none; `ties` the heads that config.json ties. Without `has_head` the embedding stands in for one."""

    def __init__(self, progress: Progress | None = None, packed_file: PackedFile | None = None) -> None:
        self.progress, self.packed_file = progress, packed_file
        self.targets = list[Target]()
        self.names: dict[str, tuple[int, ...]] = {}
        self.stored: dict[str, str] = {}
        self.ties: dict[str, Tie] = {}
        self.has_head, self.codes = True, Counter[str]()
        self._products: list[Any] = []
        self._next = -1

    @property
    def is_refilled(self) -> bool:
        """Whether products are copied into those of a first load."""
        return self._next >= 0

    def begin_refill(self) -> None:
        """The products that come from now on are copied into the ones that there are."""
        self._next = 0

    def take(self, product: Any) -> Any:
        """Keep a product; in a refill, copy it into the memory of the one that stands in its place, which is returned."""
        if self._next < 0:
            self._products.append(product)
            return product
        kept = self._products[self._next]
        self._next += 1
        copy_into(kept, product)
        return kept

    def memory(self) -> Iterator[Array]:
        """The arrays, or tensors, of all products, each once."""
        found = {id(array): array for product in self._products for array in arrays_of(product)}
        yield from found.values()


def arrays_of(value: Any) -> Iterator[Array]:
    """The arrays and tensors of a tree of tuples. TypeError for a leaf of another kind."""
    if isinstance(value, Stack):
        return  # addresses of other leaves
    value = getattr(value, "packed_beside", value)  # of a model whose other weights are leaves themselves
    if isinstance(value, PackedLinear):
        yield value.buffer
    elif isinstance(value, tuple):
        for each in value:
            yield from arrays_of(each)
    elif isinstance(value, np.ndarray) or hasattr(value, "data_ptr"):
        yield value
    elif not isinstance(value, PLAIN) and type(value).__module__ != "torch":
        raise TypeError(f"{type(value).__name__} among the weights")


def copy_into(kept: Any, made: Any) -> None:
    """Copy the arrays of a tree into those of a tree of the same shapes; those that are the same object stay."""
    for old, new in zip(arrays_of(kept), arrays_of(made), strict=True):
        if old is new:
            continue
        if isinstance(old, np.ndarray):
            old[...] = new
        else:
            old.copy_(new)
