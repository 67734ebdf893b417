"""Muse Glimmer, text only: normed embeddings, windows.

Layers without a window do not turn. Norms before attention and MLP, and those behind them, whose epsilon is smaller, multiply by
1 + weight, the last one by its weight; embeddings, queries and keys are normed without a weight, and queries then grow.
"""

from __future__ import annotations

from types import MappingProxyType

from vnext.models.config.json_keys import Json, number, positive, refuse, shown, usual
from vnext.models.config.model_config import DecoderForm, ModelConfig, common_config, layer_windows, text_part
from vnext.models.errors import ModelError
from vnext.models.families.gemma2 import BOTH_SIDES, WEIGHT_AXES as NORMS
from vnext.models.layers.assembly import Source, gated_mlp, linear, shifted_norm, wide_norm
from vnext.models.layers.decoder import Params, assemble_decoder
from vnext.models.layers.layers import Attention, FineNorm, Norm
from vnext.models.layers.sharding import Axis, matrix

WEIGHT_AXES = MappingProxyType({**NORMS, "self_attn.gate_proj": matrix(Axis.HEADS, Axis.HIDDEN)})
DEFAULTS = usual(
    num_key_value_heads=2, head_dim=128, hidden_activation="silu", max_position_embeddings=131072, rms_norm_eps=1e-5,
    sliding_window=2048, final_logit_softcapping=20.0, qk_scale_factor=3.87, output_multiplier=0.19611613513818404,
    post_norm_eps=1e-8,
)  # fmt: skip
NAMES = BOTH_SIDES._replace(root="model.language_model.")


def parse(raw: Json, generation: Json) -> ModelConfig:
    """The configuration of the language part. Raises ModelError."""
    raw = DEFAULTS | text_part(raw)
    refuse(raw, "attention_bias", unless=(False,))
    count, head_dim = positive(raw, "num_hidden_layers"), positive(raw, "head_dim")
    whole = [(count - 1 - at) % 4 == 0 for at in range(count)]
    thetas = raw.get("layer_rope_theta") or [float(not each) for each in whole]
    if len(thetas) != count:
        raise ModelError(f"layer_rope_theta is {shown(thetas)} and must have one number a layer, {count}; correct config.json")
    return common_config(
        raw | {"hidden_act": raw["hidden_activation"]},
        generation,
        windows=layer_windows(raw, [f"{'full' if each else 'sliding'}_attention" for each in whole]),
        still_layers=tuple(at for at, theta in enumerate(thetas) if not theta),
        query_scale=head_dim**-0.5 * number(raw, "qk_scale_factor"),
        logits_softcap=number(raw, "final_logit_softcapping"),
        form=DecoderForm(
            is_gated=True, gates_apart=True, logits_scale=number(raw, "output_multiplier"), fine_eps=number(raw, "post_norm_eps")
        ),
    )


def assemble(source: Source, config: ModelConfig) -> Params:
    def mixing(prefix: str) -> Attention:
        here, ones = prefix + "self_attn.", shifted_norm(source, prefix + "input_layernorm")[: config.head_dim] * 0 + 1
        joined = linear(source, here, "q_proj", "gate_proj", "k_proj", "v_proj")
        return Attention(joined, linear(source, here, "o_proj"), q_norm=ones, k_norm=ones)

    def norm(source: Source, name: str) -> Norm:
        if name == NAMES.root + NAMES.norm:
            return wide_norm(source, name)
        plain = shifted_norm(source, name)
        return FineNorm(plain, config.form.fine_eps) if ".post_" in name else plain

    found = assemble_decoder(source, config, lambda prefix, index: (mixing(prefix), gated_mlp(source, prefix)), NAMES, norm)
    ones = shifted_norm(source, f"{NAMES.root}layers.{config.layer_numbers[0]}.input_layernorm") * 0 + 1
    return found._replace(embedding_norm=ones if config.is_first else None)
