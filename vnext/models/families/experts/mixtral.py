"""Mixtral; MiniMax M2, with GLM 4.5's router and norms over all heads."""

from __future__ import annotations

from vnext.models.config.expert_keys import mixtral_experts
from vnext.models.config.json_keys import Json, positive, usual
from vnext.models.config.model_config import DecoderForm, ModelConfig, common_config, same_window
from vnext.models.layers.assembly import MIXTRAL, MIXTRAL_PREFIX, Source, attention, sparse_mlp
from vnext.models.layers.decoder import Params, assemble_decoder
from vnext.models.layers.sharding import MIXTRAL_AXES, Axis, Layout, LayoutTable

MINIMAX = "MiniMaxM2ForCausalLM"
USUAL = usual(
    num_key_value_heads=8, max_position_embeddings=131072, rms_norm_eps=1e-5, rope_theta=1e6, num_local_experts=8,
    num_experts_per_tok=2,
)  # fmt: skip
MINIMAX_USUAL = usual(
    num_key_value_heads=8, head_dim=128, max_position_embeddings=196608, rope_theta=5e6, num_experts_per_tok=8,
    num_local_experts=256, bos_token_id=200034, eos_token_id=200020,
)  # fmt: skip


def WEIGHT_AXES(config: ModelConfig) -> LayoutTable:  # noqa: N802  (a field of Family)
    norms = {"q_norm": Layout((Axis.HEADS,)), "k_norm": Layout((Axis.KV_HEADS,))}
    return {**MIXTRAL_AXES, **norms}


def parse(raw: Json, generation: Json) -> ModelConfig:
    is_minimax = raw["architectures"][0] == MINIMAX
    raw = (MINIMAX_USUAL if is_minimax else USUAL) | raw
    if not is_minimax:
        return common_config(raw, generation, windows=same_window(raw), experts=mixtral_experts(raw))
    if raw.get("rotary_dim") is not None:
        raw = {"partial_rotary_factor": positive(raw, "rotary_dim") / positive(raw, "head_dim")} | raw
    experts, form = mixtral_experts(raw, marks="sigmoid"), DecoderForm(head_norms="all")
    return common_config(raw, generation, partial=True, experts=experts, form=form)


def assemble(source: Source, config: ModelConfig) -> Params:
    is_minimax = config.architecture == MINIMAX
    names = MIXTRAL._replace(bias="e_score_correction_bias" if is_minimax else "")
    return assemble_decoder(
        source,
        config,
        lambda prefix, index: (
            attention(source, prefix, head_norms=is_minimax),
            sparse_mlp(source, config, prefix + MIXTRAL_PREFIX, names),
        ),
    )
