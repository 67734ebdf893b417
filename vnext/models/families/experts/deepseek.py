"""DeepSeek MoE, the text of DeepSeek-OCR 2: Llama's attention, softmax over experts beside shared ones."""

from __future__ import annotations

from vnext.models.config.expert_keys import GROUPED, dense_kinds, softmax_experts
from vnext.models.config.json_keys import Json, flag, refuse, usual
from vnext.models.config.model_config import DecoderForm, ModelConfig, common_config
from vnext.models.layers.assembly import ExpertNames, Source, any_mlp, own_attention
from vnext.models.layers.decoder import Params, assemble_decoder
from vnext.models.layers.sharding import shared_axes

WEIGHT_AXES = shared_axes("shared_experts")
NAMES = ExpertNames(shared="shared_experts")
DEFAULTS = usual(
    n_routed_experts=64, n_shared_experts=2, num_experts_per_tok=6, moe_intermediate_size=1407, topk_method="greedy",
    first_k_dense_replace=1,
)  # fmt: skip


def parse(raw: Json, generation: Json) -> ModelConfig:
    raw = DEFAULTS | raw
    refuse(raw, "moe_layer_freq", unless=(1,))
    refuse(raw, "scoring_func", unless=("softmax",))
    refuse(raw, "topk_method", unless=("greedy", GROUPED))
    experts = softmax_experts(raw, dense_kinds(raw, raw["first_k_dense_replace"]))
    form = DecoderForm(output_bias=flag(raw, "attention_bias"))
    return common_config(raw, generation, experts=experts, form=form)


def assemble(source: Source, config: ModelConfig) -> Params:
    return assemble_decoder(
        source, config, lambda prefix, index: (own_attention(source, config, prefix), any_mlp(source, config, prefix, index, NAMES))
    )
