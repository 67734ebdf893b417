"""The tensors of GGUF files under Hugging Face's names, as numbers.

Names follow from llama.cpp's table in the package `gguf`. Matrices of quantised blocks are rows of bytes, which formats know
(kernels/formats/gguf_blocks.py). Three families store numbers otherwise there: Llama's queries and keys have the channels of a pair
side by side, and Gemma's norms contain the 1.
"""

from __future__ import annotations

import mmap
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from vnext.kernels.format import GGUF_BLOCKS, format_of
from vnext.models.config.model_config import ModelConfig, load_config
from vnext.models.errors import ModelError
from vnext.models.gguf.config import STRETCHES
from vnext.models.gguf.folder import linked_files
from vnext.models.gguf.header import Tensor, library, read_header
from vnext.models.loading.recording import Recording
from vnext.models.loading.sources.safetensors import DTYPES, mapped, release
from vnext.models.registry import family

if TYPE_CHECKING:
    from gguf.tensor_mapping import TensorNameMap

PAIRED = frozenset({"llama", "smollm3", "granite", "arcee"})
"""Architectures whose queries and keys turn by pairs of neighbours."""
SHIFTED = frozenset({"gemma2", "gemma3"})
LAYER = re.compile(r"(?<=\.)\d+(?=\.)")
EXPERT = re.compile(r"(.*\.experts)\.(\d+)\.(.*)")
Stored = tuple[Path, mmap.mmap, Tensor]


class Quantised(NamedTuple):
    """A tensor of a GGUF file: the dtype of its numbers, its whole shape, and its bytes [start, stop). A matrix of blocks has their
    type as dtype and shape [out, bytes of a row]. `type`: how numbers stand there, as `own_name`. `pairs`: how many heads have the
    channels of a pair side by side, 0 for none. `shift` is taken off each number."""

    file: Path
    mapping: mmap.mmap
    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int
    type: str
    own_name: str
    pairs: int = 0
    shift: float = 0.0

    def part(self, ranges: tuple[slice, ...]) -> np.ndarray:
        """A part of the tensor; of a vector float32 where its numbers are quantised."""
        count = self.shape[0] if len(self.shape) > 1 or self.pairs else 1
        rows = np.frombuffer(self.mapping, np.uint8, self.stop - self.start, self.start).reshape(count, -1)
        first, *others = ranges or (slice(None),)
        if len(self.shape) == 1:
            return self._numbers(rows[self._order(count)] if self.pairs else rows).reshape(-1)[first]
        rows = rows[self._order(count)[first] if self.pairs else first]
        return (rows if self.dtype == self.type in GGUF_BLOCKS else self._numbers(rows))[:, *others]

    def release(self) -> None:
        """Release the memory of the tensor's pages."""
        release(self.mapping, self.start, self.stop)

    def _order(self, count: int) -> np.ndarray:
        """The file's row of each row: in a head [2, half] becomes [half, 2]."""
        return np.arange(count).reshape(self.pairs, -1, 2).swapaxes(1, 2).reshape(-1)

    def _numbers(self, rows: np.ndarray) -> np.ndarray:
        if self.type in DTYPES:
            numbers = np.ascontiguousarray(rows).view(DTYPES[self.type])
        else:
            numbers = format_of(self.type).to_float((rows,))
        return numbers - np.float32(self.shift) if self.shift else numbers


def gguf_tensors(folder: Path) -> dict[str, Quantised]:
    """The tensors that the family of the model in folder `folder` reads, by name. Raises ModelError."""
    return _read(folder, _opened(folder))


def unread_gguf(folder: Path) -> list[str]:
    """The file's names of tensors that the family does not read. Raises ModelError."""
    opened = _opened(folder)
    read = {tensor.own_name for tensor in _read(folder, opened).values()}
    return sorted(opened.stored.keys() - read - {STRETCHES})


class _Opened(NamedTuple):
    """llama.cpp's name of a model's architecture, and the tensors of its files."""

    architecture: str
    stored: dict[str, Stored]


class _Names(NamedTuple):
    """llama.cpp's name of an architecture, its table of tensors' names for the first layer, and how many layers there are."""

    architecture: str
    table: Mapping[str, str]
    layer_count: int

    def of(self, name: str) -> str:
        """The file's name of a tensor, "" for none."""
        if found := self._of_module(name):  # a tensor that is no weight of a module
            return f"{found}.weight"
        base, dot, ending = name.replace("_correction_bias", "_correction.bias").rpartition(".")
        found = self._of_module(base)
        return found and f"{found}{dot}{ending}"

    def _of_module(self, name: str) -> str:
        layer = LAYER.search(name)
        if name in self.table or layer is None or int(layer[0]) >= self.layer_count:
            return self.table.get(name, "")
        return self.table.get(f"{name[: layer.start()]}0{name[layer.end() :]}", "").replace("blk.0.", f"blk.{layer[0]}.")


def _read(folder: Path, opened: _Opened) -> dict[str, Quantised]:
    config, stored = load_config(folder), opened.stored
    names = file_names(opened.architecture, config)
    recording = Recording(lambda name: _place(name, names)[0] in stored)
    family(config.architecture).assemble(recording, config)
    tied = recording.heads if config.tie_embeddings else set()
    found = {name: _found(name, names, stored, config) for name in sorted(recording.read - tied)}
    return {name: tensor for name, tensor in found.items() if tensor is not None}


def file_names(architecture: str, config: ModelConfig) -> _Names:
    """The names of tensors in files of a model by llama.cpp's name of its architecture."""
    first = name_map(architecture, 1).mapping
    return _Names(architecture, {key: name for key, (_, name) in first.items()}, config.layer_count)


def name_map(architecture: str, layer_count: int) -> TensorNameMap:
    """The package's map of tensors' names, as a class of its own: an architecture's names of blocks are written into the class."""
    number = next(number for number, name in library("constants").MODEL_ARCH_NAMES.items() if name == architecture)
    shared = library("tensor_mapping").TensorNameMap
    return type("NameMap", (shared,), {"block_mappings_cfg": dict(shared.block_mappings_cfg)})(number, layer_count)


def _opened(folder: Path) -> _Opened:
    files = linked_files(folder)
    headers = [read_header(file, has_texts=False) for file in files]
    stored: dict[str, Stored] = {}
    for file, header in zip(files, headers):
        mapping = mapped(file)
        stored |= {name: (file, mapping, tensor) for name, tensor in header.tensors.items()}
    return _Opened(str(headers[0].metadata["general.architecture"]), stored)


def _place(name: str, names: _Names) -> tuple[str, int | None]:
    """The file's name of a tensor, and the expert whose part of it this is."""
    match = EXPERT.fullmatch(name)
    return (names.of(f"{match[1]}.{match[3]}"), int(match[2])) if match else (names.of(name), None)


def _found(name: str, names: _Names, stored: Mapping[str, Stored], config: ModelConfig) -> Quantised | None:
    place, expert = _place(name, names)
    if place not in stored:
        return None
    file, mapping, tensor = stored[place]
    if tensor.type not in DTYPES and tensor.type not in GGUF_BLOCKS:
        raise ModelError(f"tensor {place!r} in {file} has the type {tensor.type}, which is not read; take another quantisation")
    if expert is not None:
        if not config.experts or tensor.shape[:1] != (config.experts.count,):
            raise ModelError(f"tensor {place!r} in {file} has the shape {list(tensor.shape)}, of other experts; download it again")
        size = (tensor.stop - tensor.start) // tensor.shape[0]
        start = tensor.start + expert * size
        tensor = Tensor(tensor.type, tensor.shape[1:], start, start + size)
    pairs = {"attn_q": config.head_count, "attn_k": config.kv_head_count} if names.architecture in PAIRED else {}
    dtype, shape = tensor.type if tensor.type in DTYPES else "F32", tensor.shape
    if len(shape) == 3:  # heads one below the other
        shape = (shape[0] * shape[1], shape[2])
    if tensor.type in GGUF_BLOCKS and len(shape) == 2:
        dtype, shape = tensor.type, (shape[0], (tensor.stop - tensor.start) // shape[0])
    return Quantised(
        file, mapping, dtype, shape, tensor.start, tensor.stop, tensor.type,
        own_name=place,
        pairs=pairs.get(place.split(".")[-2], 0),
        shift=float(names.architecture in SHIFTED and "norm" in place),
    )  # fmt: skip
