"""Tails: the layers of config/tail.py with their weights, and what they make of a vector.

A vector goes through by itself, in float64, each product a sum in one order: its bits depend on no other and on no rank.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import NamedTuple

import numpy as np

from vnext.models.config.model_config import ModelConfig
from vnext.models.config.tail import WEIGHTS, TailLayer
from vnext.models.errors import ModelError
from vnext.models.loading.checkpoint import Checkpoint, open_checkpoint
from vnext.models.loading.sources.safetensors import stored_tensors


class Layer(NamedTuple):
    """`weight` float32 [out, in], `bias` float64 [out] or None, and a name of `activated`; `norm`: float64 weight and bias [out] of
    what follows it, None for none."""

    weight: np.ndarray
    bias: np.ndarray | None
    activation: str
    norm: tuple[np.ndarray, np.ndarray] | None
    eps: float


class Tail:
    """Layers that vectors go through one by one. Immutable."""

    def __init__(self, layers: tuple[Layer, ...]) -> None:
        self._layers = layers

    def __call__(self, vector: np.ndarray) -> np.ndarray:
        """float32 [in] -> float32 [out]."""
        found = vector.astype(np.float64)
        for layer in self._layers:
            found = np.einsum("oi,i->o", layer.weight, found, dtype=np.float64)
            found = activated(found if layer.bias is None else found + layer.bias, layer.activation)
            if layer.norm is not None:
                found = (found - found.mean()) / np.sqrt(found.var() + layer.eps) * layer.norm[0] + layer.norm[1]
        return found.astype(np.float32)


def load_tail(path: Path, config: ModelConfig) -> Tail | None:
    """The tail of the checkpoint in folder `path`; None for a model without. Raises ModelError."""
    described = config.pooling.layers if config.pooling else ()
    if not described:
        return None
    with open_checkpoint(path) as own:
        layers, width = [], config.hidden_size
        for each in described:
            layers.append(_layer(path, own, each, width))
            width = len(layers[-1].weight)
    if config.pooling is not None and config.pooling.scores and width != 1:
        raise ModelError(f"the head of {path} has {width} labels: only heads of one label, which score pairs of texts, are served")
    return Tail(tuple(layers))


def activated(x: np.ndarray, name: str) -> np.ndarray:
    """The activation of float64 x [N]."""
    match name:
        case "tanh":
            x = np.tanh(x)
        case "sigmoid":
            x = 1 / (1 + np.exp(-x))
        case "relu":
            x = np.maximum(x, 0.0)
        case "gelu":
            x = x * np.array([1 + math.erf(each * 0.5**0.5) for each in x.tolist()]) / 2
    return x


def _layer(path: Path, own: Checkpoint, described: TailLayer, width: int) -> Layer:
    """One layer over `width` numbers. Raises ModelError."""
    source, file = own, path / described.folder / WEIGHTS
    if described.folder:
        if not file.is_file():
            raise ModelError(f"{file} is missing, which modules.json asks for; download the whole model")
        source = Checkpoint(file.parent, dict(stored_tensors(file)), 0)
    shape = source.shape(described.weight) or ()
    if shape[1:] != (width,):
        found = f"{described.weight!r} in {source.path} has the shape {list(shape)}"
        raise ModelError(f"{found} and must be a matrix over {width} numbers; the files do not belong together")
    if described.rows:
        if max(described.rows) >= shape[0]:
            raise ModelError(f"{source.path} has no token {max(described.rows)}, by which modules.json scores")
        rows = [np.array(source.part(described.weight, shape, (slice(row, row + 1),)), np.float32) for row in described.rows]
        weight = rows[0] if len(rows) == 1 else rows[0] - rows[1]
    else:
        weight = source.part(described.weight, shape, ()).astype(np.float32)

    def vector(name: str) -> np.ndarray:
        return source.part(name, shape[:1], ()).astype(np.float64) if name else np.zeros(shape[0])

    bias = vector(described.bias) if described.bias else None
    norm = (vector(described.norm[0]), vector(described.norm[1])) if described.norm else None
    return Layer(weight, bias, described.activation, norm, described.eps)
