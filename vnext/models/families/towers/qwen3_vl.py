"""Qwen3-VL, Qwen 3.5, also with experts: a tower whose states join several layers."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from vnext.models.config.json_keys import Json
from vnext.models.config.model_config import ModelConfig, text_part
from vnext.models.config.rope_config import as_default, scaling_of, with_axes
from vnext.models.config.tower_config import Tower, parse_deep_grid
from vnext.models.families import qwen2
from vnext.models.families.experts import qwen3_moe
from vnext.models.families.hybrids import qwen3_5
from vnext.models.families.hybrids.qwen3_5 import assemble_mtp, combine_mtp, forward_mtp
from vnext.models.families.towers.llava_onevision import present
from vnext.models.families.towers.qwen2_5_vl import ROOTS, TOWERS
from vnext.models.families.towers.siglip import tower_config
from vnext.models.layers.assembly import Source, any_mlp, attention, layer_norm, linear, plain_mlp
from vnext.models.layers.decoder import Names, Params, assemble_decoder, forward, logits
from vnext.models.layers.layers import Attention, GatedMlp, LayerNorm, Linear, SparseMlp
from vnext.models.layers.sharding import EXPERT_AXES, WEIGHT_AXES as LLAMA, Axis, Layout, Sized, matrix
from vnext.models.layers.tower import Passing, TowerLayer, TowerParams

if TYPE_CHECKING:
    import torch

__all__ = [
    "WEIGHT_AXES", "assemble", "assemble_mtp", "assemble_tower", "combine_mtp", "forward", "forward_mtp", "logits", "parse",
    "project", "tower_config",
]  # fmt: skip

NEWER_TOKENS = {"image_token_id": 248056, "video_token_id": 248057}
EXPERTS = "Qwen3VLMoeForConditionalGeneration"
DEFAULTS = MappingProxyType(
    {
        "num_key_value_heads": 16, "max_position_embeddings": 128000, "moe_intermediate_size": 1408, "num_experts_per_tok": 4,
        "num_local_experts": 60, "norm_topk_prob": True,
    }
)  # fmt: skip


class Merger(NamedTuple):
    """A norm, of a state or of a square's states, and two products with a gelu between them, which make one vector of a square."""

    norm: LayerNorm
    first: Linear
    second: Linear


def WEIGHT_AXES(config: ModelConfig) -> Mapping[str, Layout]:  # noqa: N802  (a field of Family)
    own = qwen3_5.WEIGHT_AXES if is_newer(config.architecture) else {**LLAMA, **EXPERT_AXES}
    return {**own, **tower_axes(config.tower)} if config.tower else own


def is_newer(architecture: str) -> bool:
    """Whether it is one of Qwen 3.5."""
    return architecture.startswith("Qwen3_5")


def tower_axes(tower: Tower) -> Mapping[str, Layout]:
    joined, heads = Sized(tower.hidden_size * tower.shuffle**2), Axis.HEADS
    mergers = ("merger", "deepstack_merger_list")
    return {
        **dict.fromkeys(("norm1", "norm2", "merger.norm"), Layout((Axis.HIDDEN,))),
        "deepstack_merger_list.norm": Layout((joined,)),
        "qkv": matrix((heads, heads, heads), Axis.HIDDEN),
        "attn.proj": matrix(Axis.HIDDEN, heads),
        "mlp.linear_fc1": matrix(Axis.MLP, Axis.HIDDEN),
        "mlp.linear_fc2": matrix(Axis.HIDDEN, Axis.MLP),
        "pos_embed": Layout((Sized(tower.places**2),), Axis.HIDDEN),
        "patch_embed.proj": Layout((Axis.HIDDEN,), Sized(tower.patch_size), kernel=(tower.frames, tower.patch, tower.patch)),
        **{f"{merger}.linear_fc1": Layout((joined,), joined) for merger in mergers},
        **{f"{merger}.linear_fc2": Layout((Sized(tower.width),), joined) for merger in mergers},
    }


def parse(raw: Json, generation: Json) -> ModelConfig:
    """The configuration of the language part, with that of the tower where there is one. Raises ModelError."""
    if is_newer(raw["architectures"][0]):
        return _newer(raw, generation)
    text = as_default(text_part(raw))
    is_sparse = text["architectures"][0] == EXPERTS
    config = qwen3_moe.parse(DEFAULTS | text, generation) if is_sparse else qwen2.parse(text, generation)
    rope = with_axes(config.rope, {"mrope_section": [24, 20, 20], **scaling_of(text)}, config.head_dim // 2, takes_turns=True)
    return msgspec.structs.replace(config, rope=rope, tower=parse_deep_grid(raw, config.hidden_size, config.layer_count))


def _newer(raw: Json, generation: Json) -> ModelConfig:
    config = qwen3_5.parse(raw, generation)
    if not raw.get("vision_config"):
        return config
    scaling = {"mrope_section": [11, 11, 10], **scaling_of(text_part(raw))}
    rope = with_axes(config.rope, scaling, int(config.head_dim * config.rope.share) // 2, takes_turns=True)
    tower = parse_deep_grid(NEWER_TOKENS | raw, config.hidden_size, 0, ())
    return msgspec.structs.replace(config, rope=rope, tower=tower)


def assemble(source: Source, config: ModelConfig) -> Params:
    if is_newer(config.architecture):
        return qwen3_5.assemble(source, config)
    bias = config.attention_bias

    def parts(prefix: str, index: int) -> tuple[Attention, GatedMlp | SparseMlp]:
        own = attention(source, prefix, qkv_bias=bias, output_bias=bias, head_norms=True)
        return own, any_mlp(source, config, prefix, index)

    return assemble_decoder(source, config, parts, Names(root=present(source, ROOTS, "norm.weight")))


def assemble_tower(source: Source, config: ModelConfig) -> TowerParams:
    root, tower = present(source, TOWERS, "patch_embed.proj.weight"), config.tower
    assert tower is not None

    def layer(index: int) -> TowerLayer:
        prefix = f"{root}blocks.{index}."
        own = prefix + "attn."
        return TowerLayer(
            layer_norm(source, prefix + "norm1"),
            Attention(linear(source, own, "qkv", bias=True), linear(source, own, "proj", bias=True)),
            layer_norm(source, prefix + "norm2"),
            plain_mlp(source, prefix + "mlp.", "linear_fc1", "linear_fc2", bias=True),
        )

    def merger(here: str) -> Merger:
        return Merger(layer_norm(source, here + "norm"), *(linear(source, here, f"linear_fc{at}", bias=True) for at in (1, 2)))

    deep = [f"{root}deepstack_merger_list.{at}." for at in range(len(tower.deep_layers))]
    return TowerParams(
        patches=linear(source, root + "patch_embed.", "proj", bias=True),
        layers=tuple(layer(index) for index in config.layer_numbers),
        projection=tuple(merger(here) for here in (root + "merger.", *deep)),
        positions=source.fused((root + "pos_embed.weight",)),
    )


def project(params: TowerParams, passing: Passing, more: tuple[int, ...], config: ModelConfig) -> torch.Tensor:
    """Vectors [N, (1 + deep) * width] of an image, whose squares stand row by row: each is one, and what deep layers knew of it."""
    tower, chosen = config.tower, passing.step.operations
    assert tower is not None
    joined = tower.hidden_size * tower.shuffle**2

    def merged(states: torch.Tensor, merger: Merger, size: int) -> torch.Tensor:
        normed = chosen.layer_norm(states.reshape(-1, size), *merger.norm, tower.eps).reshape(-1, joined)
        widened = chosen.activate(chosen.linear(normed, *merger.first), None, None, "gelu")
        vectors: torch.Tensor = chosen.linear(widened, *merger.second)
        return vectors

    own, *deep = params.projection
    vectors = merged(passing.states[0], own, tower.hidden_size)
    found: torch.Tensor = vectors.new_empty((len(vectors), 1 + len(deep), tower.width))
    found[:, 0] = vectors
    for at, (states, merger) in enumerate(zip(passing.kept, deep, strict=True), 1):
        found[:, at] = merged(states[0], merger, joined)
    return found.flatten(1)
