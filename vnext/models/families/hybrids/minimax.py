"""MiniMax-01, M1: lightning attention, experts.

One layer of eight attends. A layer's stream is its normed input, of which it adds a multiple to one of what it gives.
"""

from __future__ import annotations

from types import MappingProxyType

import numpy as np

from vnext.models.config.expert_keys import mixtral_experts
from vnext.models.config.json_keys import Json, number, positive, refuse
from vnext.models.config.mamba_config import linear_layers
from vnext.models.config.model_config import DecoderForm, ModelConfig, Recurrent, common_config
from vnext.models.families.experts.mixtral import USUAL
from vnext.models.layers.assembly import MIXTRAL, MIXTRAL_PREFIX, Source, attention, linear, sparse_mlp
from vnext.models.layers.decoder import Mixing, Params, assemble_decoder
from vnext.models.layers.recurrent import Lightning
from vnext.models.layers.sharding import MIXTRAL_AXES, Axis, Layout, matrix

VALUES = Axis.STATE_VALUES
WEIGHT_AXES = MappingProxyType(
    {
        **MIXTRAL_AXES,
        "qkv_proj": matrix(Axis.THREE_HEADS, Axis.HIDDEN),
        "output_gate": matrix(VALUES, Axis.HIDDEN),
        "self_attn.norm": Layout((VALUES,)),
        "self_attn.out_proj": matrix(Axis.HIDDEN, VALUES),
    }
)
LINEAR, FULL = "linear_attention", "full_attention"


def parse(raw: Json, generation: Json) -> ModelConfig:
    """The configuration, which its authors and transformers spell otherwise. Raises ModelError."""
    raw = raw | {key: value for key, value in USUAL.items() if raw.get(key) is None}
    refuse(raw, "postnorm", unless=(True,))
    refuse(raw, "shared_intermediate_size", unless=(0,))
    refuse(raw, "sliding_window", unless=())
    heads = positive(raw, "num_attention_heads")
    head_dim = positive(raw, "head_dim", positive(raw, "hidden_size") // heads)
    if raw.get("rotary_dim") is not None:
        raw = {"partial_rotary_factor": positive(raw, "rotary_dim") / head_dim} | raw
    usual = [FULL if layer % 2 == 0 else LINEAR for layer in range(positive(raw, "num_hidden_layers"))]
    if isinstance(theirs := raw.get("attn_type_list"), list):
        usual = [FULL if kind else LINEAR for kind in theirs]
    layers = linear_layers(raw, usual)
    return common_config(
        raw,
        generation,
        partial=True,
        experts=mixtral_experts(raw),
        form=DecoderForm(shares=tuple(shares(raw, part) for part in ("full_attn", "linear_attn", "mlp"))),
        recurrent=Recurrent(
            layers=layers, width=1, key_heads=heads, key_dim=head_dim, value_heads=heads, value_dim=head_dim
        ),
    )


def shares(raw: Json, part: str) -> tuple[float, float]:
    """By what a part multiplies its normed input, and what it gives."""
    theirs = part.replace("attn", "attention")
    first, second = (number(raw, f"layernorm_{theirs}_{name}", 1.0) for name in ("alpha", "beta"))
    return number(raw, f"{part}_alpha_factor", first), number(raw, f"{part}_beta_factor", second)


def slopes(config: ModelConfig, index: int) -> np.ndarray:
    """What each head's decays fall by in a layer, float32: less in each, and less in later layers."""
    powers = (2.0 ** (-8.0 / config.head_count)) ** np.arange(1, config.head_count + 1)
    found: np.ndarray = powers * (1 - index / (config.layer_count - 1 + 1e-5) + 1e-5)
    return found.astype(np.float32)


def assemble_lightning(source: Source, prefix: str, slopes: np.ndarray) -> Lightning:
    """The lightning attention at `prefix`, which ends with a dot. `slopes` float32 [H] are what decays fall by."""
    return Lightning(
        inner=linear(source, prefix, "qkv_proj", "output_gate"),
        decay_logs=source.share(source.place(np.log(slopes))),
        norm=source.fused((prefix + "norm.weight",)),
        output=linear(source, prefix, "out_proj"),
    )


def assemble(source: Source, config: ModelConfig) -> Params:
    assert config.recurrent is not None
    recurring = config.recurrent.layers

    def mixing(prefix: str, index: int) -> Mixing:
        if index in recurring:
            return assemble_lightning(source, prefix + "self_attn.", slopes(config, index))
        return attention(source, prefix)

    return assemble_decoder(
        source,
        config,
        lambda prefix, index: (
            mixing(prefix, index),
            sparse_mlp(source, config, prefix + MIXTRAL_PREFIX, MIXTRAL),
        ),
    )
