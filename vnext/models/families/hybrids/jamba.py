"""Jamba: Mamba, experts.

One layer of eight attends, without positions; every other one has experts.
"""

from __future__ import annotations

from math import gcd

from vnext.kernels.calls import Router
from vnext.models.config.expert_keys import checked
from vnext.models.config.json_keys import Json, flag, positive, refuse, usual
from vnext.models.config.mamba_config import width_of
from vnext.models.config.model_config import Experts, ModelConfig, Recurrent, common_config
from vnext.models.errors import ModelError
from vnext.models.layers.assembly import ExpertNames, Source, any_mlp, attention, linear
from vnext.models.layers.decoder import Mixing, Names, Params, assemble_decoder
from vnext.models.layers.layers import GatedMlp, Linear, SparseMlp
from vnext.models.layers.recurrent import Selective, logs_of_heads
from vnext.models.layers.sharding import Axis, Layout, LayoutTable, Sized, matrix

DEFAULTS = usual(
    num_key_value_heads=8, max_position_embeddings=262144, num_experts=16, num_experts_per_tok=2, expert_layer_period=2,
    expert_layer_offset=1, attn_layer_period=8, attn_layer_offset=4, mamba_d_state=16, mamba_d_conv=4, mamba_expand=2,
    mamba_conv_bias=True,
)  # fmt: skip
LANES = 16
"""Channels whose states lie together."""
NAMES = Names(mlp_norm="pre_ff_layernorm", norm="final_layernorm")


def WEIGHT_AXES(config: ModelConfig) -> LayoutTable:  # noqa: N802  (a field of Family)
    own = config.recurrent
    assert own is not None
    values, rank, keys = Axis.STATE_VALUES, Sized(own.step_rank), Sized(own.key_dim)
    return {
        "router": matrix(Axis.EXPERTS, Axis.HIDDEN),
        **dict.fromkeys(("pre_ff_layernorm", "final_layernorm"), Layout((Axis.HIDDEN,))),
        "in_proj": matrix((values, values), Axis.HIDDEN),
        "conv1d": Layout((values,), Axis.STATE_WIDTH, depthwise=True),
        "x_proj": Layout((Sized(own.step_rank + 2 * own.key_dim),), values),
        "dt_proj": Layout((values,), rank),
        "dt_layernorm": Layout((rank,)),
        **dict.fromkeys(("b_layernorm", "c_layernorm"), Layout((keys,))),
        "A_log": Layout((values,), keys),
        "D": Layout((values,)),
        "out_proj": matrix(Axis.HIDDEN, values),
    }


def parse(raw: Json, generation: Json) -> ModelConfig:
    raw = raw | {key: value for key, value in DEFAULTS.items() if raw.get(key) is None}
    refuse(raw, "mamba_proj_bias", unless=(False,))
    refuse(raw, "mamba_inner_layernorms", unless=(True,))
    refuse(raw, "sliding_window", unless=())
    attending, sparse = (every(raw, kind) for kind in ("attn", "expert"))
    count = positive(raw, "num_hidden_layers")
    layers = tuple(layer for layer in range(count) if layer not in attending)
    if not attending or not layers:
        raise ModelError("attn_layer_period must leave layers that attend and layers that do not; correct config.json")
    experts = None
    if positive(raw, "num_experts") > 1 and sparse:
        router, dense = Router(positive(raw, "num_experts_per_tok"), False), tuple(set(range(count)) - set(sparse))
        wide = positive(raw, "intermediate_size")
        experts = checked(Experts(count=raw["num_experts"], intermediate_size=wide, router=router, dense_layers=dense))
    recurrent = selective_layers(raw, layers, positive(raw, "mamba_expand") * positive(raw, "hidden_size"))
    return common_config(raw, generation, recurrent=recurrent, experts=experts, still_layers=attending)


def selective_layers(raw: Json, layers: tuple[int, ...], inner: int, norm_eps: float = 0.0) -> Recurrent:
    """The sizes of these layers' states, `inner` values wide. Raises ModelError."""
    rank, lanes = raw.get("mamba_dt_rank"), gcd(inner, LANES)
    return Recurrent(
        layers=layers,
        width=width_of(raw, "mamba_d_conv"),
        key_dim=positive(raw, "mamba_d_state"),
        value_heads=inner // lanes,
        value_dim=lanes,
        step_rank=-(-positive(raw, "hidden_size") // 16) if rank in (None, "auto") else positive(raw, "mamba_dt_rank"),
        has_bias=flag(raw, "mamba_conv_bias"),
        norm_eps=norm_eps,
    )


def every(raw: Json, kind: str) -> tuple[int, ...]:
    """The layers of a kind: one in each period, the first of them at an offset. Raises ModelError."""
    period, offset = positive(raw, f"{kind}_layer_period"), raw[f"{kind}_layer_offset"]
    first = positive(raw, f"{kind}_layer_offset") if offset else 0
    return tuple(layer for layer in range(positive(raw, "num_hidden_layers")) if layer % period == first)


def assemble_selective(source: Source, config: ModelConfig, prefix: str) -> Selective:
    """The Mamba at `prefix`, which ends with a dot, without its norms."""
    assert config.recurrent is not None
    bias = config.recurrent.has_bias
    return Selective(
        inner=linear(source, prefix, "in_proj"),
        weight=source.fused((prefix + "conv1d.weight",)),
        bias=source.fused((prefix + "conv1d.bias",)) if bias else None,
        beside=Linear(source.packed((prefix + "x_proj.weight",), exact=True), None),
        norms=(),
        steps=Linear(source.packed((prefix + "dt_proj.weight",), exact=True), None),
        decay_logs=logs_of_heads(source.wide(prefix + "A_log"), config.recurrent),
        step_bias=source.wide(prefix + "dt_proj.bias"),
        skips=source.wide(prefix + "D"),
        output=linear(source, prefix, "out_proj"),
    )


def assemble(source: Source, config: ModelConfig) -> Params:
    assert config.recurrent is not None
    recurring = config.recurrent.layers

    def mixing(prefix: str, index: int) -> Mixing:
        if index not in recurring:
            return attention(source, prefix)
        norms = tuple(source.fused((f"{prefix}mamba.{part}_layernorm.weight",)) for part in ("dt", "b", "c"))
        return assemble_selective(source, config, prefix + "mamba.")._replace(norms=norms)

    def widening(prefix: str, index: int) -> GatedMlp | SparseMlp:
        return any_mlp(source, config, prefix, index, ExpertNames(router="router"), name="feed_forward.")

    return assemble_decoder(source, config, lambda prefix, index: (mixing(prefix, index), widening(prefix, index)), NAMES)
