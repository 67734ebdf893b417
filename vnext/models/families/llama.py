"""Llama 1 to 3.x, SmolLM 1 to 3, Falcon 3 and all of their form.

Every fourth layer of SmolLM 3 has no positions.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from vnext.models.config.json_keys import Json, flag, refuse
from vnext.models.config.model_config import DecoderForm, ModelConfig, common_config, layer_windows
from vnext.models.config.rope_config import turned_layers
from vnext.models.layers.assembly import Source, own_parts, rms_norm, wide_norm
from vnext.models.layers.decoder import Params, assemble_decoder

HELIUM = "HeliumForCausalLM"
"""Its norms multiply in float32."""
SMOLLM = "SmolLM3ForCausalLM"
DEFAULTS: Mapping[str, Json] = MappingProxyType(
    {
        "SeedOssForCausalLM": {
            "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 524288, "attention_bias": True,
        },
        "HeliumForCausalLM": {
            "num_key_value_heads": 20, "head_dim": 128, "max_position_embeddings": 4096, "rms_norm_eps": 1e-8, "rope_theta": 1e5,
        },
        SMOLLM: {
            "num_key_value_heads": 4, "max_position_embeddings": 32768, "rope_theta": 2e6, "tie_word_embeddings": True,
        },
        "InternLM3ForCausalLM": {"num_key_value_heads": 32, "max_position_embeddings": 32768},
        "Ernie4_5ForCausalLM": {
            "num_key_value_heads": 2, "head_dim": 128, "max_position_embeddings": 131072, "rms_norm_eps": 1e-5,
            "rope_theta": 500000.0, "tie_word_embeddings": True,
        },
    }
)  # fmt: skip
BIASES = MappingProxyType(
    {
        "SeedOssForCausalLM": ("attention_bias", "attention_out_bias", "mlp_bias"),
        "InternLM3ForCausalLM": ("qkv_bias", "bias", "bias"),
        "Ernie4_5ForCausalLM": ("use_bias", "use_bias", "use_bias"),
    }
)
"""The keys of biases: of queries, keys and values, of attention's output, and of the MLP."""


def parse(raw: Json, generation: Json) -> ModelConfig:
    architecture = raw["architectures"][0]
    raw = DEFAULTS.get(architecture, {}) | raw
    if architecture != SMOLLM:
        refuse(raw, "sliding_window", unless=())
    inner, output, wide = (flag(raw, key) for key in BIASES.get(architecture, ("attention_bias", "attention_bias", "mlp_bias")))
    form = DecoderForm(
        output_bias=output and architecture != HELIUM,
        turns_neighbours=architecture in ("Ernie4_5ForCausalLM", HELIUM),
    )
    own = smollm_layers(raw) if architecture == SMOLLM else {}
    return common_config(raw, generation, form=form, attention_bias=inner, mlp_bias=wide, **own)


def smollm_layers(raw: Json) -> Json:
    """What layers see: those with positions all tokens, the others those in their window, if asked. Raises ModelError."""
    turned = turned_layers(raw)
    windows: tuple[int, ...] = ()
    if flag(raw, "use_sliding_window") and raw.get("sliding_window") is not None:
        windows = layer_windows(raw, ["full_attention" if turns else "sliding_attention" for turns in turned])
    return {"windows": windows, "still_layers": tuple(index for index, turns in enumerate(turned) if not turns)}


def assemble(source: Source, config: ModelConfig) -> Params:
    norm = wide_norm if config.architecture == HELIUM else rms_norm
    return assemble_decoder(source, config, own_parts(source, config), norm=norm)
