"""Qwen2.5-VL: a tower whose layers see windows, and Qwen 2."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from vnext.kernels.arrays import Array, as_tensor
from vnext.models.config.json_keys import Json
from vnext.models.config.model_config import ModelConfig, text_part
from vnext.models.config.rope_config import as_default, scaling_of, with_axes
from vnext.models.config.tower_config import parse_grid
from vnext.models.families import qwen2
from vnext.models.families.towers.llava_onevision import present
from vnext.models.families.towers.siglip import tower_config
from vnext.models.layers.assembly import Source, gated_mlp, linear, llama_parts, rms_norm
from vnext.models.layers.decoder import Names, Params, assemble_decoder, forward, logits
from vnext.models.layers.layers import Attention, Linear
from vnext.models.layers.sharding import WEIGHT_AXES as LLAMA, Axis, Layout, Sized, matrix
from vnext.models.layers.tower import Passing, TowerLayer, TowerParams, square_order

if TYPE_CHECKING:
    import torch

__all__ = ["WEIGHT_AXES", "assemble", "assemble_tower", "forward", "logits", "parse", "project", "tower_config"]

ROOTS = ("model.", "model.language_model.")
TOWERS = ("visual.", "model.visual.")
QKV = "q", "k", "v"
"""In the place of qkv, as in Qwen2.5-Omni, and as llama.cpp's converter writes them."""


class Projection(NamedTuple):
    """A norm of states, and two products with a gelu between them, which make one vector of a square's states."""

    norm: Array
    first: Linear
    second: Linear


def WEIGHT_AXES(config: ModelConfig, towers: tuple[str, ...] = TOWERS) -> Mapping[str, Layout]:  # noqa: N802  (a field of Family)
    tower = config.tower
    assert tower is not None
    joined, heads = Sized(tower.hidden_size * tower.shuffle**2), Axis.HEADS
    sizes = {"0.weight": Layout((joined,), joined), "0.bias": Layout((joined,))}
    sizes |= {"2.weight": Layout((Sized(tower.width),), joined), "2.bias": Layout((Sized(tower.width),))}
    return {
        **LLAMA,
        **dict.fromkeys(("norm1", "norm2", "ln_q"), Layout((Axis.HIDDEN,))),
        "qkv": matrix((heads, heads, heads), Axis.HIDDEN),
        **dict.fromkeys(QKV, matrix(heads, Axis.HIDDEN)),
        "attn.proj": matrix(Axis.HIDDEN, heads),
        "patch_embed.proj": Layout((Axis.HIDDEN,), Sized(tower.patch_size), kernel=(tower.frames, tower.patch, tower.patch)),
        **{f"{root}merger.mlp.{name}": layout for root in towers for name, layout in sizes.items()},
    }


def parse(raw: Json, generation: Json) -> ModelConfig:
    """The configuration of the language part, with that of the tower. Raises ModelError."""
    text = as_default(text_part(raw) if "text_config" in raw else raw)
    config = qwen2.parse(text, generation)
    rope = with_axes(config.rope, scaling_of(text), config.head_dim // 2)
    return msgspec.structs.replace(config, rope=rope, tower=parse_grid(raw, config.hidden_size))


def assemble(source: Source, config: ModelConfig) -> Params:
    names = Names(root=present(source, ROOTS, "norm.weight"))
    return assemble_decoder(source, config, llama_parts(source, qkv_bias=True), names)


def assemble_tower(source: Source, config: ModelConfig, towers: tuple[str, ...] = TOWERS) -> TowerParams:
    """The tower under one of these names."""
    root = present(source, towers, "patch_embed.proj.weight")

    def layer(index: int) -> TowerLayer:
        prefix = f"{root}blocks.{index}."
        own = prefix + "attn."
        modules = ("qkv",) if f"{own}qkv.weight" in source else QKV
        return TowerLayer(
            rms_norm(source, prefix + "norm1"),
            Attention(linear(source, own, *modules, bias=True), linear(source, own, "proj", bias=True)),
            rms_norm(source, prefix + "norm2"),
            gated_mlp(source, prefix, bias=True),
        )

    here = root + "merger.mlp."
    return TowerParams(
        patches=linear(source, root + "patch_embed.", "proj"),
        layers=tuple(layer(index) for index in config.layer_numbers),
        projection=Projection(
            rms_norm(source, root + "merger.ln_q"), linear(source, here, "0", bias=True), linear(source, here, "2", bias=True)
        ),
    )


def project(params: TowerParams, passing: Passing, more: tuple[int, ...], config: ModelConfig) -> torch.Tensor:
    """Vectors [N, width] of an image: each square of its states is one."""
    tower, chosen, (norm, first, second) = config.tower, passing.step.operations, params.projection
    assert tower is not None
    states = chosen.rms_norm(passing.states[0], norm, tower.eps)
    joined = states.reshape(-1, tower.hidden_size * tower.shuffle**2)
    widened = chosen.activate(chosen.linear(joined, *first), None, None, "gelu")
    vectors = chosen.linear(widened, *second)
    squares, _ = square_order(passing.rows // tower.shuffle, passing.columns // tower.shuffle, tower.window)
    found: torch.Tensor = vectors.new_empty(vectors.shape)
    return found.index_copy_(0, as_tensor(squares), vectors)
