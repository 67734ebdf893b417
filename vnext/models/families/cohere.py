"""Command R and A, Aya: attention and MLP in parallel, scaled logits.

Three layers of four of Cohere 2 have a window, and the others no positions.
"""

from __future__ import annotations

from vnext.models.config.json_keys import Json, number, positive, refuse, usual
from vnext.models.config.model_config import DecoderForm, ModelConfig, common_config
from vnext.models.families.olmo2 import windows
from vnext.models.layers.assembly import Source, bare_layer_norm, llama_parts
from vnext.models.layers.decoder import Names, Params, assemble_decoder

DEFAULTS = usual(
    max_position_embeddings=8192, layer_norm_eps=1e-5, logit_scale=0.0625, tie_word_embeddings=True, sliding_window=4096,
)  # fmt: skip


def parse(raw: Json, generation: Json) -> ModelConfig:
    is_second = raw["architectures"][0] == "Cohere2ForCausalLM"
    raw = DEFAULTS | {"rope_theta": 10000.0 if is_second else 500000.0} | raw
    refuse(raw, "use_qk_norm", unless=(False,))
    own = windows(raw) if is_second else ()
    return common_config(
        raw | {"rms_norm_eps": number(raw, "layer_norm_eps")},
        generation,
        windows=own,
        still_layers=tuple(index for index in range(positive(raw, "num_hidden_layers")) if is_second and not own[index]),
        form=DecoderForm(is_parallel=True, turns_neighbours=True, logits_scale=number(raw, "logit_scale")),
    )


def assemble(source: Source, config: ModelConfig) -> Params:
    bias = config.attention_bias
    parts = llama_parts(source, qkv_bias=bias, output_bias=bias)
    return assemble_decoder(source, config, parts, Names(mlp_norm=""), bare_layer_norm)
