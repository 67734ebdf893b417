"""Mistral, Ministral, Magistral, Devstral, CWM: windows; queries of Ministral 3 grow by position.

Each layer has a sliding window, or those that layer_types names; of CWM three of four.
"""

from __future__ import annotations

from vnext.models.config.json_keys import Json, number, positive, usual
from vnext.models.config.model_config import DecoderForm, ModelConfig, common_config, layer_windows, text_part
from vnext.models.config.rope_config import scaling_of
from vnext.models.layers.assembly import Source, llama_parts
from vnext.models.layers.decoder import Names, Params, assemble_decoder

DEFAULTS = usual(sliding_window=4096, max_position_embeddings=131072, num_key_value_heads=8)
MINISTRAL3 = usual(
    sliding_window=None, max_position_embeddings=262144, num_key_value_heads=8, head_dim=128, rms_norm_eps=1e-5,
    rope_parameters={
        "rope_type": "yarn", "rope_theta": 1e6, "factor": 16.0, "original_max_position_embeddings": 16384, "mscale": 1.0,
        "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1,
    },
)  # fmt: skip
CWM_NAME = "CwmForCausalLM"
CWM = usual(
    sliding_window=8192, max_position_embeddings=131072, num_key_value_heads=8, head_dim=128, rms_norm_eps=1e-5,
    rope_parameters={
        "rope_type": "llama3", "rope_theta": 1e6, "factor": 16.0, "original_max_position_embeddings": 8192,
        "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    },
)  # fmt: skip
ROOTS = ("model.", "model.language_model.", "language_model.model.")
HEADS = ("lm_head.weight", "language_model.lm_head.weight")


def parse(raw: Json, generation: Json) -> ModelConfig:
    """The configuration; a multimodal model has that of its language part in text_config. Raises ModelError."""
    kinds = {raw.get("model_type"), raw["architectures"][0]}
    if "text_config" in raw:
        raw = text_part(raw)
        kinds.add(raw.get("model_type"))
    is_third = bool(kinds & {"ministral3", "Ministral3ForCausalLM"})
    is_cwm = raw["architectures"][0] == CWM_NAME
    if is_cwm and raw.get("rope_scaling"):
        raw = {"rope_parameters": None} | raw
    raw = (MINISTRAL3 if is_third else CWM if is_cwm else DEFAULTS) | raw
    usual = ["full_attention" if raw["sliding_window"] is None else "sliding_attention"] * positive(raw, "num_hidden_layers")
    if is_cwm:
        usual[::4] = ["full_attention"] * len(usual[::4])
    windows = layer_windows(raw, usual)
    return common_config(raw, generation, windows=windows, form=DecoderForm(query_growth=growth(raw)))


def growth(raw: Json) -> tuple[float, int, int] | None:
    """How queries grow with their position, where the rope's settings say so."""
    rope = scaling_of(raw)
    if not rope.get("llama_4_scaling_beta"):
        return None
    return number(rope, "llama_4_scaling_beta"), positive(rope, "original_max_position_embeddings"), 0


def assemble(source: Source, config: ModelConfig) -> Params:
    """The parameters, wherever this checkpoint keeps its language part."""
    names = Names(
        root=next((root for root in ROOTS if root + "norm.weight" in source), ROOTS[0]),
        head=next((name for name in HEADS if name in source), HEADS[0]),
    )
    return assemble_decoder(source, config, llama_parts(source), names)
