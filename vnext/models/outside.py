"""Outside: families that are no part of vnext, in a file that the user names or in an installed package.

A file takes the place of a family of ours; a package is looked for where no family of ours knows an architecture. Both run as the
user's own code: a checkpoint cannot name one.
"""

from __future__ import annotations

import sys
from functools import cache
from importlib.metadata import entry_points
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType

from vnext.models.errors import ModelError

GROUP = "vnext.families"
"""The entry points of packages: the architecture's name is the entry point's, the module its value."""
NAMES = "ARCHITECTURES"
FIELDS = ("WEIGHT_AXES", "parse", "assemble", "forward", "logits")
_from_files: dict[str, ModuleType] = {}  # by architecture


def use_file(file: Path) -> None:
    """Let this process take the architectures that a file names from it. Raises ModelError."""
    name = f"vnext_family_{file.stem}"
    spec = spec_from_file_location(name, file)
    if spec is None or spec.loader is None or not file.is_file():
        raise ModelError(f"--family {file} is no Python file: name one that defines {NAMES}, {', '.join(FIELDS)}")
    module = sys.modules[name] = module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except Exception as error:  # a user's code may raise anything
        raise ModelError(f"--family {file} cannot be imported ({type(error).__name__}: {error})") from error
    require_fields(module, f"--family {file}", (NAMES, *FIELDS))
    _from_files.update(dict.fromkeys(getattr(module, NAMES), module))


def require_fields(module: ModuleType, what: str, fields: tuple[str, ...] = FIELDS) -> None:
    """Raise ModelError for a module that lacks one of the names of a family."""
    if lacking := [name for name in fields if not hasattr(module, name)]:
        raise ModelError(f"{what} defines no {lacking[0]}: a family has {', '.join(fields)}")


def from_file(architecture: str) -> ModuleType | None:
    """The family that a file has for an architecture."""
    return _from_files.get(architecture)


@cache
def from_package(architecture: str) -> ModuleType | None:
    """The family that an installed package has for an architecture. Raises ModelError."""
    for point in entry_points(group=GROUP, name=architecture):
        what = f"the family {point.value} of {point.dist.name if point.dist else 'a package'}"
        try:
            module: ModuleType = point.load()
        except Exception as error:  # a package's code may raise anything
            raise ModelError(f"{what} cannot be imported ({type(error).__name__}: {error})") from error
        require_fields(module, what)
        return module
    return None
