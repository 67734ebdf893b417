"""RecurrentGemma: RG-LRU, windows.

One layer of three attends, to a window. Two gates of the recurrence are products by head; embeddings are scaled by a number that is
rounded to bfloat16 in every dtype.
"""

from __future__ import annotations

from math import frexp, ldexp

from vnext.models.config.json_keys import Json, positive, shown, usual
from vnext.models.config.mamba_config import width_of
from vnext.models.config.model_config import ModelConfig, Recurrent, common_config
from vnext.models.errors import ModelError
from vnext.models.layers.assembly import Source, gated_mlp, linear, shifted_norm
from vnext.models.layers.decoder import Mixing, Names, Params, assemble_decoder
from vnext.models.layers.layers import Attention
from vnext.models.layers.recurrent import GatedRecurrence
from vnext.models.layers.sharding import Axis, Layout, LayoutTable, Sized, matrix

DEFAULTS = usual(
    num_attention_heads=10, hidden_activation="gelu_pytorch_tanh", attention_window_size=2048, conv1d_width=4, logits_soft_cap=30.0,
    tie_word_embeddings=True, max_position_embeddings=8192, partial_rotary_factor=0.5,
    block_types=["recurrent", "recurrent", "attention"],
)  # fmt: skip
NORMS = ("temporal_pre_norm", "channel_pre_norm", "final_norm")
NAMES = Names(attention_norm=NORMS[0], mlp_norm=NORMS[1], norm=NORMS[2])
GATES = ("input_gate", "recurrent_gate")


def WEIGHT_AXES(config: ModelConfig) -> LayoutTable:  # noqa: N802  (a field of Family)
    """The layouts."""
    own, heads, values = config.recurrent, Axis.STATE_HEADS, Axis.STATE_VALUES
    assert own is not None
    gate = Layout((heads,), Sized(own.value_dim * own.value_dim), kernel=(own.value_dim,))
    return {
        **dict.fromkeys(NORMS, Layout((Axis.HIDDEN,))),
        **dict.fromkeys(("linear_x", "linear_y"), matrix(values, Axis.HIDDEN)),
        "conv_1d": Layout((values,), Axis.STATE_WIDTH, depthwise=True),
        **{f"{name}_weight": gate for name in GATES},
        **{f"{name}_bias": Layout((heads,), Axis.STATE_HEAD_DIM) for name in GATES},
        "recurrent_param": Layout((values,)),
        "linear_out": matrix(Axis.HIDDEN, values),
    }


def parse(raw: Json, generation: Json) -> ModelConfig:
    """The configuration. Raises ModelError."""
    raw = raw | {key: value for key, value in DEFAULTS.items() if raw.get(key) is None}
    count, heads, blocks = positive(raw, "num_hidden_layers"), positive(raw, "num_attention_heads"), raw["block_types"]
    if not isinstance(blocks, list) or set(blocks) != {"recurrent", "attention"}:
        raise ModelError(f"block_types must name recurrent and attention but is {shown(blocks)}; correct config.json")
    kinds = (blocks * count)[:count]
    wide = positive(raw, "lru_width") if raw.get("lru_width") is not None else positive(raw, "hidden_size")
    if wide % heads or raw["intermediate_size"] % 2:
        raise ModelError(f"lru_width {wide} must be a multiple of {heads} heads and intermediate_size of 2; correct config.json")
    recurrent = Recurrent(
        layers=tuple(layer for layer, kind in enumerate(kinds) if kind == "recurrent"),
        width=width_of(raw, "conv1d_width"),
        key_dim=1,
        value_heads=heads,
        value_dim=wide // heads,
        has_bias=True,
    )
    own = {"intermediate_size": positive(raw, "intermediate_size") // 2, "hidden_act": raw["hidden_activation"]}
    window = positive(raw, "attention_window_size")
    return common_config(
        raw | own,
        generation,
        recurrent=recurrent,
        windows=tuple(window if kind == "attention" else 0 for kind in kinds),
        logits_softcap=float(raw["logits_soft_cap"]),
        partial=True,
    )


def assemble(source: Source, config: ModelConfig) -> Params:
    """The parameters."""
    assert config.recurrent is not None
    recurring, bias = config.recurrent.layers, config.attention_bias

    def mixing(here: str, index: int) -> Mixing:
        if index in recurring:
            return assemble_recurrence(source, here, config.recurrent)
        return Attention(linear(source, here, "q_proj", "k_proj", "v_proj", bias=bias), linear(source, here, "o_proj", bias=True))

    found = assemble_decoder(
        source,
        config,
        lambda prefix, index: (mixing(prefix + "temporal_block.", index), gated_mlp(source, prefix, bias=True, name="mlp_block.")),
        NAMES,
        shifted_norm,
    )
    fraction, exponent = frexp(config.hidden_size**0.5)
    return found._replace(embedding_scale=ldexp(round(fraction * 256), exponent - 8))


def assemble_recurrence(source: Source, here: str, sizes: Recurrent | None) -> GatedRecurrence:
    """The recurrence at `here`, which ends with a dot."""
    assert sizes is not None
    gates = tuple(source.by_head((f"{here}rg_lru.{name}_weight",), (sizes.value_dim, 0))[0] for name in GATES)
    return GatedRecurrence(
        inner=linear(source, here, "linear_x", "linear_y", bias=True),
        weight=source.fused((here + "conv_1d.weight",)),
        bias=source.fused((here + "conv_1d.bias",)),
        gates=gates,
        gate_biases=tuple(source.wide(f"{here}rg_lru.{name}_bias") for name in GATES),
        rates=source.wide(here + "rg_lru.recurrent_param"),
        output=linear(source, here, "linear_out", bias=True),
    )
