"""Settings of latent attention as DeepSeek spells them: parsed from config.json, checked once, in vnext's terms."""

from __future__ import annotations

import math

from vnext.models.config.json_keys import Json, flag, number, positive, shown
from vnext.models.config.layer_kinds import Index, Latent
from vnext.models.config.rope_config import Rope, parse_rope, scaling_of
from vnext.models.errors import ModelError


def latent_fields(raw: Json) -> Json:
    """The fields of ModelConfig that say how its heads share a row of each token, and how they turn. Raises ModelError."""
    latent = parse_latent(raw)
    rope, scaling = parse_latent_rope(raw, latent), scaling_of(raw)
    scale = (latent.plain + latent.turning) ** -0.5
    if rope.kind != "default" and scaling.get("mscale_all_dim"):
        scale *= warmth(rope.factor, number(scaling, "mscale_all_dim")) ** 2
    return dict(latent=latent, rope=rope, query_scale=scale, head_dim=latent.width, kv_head_count=1)


def parse_latent(raw: Json) -> Latent:
    """The sizes."""
    latent = Latent(
        rank=positive(raw, "kv_lora_rank"),
        turning=positive(raw, "qk_rope_head_dim"),
        plain=positive(raw, "qk_nope_head_dim"),
        value=positive(raw, "v_head_dim"),
        query_rank=0 if raw.get("q_lora_rank") is None else positive(raw, "q_lora_rank"),
        index=parse_index(raw) if "index_topk" in raw else None,
        gate_rank=positive(raw, "gated_norm_rank") if raw.get("gated_norm_rank") else 0,
    )
    if not latent.query_rank and flag(raw, "attention_bias"):
        raise ModelError("attention_bias without q_lora_rank is not supported: queries and rows would need biases apart")
    return latent


def parse_index(raw: Json) -> Index:
    """What chooses keys; of GLM 5 some layers share the choice of the one before."""
    count = positive(raw, "num_hidden_layers")
    kinds = raw.get("indexer_types") or raw.get("index_topk_pattern")
    if kinds is None:
        every, first = positive(raw, "index_topk_freq", 1), positive(raw, "index_skip_topk_offset", 2)
        kinds = ["S" if max(layer - first + 1, 0) % every else "F" for layer in range(count)]
    initials = "".join(str(kind)[:1].upper() for kind in kinds)
    if len(initials) != count or initials[0] != "F" or set(initials) > {"F", "S"}:
        raise ModelError(f"indexer_types must name full or shared for {count} layers, the first full, but is {shown(kinds)}")
    return Index(
        heads=positive(raw, "index_n_heads"),
        dim=positive(raw, "index_head_dim"),
        count=positive(raw, "index_topk"),
        turns_neighbours=flag(raw, "indexer_rope_interleave"),
        shared=tuple(layer for layer, kind in enumerate(initials) if kind == "S"),
    )


def parse_latent_rope(raw: Json, latent: Latent) -> Rope:
    """The rope of the part that turns: all of that part turns, whatever share of a whole head config.json names."""
    scaling = {key: value for key, value in scaling_of(raw).items() if key != "partial_rotary_factor"}
    return parse_rope(raw | {"partial_rotary_factor": 1.0}, scaling, latent.turning)


def warmth(factor: float, mscale: float) -> float:
    """By what a context stretched by `factor` warms cosines and sines, in YaRN as DeepSeek has it."""
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1.0 else 1.0
