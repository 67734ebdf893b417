"""Mamba, Mamba-2, Falcon, Codestral Mamba: states alone.

No layer attends. The stream is of the activations' dtype, also where residual_in_fp32 asks for more.
"""

from __future__ import annotations

import numpy as np

from vnext.models.config.json_keys import Json, flag, number, positive, refuse, usual
from vnext.models.config.mamba_config import mamba_layers
from vnext.models.config.model_config import ModelConfig, Recurrent, common_config
from vnext.models.families.hybrids.jamba import WEIGHT_AXES as JAMBA_AXES, assemble_selective, selective_layers
from vnext.models.families.hybrids.nemotron_h import OWN_AXES
from vnext.models.layers.assembly import Source
from vnext.models.layers.decoder import Mixing, Names, Params, assemble_decoder
from vnext.models.layers.recurrent import assemble_mamba
from vnext.models.layers.sharding import LayoutTable

FIRST, FALCON, SECOND = "MambaForCausalLM", "FalconMambaForCausalLM", "Mamba2ForCausalLM"
DEFAULTS = usual(
    conv_kernel=4, expand=2, layer_norm_epsilon=1e-5, max_position_embeddings=1048576, mixer_rms_eps=1e-6, state_size=16,
    tie_word_embeddings=True, use_conv_bias=True,
)  # fmt: skip
SECOND_DEFAULTS = usual(n_groups=8, num_heads=128, state_size=128, tie_word_embeddings=False)
ROOT, EMBEDDINGS = "backbone.", ("embeddings", "embedding")
HEAD_DIM = 16
"""Of the heads that no layer has: what a token takes in a page."""


def WEIGHT_AXES(config: ModelConfig) -> LayoutTable:  # noqa: N802  (a field of Family)
    around = {**dict.fromkeys(EMBEDDINGS, OWN_AXES["embeddings"]), "norm_f": OWN_AXES["norm_f"]}
    return {**around, **(OWN_AXES if config.architecture == SECOND else JAMBA_AXES(config))}


def parse(raw: Json, generation: Json) -> ModelConfig:
    name = raw["architectures"][0]
    usual = DEFAULTS | (SECOND_DEFAULTS if name == SECOND else {})
    raw = raw | {key: value for key, value in usual.items() if raw.get(key) is None}
    refuse(raw, "use_bias", unless=(False,))
    refuse(raw, "hidden_act", unless=("silu",))
    refuse(raw, "rms_norm", unless=(True,))
    flag(raw, "residual_in_fp32")
    sizes = {
        "mamba_conv_bias": flag(raw, "use_conv_bias"),
        "mamba_d_conv": raw["conv_kernel"],
        "mamba_d_head": raw.get("head_dim"),
        "mamba_d_state": raw["state_size"],
        "mamba_dt_rank": raw.get("time_step_rank"),
        "mamba_expand": raw["expand"],
        "mamba_n_groups": raw.get("n_groups"),
        "mamba_n_heads": raw.get("num_heads"),
    }
    recurrent = states(raw | sizes, name)
    heads = {
        "head_dim": HEAD_DIM,
        "intermediate_size": recurrent.values,
        "num_attention_heads": recurrent.value_heads,
        "num_key_value_heads": 1,
        "rms_norm_eps": number(raw, "layer_norm_epsilon"),
    }
    return common_config(raw | heads, generation, recurrent=recurrent)


def states(raw: Json, name: str) -> Recurrent:
    """Those of all layers."""
    layers = tuple(range(positive(raw, "num_hidden_layers")))
    if name != SECOND:
        inner = positive(raw, "intermediate_size", positive(raw, "expand") * positive(raw, "hidden_size"))
        return selective_layers(raw, layers, inner, number(raw, "mixer_rms_eps") if name == FALCON else 0.0)
    found = mamba_layers(raw, ())
    assert found is not None
    return found


def assemble(source: Source, config: ModelConfig) -> Params:
    own = config.recurrent
    assert own is not None
    widths = (own.step_rank, own.key_dim, own.key_dim) if config.architecture == FALCON else ()
    norms = tuple(source.place(np.ones(width, source.dtype)) for width in widths)

    def mixing(prefix: str) -> Mixing:
        if config.architecture == SECOND:
            return assemble_mamba(source, config, prefix + "mixer.")
        return assemble_selective(source, config, prefix + "mixer.")._replace(norms=norms)

    embedding = next((name for name in EMBEDDINGS if f"{ROOT}{name}.weight" in source), EMBEDDINGS[0])
    names = Names(root=ROOT, embedding=embedding, norm="norm_f", attention_norm="norm", mlp_norm="")
    return assemble_decoder(source, config, lambda prefix, _: (mixing(prefix), None), names)
