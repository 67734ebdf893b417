"""Nemotron H: layers that are one thing each: Mamba-2, attention without positions, or an MLP with a square.

Steps have no lower bound, as in their authors' own code; transformers has one of 0.001 for whole prompts alone.
"""

from __future__ import annotations

from types import MappingProxyType

from msgspec.structs import replace

from vnext.models.config.json_keys import Json, flag, number, positive, refuse, shown
from vnext.models.config.mamba_config import mamba_layers
from vnext.models.config.model_config import PLAIN_ACTIVATIONS, ModelConfig, activation, common_config
from vnext.models.errors import ModelError
from vnext.models.layers.assembly import Source, linear, plain_mlp, wide_norm
from vnext.models.layers.decoder import Mixing, Names, Params, assemble_decoder, forward, logits
from vnext.models.layers.layers import Attention, PlainMlp
from vnext.models.layers.recurrent import assemble_mamba
from vnext.models.layers.sharding import MAMBA_AXES, WEIGHT_AXES as LLAMA_AXES, Axis, Layout, matrix

__all__ = ["WEIGHT_AXES", "assemble", "forward", "logits", "parse"]

WEIGHT_AXES = MappingProxyType(
    {
        **LLAMA_AXES,
        **{name.replace("mamba", "mixer"): layout for name, layout in MAMBA_AXES.items()},
        "embeddings": matrix(Axis.VOCAB, Axis.HIDDEN),
        "norm_f": Layout((Axis.HIDDEN,)),
    }
)
MAMBA, ATTENDING, PLAIN = OWN = ("linear_attention", "full_attention", "mlp")
KINDS = MappingProxyType(
    {"M": MAMBA, "*": ATTENDING, "-": PLAIN, "mamba": MAMBA, "attention": ATTENDING} | dict(zip(OWN, OWN))
)
"""What a layer is, by the names that configurations have for it."""
DEFAULTS = MappingProxyType(
    {
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 4096,
        "intermediate_size": 21504,
        "layer_norm_epsilon": 1e-5,
        "mlp_hidden_act": "relu2",
        "mamba_num_heads": 128,
        "mamba_head_dim": 64,
        "ssm_state_size": 128,
        "n_groups": 8,
        "conv_kernel": 4,
        "use_conv_bias": True,
    }
)
ROOTS = ("backbone.", "model.")


def parse(raw: Json, generation: Json) -> ModelConfig:
    """The configuration. Raises ModelError."""
    raw = raw | {key: value for key, value in DEFAULTS.items() if raw.get(key) is None}
    for key in ("use_bias", "residual_in_fp32", "sliding_window"):
        refuse(raw, key, unless=(False,))
    refuse(raw, "mamba_hidden_act", unless=("silu",))
    kinds = layer_kinds(raw)
    attending = tuple(layer for layer, kind in enumerate(kinds) if kind == ATTENDING)
    idle = tuple(layer for layer, kind in enumerate(kinds) if kind == PLAIN)
    inner = positive(raw, "mamba_num_heads") * positive(raw, "mamba_head_dim")
    named = {
        "num_hidden_layers": len(kinds),
        "rms_norm_eps": number(raw, "layer_norm_epsilon"),
        "mamba_d_ssm": inner,
        "mamba_n_heads": raw["mamba_num_heads"],
        "mamba_d_head": raw["mamba_head_dim"],
        "mamba_n_groups": raw["n_groups"],
        "mamba_d_state": raw["ssm_state_size"],
        "mamba_d_conv": raw["conv_kernel"],
        "mamba_conv_bias": flag(raw, "use_conv_bias"),
    }
    recurrent = mamba_layers(raw | named, (*attending, *idle))
    return common_config(
        raw | named,
        generation,
        activation=activation(raw, "mlp_hidden_act", PLAIN_ACTIVATIONS),
        recurrent=recurrent and replace(recurrent, idle=idle),
        still_layers=attending,
    )


def layer_kinds(raw: Json) -> list[str]:
    """What each layer is: by a word a layer, or by a sign. Raises ModelError."""
    given = raw.get("layers_block_type") or raw.get("layer_types") or list(raw.get("hybrid_override_pattern") or "")
    if "moe" in given or "E" in given:
        raise ModelError("Nemotron H with experts is not served, for its experts have no gates; use a model of it without experts")
    kinds = [KINDS.get(each, "") for each in given]
    if not all(kinds) or not {MAMBA, ATTENDING} <= set(kinds):
        raise ModelError(
            "layers_block_type must name linear_attention, full_attention or mlp for each layer, each of the first two at least "
            f"once, but is {shown(given)}; correct config.json"
        )
    return kinds


def assemble(source: Source, config: ModelConfig) -> Params:
    """The parameters."""
    assert config.recurrent is not None
    recurrent, bias = config.recurrent, config.attention_bias

    def mixing(here: str, index: int) -> Mixing:
        if index in recurrent.layers:
            return assemble_mamba(source, config, here)
        return Attention(linear(source, here, "q_proj", "k_proj", "v_proj", bias=bias), linear(source, here, "o_proj", bias=bias))

    def parts(prefix: str, index: int) -> tuple[Mixing | None, PlainMlp | None]:
        here = prefix + "mixer."
        if index in recurrent.idle:
            return None, plain_mlp(source, here, "up_proj", "down_proj", bias=config.mlp_bias)
        return mixing(here, index), None

    root = next((root for root in ROOTS if root + "norm_f.weight" in source), ROOTS[0])
    names = Names(root=root, embedding="embeddings", norm="norm_f", attention_norm="norm", mlp_norm="")
    return assemble_decoder(source, config, parts, names, wide_norm)
