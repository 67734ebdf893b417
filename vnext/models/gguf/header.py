"""The header of a GGUF file: its metadata and where its tensors lie, checked against the file's size before memory is taken.

Source: the format's specification in ggml's repository. The package `gguf` reads headers too, an array for each text of a
vocabulary: seconds where this takes a tenth, and it trusts the counts that a file states.
"""

from __future__ import annotations

import mmap
import struct
import sys
from array import array
from collections.abc import Callable
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from math import prod
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias, TypeVar

from vnext.base.spelling import reason
from vnext.base.tokenizer_files import POINTER_BYTES, is_pointer, pointer_sentence
from vnext.models.errors import ModelError

if TYPE_CHECKING:
    from gguf.tensor_mapping import TensorNameMap

MAGIC, VERSIONS = b"GGUF", (2, 3)
PACKED = {b"PK\3\4": "a zip archive", b"\x1f\x8b": "packed by gzip", b"(\xb5/\xfd": "packed by zstd", b"\xfd7zXZ": "packed by xz"}
"""What a file is that begins so."""
SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
STRING, ARRAY = 8, 9
LENGTH = struct.Struct("<Q")
DIMENSIONS_MAX = 4
LEAST_ENTRY_BYTES = 12
"""Of a member of the metadata and of a tensor's entry: a length, and a type or a count."""
SIZE_BYTES_MAX = 2**26
"""Of a header: that of the largest vocabularies has a tenth. A file of gigabytes may say that all of them are one text."""
ALIGNMENT = "general.alignment"
LIBRARY = "vnext_gguf"
"""The name of what `library` imports from."""
Value: TypeAlias = "str | int | float | bool | list[str] | array[int] | array[float]"
Read = TypeVar("Read")


class Tensor(NamedTuple):
    """A tensor's type by ggml's name, its shape with the rows first, and its bytes [start, stop) in the file."""

    type: str
    shape: tuple[int, ...]
    start: int
    stop: int


class Header(NamedTuple):
    """Arrays of numbers are arrays, those of texts lists. `size_bytes`: of all before the tensors' data."""

    metadata: dict[str, Value]
    tensors: dict[str, Tensor]
    size_bytes: int


class _Broken(Exception):
    """What is wrong with a file."""


class _Cursor:
    """Reads one value after the other, never beyond the end of the file or of what a header may have."""

    def __init__(self, data: mmap.mmap, has_texts: bool) -> None:
        self._data, self._end, self.place = data, min(len(data), SIZE_BYTES_MAX), 0
        self._has_texts = has_texts

    def take(self, size: int) -> bytes:
        if not 0 <= size <= self._end - self.place:
            raise _Broken(f"{size} bytes at {self.place}, of {self._end}")
        self.place += size
        return self._data[self.place - size : self.place]

    def number(self, code: str) -> Any:
        return struct.unpack("<" + code, self.take(struct.calcsize(code)))[0]

    def count(self, least_bytes: int) -> int:
        """A number of things that have at least so many bytes each."""
        found: int = self.number("Q")
        if found * least_bytes > self._end - self.place:
            raise _Broken(f"{found} entries at {self.place}, of {self._end} bytes")
        return found

    def text(self) -> str:
        return self.take(self.number("Q")).decode()

    def value(self, kind: int) -> Value:
        if kind == STRING:
            return self.text()
        if kind != ARRAY:
            found: Value = self.number(self._code(kind))
            return found
        of = self.number("I")
        if of == STRING:
            count = self.count(LENGTH.size)
            return [self.text() for _ in range(count)] if self._has_texts else self._passed(count)
        code = self._code(of)
        size = struct.calcsize(code)
        return array("B" if code == "?" else code, self.take(self.count(size) * size))

    def _passed(self, count: int) -> list[str]:
        """So many texts are left out."""
        place, last, length_at = self.place, self._end - LENGTH.size, LENGTH.unpack_from
        for _ in range(count):
            if place > last:
                raise _Broken(f"{LENGTH.size} bytes at {place}, of {self._end}")
            place += LENGTH.size + length_at(self._data, place)[0]
        if place > self._end:
            raise _Broken(f"texts up to {place}, of {self._end} bytes")
        self.place = place
        return []

    def _code(self, kind: int) -> str:
        if kind not in SCALARS:
            raise _Broken(f"a value of kind {kind} at {self.place}")
        return SCALARS[kind]


def read_header(file: Path, has_texts: bool = True) -> Header:
    """The header of a GGUF file. Without `has_texts` the lists of texts are empty, which are most of it. Raises ModelError, one
    sentence."""
    try:
        with file.open("rb") as stream, mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as data:
            if is_pointer(data[:POINTER_BYTES]):
                raise ModelError(pointer_sentence(file))
            if kind := next((PACKED[first] for first in PACKED if data[: len(first)] == first), ""):
                raise ModelError(f"{file} is {kind}; unpack it, and give the GGUF file that is in it")
            return _header(_Cursor(data, has_texts), len(data))
    except (_Broken, ValueError, OSError) as error:
        raise ModelError(f"{file} is no GGUF file that can be read ({reason(error)}); download it again") from error


def _header(cursor: _Cursor, size_bytes: int) -> Header:
    if cursor.take(4) != MAGIC:
        raise _Broken("it does not begin with GGUF")
    if (version := cursor.number("I")) not in VERSIONS:
        raise _Broken(f"version {version}; versions {VERSIONS[0]} and {VERSIONS[1]} with the low byte first are read")
    tensor_count, member_count = cursor.count(LEAST_ENTRY_BYTES), cursor.count(LEAST_ENTRY_BYTES)
    metadata = _named(member_count, cursor, lambda: cursor.value(cursor.number("I")))
    entries = _named(tensor_count, cursor, lambda: _entry(cursor))
    alignment = metadata.get(ALIGNMENT, 32)
    if not isinstance(alignment, int) or alignment <= 0 or alignment & (alignment - 1):
        raise _Broken(f"{ALIGNMENT} is {alignment!r:.120}")
    begin = -(-cursor.place // alignment) * alignment
    tensors = {name: _placed(name, *entry, begin, size_bytes) for name, entry in entries.items()}
    return Header(metadata, tensors, cursor.place)


def _named(count: int, cursor: _Cursor, read: Callable[[], Read]) -> dict[str, Read]:
    found: dict[str, Read] = {}
    for _ in range(count):
        if (name := cursor.text()) in found or not name:
            raise _Broken(f"{name!r:.120} stands twice" if name else f"an entry without a name at {cursor.place}")
        found[name] = read()
    return found


def _entry(cursor: _Cursor) -> tuple[tuple[int, ...], int, int]:
    """Shape with the rows first, number of the type, offset."""
    if (count := cursor.number("I")) > DIMENSIONS_MAX:
        raise _Broken(f"{count} dimensions at {cursor.place}")
    sizes = [cursor.number("Q") for _ in range(count)]
    return tuple(reversed(sizes)), cursor.number("I"), cursor.number("Q")


def _placed(name: str, shape: tuple[int, ...], kind: int, offset: int, begin: int, size_bytes: int) -> Tensor:
    if kind not in sizes():
        raise _Broken(f"tensor {name!r:.120} has the unknown type {kind}")
    type_, block, block_bytes = sizes()[kind]
    row = shape[-1] if shape else 1
    if not all(shape):
        raise _Broken(f"tensor {name!r:.120} has the shape {list(shape)}")
    if row % block:
        raise _Broken(f"tensor {name!r:.120} has rows of {row} numbers, and {type_} has blocks of {block}")
    start = begin + offset
    stop = start + prod(shape) // block * block_bytes
    if stop > size_bytes:
        raise _Broken(f"tensor {name!r:.120} ends at {stop}, of {size_bytes} bytes")
    return Tensor(type_, shape, start, stop)


@cache
def sizes() -> dict[int, tuple[str, int, int]]:
    """By a type's number: its name, the numbers and the bytes of a block."""
    return {int(kind): (kind.name, *size) for kind, size in library("constants").GGML_QUANT_SIZES.items()}


def name_map(architecture: str, layer_count: int) -> TensorNameMap:
    """The package's map of tensors' names, as a class of its own: an architecture's names of blocks are written into the class."""
    number = next(number for number, name in library("constants").MODEL_ARCH_NAMES.items() if name == architecture)
    shared = library("tensor_mapping").TensorNameMap
    own: type[TensorNameMap] = type("NameMap", (shared,), {"block_mappings_cfg": dict(shared.block_mappings_cfg)})
    return own(number, layer_count)


@cache
def library(name: str) -> ModuleType:
    """A module of the package of ggml's authors: `constants`, types and architectures, or `tensor_mapping`, names of tensors. Not
    by way of the package, which also imports what writes files: that takes longer than a small model's load."""
    if LIBRARY not in sys.modules:
        sys.modules[LIBRARY] = package = ModuleType(LIBRARY)
        package.__path__ = [str(library_folder())]
    return import_module(f"{LIBRARY}.{name}")


def library_folder() -> Path:
    """Where the package's modules are."""
    found = find_spec("gguf")
    assert found is not None and found.origin is not None, "a requirement of this package"
    return Path(found.origin).parent
