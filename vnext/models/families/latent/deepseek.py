"""DeepSeek 2 to V3.2, Kimi K2 and their kin: latent attention, chosen keys, experts.

DeepSeek 2 and Mistral 4 mark experts by softmax, the others by sigmoids and choose with a bias; Youtu and MiniCPM 3,
with multipliers, have none.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from vnext.models.config.expert_keys import GROUPED, dense_kinds, first_layers, sigmoid_experts, softmax_experts
from vnext.models.config.json_keys import Json, flag, number, positive, refuse
from vnext.models.config.latent_config import latent_fields
from vnext.models.config.model_config import DecoderForm, Experts, ModelConfig, common_config
from vnext.models.config.rope_config import scaling_of
from vnext.models.errors import ModelError
from vnext.models.layers.assembly import ExpertNames, Source, any_mlp, gated_norm, rms_norm
from vnext.models.layers.decoder import Names, Params, assemble_decoder, forward, logits
from vnext.models.layers.decoder_params import LayerParams
from vnext.models.layers.latent import LatentAttention, assemble_attention, latent_axes
from vnext.models.layers.layers import GatedMlp, Norm, SparseMlp
from vnext.models.layers.mtp_layer import MtpParams, combine_mtp, forward_mtp
from vnext.models.layers.rope import inverse_frequencies
from vnext.models.layers.sharding import Axis, Layout, LayoutTable

__all__ = ["WEIGHT_AXES", "assemble", "assemble_mtp", "combine_mtp", "forward", "forward_mtp", "logits", "parse"]

SECOND, THIRD, FLASH, YOUTU = "DeepseekV2ForCausalLM", "DeepseekV3ForCausalLM", "Glm4MoeLiteForCausalLM", "YoutuForCausalLM"
MISTRAL, MINICPM, AX, AX_2 = "Mistral4ForCausalLM", "MiniCPM3ForCausalLM", "AXK1ForCausalLM", "AXK2ForCausalLM"
SPARSE, GLM = "DeepseekV32ForCausalLM", "GlmMoeDsaForCausalLM"
AFTER = "post_mlp_layernorm"
COUNT = "num_nextn_predict_layers"
SIZES = MappingProxyType(
    {"kv_lora_rank": 512, "q_lora_rank": 1536, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}
)
USUAL = MappingProxyType(
    {
        **SIZES, "n_routed_experts": 256, "num_experts_per_tok": 8, "moe_intermediate_size": 2048, "routed_scaling_factor": 2.5,
        "n_group": 8, "topk_group": 4, "norm_topk_prob": True, "first_k_dense_replace": 3, "max_position_embeddings": 4096,
    }
)  # fmt: skip
STRETCHED = MappingProxyType(
    {
        "rope_type": "yarn", "rope_theta": 10000.0, "factor": 128.0, "original_max_position_embeddings": 8192, "mscale": 1.0,
        "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1,
    }
)  # fmt: skip
"""How Mistral 4 turns where its configuration does not say it."""
INDEX = MappingProxyType({"index_topk": 2048, "index_head_dim": 128, "index_n_heads": 64})
DEFAULTS: Mapping[str, Json] = MappingProxyType(
    {
        SPARSE: {**USUAL, **INDEX, "max_position_embeddings": 163840},
        GLM: {
            **USUAL, **INDEX, "index_n_heads": 32, "indexer_rope_interleave": True, "q_lora_rank": 2048, "v_head_dim": 256,
            "qk_nope_head_dim": 192, "n_group": 1, "topk_group": 1, "max_position_embeddings": 202752, "rms_norm_eps": 1e-5,
        },
        SECOND: {
            **SIZES, "n_routed_experts": 64, "num_experts_per_tok": 6, "n_shared_experts": 2, "moe_intermediate_size": 1407,
            "routed_scaling_factor": 1.0, "topk_method": "greedy",
        },
        FLASH: {
            **SIZES, "q_lora_rank": 768, "v_head_dim": 256, "qk_nope_head_dim": 192, "n_routed_experts": 64,
            "num_experts_per_tok": 4, "moe_intermediate_size": 1536, "routed_scaling_factor": 1.8, "norm_topk_prob": True,
            "max_position_embeddings": 202752, "rms_norm_eps": 1e-5,
        },
        MISTRAL: {
            **SIZES, "kv_lora_rank": 256, "q_lora_rank": 1024, "qk_nope_head_dim": 64, "n_routed_experts": 128,
            "num_experts_per_tok": 4, "moe_intermediate_size": 2048, "norm_topk_prob": True, "max_position_embeddings": 1048576,
        },
        MINICPM: {
            "max_position_embeddings": 32768, "rms_norm_eps": 1e-5, "tie_word_embeddings": True, "kv_lora_rank": 256,
            "q_lora_rank": 768, "qk_nope_head_dim": 64, "qk_rope_head_dim": 32, "scale_emb": 12, "scale_depth": 1.4,
            "dim_model_base": 256,
        },
        AX: {**USUAL, "n_routed_experts": 192, "first_k_dense_replace": 1, "max_position_embeddings": 32768},
        AX_2: {
            **USUAL, **INDEX, "kv_lora_rank": 128, "q_lora_rank": 384, "qk_nope_head_dim": 64, "qk_rope_head_dim": 32,
            "v_head_dim": 64, "n_routed_experts": 128, "moe_intermediate_size": 512, "n_group": None, "topk_group": None,
            "first_k_dense_replace": 1, "index_n_heads": 16, "gated_norm_rank": 16, "max_position_embeddings": 131072,
        },
        YOUTU: {**SIZES, "tie_word_embeddings": True, "max_position_embeddings": 131072},
    }
)  # fmt: skip


def WEIGHT_AXES(config: ModelConfig) -> LayoutTable:  # noqa: N802  (a field of Family)
    return {**latent_axes(config), AFTER: Layout((Axis.HIDDEN,))}


def parse(raw: Json, generation: Json) -> ModelConfig:
    architecture = raw["architectures"][0]
    raw = DEFAULTS.get(architecture, USUAL) | raw
    if architecture == MINICPM:
        return _minicpm(raw, generation)
    if architecture == MISTRAL and not scaling_of(raw):
        raw = raw | {"rope_parameters": dict(STRETCHED)}
    form = DecoderForm(
        turns_neighbours=architecture == SECOND or flag(raw, "rope_interleave", True),
        output_bias=flag(raw, "attention_bias"),
        query_growth=growth_of(raw) if architecture == MISTRAL else None,
    )
    has_none = architecture in (SECOND, MISTRAL, YOUTU, AX, AX_2)
    drafting = 0 if has_none else raw.get(COUNT, int(architecture in (THIRD, SPARSE, GLM)))
    own = latent_fields(raw) | {"mtp_layers": positive({COUNT: drafting}, COUNT) if drafting else 0}
    return common_config(raw, generation, form=form, experts=experts_of(raw, architecture), **own)


def _minicpm(raw: Json, generation: Json) -> ModelConfig:
    if raw.get("v_head_dim") is None:
        raw = raw | {"v_head_dim": positive(raw, "hidden_size") // positive(raw, "num_attention_heads")}
    depth = positive(raw, "num_hidden_layers") ** 0.5
    form = DecoderForm(
        embedding_scale=number(raw, "scale_emb"),
        residual_scale=1.0 if raw["scale_depth"] is None else number(raw, "scale_depth") / depth,
        logits_scale=1.0 if raw["dim_model_base"] is None else positive(raw, "dim_model_base") / positive(raw, "hidden_size"),
    )
    return common_config(raw, generation, form=form, **latent_fields(raw))


def experts_of(raw: Json, architecture: str) -> Experts | None:
    """The experts; None in a model that has none."""
    if architecture == YOUTU:
        return None
    is_second, by_softmax = architecture == SECOND, architecture in (SECOND, MISTRAL)
    refuse(raw, "moe_layer_freq", unless=(1,))
    refuse(raw, "scoring_func", unless=("softmax" if by_softmax else "sigmoid",))
    refuse(raw, "topk_method", unless=("greedy", GROUPED) if is_second else ("noaux_tc",))
    if architecture in (FLASH, SPARSE, GLM, AX, AX_2):
        dense = dense_kinds(raw, 1 if architecture == FLASH else raw["first_k_dense_replace"])
    else:
        dense = first_layers(raw, "first_k_dense_replace")
    if not by_softmax:
        return sigmoid_experts(raw, dense)
    if is_second:
        refuse(raw, "norm_topk_prob", unless=(False,))
    return softmax_experts(raw if is_second else raw | {"topk_method": GROUPED}, dense, group_best=1 if is_second else 2)


def growth_of(raw: Json) -> tuple[float, int, int] | None:
    """How queries grow with their position, where they do."""
    scaling = scaling_of(raw)
    if scaling.get("llama_4_scaling_beta") is None:
        return None
    return number(scaling, "llama_4_scaling_beta"), positive(scaling, "original_max_position_embeddings"), 0


def assemble(source: Source, config: ModelConfig) -> Params:
    """The parameters. Layers of A.X K1 with experts have a norm behind these; norms of A.X K2 but for those of dense MLPs and the
    last one have gates."""
    dense = range(config.layer_count) if config.experts is None else config.experts.dense_layers

    def names(index: int) -> Names:
        return Names(after_mlp_norm=AFTER if config.architecture == AX and index not in dense else "")

    plain = {"model.norm", *(f"model.layers.{index}.post_attention_layernorm" for index in dense)}

    def norm(source: Source, name: str) -> Norm:
        return gated_norm(source, name) if config.architecture == AX_2 and name not in plain else rms_norm(source, name)

    return assemble_decoder(source, config, lambda prefix, index: parts_of(source, config, prefix, index), names, norm)


def parts_of(source: Source, config: ModelConfig, prefix: str, index: int) -> tuple[LatentAttention, GatedMlp | SparseMlp]:
    by_sigmoid = config.experts is not None and config.experts.router.marks == "sigmoid"
    bias = "gate.e_score_correction_bias"
    is_there = by_sigmoid and (config.architecture != AX or f"{prefix}mlp.{bias}" in source)
    names = ExpertNames(bias=bias if is_there else "", shared="shared_experts")
    return assemble_attention(source, config, prefix), any_mlp(source, config, prefix, index, names)


def assemble_mtp(source: Source, config: ModelConfig) -> MtpParams:
    """The parameters of the layer that drafts, which stands behind the model's. Raises ModelError."""
    here = f"model.layers.{config.layer_count}."
    if here + "eh_proj.weight" not in source:
        raise ModelError(f"the checkpoint has no tensors {here}*, which method mtp needs: take another method")
    mixing, widening = parts_of(source, config, here, config.layer_count)
    return MtpParams(
        last_norm=rms_norm(source, "model.norm"),
        embedding_norm=rms_norm(source, here + "enorm"),
        state_norm=rms_norm(source, here + "hnorm"),
        project=source.packed((here + "eh_proj.weight",)),
        layer=LayerParams(
            rms_norm(source, here + "input_layernorm"), mixing, rms_norm(source, here + "post_attention_layernorm"), widening
        ),
        norm=rms_norm(source, here + "shared_head.norm"),
        frequencies=source.place(inverse_frequencies(config.rope, config.turning_dim)),
    )
