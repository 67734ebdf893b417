"""A program: under MKL_CBWR every family's logits are bitwise the same alone, in a batch, chunked or decoded."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from family_cases import CASES, save_case
from llama_invariance import check

SPLITS = ([7] * 21 + [3], [37, 1, 1, 90, *[1] * 21])

if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        for name in CASES:
            save_case(Path(folder) / name, name)
            check(Path(folder) / name, SPLITS)
    sys.stdout.write("invariant\n")
