"""LLaVA-OneVision: SigLIP's tower over squares, and Qwen 2."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple

import msgspec
import numpy as np

from vnext.kernels.arrays import Array, as_tensor
from vnext.models.config.json_keys import Json, refuse, required
from vnext.models.config.model_config import ModelConfig, text_part
from vnext.models.config.tower_config import parse_anyres
from vnext.models.families import qwen2
from vnext.models.families.towers import siglip
from vnext.models.families.towers.siglip import tower_config
from vnext.models.layers.assembly import Source, linear, llama_parts
from vnext.models.layers.decoder import Names, Params, assemble_decoder, forward, logits
from vnext.models.layers.layers import Linear
from vnext.models.layers.sharding import WEIGHT_AXES as LLAMA, Layout, Sized
from vnext.models.layers.tower import Passing, TowerParams

if TYPE_CHECKING:
    import torch

__all__ = ["WEIGHT_AXES", "assemble", "assemble_tower", "forward", "logits", "parse", "project", "tower_config"]

ROOTS = ("language_model.model.", "model.language_model.")
HEADS = ("language_model.lm_head.weight", "lm_head.weight")
TOWERS = ("vision_tower.", "vision_tower.vision_model.", "model.vision_tower.", "model.vision_tower.vision_model.")
PROJECTORS = ("multi_modal_projector.", "model.multi_modal_projector.")
NEWLINES = ("image_newline", "model.image_newline")


class Projection(NamedTuple):
    """Two products with a gelu between them, and what stands behind each row of vectors, [width]."""

    first: Linear
    second: Linear
    newline: Array


def WEIGHT_AXES(config: ModelConfig) -> Mapping[str, Layout]:  # noqa: N802  (a field of Family)
    tower = config.tower
    assert tower is not None
    width = Sized(tower.width)
    projector = {"linear_1": Layout((width,), Sized(tower.hidden_size)), "linear_2": Layout((width,), width)}
    return {**LLAMA, **siglip.axes(tower), **projector, "image_newline": Layout((width,))}


def parse(raw: Json, generation: Json) -> ModelConfig:
    """The configuration of the language part, with that of the tower. Raises ModelError."""
    refuse(raw, "vision_feature_layer", unless=(-1,))
    refuse(raw, "vision_feature_select_strategy", unless=("full",))
    refuse(raw, "projector_hidden_act", unless=("gelu",))
    refuse(raw, "multimodal_projector_bias", unless=(True,))
    refuse(required(raw, "text_config", None), "model_type", unless=("qwen2",))
    config = qwen2.parse(text_part(raw), generation)
    return msgspec.structs.replace(config, tower=parse_anyres(raw, config.hidden_size))


def assemble(source: Source, config: ModelConfig) -> Params:
    names = Names(root=present(source, ROOTS, "norm.weight"), head=present(source, HEADS))
    return assemble_decoder(source, config, llama_parts(source, qkv_bias=True), names)


def assemble_tower(source: Source, config: ModelConfig) -> TowerParams:
    here = present(source, PROJECTORS, "linear_1.weight")
    first, second = (linear(source, here, name, bias=True) for name in ("linear_1", "linear_2"))
    projection = Projection(first, second, source.fused((present(source, NEWLINES),)))
    return siglip.assemble(source, config, present(source, TOWERS, "embeddings.patch_embedding.weight"), projection, norms=False)


def project(params: TowerParams, passing: Passing, more: tuple[int, ...], config: ModelConfig) -> torch.Tensor:
    """Vectors [N, width] of an image: those of all of it, then those of its squares row by row; `more` says how they lie. Of a
    frame, whose `more` is one number: a quarter of them, between the others, and so many behind."""
    chosen, (first, second, newline) = passing.step.operations, params.projection
    states = chosen.activate(chosen.linear(passing.states.flatten(0, 1), *first), None, None, "gelu")
    vectors = chosen.linear(states, *second)
    size, grid = vectors.shape[1], passing.rows
    if len(more) == 1:
        few = -(-grid // 2)
        between = scaled(scaled(vectors.view(grid, grid, size), few, 0), few, 1).to(vectors.dtype)
        frame = vectors.new_empty((few**2 + more[0], size))
        frame[: few**2], frame[few**2 :] = between.reshape(-1, size), newline
        return frame
    down, across, above, before, height, width = more or (0, 0, 0, 0, 1, 0)
    found = vectors.new_empty((grid**2 + height * (width + 1), size))
    found[: grid**2] = vectors[: grid**2]
    lines = found[grid**2 :].view(height, width + 1, size)
    lines[:, width] = newline
    if more:
        squares = vectors[grid**2 :].reshape(down, across, grid, grid, size)
        laid = squares.transpose(1, 2).reshape(down * grid, across * grid, size)
        laid = laid[above : down * grid - above, before : across * grid - before]
        lines[:, :width] = laid if laid.shape[:2] == (height, width) else scaled(scaled(laid, height, 0), width, 1)
    return found


def scaled(grid: torch.Tensor, size: int, axis: int) -> torch.Tensor:
    """A grid brought to another size along an axis: each place is between two of the old ones, by its distance from them."""
    length = grid.shape[axis]
    at = np.maximum((np.arange(size, dtype=np.float32) + np.float32(0.5)) * np.float32(length / size) - np.float32(0.5), 0)
    low = at.astype(np.int64)
    far: torch.Tensor = as_tensor((at - low).astype(np.float32).reshape((-1, 1, 1) if axis == 0 else (1, -1, 1)))
    high = np.minimum(low + 1, length - 1)
    below, above = (grid.index_select(axis, as_tensor(each)).float() for each in (low, high))
    return below * (1 - far) + above * far


def present(source: Source, names: tuple[str, ...], behind: str = "") -> str:
    """The first of these names that the checkpoint has, with what stands behind it there; without any, the first."""
    return next((name for name in names if name + behind in source), names[0])
