"""Scales: numbers that share a factor, in groups of inputs or blocks of a weight, and what all formats in checkpoints have alike.

A format finds its parameters, as bits and groups, from its tensors' shapes: `found` returns an object for that weight.
"""

from __future__ import annotations

from abc import abstractmethod
from math import gcd
from typing import NamedTuple

import numpy as np

from vnext.kernels.codes import INPUTS, Codes, Scales
from vnext.kernels.format import Cut, Format, Shape, StoredTensors
from vnext.kernels.formats.bits import floats_of

FLOATS = ("F32", "F16", "BF16")


class Stored(Format):
    """A format of checkpoints. `suffixes`: of its tensors' names, in place of "weight"."""

    suffixes: tuple[str, ...] = ()

    def tensors(self, weight: str) -> tuple[str, ...]:
        stem = weight.removesuffix("weight")
        return tuple(f"{stem}{each}" for each in self.suffixes)

    @abstractmethod
    def found(self, weight: str, tensors: StoredTensors) -> Format | None:
        """As in Format."""


def require(tensors: StoredTensors, weight: str, expected: dict[str, tuple[str, ...]], axes: int = 2) -> list[Shape]:
    """The shapes of tensors by suffix, which must be of one of these dtypes and have `axes` axes, none of length 0. Raises
    ValueError."""
    shapes = []
    for suffix, dtypes in expected.items():
        name = weight.removesuffix("weight") + suffix
        shape, dtype = tensors.shape(name), tensors.stored_dtype(name)
        if shape is None:
            raise ValueError(f"there is no tensor {name!r}; download the model again")
        if dtype not in dtypes or len(shape) != axes or 0 in shape:
            raise ValueError(f"{name!r} is {dtype} {list(shape)}, not {' or '.join(dtypes)} of {axes} axes")
        shapes.append(shape)
    return shapes


def has(tensors: StoredTensors, weight: str, suffix: str) -> bool:
    """Whether there is a tensor beside the weight of this name."""
    return tensors.shape(weight.removesuffix("weight") + suffix) is not None


class Grid(NamedTuple):
    """Which numbers of a weight [out, in] share a scale: blocks of `rows` outputs and `group` inputs, the last ones maybe smaller.
    `order`: the group of each input, int64 [in], where they are no neighbours."""

    rows: int
    group: int
    order: np.ndarray | None = None

    def shape(self, shape: Shape) -> Shape:
        return -(-shape[0] // self.rows), -(-shape[1] // self.group)

    @property
    def unit(self) -> int:
        """Neighbouring inputs that a part of the weight has all of: those that the kernels multiply together, at most."""
        return 1 if self.order is not None else gcd(self.group, INPUTS)

    def cut(self, rows: slice, columns: slice) -> Cut:
        """Of the scales: a row for each output; a column for each group, for equal parts of groups where some are cut, or for each
        input where they are in an order."""
        outputs: slice | np.ndarray = rows if self.rows == 1 else np.arange(rows.start, rows.stop) // self.rows
        inputs: slice | np.ndarray
        if self.order is not None:
            inputs = self.order[columns]
        elif columns.start % self.group or columns.stop % self.group:
            inputs = np.arange(columns.start, columns.stop, gcd(self.group, columns.start, columns.stop)) // self.group
        else:
            inputs = slice(columns.start // self.group, columns.stop // self.group)
        if isinstance(outputs, np.ndarray) and isinstance(inputs, np.ndarray):
            outputs = outputs[:, None]
        return outputs, inputs


def order_of(tensors: StoredTensors, weight: str, suffix: str, groups: int, inputs: int) -> np.ndarray | None:
    """The group of each input by the tensor of this name, None where they are neighbours. Raises ValueError."""
    name = weight.removesuffix("weight") + suffix
    shape = tensors.shape(name)
    if shape is None:
        return None
    if tensors.stored_dtype(name) not in ("I32", "I64") or shape != (inputs,):
        raise ValueError(f"{name!r} is {tensors.stored_dtype(name)} {list(shape)}, not whole numbers for {inputs} inputs")
    order = tensors.values(name).astype(np.int64)
    if (order == -1).all() or np.array_equal(order, np.arange(inputs) // -(-inputs // groups)):
        return None
    if order.min() < 0 or order.max() >= groups:
        raise ValueError(f"{name!r} names groups from {order.min()} to {order.max()}, and there are {groups}")
    return order


def finite(scales: np.ndarray) -> np.ndarray:
    """Scales in float32. Raises ValueError for those that are no numbers."""
    found = floats_of(scales)
    if not np.isfinite(found).all():
        raise ValueError("it has scales that are not finite")
    return found


def coded(codes: np.ndarray, bits: int, scales: np.ndarray, zeros: np.ndarray | int) -> Codes:
    """codes uint8 [out, in] with scales [out, groups] or [1, 1], which stay in 16 bits, and zeros likewise. Raises ValueError."""
    wide, shape = finite(scales), (len(codes), scales.shape[1])
    rows = Scales(np.ascontiguousarray(np.broadcast_to(scales if scales.itemsize == 2 else wide, shape)))
    if isinstance(zeros, int):
        return Codes(np.ascontiguousarray(codes), bits, rows, zeros)
    return Codes(np.ascontiguousarray(codes), bits, rows, lows=Scales(np.broadcast_to(wide, shape) * zeros.astype(np.float32)))


def scaled(numbers: np.ndarray, scales: np.ndarray, zeros: np.ndarray | int = 0) -> np.ndarray:
    """(numbers - zeros) * scales in float32: numbers [out, in] that are float32 change in place; scales [out, groups], [1, 1] or
    [out, in], and zeros likewise. Raises ValueError for scales that are no numbers."""
    scales = finite(scales)
    wide = numbers.astype(np.float32, copy=False)
    height, groups = wide.shape[0], scales.shape[1]
    parts = wide.reshape(height, groups, wide.shape[1] // groups)
    if not isinstance(zeros, int) or zeros:
        parts -= zeros if isinstance(zeros, int) else zeros[:, :, None].astype(np.float32)
    parts *= scales[:, :, None]
    return parts.reshape(wide.shape)
