"""MiniCPM 3: latent attention, and multipliers."""

from __future__ import annotations

from types import MappingProxyType

from vnext.models.config.json_keys import Json, number, positive
from vnext.models.config.latent_config import latent_fields
from vnext.models.config.model_config import DecoderForm, ModelConfig, common_config
from vnext.models.layers.assembly import Source, gated_mlp
from vnext.models.layers.decoder import Params, assemble_decoder, forward, logits
from vnext.models.layers.latent import assemble_attention
from vnext.models.layers.sharding import latent_axes as WEIGHT_AXES

__all__ = ["WEIGHT_AXES", "assemble", "forward", "logits", "parse"]

DEFAULTS = MappingProxyType(
    {
        "max_position_embeddings": 32768,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": True,
        "kv_lora_rank": 256,
        "q_lora_rank": 768,
        "qk_nope_head_dim": 64,
        "qk_rope_head_dim": 32,
        "scale_emb": 12,
        "scale_depth": 1.4,
        "dim_model_base": 256,
    }
)


def parse(raw: Json, generation: Json) -> ModelConfig:
    """The configuration. Raises ModelError."""
    raw = DEFAULTS | raw
    if raw.get("v_head_dim") is None:
        raw = raw | {"v_head_dim": positive(raw, "hidden_size") // positive(raw, "num_attention_heads")}
    depth = positive(raw, "num_hidden_layers") ** 0.5
    form = DecoderForm(
        embedding_scale=number(raw, "scale_emb"),
        residual_scale=1.0 if raw["scale_depth"] is None else number(raw, "scale_depth") / depth,
        logits_scale=1.0 if raw["dim_model_base"] is None else positive(raw, "dim_model_base") / positive(raw, "hidden_size"),
    )
    return common_config(raw, generation, form=form, **latent_fields(raw))


def assemble(source: Source, config: ModelConfig) -> Params:
    """The parameters."""
    return assemble_decoder(
        source, config, lambda prefix, index: (assemble_attention(source, config, prefix), gated_mlp(source, prefix))
    )
