"""Compiled modules: loads the modules that were built, and refuses a module that was built from other sources.

Owns the only way to load one: `load` returns the module, or None, and then the caller uses the plain implementation. Two
checks come first. In a checkout, the hash of the sources beside the module must equal the hash that it was built from. And
numbers that C and Python share, such as the fields of a matrix or offsets in a struct, must agree: the module exports its
own as CONSTANTS.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from functools import cache
from importlib import import_module
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).resolve().parents[2]
NOT_BUILT = "not built: no compiler, or no headers of Python, was found when vnext was installed"
REMEDY = "build it again: `pip install -e .`, or `python setup.py build_ext --inplace`"

MODULES = (
    "vnext.state.store._columns", "vnext.state.store._prefix_index", "vnext.log._log",
    "vnext.log._open_blocks", "vnext.runtime.transport.ring._ring", "vnext.runtime.transport.collectives._exchange",
    "vnext.kernels.cpu._native", "vnext.sampling.drafters._automaton",
)  # fmt: skip
CUDA_LAUNCHES = "vnext.kernels.cuda._native"  # needs torch, which its only importer has loaded (vnext/kernels/cuda/compiled.py)

absent: dict[str, str] = {}
"""Module name -> why the module is missing."""


class StaleModule(SystemExit):
    """A compiled module does not match the sources beside it. Ends the program with one sentence and the remedy: an import
    raises it, and the importing code cannot handle it."""

    def __init__(self, module: ModuleType, have: str = "") -> None:
        """`have` names a difference between its sources and Python, such as "have no CACHED"."""
        which = f", which {have}" if have else ""
        super().__init__(f"vnext: {module.__file__} was built from other sources{which}: {REMEDY}")


def load(name: str, constants: Mapping[str, int] | None = None) -> ModuleType | None:
    """The compiled module `name`, or None where it was not built or cannot be loaded; `absent` holds the reason.

    Raises StaleModule if it was built from other sources, or if its numbers differ from `constants`.
    """
    try:
        module = import_module(name)
    except ModuleNotFoundError:
        absent[name] = NOT_BUILT
        return None
    except ImportError as error:
        absent[name] = f"cannot be loaded ({str(error).splitlines()[0]})"
        return None
    built_from, *sources = getattr(module, "BUILT_FROM", "").split() or [""]
    if not built_from or (is_checkout() and fingerprint(ROOT, sources) != built_from):
        raise StaleModule(module)
    agree(module, constants or {})
    return module


def agree(module: ModuleType, constants: Mapping[str, int]) -> None:
    """Raise StaleModule unless the module has all these names with these numbers."""
    for name, number in constants.items():
        if (found := module.CONSTANTS.get(name)) != number:
            have = f"have no {name}" if found is None else f"number {name} as {found}, where Python has {number}"
            raise StaleModule(module, have)


def check() -> None:
    """Raise StaleModule for the first stale module. For programs that start other processes, which load the modules."""
    for name in MODULES:
        load(name)


def lacking() -> str:
    """One sentence about the modules that `absent` holds."""
    names = ", ".join(name.removeprefix("vnext.") for name in absent)
    return (
        f"vnext runs without {len(absent)} of its {len(MODULES)} compiled modules ({names}), many times slower: install it where "
        "gcc, g++ and Python's headers (python3-dev) are, or from a wheel that has them; `vnext doctor` says why each is missing."
    )


def fingerprint(root: Path, sources: list[str]) -> str:
    """One hash of the contents of these sources; "" where one is missing."""
    try:
        contents = b"".join(source.encode() + b"\0" + (root / source).read_bytes() for source in sorted(sources))
    except OSError:
        return ""
    return hashlib.blake2b(contents, digest_size=16).hexdigest()


@cache
def is_checkout() -> bool:
    """Whether the sources are present, so that a module can be stale: a wheel contains no sources."""
    return Path(__file__).with_name("compiled.h").is_file()


def leftovers() -> list[Path]:
    """Modules that earlier builds for this Python left in folders where none is built now. They are never loaded."""
    found = sorted((ROOT / "vnext").rglob(f"*{EXTENSION_SUFFIXES[0]}"))
    known = {*MODULES, CUDA_LAUNCHES}
    return [path for path in found if _name_of(path) not in known]


def _name_of(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).parts).removesuffix(EXTENSION_SUFFIXES[0])
