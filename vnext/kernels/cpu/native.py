"""Native: the compiled module, its threads, its instruction set and the numbers that it shares with Python.

Owns the only import of `_native`. Without a compiler at installation the module is missing, and the references run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import IntEnum
from types import ModuleType
from typing import Any, NoReturn

import numpy as np

from vnext.base.compiled import NOT_BUILT, REMEDY, absent, agree, load
from vnext.kernels.arrays import dtype_name
from vnext.kernels.calls import WIDTHS
from vnext.kernels.mxint8 import BLOCK
from vnext.kernels.shards import SHARDS_MAX

NAME = "vnext.kernels.cpu._native"


class Level(IntEnum):
    """Instruction sets; a processor has those of its architecture. For bfloat16 products all but AVX512_BF16 and NEON_BF16 give
    the same bits."""

    PORTABLE = 0
    AVX2 = 1
    AVX512 = 2
    AVX512_BF16 = 3
    AMX = 4
    NEON = 5
    NEON_BF16 = 6


class Kind(IntEnum):
    """Element types as the module numbers them."""

    FLOAT32 = 0
    BFLOAT16 = 1
    INT8 = 2
    BFLOAT16_WIDE_NORM = 3
    CODES = 4
    FLOAT16 = 5
    UINT8 = 6


GATES = {"": 0, "silu": 1, "gelu_tanh": 2, "swiglu_clamped": 3, "silu_limited": 4}
"""Activations of a gate that a product can apply itself."""
ACTIVATIONS = GATES | {"gelu": 5, "relu2": 6, "xielu": 7}
"""With those that rows alone have."""

PIECES_MAX = 8
"""Forms that a weight of codes may have side by side."""

BLOCK_TYPES = {
    "Q4_0": 1, "Q4_1": 2, "Q5_0": 3, "Q5_1": 4, "Q8_0": 5, "Q2_K": 6, "Q3_K": 7, "Q4_K": 8, "Q5_K": 9, "Q6_K": 10, "TQ1_0": 11,
    "TQ2_0": 12, "IQ4_NL": 13, "IQ4_XS": 14, "MXFP4": 15,
}  # fmt: skip
"""Blocks of GGUF files that the module takes apart."""

_native = load(
    NAME,
    {member.name: member for enum in (Level, Kind) for member in enum}
    | {(name or "no_gate").upper(): number for name, number in ACTIVATIONS.items()}
    | {f"BLOCK_{name}": number for name, number in BLOCK_TYPES.items()}
    | {"SHARDS_MAX": SHARDS_MAX, "PIECES_MAX": PIECES_MAX, "CONVOLUTION_MAX": WIDTHS.stop - 1, "CODES_A_SCALE": BLOCK},
)


class _Absent(ModuleType):
    """In its place where there is none."""

    def __getattr__(self, name: str) -> NoReturn:
        raise RuntimeError("the CPU kernels were not compiled: install a C++ compiler, then vnext again")


kernels = _native or _Absent(NAME)
"""The compiled module. Whatever is asked of it raises RuntimeError where there is none."""


class Kinds(dict[Any, Kind]):
    """Kinds by the dtypes of numpy and of torch. Raises KeyError for dtypes that the module does not know."""

    def __init__(self, *kinds: Kind) -> None:
        super().__init__({kind.name.lower(): kind for kind in kinds})

    def __missing__(self, dtype: Any) -> Kind:
        if (name := dtype_name(dtype)) not in self:
            raise KeyError(dtype)
        self[dtype] = self[name]
        return self[name]


KINDS = Kinds(Kind.FLOAT32, Kind.BFLOAT16)
"""What activations may be."""
CACHE_KINDS = Kinds(Kind.FLOAT32, Kind.BFLOAT16, Kind.INT8)
"""What caches may be: of the activations' dtype, or int8."""
NUMBER_KINDS = Kinds(Kind.FLOAT32, Kind.BFLOAT16, Kind.FLOAT16, Kind.UINT8, Kind.INT8)
"""What scales of codes may be."""


def is_built() -> bool:
    """Whether the module was compiled when vnext was installed."""
    return _native is not None


def why_absent() -> str:
    """Why there is no module, "" where there is one."""
    return "" if _native else absent.get(NAME, NOT_BUILT)


def agree_on(constants: Mapping[str, int]) -> None:
    """Raises StaleModule unless the module has these numbers under these names."""
    if _native is not None:
        agree(_native, constants)


def agree_on_struct(name: str, fields: Sequence[str]) -> None:
    """Raises StaleModule unless the module's struct of that name is these fields, of 64 bits each, in this order."""
    agree_on({name: len(fields), **{f"{name}.{field}": place for place, field in enumerate(fields)}})


def start(threads: int, spin_us: int) -> None:
    """Give the kernels `threads` threads, the caller's included; call it once when a rank starts.

    `spin_us` is how long an idle one looks for work before it sleeps: with fewer cores than busy threads on the machine, 0 is
    kinder to the others. Results depend on neither.
    """
    kernels.configure_team(threads, spin_us)


def bind_member(member: int, cpus: Sequence[int]) -> bool:
    """Let a thread of the pool run on these logical processors only; 0 is the caller. Whether the system allows it."""
    ids = np.array(cpus, dtype=np.int32)
    return bool(kernels.bind_member(member, ids.ctypes.data, len(ids)))


def why_incomplete() -> str:
    """One sentence where this machine has instructions that the module was built without, else ""."""
    if _native is None or _native.is_complete():
        return ""
    return f"The CPU kernels were built for a processor with fewer instructions, and are slower here than they could be: {REMEDY}."


def best_level() -> Level:
    """The highest instruction set of this machine that was built; not its fastest on an Intel without tiles."""
    return Level(kernels.best_level())


def levels() -> tuple[Level, ...]:
    """The instruction sets that this machine has and the module too, from the plainest to the best. Raises RuntimeError where
    none is compiled."""
    return tuple(level for level in Level if kernels.has_level(level))


def level() -> Level:
    """The instruction set in use: the machine's fastest one, unless `set_level` changed it."""
    return Level(kernels.level())


def set_level(wanted: Level) -> None:
    """Use an instruction set from now on, for tests and comparisons. Raises ValueError where the machine lacks it."""
    if not kernels.set_level(wanted):
        raise ValueError(f"this machine has no {wanted.name}; the best it has is {best_level().name}")
