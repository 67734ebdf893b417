"""A checkpoint on disk: which safetensors file holds which tensor, and the reading of parts of tensors.

Owns the files' memory maps while open and every error that a broken checkpoint can cause. Reads only the parts asked
for. Knows no model: names, shapes and ranges come from the caller.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from hashlib import blake2b
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from vnext.models.errors import ModelError
from vnext.models.json_keys import read_json

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"
HEADER_SIZE_MAX = 100_000_000
DTYPES = MappingProxyType({"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16})
"""The files' names of what can be read."""
SAMPLE_COUNT = 16
SAMPLE_SIZE_BYTES = 4096


class Checkpoint:
    """Open files by tensor name. Made by `open_checkpoint`."""

    def __init__(self, path: Path, handles: dict[str, Any], files: dict[str, Path], size_bytes: int) -> None:
        """`handles` maps tensor names to open files, `files` to the paths that errors name."""
        self.path = path
        self.size_bytes = size_bytes
        self._handles = handles
        self._files = files

    def __contains__(self, name: str) -> bool:
        return name in self._handles

    def dtype(self, name: str) -> torch.dtype | None:
        """A tensor's dtype in its file, None where `part` would refuse it."""
        if name not in self._handles:
            return None
        return DTYPES.get(self._handles[name].get_slice(name).get_dtype())

    def part(self, name: str, shape: tuple[int, ...], ranges: tuple[slice, ...]) -> torch.Tensor:
        """A part of a tensor that must have this whole shape, in the checkpoint's dtype. Raises ModelError."""
        if name not in self._handles:
            raise ModelError(f"{self.path} has no tensor {name!r}; config.json asks for it, download the model again")
        view = self._handles[name].get_slice(name)
        found = tuple(view.get_shape())
        if found != shape:
            raise ModelError(
                f"tensor {name!r} in {self._files[name]} has the shape {list(found)} but config.json asks for "
                f"{list(shape)}; the two files do not belong together"
            )
        if view.get_dtype() not in DTYPES:
            raise ModelError(
                f"tensor {name!r} in {self._files[name]} has the dtype {view.get_dtype()}; supported are {', '.join(DTYPES)}"
            )
        return view[ranges]


@contextmanager
def open_checkpoint(path: Path) -> Iterator[Checkpoint]:
    """The checkpoint in folder `path`, its files mapped until the block ends. Raises ModelError."""
    files = weight_files(path)
    handles: dict[str, Any] = {}
    homes: dict[str, Path] = {}
    with ExitStack() as stack:
        for file in files:
            handle = stack.enter_context(open_file(file))
            for name in handle.keys():
                handles[name], homes[name] = handle, file
        yield Checkpoint(path, handles, homes, sum(file.stat().st_size for file in files))


def open_file(file: Path) -> Any:
    """One safetensors file, mapped."""
    read_header(file)
    try:
        return safe_open(file, framework="pt", device="cpu")
    except (SafetensorError, OSError) as error:
        raise ModelError(f"{file} is truncated or corrupt ({error}); download the model again") from error


def weight_files(path: Path) -> list[Path]:
    """The checkpoint's safetensors files, sorted: those that an index names, else the single one. Raises ModelError."""
    if (path / INDEX_NAME).is_file():
        names = read_json(path / INDEX_NAME).get("weight_map")
        if not isinstance(names, dict) or not names or any(Path(str(name)).name != name for name in names.values()):
            raise ModelError(f"{path / INDEX_NAME} does not map tensors to files; download the model again")
        files = [path / name for name in sorted(set(names.values()))]
    else:
        files = [path / SINGLE_NAME]
    for file in files:
        if not file.is_file():
            raise ModelError(f"{file} is missing; vnext reads safetensors weights, download the whole model")
    return files


def read_header(file: Path) -> bytes:
    """The JSON header of a safetensors file, checked against the file's size. Raises ModelError."""
    broken = ModelError(f"{file} is truncated or corrupt; download the model again")
    try:
        with file.open("rb") as stream:
            size = int.from_bytes(stream.read(8), "little")
            if not 2 <= size <= min(HEADER_SIZE_MAX, file.stat().st_size - 8):
                raise broken
            header = stream.read(size)
        entries = json.loads(header)
        ends = [entry["data_offsets"][1] for name, entry in entries.items() if name != "__metadata__"]
    except (OSError, ValueError, KeyError, TypeError, IndexError, AttributeError) as error:
        raise broken from error
    if 8 + size + max(ends, default=0) != file.stat().st_size:
        raise broken
    return header


def fingerprint(path: Path | str) -> str:
    """A digest of a checkpoint, 32 hexadecimal digits, the same wherever and whenever its files are the same.

    Cheap, not complete: it covers config.json, generation_config.json, and of each weight file the name, size, header
    and SAMPLE_COUNT pages spread over it; not every byte of gigabytes. Two trainings of one model differ in every
    page, so they differ here; a single weight changed by hand may not. Raises ModelError.
    """
    path = Path(path)
    digest = blake2b(digest_size=16)
    for name in ("config.json", "generation_config.json"):
        content = (path / name).read_bytes() if (path / name).is_file() else b""
        digest.update(len(content).to_bytes(8, "little") + content)
    for file in weight_files(path):
        header, size = read_header(file), file.stat().st_size
        digest.update(f"{file.name}:{size}:{len(header)}:".encode())
        digest.update(header)
        with file.open("rb") as stream:
            for index in range(SAMPLE_COUNT):
                stream.seek(size * index // SAMPLE_COUNT)
                digest.update(stream.read(SAMPLE_SIZE_BYTES))
    return digest.hexdigest()
