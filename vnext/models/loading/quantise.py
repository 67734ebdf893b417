"""Quantising: a float checkpoint rounded to few bits and written as compressed-tensors, which vLLM and transformers read too.

The weights of the layers' products are rounded; embeddings, the head, routers and norms stay what they are. One weight is in memory
at a time. The folder appears under its name when it is whole.
"""

from __future__ import annotations

import json
import secrets
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import BinaryIO, NamedTuple

import numpy as np

from vnext.kernels.formats.bits import to_words, unsigned
from vnext.kernels.formats.rounding import Rounded, to_float8, to_integers
from vnext.models.config.folder import CONFIG_NAME, INDEX_NAME, SINGLE_NAME, read_config, settings_in
from vnext.models.config.model_config import load_config
from vnext.models.errors import ModelError
from vnext.models.loading.checkpoint import Checkpoint, open_checkpoint
from vnext.models.loading.recording import layer_products
from vnext.models.loading.sources.safetensors import DTYPES, ELEMENTS

Entry = tuple[str, tuple[int, ...]]
"""A tensor's dtype by the files' name, and its shape."""


class Scheme(NamedTuple):
    """`bits` of whole numbers with a scale for each group of inputs, of the first of `groups` that serves, or 8 of a float with a
    scale for each output."""

    bits: int
    groups: tuple[int, ...] = ()

    @property
    def is_float(self) -> bool:
        return not self.groups

    def settings(self, group: int) -> dict[str, object]:
        """What config.json says of the weights and the activations."""
        common = {"num_bits": self.bits, "symmetric": True, "actorder": None, "block_structure": None, "observer": "minmax"}
        if not self.is_float:
            weights = common | {"type": "int", "strategy": "group", "group_size": group, "dynamic": False}
            return {"weights": weights, "input_activations": None}
        weights = common | {"type": "float", "strategy": "channel", "group_size": None, "dynamic": False}
        return {"weights": weights, "input_activations": weights | {"strategy": "token", "dynamic": True, "observer": None}}

    def entries(self, shape: tuple[int, ...], dtype: str, group: int) -> dict[str, Entry]:
        """The tensors of a weight of this shape by suffix, with scales of the files' dtype `dtype`."""
        outputs, inputs = shape
        if self.is_float:
            return {"weight": ("F8_E4M3", shape), "weight_scale": (dtype, (outputs, 1))}
        packed = ("I32", (outputs, inputs * self.bits // 32))
        return {"weight_packed": packed, "weight_scale": (dtype, (outputs, inputs // group)), "weight_shape": ("I64", (2,))}

    def tensors(self, weight: np.ndarray, rounded: Rounded) -> tuple[np.ndarray, ...]:
        if self.is_float:
            return rounded.numbers, rounded.scales
        return to_words(unsigned(rounded.numbers, self.bits), self.bits), rounded.scales, np.array(weight.shape)


SCHEMES = MappingProxyType({"w4a16": Scheme(4, (32,)), "w8a16": Scheme(8, (128, 64, 32)), "fp8": Scheme(8)})
"""By the values of --scheme. Of 4 bits groups of 64 lose a third more than those of 32."""
LEFT_OUT = ("*.safetensors", INDEX_NAME, CONFIG_NAME, "*.gguf", "*.bin", "*.pt", "*.pth")


class Loss(NamedTuple):
    """How far a weight's rounded numbers are from its own: the root of the mean square, as a share of theirs."""

    name: str
    share: float


class Quantiser:
    """Makes the folder `out` of the checkpoint in `folder`. `group`: inputs that share a scale, where the scheme has groups, 0 for
    the first of the scheme's that divides all weights. `squares`: of columns (calibration.py). Raises ModelError before anything is
    written."""

    def __init__(
        self, folder: Path, out: Path, scheme: str, group: int, squares: Mapping[str, np.ndarray] = MappingProxyType({})
    ) -> None:
        self._folder, self._out, self._scheme, self._group, self._squares = folder, out, SCHEMES[scheme], 0, squares
        self._config = load_config(folder)
        if out.exists():
            raise ModelError(f"{out} is there already: give a folder that is not")
        if settings_in(folder, read_config(folder)):
            raise ModelError(f"{folder} is quantised already: give the float checkpoint of this model, or take a GGUF scheme")
        with open_checkpoint(folder) as tensors:
            names, self._exact = self._chosen(tensors.rooted())
            self.names = dict.fromkeys(names)
            if not self._scheme.is_float:
                self._group = self._group_of({name: (tensors.rooted().shape(name) or (0,))[-1] for name in self.names}, group)

    def run(self) -> Iterator[Loss]:
        """Write the folder; yields as each of `names` is written. Raises ModelError and OSError."""
        draft = self._out.with_name(f"{self._out.name}.{secrets.token_hex(4)}")
        draft.mkdir(parents=True)
        try:
            shutil.copytree(self._folder, draft, ignore=shutil.ignore_patterns(*LEFT_OUT), dirs_exist_ok=True)
            config = read_config(self._folder) | {"quantization_config": self._settings()}
            (draft / CONFIG_NAME).write_text(json.dumps(config, indent=2))
            with open_checkpoint(self._folder) as own, (draft / SINGLE_NAME).open("wb") as file:
                yield from self._write(own.rooted(), own, file)
            draft.rename(self._out)
        except BaseException:
            shutil.rmtree(draft, ignore_errors=True)
            raise

    def _chosen(self, tensors: Checkpoint) -> tuple[list[str], list[str]]:
        """The weights that are rounded, and those of products that are not."""
        chosen, others = layer_products(tensors, self._config)
        if not chosen:
            raise ModelError(f"{self._folder} has no weights of layers that can be quantised: give a float checkpoint")
        return chosen, others

    def _group_of(self, inputs: Mapping[str, int], given: int) -> int:
        """The size of groups. Raises ModelError where none, or not the given one, divides the inputs of all weights."""
        for group in (given,) if given else self._scheme.groups:
            if not any(count % group for count in inputs.values()):
                return group
        name, count = next((name, count) for name, count in inputs.items() if count % group)
        remedy = "leave --group-size out or give a smaller one" if given else "take --scheme fp8"
        raise ModelError(f"{name} has {count} inputs, which are no whole groups of {group}: {remedy}")

    def _settings(self) -> dict[str, object]:
        ignored = [name.removesuffix(".weight") for name in self._exact if "embed" not in name]
        return {
            "quant_method": "compressed-tensors", "quantization_status": "compressed", "kv_cache_scheme": None,
            "format": "float-quantized" if self._scheme.is_float else "pack-quantized", "ignore": ignored,
            "config_groups": {"group_0": {"targets": ["Linear"], "output_activations": None, **self._scheme.settings(self._group)}},
        }  # fmt: skip

    def _write(self, tensors: Checkpoint, own: Checkpoint, file: BinaryIO) -> Iterator[Loss]:
        planned = {name: self._entries(name, tensors) for name in tensors.names()}
        header: dict[str, Entry] = {}
        for name, entries in planned.items():
            whole = name if name in own else name.removeprefix("model.")
            stem = whole.removesuffix("weight") if name in self.names else whole
            header |= {stem + suffix: entry for suffix, entry in entries.items()}
        _write_header(header, file)
        for name in planned:
            shape = tensors.shape(name) or ()
            part = tensors.part(name, shape, ())
            if name not in self.names:
                _write_array(part, file)
            else:
                yield self._write_rounded(name, part, file)
            tensors.release(name)

    def _entries(self, name: str, tensors: Checkpoint) -> Mapping[str, Entry]:
        """A tensor's entries of the new file by suffix, or by "" where it stays. Raises ModelError."""
        shape, dtype = tensors.shape(name) or (), tensors.stored_dtype(name)
        tensors.require(name, shape, DTYPES)
        return self._scheme.entries(shape, dtype, self._group) if name in self.names else {"": (dtype, shape)}

    def _write_rounded(self, name: str, part: np.ndarray, file: BinaryIO) -> Loss:
        weight = part.astype(np.float32)
        if not np.isfinite(weight).all():
            raise ModelError(f"{name} has numbers that are not finite, which cannot be quantised: repair the checkpoint")
        scheme = self._scheme
        if scheme.is_float:
            rounded = to_float8(weight, part.dtype)
        else:
            rounded = to_integers(weight, scheme.bits, self._group, part.dtype, self._squares.get(name))
        for array in scheme.tensors(weight, rounded):
            _write_array(array, file)
        whole = float(np.square(weight).sum(dtype=np.float64))
        return Loss(name, (rounded.error / whole) ** 0.5 if whole else 0.0)


def _write_header(entries: Mapping[str, Entry], file: BinaryIO) -> None:
    place, header = 0, {"__metadata__": {"format": "pt"}}
    for name, (dtype, shape) in entries.items():
        stop = place + int(np.prod(shape, dtype=np.int64)) * ELEMENTS[dtype].itemsize
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [place, stop]}  # type: ignore[dict-item]
        place = stop
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    file.write(len(text).to_bytes(8, "little") + text)


def _write_array(array: np.ndarray, file: BinaryIO) -> None:
    file.write(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
