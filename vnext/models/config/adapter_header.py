"""The header of an adapter's safetensors file, compared with the linear layers of a model before anything is loaded.

Reads names, shapes and dtypes, no numbers: cheap enough for the moment at which a client names the adapter. Needs no torch.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from vnext.models.config.adapter_config import WEIGHTS_NAME, AdapterSettings
from vnext.models.config.folder import read_header
from vnext.models.errors import ModelError

PREFIX = "base_model.model."
TENSOR = re.compile(r"(?P<module>.+)\.lora_(?P<half>[AB])(?:\.(?P<adapter>[^.]+))?\.weight")
"""An adapter's own name is in the names that its tensors have in memory (`lora_A.default.weight`), not in those that PEFT saves."""
OTHERS = MappingProxyType(
    {
        ".base_layer.": "which is the base's: save the adapter alone, with PEFT's save_pretrained",
        ".original_module.": "which is the base's: save the adapter alone, with PEFT's save_pretrained",
        ".modules_to_save.": "which is a whole module beside the adapter: not supported, so merge the adapter into the weights",
        ".lora_magnitude_vector": "of weights that are decomposed (DoRA): not supported, so merge the adapter into the weights",
        ".lora_embedding_": "of an adapted embedding: not supported, so merge the adapter into the weights",
    }
)
"""Part of a tensor's name -> why the tensor cannot be read."""
READ_DTYPES = ("F32", "F16", "BF16")
ROOTS = ("model.language_model.", "language_model.model.", "model.", "transformer.", "")
"""What precedes the name of a layer in one class or file of a model and not in another; longer ones come first."""
COPIES = ("embed_tokens.weight", "lm_head.weight", "wte.weight")
"""Ends of the names of whole embeddings and heads, which PEFT puts beside an adapter."""

LinearLayers = Mapping[str, tuple[int, int]]
"""(inputs, outputs) of each layer that an adapter may change, by its module's name in the checkpoint."""


class AdaptedModule(NamedTuple):
    """A module by its name in the adapter, and the adapter's tensors of it."""

    name: str
    down: str
    up: str


class AdapterTensors(NamedTuple):
    """`modules` by the layers' names in the model's checkpoint; `copies`: tensors that must be those of the model."""

    modules: dict[str, AdaptedModule]
    copies: tuple[str, ...]


def check_adapter_header(folder: Path, settings: AdapterSettings, layers: LinearLayers) -> AdapterTensors:
    """The tensors of the adapter in `folder`. Raise ModelError unless each belongs to one of the layers and has the shape that the
    layer and the rank ask for."""
    file = folder / WEIGHTS_NAME
    tensors = {name: entry for name, entry in json.loads(read_header(file)).items() if name != "__metadata__"}
    copies = tuple(sorted(name for name in tensors if name.endswith(COPIES)))
    modules = _modules(file, sorted(tensors.keys() - set(copies)), layers)
    if not modules:
        raise ModelError(f"{file} has no tensors of linear layers: save the adapter again")
    for layer, module in sorted(modules.items()):
        (inputs, outputs), rank = layers[layer], settings.rank_of(module.name)
        for name, shape in ((module.down, [rank, inputs]), (module.up, [outputs, rank])):
            _check_tensor(file, name, tensors, shape)
    return AdapterTensors(modules, copies)


def _modules(file: Path, names: Sequence[str], layers: LinearLayers) -> dict[str, AdaptedModule]:
    """The layers that tensors of these names change."""
    by_end = {_end(layer): layer for layer in layers}
    found: dict[str, AdaptedModule] = {}
    own = _own_name(file, names)
    for name in names:
        stem = name[: name.rindex(".lora_")]
        module = stem.removeprefix(PREFIX)
        layer = module if module in layers else by_end.get(_end(module))
        if layer is None:
            raise ModelError(f"{file} adapts {module!r}, which is no linear layer of this model that an adapter may change")
        if found.setdefault(layer, AdaptedModule(module, *(f"{stem}.lora_{half}{own}.weight" for half in "AB"))).name != module:
            raise ModelError(f"{file} adapts {module!r} twice, under two names: save the adapter again")
    return found


def _own_name(file: Path, names: Sequence[str]) -> str:
    """What the names of the adapter's tensors have of its own, ".default" say, or "". Raises ModelError where a tensor is none of
    an adapter, or there are several."""
    own: dict[str, str] = {}
    for name in names:
        if (parts := TENSOR.fullmatch(name)) is None:
            usual = "which is neither lora_A nor lora_B of a linear layer"
            why = next((why for part, why in OTHERS.items() if part in name), usual)
            raise ModelError(f"{file} has the tensor {name!r}, {why}")
        own.setdefault(parts["adapter"] or "", name)
    if len(own) > 1:
        one, other = [*own.values()][:2]
        several = f"tensors of {len(own)} adapters, such as {one!r} and {other!r}"
        raise ModelError(f"{file} has {several}: save each in a folder of its own")
    return "".join(f".{name}" for name in own if name)


def _end(module: str) -> str:
    """A module's name without what precedes its layer."""
    return module.removeprefix(next(root for root in ROOTS if module.startswith(root)))


def _check_tensor(file: Path, name: str, tensors: Mapping[str, Any], shape: list[int]) -> None:
    if name not in tensors:
        raise ModelError(f"{file} has no tensor {name!r}, the other half of one that it has: save the adapter again")
    found = tensors[name].get("shape")
    if found != shape:
        raise ModelError(
            f"{name!r} in {file} has the shape {found} where this model and the rank in adapter_config.json ask for {shape}: the "
            "adapter was made for another model, or its two files do not belong together"
        )
    if (dtype := tensors[name].get("dtype")) not in READ_DTYPES:
        raise ModelError(f"{name!r} in {file} has the dtype {dtype}; supported are {', '.join(READ_DTYPES)}")
