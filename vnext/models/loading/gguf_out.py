"""GGUF out: a checkpoint of floats or of few bits, or another GGUF file, as a GGUF file of few bits that llama.cpp loads.

Matrices become blocks of the scheme's type, the embedding and the head of at least 8 bits; vectors, routers and what else llama.cpp
wants exact keep their numbers. The metadata that a checkpoint's configuration becomes is read again as any file's: where that gives
another configuration, the model is refused. The file appears under its name when it is whole.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

import gguf
import numpy as np
from gguf import GGMLQuantizationType, GGUFValueType
from msgspec.structs import replace

from vnext.kernels.formats.gguf_rounding import to_blocks
from vnext.models.config.folder import require_checkpoint
from vnext.models.config.model_config import ModelConfig, load_config, without_windows
from vnext.models.errors import ModelError
from vnext.models.gguf.folder import SUFFIX, files_of
from vnext.models.gguf.gemmas import UNTURNED
from vnext.models.gguf.header import name_map, read_header
from vnext.models.gguf.members import STRETCHES
from vnext.models.gguf.vocabulary_out import Ends, vocabulary_members
from vnext.models.layers.rope import inverse_frequencies
from vnext.models.layers.sharding import alone, weight_axes
from vnext.models.loading.checkpoint import Checkpoint, open_checkpoint
from vnext.models.loading.gguf_members import config_members, require_same
from vnext.models.loading.gguf_mixtures import FILE_TYPES, Mixture
from vnext.models.loading.gguf_tensors import Form, Names, form_of, place_of
from vnext.models.loading.quantise import Loss
from vnext.models.loading.recording import Recording
from vnext.models.loading.stored import StoredPart, StoredWeights
from vnext.models.registry import family

JOINED = MappingProxyType({"input_linear.weight": ("gate_proj", "up_proj"), "output_linear.weight": ("down_proj",)})
"""Granite's MLP, whose parts stand one below the other."""
GATED = re.compile("(gate|up)_proj")
"""Of an expert: files of some architectures have the two in one tensor, up behind gate."""
ALONE = -1, 0
"""The part that is all of a tensor."""
MAMBA = "GraniteMoeHybridForCausalLM"
TOGETHER = 2**22
"""Numbers that are floats at a time."""
OWN = ("general.file_type", "general.quantization_version", "general.alignment")
"""Members that are written anew; those of `split` are left out."""
NONE: Mapping[str, np.ndarray] = MappingProxyType({})
VERSION = 2
"""Of the layout of blocks."""
Member = tuple[object, GGUFValueType, GGUFValueType | None]


class Plan(NamedTuple):
    """A tensor of the file: its shape, its new type, and `rows`, which gives its rows in float32, some at a time. `data`: its bytes
    where they stay as they are, [rows, bytes]. `columns`: how often errors of each count (calibration.py), None for alike."""

    shape: tuple[int, ...]
    type: str
    rows: Callable[[], Iterator[np.ndarray]]
    data: np.ndarray | None = None
    columns: np.ndarray | None = None


class GgufQuantiser:
    """Makes the GGUF file `out` of a checkpoint's folder or of a GGUF file. `scheme`: of FILE_TYPES, in lower case. `templates`: a
    folder's chat templates by name; `squares`: of columns (calibration.py), by the source's names. Raises ModelError before
    anything is written."""

    def __init__(
        self, source: Path, out: Path, scheme: str, templates: Mapping[str, str], squares: Mapping[str, np.ndarray] = NONE
    ) -> None:
        self._out, self._type, self._squares = out, scheme.upper(), squares
        if out.suffix != SUFFIX:
            raise ModelError(f"{scheme} is written as one GGUF file, and {out} has not the ending {SUFFIX}: give a name that has")
        if out.exists():
            raise ModelError(f"{out} is there already: give a name that is not")
        self._open = ExitStack()
        if source.suffix == SUFFIX and source.is_file():
            self._members, self._plans = self._of_file(source)
        else:
            self._members, self._plans = self._of_folder(source, templates)
        self.names = [name for name, plan in self._plans.items() if plan.data is None and plan.type != "F32"]
        if not self.names:
            raise ModelError(f"{source} has no weights that can become {self._type}: all are so already, or too narrow")

    def run(self) -> Iterator[Loss]:
        """Write the file; yields as each of `names` is written. Raises ModelError and OSError."""
        draft = self._out.with_name(f"{self._out.name}.{secrets.token_hex(4)}")
        self._out.parent.mkdir(parents=True, exist_ok=True)
        try:
            writer = self._writer(draft)
            for name, plan in self._plans.items():
                loss = self._write(name, plan, writer)
                if name in self.names:
                    yield loss
            writer.close()
            draft.rename(self._out)
        finally:
            self._open.close()
            draft.unlink(missing_ok=True)

    def _writer(self, draft: Path) -> gguf.GGUFWriter:
        """A file that has all but the tensors' data."""
        writer = gguf.GGUFWriter(draft, str(self._members["general.architecture"][0]))
        own = {"general.file_type": FILE_TYPES[self._type], "general.quantization_version": VERSION}
        for name, (value, kind, of) in (self._members | {name: _member(value) for name, value in own.items()}).items():
            if name != "general.architecture" and value != []:  # the package writes the first itself, and no empty lists
                writer.add_key_value(name, value, kind, sub_type=of)
        for name, plan in self._plans.items():
            type_ = GGMLQuantizationType[plan.type]
            shape = gguf.quants.quant_shape_to_byte_shape(plan.shape, type_)
            writer.add_tensor_info(name, shape, np.dtype(np.uint8), int(np.prod(shape)), raw_dtype=type_)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        return writer

    def _write(self, name: str, plan: Plan, writer: gguf.GGUFWriter) -> Loss:
        if plan.data is not None:
            writer.write_tensor_data(plan.data)
            return Loss(name, 0.0)
        written, lost, whole = [], 0.0, 0.0
        for rows in plan.rows():
            if not np.isfinite(rows).all():
                raise ModelError(f"{name} has numbers that are not finite, which cannot be quantised: repair the checkpoint")
            with np.errstate(over="ignore", invalid="ignore"):
                written.append(blocks := to_blocks(rows, plan.type, plan.columns))
                found = gguf.quants.dequantize(blocks, GGMLQuantizationType[plan.type]).reshape(rows.shape)
                lost += float(np.square(found - rows).sum(dtype=np.float64))
            whole += float(np.square(rows, dtype=np.float64).sum())
        if not np.isfinite(lost):
            raise ModelError(f"{name} has numbers too large for the scales of {plan.type}: take --scheme bf16")
        writer.write_tensor_data(np.concatenate(written))
        return Loss(name, (lost / whole) ** 0.5 if whole else 0.0)

    # ---- of a GGUF file

    def _of_file(self, source: Path) -> tuple[dict[str, Member], dict[str, Plan]]:
        files = files_of(source)
        for file in files:
            read_header(file)  # refuses what is broken: the package trusts a file
        readers = [gguf.GGUFReader(file) for file in files]
        members: dict[str, Member] = {}
        for field in readers[0].fields.values():
            if not field.name.startswith(("GGUF.", "split.")) and field.name not in OWN:
                is_list = field.types[0] == GGUFValueType.ARRAY
                members[field.name] = field.contents(), field.types[0], field.types[-1] if is_list else None
        tensors = {each.name: each for reader in readers for each in reader.tensors}
        shapes = {name: tuple(int(size) for size in reversed(each.shape)) for name, each in tensors.items()}
        mixture = Mixture(self._type, shapes, _number(members, "expert_count"))
        return members, {name: self._of_tensor(each, shapes[name], mixture.type_of(name)) for name, each in tensors.items()}

    def _of_tensor(self, tensor: gguf.ReaderTensor, shape: tuple[int, ...], type_: str) -> Plan:
        own = tensor.tensor_type
        if type_ in ("F32", own.name):
            return Plan(shape, own.name, lambda: iter(()), tensor.data.view(np.uint8))
        data = tensor.data.reshape(-1, tensor.data.shape[-1])
        rows = lambda: (gguf.quants.dequantize(data[some], own) for some in _runs(len(data), shape[-1]))  # noqa: E731
        return Plan(shape, type_, rows, columns=self._squares.get(tensor.name))

    # ---- of a checkpoint's folder

    def _of_folder(self, folder: Path, templates: Mapping[str, str]) -> tuple[dict[str, Member], dict[str, Plan]]:
        require_checkpoint(folder)
        config = load_config(folder)
        members = config_members(config)
        tensors = self._open.enter_context(open_checkpoint(folder)).rooted()
        plans = self._planned(config, str(members["general.architecture"]), tensors)
        if len(stretches := _stretches(config)):
            plans[STRETCHES] = Plan(stretches.shape, "F32", lambda: iter((stretches,)))
        require_same(config, members, {name: plan.shape for name, plan in plans.items()}, stretches)
        ends = Ends(config.vocab_size, config.bos_token_id, config.eos_token_ids)
        members |= vocabulary_members(folder, ends, templates) | {"general.type": "model", "general.name": folder.resolve().name}
        return {name: _member(value) for name, value in members.items()}, plans

    def _planned(self, config: ModelConfig, architecture: str, tensors: Checkpoint) -> dict[str, Plan]:
        table = {key: name for key, (_, name) in name_map(architecture, 1).mapping.items()}
        names = Names(architecture, table, config.layer_count)
        recording, weights = Recording(partial(_has, tensors)), StoredWeights(tensors, config, alone(), weight_axes(config))
        family(config.architecture).assemble(recording, config)
        homes: dict[str, dict[tuple[int, int], _Part]] = {}
        for own in sorted(recording.read - (recording.heads if config.tie_embeddings else set())):
            shape = weights.whole_shape(own, weights.layout(own)) if tensors.format_of(own) else tensors.shape(own)
            for part in _parts(own, shape, config) if shape else ():
                place, key = _home(part.alias, names)
                if not place:
                    raise ModelError(f"{own} has no place in a GGUF file; take --scheme w4a16")
                homes.setdefault(place, {})[key] = part
        plans = {}
        for place, parts in homes.items():
            first = next(iter(parts.values()))
            count, runs = len(range(first.whole[0])[first.rows]), 1 + max(run for _, run in parts)
            form = form_of(place, count, names, config)
            every = [_Rows(tensors, parts[each], form) for each in sorted(parts)]
            one = (count * runs, *first.whole[1:])
            shape = _axes(place, one, config) if ALONE in parts else (len(parts) // runs, *one)
            columns = self._squares.get(first.own) if ALONE in parts else None
            plans[place] = Plan(shape, "F32", partial(_all_rows, every), columns=columns)
        shapes = {name: plan.shape for name, plan in plans.items()}
        mixture = Mixture(self._type, shapes, config.experts.count if config.experts else 0)
        return {name: plan._replace(type=mixture.type_of(name)) for name, plan in plans.items()}


def _home(name: str, names: Names) -> tuple[str, tuple[int, int]]:
    """A tensor's place in a file, "" for none, and which part of it this is: of which expert, and whose run of that one's rows."""
    place, expert = place_of(name, names)
    if place or expert is None:
        return place, ALONE if expert is None else (expert, 0)
    place, _ = place_of(GATED.sub("gate_up_proj", name), names)
    return place, (expert, int("up_proj" in name))


def _has(tensors: Checkpoint, name: str) -> bool:
    """Whether a checkpoint has a weight in any format."""
    return name in tensors or tensors.format_of(name) is not None


def _stretches(config: ModelConfig) -> np.ndarray:
    """What divides the frequencies of a rope as that of Llama 3.1 or of Gemma 4, nothing for others."""
    if config.rope.kind == "proportional":
        half = without_windows(config).head_dim // 2
        return np.where(np.arange(half) < int(half * config.rope.share), 1, UNTURNED).astype(np.float32)
    if config.rope.kind != "llama3":
        return np.empty(0, np.float32)
    plain = replace(config.rope, kind="default")
    found: np.ndarray = inverse_frequencies(plain, config.head_dim) / inverse_frequencies(config.rope, config.head_dim)
    return found


class _Part(NamedTuple):
    """Rows of a checkpoint's tensor `own` of the shape `whole`, and the name of a tensor that a file has of them."""

    own: str
    whole: tuple[int, ...]
    alias: str
    rows: slice


def _parts(own: str, whole: tuple[int, ...], config: ModelConfig) -> list[_Part]:
    """A tensor as files have it: Granite's joined MLP apart."""
    here, _, name = own.partition("shared_mlp.")
    if name not in JOINED:
        return [_Part(own, whole, own, slice(None))]
    inner, size = "mlp.shared_expert." if config.experts else "mlp.", whole[0] // len(JOINED[name])
    places = enumerate(JOINED[name])
    return [_Part(own, whole, f"{here}{inner}{each}.weight", slice(at * size, (at + 1) * size)) for at, each in places]


def _axes(place: str, shape: tuple[int, ...], config: ModelConfig) -> tuple[int, ...]:
    """The shape in a file: without axes of length 1 within, with those that Mamba-2 has."""
    part = place.split(".")[-2 if place.endswith(".weight") else -1]
    if config.recurrent and config.recurrent.key_dim and config.architecture == MAMBA:
        if part in ("ssm_a", "ssm_d"):
            return (*shape, 1)
        if part == "ssm_norm":
            return config.recurrent.key_heads, shape[0] // config.recurrent.key_heads
    return tuple(size for size in shape if size > 1 or len(shape) < 3)


class _Rows(NamedTuple):
    """A part of a checkpoint's tensor, in the form that a file has it."""

    tensors: Checkpoint
    part: _Part
    form: Form

    def floats(self) -> Iterator[np.ndarray]:
        """Its rows, [some, numbers of a row], of a vector [some]."""
        own, shape, _, rows = self.part
        order, columns, shift, is_decay = self.form
        if (format := self.tensors.format_of(own)) is None:
            whole = self.tensors.part(own, shape, (rows,))
        else:
            start, stop, _ = rows.indices(shape[0])
            whole = StoredPart(self.tensors, own, format, shape, slice(start, stop), slice(0, shape[1]), stop - start).floats()
        whole = whole.reshape(len(whole), -1) if len(shape) > 2 else whole
        places = None if order is None else np.argsort(order)
        for some in _runs(len(whole), int(np.prod(shape[1:]))):
            part = whole[some if places is None else places[some]].astype(np.float32)
            if columns is not None:
                part = part.reshape(len(part), len(columns), -1)[:, np.argsort(columns)].reshape(part.shape)
            part = -np.exp(part) if is_decay else part
            yield part + np.float32(shift) if shift else part
        for name in format.tensors(own) if format else (own,):
            self.tensors.release(name)


def _all_rows(every: list[_Rows]) -> Iterator[np.ndarray]:
    return (rows for each in every for rows in each.floats())


def _runs(count: int, width: int) -> Iterator[slice]:
    step = max(1, TOGETHER // width)
    return (slice(first, first + step) for first in range(0, count, step))


def _member(value: object) -> Member:
    kinds = {bool: GGUFValueType.BOOL, int: GGUFValueType.UINT32, float: GGUFValueType.FLOAT32, str: GGUFValueType.STRING}
    if not isinstance(value, list):
        return value, kinds[type(value)], None
    of = type(value[0]) if value else int
    return value, GGUFValueType.ARRAY, GGUFValueType.INT32 if of is int else kinds[of]


def _number(members: Mapping[str, Member], key: str) -> int:
    """A count among an architecture's members, 0 where it is not there."""
    value, _, _ = members.get(f"{members['general.architecture'][0]}.{key}", (0, None, None))
    return value if isinstance(value, int) else 0
