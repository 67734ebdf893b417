"""Undocumented: numpy without the texts of its compiled objects' documentation, which it hands out one by one as it is imported,
and without the types that only a type checker reads: two fifths of that time. The processes of an engine import so, where nobody
asks for help; programs that use vnext as ever.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from types import ModuleType
from typing import cast

TEXTS = ("numpy._core._add_newdocs", "numpy._core._add_newdocs_scalars")
"""Modules that do nothing else."""
TYPES = "numpy._typing"
BACKPORTS = "typing_extensions"
"""What msgspec asks for names that this Python's `typing` has, too."""


class _Types(ModuleType):
    """Stands for TYPES while numpy is imported: an array's type is the array's class. Any other name is the module's own."""

    def __getattr__(self, name: str) -> object:
        if name == "NDArray":
            return sys.modules["numpy"].ndarray
        if name.startswith("__"):
            raise AttributeError(name)
        if sys.modules.get(TYPES) is self:
            del sys.modules[TYPES]
        return getattr(import_module(TYPES), name)


@contextmanager
def undocumented() -> Iterator[None]:
    """numpy, if it is imported in the block, has compiled objects without docstrings and annotations without types of numbers."""
    modules = cast(dict[str, ModuleType | None], sys.modules)  # None: not to be found
    others = {**{name: ModuleType(name) for name in TEXTS}, TYPES: _Types(TYPES), BACKPORTS: None}
    ours = {name: module for name, module in others.items() if name not in modules}
    modules.update(ours)
    try:
        yield
    finally:
        for name, module in ours.items():
            if modules.get(name) is module:
                modules.pop(name, None)
