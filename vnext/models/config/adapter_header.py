"""The header of an adapter's safetensors file, compared with the linear layers of a model before anything is loaded.

Reads names, shapes and dtypes, no numbers: cheap enough for the moment at which a client names the adapter. Needs no torch.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from vnext.models.config.adapter_config import WEIGHTS_NAME, AdapterSettings
from vnext.models.config.folder import read_header
from vnext.models.errors import ModelError

PREFIX = "base_model.model."
DOWN, UP = ".lora_A.weight", ".lora_B.weight"
READ_DTYPES = ("F32", "F16", "BF16")

LinearLayers = Mapping[str, tuple[int, int]]
"""(inputs, outputs) of each layer that an adapter may change, by its module's name in the checkpoint."""


def check_adapter_header(folder: Path, settings: AdapterSettings, layers: LinearLayers) -> None:
    """Raise ModelError unless each tensor of the adapter in `folder` belongs to one of the layers and has the shape that the
    layer and the rank ask for."""
    file = folder / WEIGHTS_NAME
    tensors = {name: entry for name, entry in json.loads(read_header(file)).items() if name != "__metadata__"}
    modules = {_module(file, name, layers) for name in sorted(tensors)}
    if not modules:
        raise ModelError(f"{file} has no tensors: save the adapter again")
    for module in sorted(modules):
        inputs, outputs = layers[module]
        for kind, shape in ((DOWN, [settings.rank, inputs]), (UP, [outputs, settings.rank])):
            _check_tensor(file, PREFIX + module + kind, tensors, shape)


def _module(file: Path, tensor: str, layers: LinearLayers) -> str:
    """The layer that a tensor changes."""
    kind = next((kind for kind in (DOWN, UP) if tensor.endswith(kind)), None)
    if kind is None:
        raise ModelError(f"{file} has the tensor {tensor!r}, which is neither lora_A nor lora_B of a linear layer")
    module = tensor.removeprefix(PREFIX).removesuffix(kind)
    if module not in layers:
        raise ModelError(f"{file} adapts {module!r}, which is no linear layer of this model that an adapter may change")
    return module


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
