"""Compiling: the C sources of state/store and log once more, with every planted fault and a switch that turns one on.

One build a run, into a temporary folder: `old` becomes `planted == N ? new : old`, so the product has no switch and a fault
costs no build of its own. A text must occur exactly once in its file.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.machinery import ExtensionFileLoader
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType

import msgspec
import pytest

from vnext.base import compiled
from vnext.log import log_bytes, redaction
from vnext.state.store import columns, prefix_index


class Served(msgspec.Struct, frozen=True):
    """Where a compiled module serves: `module.attribute` is the module, or its `part`."""

    module: ModuleType
    attribute: str = "impl"
    part: str = ""


ROOT = Path(compiled.__file__).parent
ROOMS = [Path(module.__file__).parent for module in (columns, log_bytes)]
MODULES = {
    "store/_columns": Served(columns), "store/_prefix_index": Served(prefix_index), "log/_log": Served(log_bytes),
    "log/_open_blocks": Served(redaction, "OpenBlocks", "OpenBlocks"),
}  # fmt: skip
SWITCH = "#ifndef PLANTED\n#define PLANTED\nstatic int planted;\n#endif\n"
SETTER = """static PyObject *plant(PyObject *self, PyObject *number) {
    planted = (int)PyLong_AsLong(number);
    Py_RETURN_NONE;
}

"""
ROW = '\n    {"plant", plant, METH_O, "Turn one fault on, 0 for none."},'
TABLE = "static PyMethodDef functions[] = {"
DEFINED = "static PyModuleDef module"


class CompiledBug(msgspec.Struct, frozen=True, kw_only=True):
    """One fault in a C file: an expression, or with `whole` statements, that become others; or a text that becomes one in
    which BAD is whether the fault is turned on. `found_by` as in Bug."""

    name: str
    file: str
    old: str
    new: str
    found_by: tuple[str, ...]
    whole: bool = False


class Variants:
    """The modules with all faults, none of them turned on."""

    def __init__(self, bugs: Sequence[CompiledBug], folder: Path) -> None:
        compiler = shutil.which("cc") or shutil.which("gcc") or pytest.skip("there is no C compiler: apt install gcc")
        for path in (path for room in ROOMS for path in (*room.glob("*.c"), *room.glob("*.h"))):
            place = folder / path.parent.name / path.name
            place.parent.mkdir(exist_ok=True)
            place.write_text(source_with(path, bugs))
        flags = [
            "-O1",
            "-g0",
            "-shared",
            "-fPIC",
            "-I",
            sysconfig.get_paths()["include"],
            "-I",
            folder / "store",
            "-I",
            ROOT,
            '-DVNEXT_BUILT_FROM=""',
        ]
        builds = [
            subprocess.Popen([compiler, *flags, folder / f"{name}.c", "-o", folder / f"{name}.so"]) for name in MODULES
        ]
        assert not any([build.wait() for build in builds]), "a fault does not compile"
        self.modules = {name: loaded(name, folder / f"{name}.so") for name in MODULES}

    @contextmanager
    def planted(self, number: int) -> Iterator[None]:
        """The engine is in its compiled forms, with this fault inside the block (0: none)."""
        with pytest.MonkeyPatch.context() as patch:
            for name, module in self.modules.items():
                served = MODULES[name]
                patch.setattr(served.module, served.attribute, getattr(module, served.part) if served.part else module)
                module.plant(number)
            yield


def source_with(path: Path, bugs: Sequence[CompiledBug]) -> str:
    """A source with the faults that are in it, numbered from 1 as in `bugs`."""
    text = path.read_text()
    for number, bug in enumerate(bugs, start=1):
        if bug.file == path.name:
            assert text.count(bug.old) == 1, f"{path.name} has {bug.old!r} {text.count(bug.old)} times: choose another text"
            text = text.replace(bug.old, with_switch(bug, number))
    if f"{path.parent.name}/{path.stem}" in MODULES and path.suffix == ".c":
        text = with_setter(text)
    return SWITCH + text


def with_setter(text: str) -> str:
    """A module's source with the function that turns a fault on, in its table of functions or in one of its own."""
    if TABLE not in text:
        head, definition = text.split(DEFINED)
        text = head + TABLE + "\n    {NULL, NULL, 0, NULL},\n};\n\n" + DEFINED + definition.replace("NULL);", "functions);", 1)
    head, rest = text.split(TABLE)
    return head + SETTER + TABLE + ROW + rest


def with_switch(bug: CompiledBug, number: int) -> str:
    if "BAD" in bug.new:
        return bug.new.replace("BAD", f"(planted == {number})")
    if bug.whole:
        return f"if (planted == {number}) {{ {bug.new} }} else {{ {bug.old} }}"
    return f"(planted == {number} ? ({bug.new}) : ({bug.old}))"


def loaded(name: str, path: Path) -> ModuleType:
    """The module of its own name from another place, beside the product's."""
    full_name = "vnext." + name.replace("/", ".")
    spec = spec_from_file_location(full_name, path, loader=ExtensionFileLoader(full_name, str(path)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, full_name, sys.modules.get(full_name))  # creating it enters it there
        module = module_from_spec(spec)
        spec.loader.exec_module(module)
    return module
