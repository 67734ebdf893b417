"""The shapes of scripts/random_model.py, for the modules here: `scripts` is a folder of programs and no package."""

from __future__ import annotations

import sys
from pathlib import Path

SCRIPTS = str(Path(__file__).resolve().parents[2] / "scripts")
sys.path.insert(0, SCRIPTS)
try:
    from random_mixed import HOSTED, MIXED, write_mixed
    from random_model import SHAPES, Shape, tensor_shapes, write_checkpoint
finally:
    sys.path.remove(SCRIPTS)

__all__ = ["HOSTED", "MIXED", "QUANTISED", "SHAPES", "Shape", "shape_of", "tensor_shapes", "write_checkpoint", "write_mixed"]
FEW_BITS = {"q4": "q4_0", "mxfp4": "mxfp4"}
"""Schemes of `vnext quantize`, by the endings of shapes' names."""
QUANTISED = {f"{name}-{bits}": (name, scheme) for name in (*SHAPES, *MIXED) for bits, scheme in FEW_BITS.items()}
"""Random weights in the 4 bits of Q4_0, or experts in those of MXFP4, in one GGUF file for all engines: the shape and the scheme."""


def shape_of(name: str) -> Shape:
    """A shape by its name. SystemExit with the known ones for any other."""
    if name not in SHAPES:
        sys.exit(f"there is no shape {name!r}: known are {', '.join(sorted(SHAPES))}")
    return SHAPES[name]
