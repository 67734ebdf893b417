"""bitsandbytes' 4 bits: codes of a table of 16 numbers, two in a byte, the higher one first, with a scale for each block.

Blocks go on from one row of a weight to the next.

    weight [out * in / 2, 1] U8, weight.quant_map [16], weight.absmax of each block
    weight.nested_absmax, weight.nested_quant_map [256]: where absmax are codes of that table, with a scale for `nested_blocksize`
    weight.quant_state.bitsandbytes__nf4 or __fp4: JSON, the block sizes and what is added to nested scales
"""

from __future__ import annotations

import json
from typing import NamedTuple

import numpy as np

from vnext.kernels.format import Cut, Format, Shape, StoredTensors
from vnext.kernels.formats.bits import floats_of, nibbles
from vnext.kernels.formats.scales import FLOATS, Stored, require, scaled

STATES = tuple(f"weight.quant_state.bitsandbytes__{kind}" for kind in ("nf4", "fp4"))
PLAIN = ("weight", "weight.absmax", "weight.quant_map")
NESTED = ("weight.nested_absmax", "weight.nested_quant_map")


class State(NamedTuple):
    """A weight's shape and block sizes; `nested` is 0 where absmax are numbers, and `offset` is added to nested ones."""

    shape: Shape
    block: int
    nested: int = 0
    offset: float = 0.0


def state_of(text: bytes) -> State:
    """What the JSON says. Raises ValueError."""
    try:
        found = json.loads(text)
        nested = found.get("nested_blocksize", 0)
        state = State(tuple(found["shape"]), found["blocksize"], nested, float(found.get("nested_offset", 0.0)))
        is_right = len(state.shape) == 2 and all(type(each) is int and each > 0 for each in (*state.shape, state.block))
        if is_right and type(nested) is int and nested >= 0 and np.isfinite(state.offset):
            return state
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise ValueError(f"its quant_state cannot be read ({error}); download the model again") from error
    raise ValueError("its quant_state has a shape or a block size that is none; download the model again")


class BitsAndBytes4(Stored):
    """`state`: of one weight."""

    name = "bitsandbytes"

    def __init__(self, state: State) -> None:
        self._state = state
        self.suffixes = (*PLAIN, *NESTED) if state.nested else PLAIN

    def found(self, weight: str, tensors: StoredTensors) -> Format | None:
        stem = weight.removesuffix("weight")
        name = next((stem + each for each in STATES if tensors.shape(stem + each)), None)
        if name is None:
            return None
        state = state_of(tensors.values(name).astype(np.uint8).tobytes())
        require(tensors, weight, {"weight": ("U8",)})
        require(tensors, weight, {"weight.absmax": ("U8",) if state.nested else FLOATS, "weight.quant_map": FLOATS}, 1)
        if state.nested:
            require(tensors, weight, dict.fromkeys(NESTED, FLOATS), 1)
        return BitsAndBytes4(state)

    def shapes(self, shape: Shape) -> tuple[Shape, ...]:
        state = self._state
        if shape != state.shape:
            raise ValueError(f"its quant_state has the shape {list(state.shape)}")
        if shape[1] % 2:
            raise ValueError(f"{shape[1]} inputs are no whole bytes of 2")
        blocks = -(-shape[0] * shape[1] // state.block)
        nested = ((-(-blocks // state.nested),), (256,)) if state.nested else ()
        return (shape[0] * shape[1] // 2, 1), (blocks,), (16,), *nested

    def slices(self, rows: slice, columns: slice) -> tuple[Cut, ...]:
        if columns.start % 2 or columns.stop % 2:
            raise ValueError(f"inputs {columns.start} to {columns.stop} cut a byte of 2")
        inputs, block = self._state.shape[1], self._state.block
        are_whole = inputs % block == columns.start % block == columns.stop % block == 0
        scales = self._places(rows, columns, block if are_whole else 1) // block
        numbers: Cut = (self._places(rows, columns, 2) // 2,)
        if columns == slice(0, inputs):
            numbers = (slice(rows.start * inputs // 2, rows.stop * inputs // 2),)
        return numbers, (scales,), (), *(((scales // self._state.nested,), ()) if self._state.nested else ())

    def _places(self, rows: slice, columns: slice, step: int) -> np.ndarray:
        """Where each `step`-th input of each row lies, int64 [rows, inputs / step]."""
        inputs = np.arange(columns.start, columns.stop, step)
        found: np.ndarray = np.arange(rows.start, rows.stop)[:, None] * self._state.shape[1] + inputs
        return found

    def to_float(self, part: tuple[np.ndarray, ...]) -> np.ndarray:
        packed, scales, table, *nested = part
        floats = floats_of(scales)
        if nested:
            factors, codes = map(floats_of, nested)
            floats = codes[scales] * factors + np.float32(self._state.offset)
        return scaled(floats_of(table)[nibbles(packed.reshape(len(scales), -1), high_first=True)], floats)


BITSANDBYTES = BitsAndBytes4(State((1, 1), 64))
