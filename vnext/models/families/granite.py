"""Granite 3 and 4, dense: multipliers of embedding, scores, residual stream and logits.

Dense models of Granite 4 have the form of the hybrid ones, with layers that all attend and the MLP that experts would share.
"""

from __future__ import annotations

from types import MappingProxyType

from vnext.models.config.json_keys import Json, number, positive, refuse
from vnext.models.config.model_config import DecoderForm, ModelConfig, common_config
from vnext.models.errors import ModelError
from vnext.models.layers.assembly import Source, attention, gated, gated_mlp, linear
from vnext.models.layers.decoder import Params, assemble_decoder, forward, logits
from vnext.models.layers.layers import GatedMlp
from vnext.models.layers.sharding import WEIGHT_AXES as LLAMA_AXES, Axis, matrix

__all__ = ["WEIGHT_AXES", "assemble", "forward", "logits", "parse"]

WEIGHT_AXES = MappingProxyType(
    {
        **LLAMA_AXES,
        "shared_mlp.input_linear": matrix((Axis.MLP, Axis.MLP), Axis.HIDDEN),
        "shared_mlp.output_linear": matrix(Axis.HIDDEN, Axis.MLP),
    }
)
HYBRID = "GraniteMoeHybridForCausalLM"


def parse(raw: Json, generation: Json) -> ModelConfig:
    """The configuration. Raises ModelError."""
    is_hybrid, still = raw["architectures"][0] == HYBRID, ()
    if is_hybrid:
        refuse(raw, "num_local_experts", unless=(0,))
        raw = raw | {"intermediate_size": positive(raw, "shared_intermediate_size", 1024)}
        count = positive(raw, "num_hidden_layers")
        if set(raw.get("layer_types") or raw.get("layers_block_type") or ["mamba"]) - {"attention", "full_attention"}:
            raise ModelError("Granite 4 with layers that have a state is not supported; use one whose layers all attend")
        still = () if raw.get("position_embedding_type") == "rope" else tuple(range(count))
    form = DecoderForm(
        embedding_scale=number(raw, "embedding_multiplier", 1.0),
        residual_scale=number(raw, "residual_multiplier", 1.0),
        logits_scale=1 / number(raw, "logits_scaling", 1.0),
    )
    scale = number(raw, "attention_multiplier", 1.0)
    return common_config(raw, generation, form=form, query_scale=scale, still_layers=still)


def assemble(source: Source, config: ModelConfig) -> Params:
    """The parameters."""
    bias, is_hybrid = config.attention_bias, config.architecture == HYBRID

    def widening(prefix: str) -> GatedMlp:
        if not is_hybrid:
            return gated_mlp(source, prefix, bias=config.mlp_bias)
        here = prefix + "shared_mlp."
        return GatedMlp(gated(source, here, "input_linear"), linear(source, here, "output_linear"))

    return assemble_decoder(
        source,
        config,
        lambda prefix, index: (attention(source, prefix, qkv_bias=bias, output_bias=bias), widening(prefix)),
    )
