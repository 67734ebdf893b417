"""The tensors of GGUF files under Hugging Face's names, as numbers.

Names follow from llama.cpp's table in the package `gguf`. Matrices of quantised blocks are rows of bytes, which formats know
(kernels/formats/gguf_blocks.py). Some families store numbers otherwise there: Llama's queries and keys have the channels of a pair
side by side, norms contain the 1, decays stand for their logarithms, and heads of values take turns. Axes of length 1 are left out.
"""

from __future__ import annotations

import mmap
import re
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from math import prod
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

import numpy as np

from vnext.base.tokenizer_files import file_state
from vnext.kernels.format import GGUF_BLOCKS, format_of
from vnext.models.config.folder import CONFIG_NAME
from vnext.models.config.model_config import ModelConfig, load_config
from vnext.models.errors import ModelError
from vnext.models.gguf.folder import linked_files, outline
from vnext.models.gguf.header import Tensor, sizes
from vnext.models.gguf.members import BY_LENGTH, STRETCHES
from vnext.models.gguf.towers import ARCHITECTURE as TOWER, BREAK, DEEP
from vnext.models.layers.sharding import LayoutTable, layout_of, weight_axes, whole_shape
from vnext.models.loading.recording import Recording
from vnext.models.loading.sources.safetensors import DTYPES, mapped, release
from vnext.models.registry import family, tower_parts

PAIRED = frozenset({"llama", "smollm3", "granite", "granitemoe", "granitehybrid", "arcee", "mistral3"})
"""Architectures whose queries and keys turn by pairs of neighbours."""
SHIFTED = frozenset({"gemma", "gemma2", "gemma3", "qwen3next", "qwen35", "qwen35moe", "nemotron"})
"""Architectures whose norms contain the 1, but for those of states."""
SHIFTED_VECTORS = "mm.soft_emb_norm.weight"
"""The norm behind Gemma 3's tower, which contains the 1, too."""
IN_TURNS = frozenset({"qwen35", "qwen35moe"})
"""Architectures whose heads of values take turns among those of keys, the first of each before the second of any."""
ENDINGS = MappingProxyType({"A_log": "", "D": "", "expert_bias": ".bias", "e_score_correction_bias": ".bias", "weight": ""})
"""Of a tensor that is no weight of a module; of others it is .weight."""
OTHERWISE = (
    (".dt_bias", ".dt_proj.bias"),
    ("_correction_bias", "_correction.bias"),
    (".block_sparse_moe.experts.", ".mlp.experts."),
    (".mixer.experts.", ".mlp.experts."),
    ("backbone.", "model."),
    (".feed_forward.experts.w1.", ".mlp.experts.gate_proj."),
    (".feed_forward.experts.w2.", ".mlp.experts.down_proj."),
    (".feed_forward.experts.w3.", ".mlp.experts.up_proj."),
    (".router.scale", ".router.proj.scale"),
    (".router.per_expert_scale", ".experts.down_proj.scale"),
    ("_projection_weight", "_projection.weight"),
    ("model.text_model.", "model."),
    ("merger.norm", "merger.ln_q"),
    ("merger.linear_fc1", "merger.mlp.0"),
    ("merger.linear_fc2", "merger.mlp.2"),
)
"""Parts of names, and what stands for them in the table where that does not know the name."""
MERGERS = "visual.deepstack_merger_list.{}.{}"
"""Behind layers of a tower, by their order; files name them by their layers."""
PATCHES, SECOND = "v.patch_embd.weight", "v.patch_embd.weight.1"
"""What multiplies a patch, and its second frame, where it has two."""
LAYER = re.compile(r"(?<=\.)\d+(?=\.)")
EXPERT = re.compile(r"(.*\.(?:experts|altup(?:_unembed)?_projections))\.(\d+)\.(.*)")
FLOAT_BYTES = 4
FOLDERS_KEPT = 8
Stored = tuple[Path, mmap.mmap, Tensor]
Whereabouts = tuple[str, int | None]
"""The file's name of a tensor, and the expert whose part of it one is, None for a whole one."""


class Quantised(NamedTuple):
    """A tensor of a GGUF file: the dtype of its numbers, its whole shape, and its bytes [start, stop). A matrix of blocks has their
    type as dtype and shape [out, bytes of a row]. `type`: how numbers stand there, as `own_name`. `rows` and `columns`: where the
    file has each row, and each head's columns; None where they are in order. `shift` is taken off each number; `is_decay`: the
    numbers are -exp of those wanted. `frames`: where each frame of patches begins, whose third axis they are; () where they are
    one tensor."""

    file: Path
    mapping: mmap.mmap
    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int
    type: str
    own_name: str
    rows: np.ndarray | None = None
    columns: np.ndarray | None = None
    shift: float = 0.0
    is_decay: bool = False
    frames: tuple[int, ...] = ()

    def part(self, ranges: tuple[slice, ...]) -> np.ndarray:
        """A part of the tensor; of a vector float32 where its numbers are quantised."""
        if self.frames:
            return np.stack([each.part(()) for each in self._apart()], axis=2)[ranges]
        first, *others = ranges or (slice(None),)
        count = self.shape[0] if len(self.shape) > 1 else 1
        found: np.ndarray = np.frombuffer(self.mapping, np.uint8, self.stop - self.start, self.start).reshape(count, -1)
        if len(self.shape) == 1:
            found = self._numbers(found).reshape(-1)
            return (found if self.rows is None else found[self.rows])[first]
        found = found[first if self.rows is None else self.rows[first]]
        if self.dtype != self.type or self.type not in GGUF_BLOCKS:
            found = self._numbers(found)
        if self.columns is not None:
            found = found.reshape(len(found), len(self.columns), -1)[:, self.columns]
        _, *inner = self.shape
        return found.reshape(len(found), *inner)[:, *others]

    def release(self) -> None:
        """Release the memory of the tensor's pages."""
        for each in self._apart():
            release(self.mapping, each.start, each.stop)

    def _apart(self) -> list[Quantised]:
        """Its frames, or itself."""
        size, shape = self.stop - self.start, (*self.shape[:2], *self.shape[3:])
        return [self._replace(shape=shape, start=start, stop=start + size, frames=()) for start in self.frames] or [self]

    def _numbers(self, rows: np.ndarray) -> np.ndarray:
        if self.type in DTYPES:
            numbers = np.ascontiguousarray(rows).view(DTYPES[self.type])
        else:
            numbers = format_of(self.type).to_float((rows,))
        if self.is_decay:
            numbers = np.log(-numbers.astype(np.float64)).astype(np.float32)
        return numbers - np.float32(self.shift) if self.shift else numbers


def gguf_tensors(folder: Path) -> dict[str, Quantised]:
    """The tensors that the family of the model in folder `folder` reads, by name. Raises ModelError."""
    stored, found = _opened(folder).stored, dict[str, Quantised | None]()
    for part in _parts(folder, _state(folder)):
        axes = weight_axes(part.config)
        found |= {name: _found(name, part, axes, stored) for name in part.wanted}
    return {name: tensor for name, tensor in found.items() if tensor is not None}


def unread_gguf(folder: Path) -> list[str]:
    """The file's names of tensors that the family does not read. Raises ModelError."""
    read = {place for part in _parts(folder, _state(folder)) for place, _ in part.wanted.values()}
    return sorted(_opened(folder).stored.keys() - read - {STRETCHES, BREAK, SECOND, *BY_LENGTH.values()})


class _Opened(NamedTuple):
    """llama.cpp's name of a model's architecture, its table of names, that of the tower or {}, and the tensors of its files."""

    architecture: str
    names: Mapping[str, str]
    tower_names: Mapping[str, str]
    stored: dict[str, Stored]


class Names(NamedTuple):
    """llama.cpp's name of an architecture, its table of tensors' names for the first layer, and how many layers there are."""

    architecture: str
    table: Mapping[str, str]
    layer_count: int

    def of(self, name: str) -> str:
        """The file's name of a tensor, "" for none."""
        if found := self._of_module(name):
            return found + ENDINGS.get(name.rpartition(".")[2], ".weight")
        base, dot, ending = name.rpartition(".")
        if ending in ("weight", "bias", "scale") and (found := self._of_module(base)):
            return f"{found}{dot}{ending}"
        other = next((name.replace(*each) for each in OTHERWISE if each[0] in name), "")
        return other and self.of(other)

    def _of_module(self, name: str) -> str:
        layer = LAYER.search(name)
        if name in self.table or layer is None or int(layer[0]) >= self.layer_count:
            return self.table.get(name, "")
        return self.table.get(f"{name[: layer.start()]}0{name[layer.end() :]}", "").replace("blk.0.", f"blk.{layer[0]}.")


class _Part(NamedTuple):
    """A decoder or its tower: the file's names, its configuration, and the tensors that its family asks for, with their places."""

    names: Names
    config: ModelConfig
    wanted: Mapping[str, Whereabouts]


def _state(folder: Path) -> tuple[tuple[int, ...], ...]:
    return tuple(map(file_state, (folder / CONFIG_NAME, *linked_files(folder))))


@lru_cache(maxsize=FOLDERS_KEPT)
def _parts(folder: Path, _states: tuple[tuple[int, ...], ...]) -> list[_Part]:
    """Of a model. A start asks twice: for what is read, and what is not."""
    config, opened = load_config(folder), _opened(folder)
    names = Names(opened.architecture, opened.names, config.layer_count)
    found = [_part(names, config, family(config.architecture).assemble, opened)]
    if opened.tower_names and (config.tower or config.sound):
        tower = tower_parts(config.architecture)
        own = tower.config(config)
        table = {**opened.tower_names, **_deep(config.tower.deep_layers if config.tower else ())}
        found.append(_part(Names(TOWER, table, own.layer_count), own, tower.assemble, opened))
    return found


def _deep(layers: Sequence[int]) -> dict[str, str]:
    """The files' names of what stands behind these layers of a tower."""
    parts = {"norm": "norm", "linear_fc1": "fc1", "linear_fc2": "fc2"}
    return {MERGERS.format(at, name): DEEP.format(layer, own) for at, layer in enumerate(layers) for name, own in parts.items()}


def _part(names: Names, config: ModelConfig, assemble: Callable[..., object], opened: _Opened) -> _Part:
    recording = Recording(lambda name: place_of(name, names)[0] in opened.stored)
    assemble(recording, config)
    wanted = sorted(recording.read - (recording.heads if config.tie_embeddings else set()))
    return _Part(names, config, {name: place_of(name, names) for name in wanted})


def _opened(folder: Path) -> _Opened:
    files = linked_files(folder)
    outlines = [outline(file) for file in files]
    stored: dict[str, Stored] = {}
    for file, each in zip(files, outlines):
        mapping = mapped(file)
        stored |= {name: (file, mapping, tensor) for name, tensor in each.tensors.items()}
    first = outlines[0]
    tower_names = next((each.names for each in outlines[1:] if each.architecture == TOWER), {})
    return _Opened(first.architecture, first.names, tower_names, stored | _slopes(files[0], first.slopes))


def _slopes(file: Path, slopes: Mapping[str, Sequence[float]]) -> dict[str, Stored]:
    """What Apertus's activation learned, of each layer, as tensors."""
    found: dict[str, Stored] = {}
    for name, numbers in slopes.items():
        data = np.array(numbers, np.float32).tobytes()
        mapping = mmap.mmap(-1, len(data) or 1)
        mapping.write(data)
        for layer, start in enumerate(range(0, len(data), FLOAT_BYTES)):
            found[f"blk.{layer}.{name}"] = file, mapping, Tensor("F32", (1,), start, start + FLOAT_BYTES)
    return found


def place_of(name: str, names: Names) -> Whereabouts:
    """The file's name of a tensor, and the expert whose part of it this is."""
    if (slope := name.rpartition(".mlp.act_fn."))[1] and (layer := LAYER.search(slope[0] + ".")):
        return f"blk.{layer[0]}.{slope[2]}", None
    match = EXPERT.fullmatch(name)
    return (names.of(f"{match[1]}.{match[3]}"), int(match[2])) if match else (names.of(name), None)


def _found(name: str, part: _Part, axes: LayoutTable, stored: Mapping[str, Stored]) -> Quantised | None:
    names, config, wanted = part
    place, expert = wanted[name]
    if place not in stored:
        return None
    file, mapping, tensor = stored[place]
    if tensor.type not in DTYPES and tensor.type not in GGUF_BLOCKS:
        raise ModelError(f"tensor {place!r} in {file} has the type {tensor.type}, which is not read; take another quantisation")
    if expert is not None:
        count = config.experts.count if config.experts else config.streams.count - 1 if config.streams else 0
        if tensor.shape[:1] != (count,):
            raise ModelError(f"tensor {place!r} in {file} has the shape {list(tensor.shape)}, of other experts; download it again")
        size = (tensor.stop - tensor.start) // tensor.shape[0]
        start = tensor.start + expert * size
        tensor = Tensor(tensor.type, tensor.shape[1:], start, start + size)
    shape, is_blocks = tensor.shape, tensor.type in GGUF_BLOCKS
    form = form_of(place, shape[0], names, config)
    dtype = tensor.type if tensor.type in DTYPES else "F32"
    if len(shape) == 3 and names.architecture != TOWER:  # heads one below the other
        shape = (shape[0] * shape[1], shape[2])
    elif len(shape) != len(usual := whole_shape(layout_of(name, axes), config)) and prod(shape) == prod(usual):
        shape = usual
    if is_blocks and len(shape) == 2 and (form.columns is None or shape[1] // len(form.columns) % _block(tensor.type) == 0):
        dtype, shape = tensor.type, (shape[0], (tensor.stop - tensor.start) // shape[0])
    found = Quantised(file, mapping, dtype, shape, tensor.start, tensor.stop, tensor.type, place, *form)
    return _of_frames(found, stored[SECOND]) if place == PATCHES and SECOND in stored else found


def _of_frames(first: Quantised, second: Stored) -> Quantised:
    """What multiplies patches of two frames. Raises ModelError."""
    file, _, tensor = second
    if (file, tensor.type, tensor.shape) != (first.file, first.type, first.shape):
        raise ModelError(f"{PATCHES!r} and {SECOND!r} in {first.file} differ in type or shape; download it again")
    shape = (*first.shape[:2], 2, *first.shape[2:])
    return first._replace(shape=shape, frames=(first.start, tensor.start))


def _block(type_: str) -> int:
    return next(count for name, count, _ in sizes().values() if name == type_)


class Form(NamedTuple):
    """How a file has the numbers of a tensor, as Quantised says."""

    rows: np.ndarray | None
    columns: np.ndarray | None
    shift: float
    is_decay: bool


def form_of(place: str, count: int, names: Names, config: ModelConfig) -> Form:
    """Of the tensor `place` of `count` rows. Raises ModelError."""
    part = place.split(".")[-2 if place.endswith((".weight", ".bias")) else -1]
    is_shifted = names.architecture in SHIFTED and place.endswith("norm.weight") and part != "ssm_norm" or place == SHIFTED_VECTORS
    return Form(*_orders_of(part, count, names, config), float(is_shifted), part == "ssm_a")


def _orders_of(part: str, count: int, names: Names, config: ModelConfig) -> tuple[np.ndarray | None, np.ndarray | None]:
    """Where the file has each of `count` rows of a tensor, and each head's columns; None where they are in order."""
    heads = {"attn_q": config.head_count, "attn_k": config.kv_head_count}.get(part)
    is_tower = names.architecture == TOWER and config.tower and config.tower.form == "rows"
    if heads and (is_tower or names.architecture in PAIRED):  # in a head [2, half] becomes [half, 2]
        if count % (2 * heads):
            raise ModelError(f"the file's {part} has {count} rows, which are no pairs of {heads} heads; download it again")
        return np.arange(count).reshape(heads, -1, 2).swapaxes(1, 2).reshape(-1), None
    recurrent = config.recurrent
    if names.architecture not in IN_TURNS or recurrent is None or recurrent.key_heads == recurrent.value_heads:
        return None, None
    own = np.arange(recurrent.value_heads).reshape(-1, recurrent.key_heads).T.reshape(-1)
    if part in ("ssm_a", "ssm_dt", "ssm_alpha", "ssm_beta"):
        return own, None
    values = (own[:, None] * recurrent.value_dim + np.arange(recurrent.value_dim)).reshape(-1)
    if part in ("attn_qkv", "ssm_conv1d"):
        keys = 2 * recurrent.keys
        return np.concatenate((np.arange(keys), keys + values)), None
    return values if part == "attn_gate" else None, own if part == "ssm_out" else None
