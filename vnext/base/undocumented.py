"""Undocumented: numpy without the texts of its compiled objects' documentation, which it hands out one by one as it is imported: a
tenth of that time. The processes of an engine import so, where nobody asks for help; programs that use vnext as ever.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType

TEXTS = ("numpy._core._add_newdocs", "numpy._core._add_newdocs_scalars")
"""Modules that do nothing else."""


@contextmanager
def undocumented() -> Iterator[None]:
    """numpy, if it is imported in the block, has compiled objects without docstrings."""
    empty = {name: ModuleType(name) for name in TEXTS if name not in sys.modules}
    sys.modules.update(empty)
    try:
        yield
    finally:
        for name in empty:
            del sys.modules[name]
