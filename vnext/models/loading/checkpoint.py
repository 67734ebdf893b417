"""A checkpoint on disk: finds the source of each tensor and reads parts of tensors.

Owns the errors for broken tensors; folder.py owns the list of required files, and sources/ knows the kinds of files. Reads only
the requested parts, and releases their pages once the caller has copied them, so that a model is never in memory twice. Knows
no model: names, shapes and ranges come from the caller.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import lru_cache
from hashlib import blake2b
from math import log2, prod
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple, Protocol

import ml_dtypes
import numpy as np

from vnext.base.tokenizer_files import file_state
from vnext.kernels.format import GGUF_BLOCKS, Cut, Format, Settings, format_of, stored_formats
from vnext.models.config.folder import (
    CONFIG_NAME,
    DUMMY_NAME,
    assigned_files,
    is_dummy,
    read_config,
    read_header,
    settings_in,
    weight_files,
)
from vnext.models.config.model_config import ModelConfig, load_config
from vnext.models.config.pooling import tail_files
from vnext.models.config.tower_config import THEIRS
from vnext.models.errors import ModelError
from vnext.models.gguf.folder import linked_files
from vnext.models.layers.sharding import Layout, layout_of, weight_axes, whole_shape
from vnext.models.loading.gguf_tensors import gguf_tensors
from vnext.models.loading.joined_experts import by_expert
from vnext.models.loading.recording import Recording
from vnext.models.loading.sources.safetensors import DTYPES, ELEMENTS, INTEGERS, Stored, stored_tensors
from vnext.models.registry import family, mtp, sound_parts, tower_parts

STORED = ELEMENTS | dict.fromkeys(GGUF_BLOCKS, np.dtype("uint8"))
"""What formats of weights make numbers of."""
SETTINGS = CONFIG_NAME, "generation_config.json"
SAMPLE_COUNT = 16
SAMPLE_SIZE_BYTES = 4096
DIGESTED_TOGETHER = 2**22
COMPARED_ROWS = 4096
ROOT = "model."
ROOTS = {
    **dict.fromkeys(("embed_tokens", "layers", "norm"), ROOT),
    **dict.fromkeys(("wte", "wpe", "word_embeddings", "word_embeddings_layernorm", "h", "ln_f"), "transformer."),
}
"""How names of a model begin, and what precedes them in the one that gives it a head."""


class StoredTensor(Protocol):
    """A tensor where it comes from: its file, its dtype by the file's own name, its whole shape, and its bytes [start, stop)."""

    @property
    def file(self) -> Path: ...

    @property
    def dtype(self) -> str: ...

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def start(self) -> int: ...

    @property
    def stop(self) -> int: ...

    def part(self, ranges: tuple[slice, ...]) -> np.ndarray:
        """A part of the tensor, one of ELEMENTS, not to be written to nor kept."""

    def release(self) -> None:
        """Release the memory of the tensor's pages."""


Tensors = dict[str, StoredTensor]


def rooted(name: str) -> str:
    """A tensor's name in a model with a head."""
    return ROOTS.get(name.partition(".")[0], "") + name


class Checkpoint:
    """Mapped tensors by name. Made by `open_checkpoint`. `is_bare`: of a model that was saved without what holds its head.
    `settings`: what config.json says of quantised weights."""

    def __init__(
        self, path: Path, tensors: Tensors, size_bytes: int, is_bare: bool = False, settings: Settings = MappingProxyType({})
    ) -> None:
        self.path = path
        self.size_bytes = size_bytes
        self.is_bare = is_bare
        self.settings = settings
        self._tensors = tensors
        self._stored_formats, self._formats = stored_formats(), dict[str, Format | None]()

    def __contains__(self, name: object) -> bool:
        return name in self._tensors

    def rooted(self) -> Checkpoint:
        """The same, with the tensors of a bare model under the names that they have in a whole one."""
        names = {name: whole for name in self._tensors if (whole := rooted(name)) not in self._tensors}
        if not names:
            return self
        tensors = {names.get(name, name): each for name, each in self._tensors.items()}
        return Checkpoint(self.path, tensors, self.size_bytes, is_bare=True, settings=self.settings)

    def names(self) -> list[str]:
        return sorted(self._tensors)

    def file(self, name: str) -> Path:
        return self._tensors[name].file

    def stored_dtype(self, name: str) -> str:
        """A tensor's dtype by its file's own name for it, "" where there is no such tensor."""
        return self._tensors[name].dtype if name in self._tensors else ""

    def dtype(self, name: str) -> np.dtype | None:
        """A tensor's dtype in its file, None where `part` would refuse it."""
        return DTYPES.get(self._tensors[name].dtype) if name in self._tensors else None

    def size_of(self, name: str) -> int:
        """The bytes of a tensor in its file."""
        return self._tensors[name].stop - self._tensors[name].start

    def shape(self, name: str) -> tuple[int, ...] | None:
        """A tensor's whole shape, None where there is no such tensor."""
        return self._tensors[name].shape if name in self._tensors else None

    def format_of(self, name: str) -> Format | None:
        """The format that holds a weight; None for floats, and where there is no such weight. Raises ModelError."""
        if name not in self._formats:
            try:
                self._formats[name] = self._found(name)
            except ValueError as error:
                raise ModelError(f"{name} in {self.path} cannot be read: {error}") from error
        return self._formats[name]

    def _found(self, name: str) -> Format | None:
        """Each type of block is a format, which needs not be looked for."""
        if (dtype := self.stored_dtype(name)) in GGUF_BLOCKS:
            return format_of(dtype)
        return next(filter(None, (each.found(name, self) for each in self._stored_formats)), None)

    def hold(self, name: str, format: Format) -> None:
        """From now on count a weight as held in this format."""
        self._formats[name] = format

    def are_equal(self, first: str, second: str, other: Checkpoint | None = None) -> bool:
        """Whether two tensors, the second one perhaps of another checkpoint, have one shape and the same numbers, whatever their
        dtypes. Raises ModelError."""
        shape, sides = self.shape(first) or (), ((self, first), (other or self, second))
        if shape != (other or self).shape(second):
            return False
        parts = [np.atleast_1d(each.part(name, shape, ())) for each, name in sides]
        bits = f"uint{8 * parts[0].itemsize}" if parts[0].dtype == parts[1].dtype else ""
        rows = (slice(row, row + COMPARED_ROWS) for row in range(0, len(parts[0]), COMPARED_ROWS))
        pairs = ((part[each].view(bits) if bits else part[each].astype(np.float32) for part in parts) for each in rows)
        are_equal = all(np.array_equal(one, other) for one, other in pairs)
        for each, name in sides:
            each.release(name)
        return are_equal

    def part(self, name: str, shape: tuple[int, ...], ranges: tuple[slice, ...]) -> np.ndarray:
        """A part of a tensor that must have this whole shape, in the checkpoint's dtype. Raises ModelError.

        It lies in the file's mapping, not to be written to nor kept: copy it, then `release` the tensor.
        """
        self.require(name, shape)
        return self._tensors[name].part(ranges)

    def raw(self, name: str, shape: tuple[int, ...], cut: Cut) -> np.ndarray:
        """As `part`, of a tensor of any of STORED, which a format of weights makes numbers of."""
        self.require(name, shape, STORED)
        ranges = tuple(each for each in cut if isinstance(each, slice))
        return self._tensors[name].part(ranges) if len(ranges) == len(cut) else self._tensors[name].part(())[cut]

    def values(self, name: str) -> np.ndarray:
        """A whole tensor of one of ELEMENTS, copied. Raises ModelError."""
        shape = self.shape(name) or ()
        found = self.raw(name, shape, ()).copy()
        self.release(name)
        return found

    def require(self, name: str, shape: tuple[int, ...], dtypes: Mapping[str, np.dtype] = DTYPES) -> None:
        """Raise ModelError unless there is such a tensor, of this whole shape and one of these dtypes."""
        if name not in self._tensors:
            raise ModelError(f"{self.path} has no tensor {name!r}; config.json asks for it, download the model again")
        found = self._tensors[name]
        if found.shape != shape:
            raise ModelError(
                f"tensor {name!r} in {found.file} has the shape {list(found.shape)} but config.json asks for "
                f"{list(shape)}; the two files do not belong together"
            )
        if found.dtype not in dtypes:
            raise ModelError(
                f"tensor {name!r} in {found.file} has the dtype {found.dtype}; supported are {', '.join(dtypes)}"
            )

    def integers(self, name: str, count: int) -> np.ndarray:
        """A tensor that must have `count` whole numbers, copied as int64. Raises ModelError."""
        found = self._tensors.get(name)
        if found is None or found.shape != (count,) or found.dtype not in INTEGERS:
            what = "no such tensor" if found is None else f"shape {list(found.shape)}, dtype {found.dtype}"
            raise ModelError(f"{self.path} must have {count} whole numbers as {name!r} ({what}); download the model again")
        return found.part(()).astype(np.int64)

    def release(self, name: str) -> None:
        """Release the memory of a tensor's pages; another read takes them from the file."""
        self._tensors[name].release()


def overlaid(*checkpoints: Checkpoint) -> Checkpoint:
    """The tensors of all, each of the last one that has it. The last one's path names them."""
    tensors = {name: each for one in checkpoints for name, each in one._tensors.items()}
    return Checkpoint(checkpoints[-1].path, tensors, 0)


@contextmanager
def open_checkpoint(path: Path) -> Iterator[Checkpoint]:
    """The checkpoint in folder `path`, its files mapped until the block ends. Raises ModelError."""
    tensors = folder_tensors(path)
    sizes = [file.stat().st_size for file in weight_files(path)] or [each.stop - each.start for each in tensors.values()]
    yield Checkpoint(path, tensors, sum(sizes), settings=settings_in(path, read_config(path)))


def folder_tensors(path: Path) -> Tensors:
    """The tensors of the checkpoint in folder `path`. Raises ModelError."""
    if is_dummy(path):
        return dict(drawn_tensors(path))
    if linked_files(path):
        return dict(gguf_tensors(path))
    homes = assigned_files(path)
    tensors: dict[str, Stored] = {}
    for file in weight_files(path):  # other files may hold stale copies: the index says which counts
        found = stored_tensors(file)
        tensors |= {name: each for name, each in found.items() if name not in tensors or homes.get(name) == file.name}
    return dict(by_expert(tensors))


def file_tensors(file: Path) -> Tensors:
    """The tensors of a file of a checkpoint or an update. Raises ModelError."""
    return folder_tensors(file.parent) if file.name == DUMMY_NAME else dict(by_expert(stored_tensors(file)))


def fingerprint(path: Path | str) -> str:
    """A digest of a checkpoint, 32 hexadecimal digits, the same wherever and whenever its files are the same. See `weights_digest`.

    Cheap, not complete: it covers config.json, generation_config.json, the settings of layers behind the pooling, and of each
    weight file the name, size, header and SAMPLE_COUNT pages spread over it; not every byte of gigabytes. Two trainings of one
    model differ in every page, so they differ here; a single weight changed by hand may not. Raises ModelError.
    """
    path = Path(path)
    return _fingerprint(path, tuple(map(file_state, (*(path / name for name in SETTINGS), *weight_files(path), *tail_files(path)))))


@lru_cache(maxsize=8)
def _fingerprint(path: Path, _states: tuple[tuple[int, ...], ...]) -> str:
    """Files that are as they were are not read again: a start asks twice."""
    digest = blake2b(digest_size=16)
    for name in SETTINGS:
        content = (path / name).read_bytes() if (path / name).is_file() else b""
        digest.update(len(content).to_bytes(8, "little") + content)
    behind = tail_files(path)
    for file in (each for each in behind if each.name == CONFIG_NAME):
        digest.update(f"{file.relative_to(path)}:".encode() + file.read_bytes())
    for file in (*weight_files(path), *(each for each in behind if each.name != CONFIG_NAME)):
        header, size = read_header(file), file.stat().st_size
        digest.update(f"{file.name}:{size}:{len(header)}:".encode())
        digest.update(header)
        with file.open("rb") as stream:
            for index in range(SAMPLE_COUNT):
                stream.seek(size * index // SAMPLE_COUNT)
                digest.update(stream.read(SAMPLE_SIZE_BYTES))
    return digest.hexdigest()


def weights_digest(path: Path | str) -> str:
    """A digest of every byte of a checkpoint's weight files, or of what random weights are drawn from, 64 hexadecimal digits. Reads
    them all. Raises ModelError."""
    digest = blake2b(digest_size=32)
    for file in (*(weight_files(path := Path(path)) or (path / CONFIG_NAME, path / DUMMY_NAME)), *tail_files(path)):
        digest.update(f"{file.name}:{file.stat().st_size}:".encode())
        with file.open("rb") as stream:
            while piece := stream.read(DIGESTED_TOGETHER):
                digest.update(piece)
    return digest.hexdigest()


# ---- weights of no file ------------------------------------------------------------------------------------------
# Random numbers in the place of a checkpoint's files, for benchmarks and tests of large shapes. Names and shapes come from the
# family. A number depends on its tensor's name and its place in it alone, so that every split over ranks and stages has the same
# model. Norms get numbers in [1, 2), biases small ones, and matrices such that a product keeps the size of its inputs: all logits
# are finite. Numbers are computed where they are read, and none are kept.

FILE_NAMES = MappingProxyType({"float32": "F32", "float16": "F16", "bfloat16": "BF16"})
NUMBERS_A_BLOCK = 16
"""Of the generator: each has 256 bits."""
SIGN, MANTISSA, MANTISSA_BITS, ZERO_EXPONENT = 0x8000, 0x7F, 7, 127  # of bfloat16
BIAS_EXPONENT = -6
DRAWN_TOGETHER = 2**22


class Drawn(NamedTuple):
    """A tensor of random numbers: its dtype by a file's name for it, its whole shape, and its size in bytes as `stop`. The numbers
    have magnitudes in [2 ** exponent, 2 ** (exponent + 1)), and both signs if `is_signed`."""

    file: Path
    dtype: str
    shape: tuple[int, ...]
    key: int
    exponent: int
    is_signed: bool
    stop: int
    start: int = 0

    def part(self, ranges: tuple[slice, ...]) -> np.ndarray:
        width = prod(self.shape[1:])
        rows = range(self.shape[0])[ranges[0] if ranges else slice(None)]
        columns = range(width)[ranges[1] if len(ranges) > 1 else slice(None)]
        bits = np.empty((len(rows), len(columns)), np.uint16)
        together = max(1, DRAWN_TOGETHER // width)
        for first in range(0, len(rows), together):
            count = min(together, len(rows) - first)
            numbers = self._bits((rows.start + first) * width, count * width).reshape(count, width)
            bits[first : first + count] = numbers[:, columns.start : columns.stop]
        found: np.ndarray = bits.view(ml_dtypes.bfloat16).reshape((len(rows), len(columns))[: len(self.shape)])
        return found if self.dtype == "BF16" else found.astype(np.float16 if self.dtype == "F16" else np.float32)

    def release(self) -> None:
        """Nothing is kept."""

    def _bits(self, start: int, count: int) -> np.ndarray:
        """Numbers of the flat tensor from number `start` on, as bits of bfloat16, uint16 [count]."""
        block, skipped = divmod(start, NUMBERS_A_BLOCK)
        words = -(-(skipped + count) // 4)
        drawn = np.random.Philox(key=self.key, counter=block).random_raw(words).astype("<u8", copy=False).view("<u2")
        drawn &= (SIGN if self.is_signed else 0) | MANTISSA
        drawn |= (self.exponent + ZERO_EXPONENT) << MANTISSA_BITS
        return drawn[skipped : skipped + count]


def drawn_tensors(path: Path) -> dict[str, Drawn]:
    """The tensors of the model whose configuration is in folder `path`, by name. Raises ModelError."""
    config = load_config(path)
    recording, layouts = Recording(lambda name: True), weight_axes(config)
    family(config.architecture).assemble(recording, config)
    if config.mtp_layers and (drafting := mtp(config.architecture)):
        drafting.assemble(recording, config)
    names = recording.read - recording.heads
    drawn = {name: _drawn(path / DUMMY_NAME, name, layout_of(name, layouts), config) for name in sorted(names)}
    ours = config.sound or (config.tower and config.tower.form not in THEIRS)
    return drawn | _tower_tensors(path, config) if ours else drawn


def _tower_tensors(path: Path, config: ModelConfig) -> dict[str, Drawn]:
    found = dict[str, Drawn]()
    for parts in (tower_parts(config.architecture), sound_parts(config.architecture)):
        recording, tower = Recording(lambda name: True), parts.config(config)
        parts.assemble(recording, tower)
        layouts = weight_axes(tower)
        found |= {name: _drawn(path / DUMMY_NAME, name, layout_of(name, layouts), tower) for name in sorted(recording.read)}
    return found


def _drawn(file: Path, name: str, layout: Layout, config: ModelConfig) -> Drawn:
    shape, dtype = whole_shape(layout, config), FILE_NAMES[config.dtype]
    key = int.from_bytes(blake2b(name.encode(), digest_size=16).digest(), "little")
    is_norm = layout.inner is None and not name.endswith(".bias")
    inputs = shape[0] if layout.flipped else prod(shape[1:])
    exponent = 0 if is_norm else BIAS_EXPONENT if layout.inner is None else round(-log2(inputs) / 2 - log2(1.5))
    return Drawn(file, dtype, shape, key, exponent, not is_norm, prod(shape) * (4 if dtype == "F32" else 2))
