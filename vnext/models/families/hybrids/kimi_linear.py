"""Kimi Linear: Kimi Delta Attention, experts.

One layer of four has latent attention, without positions. Experts are those of DeepSeek 3.
"""

from __future__ import annotations

from types import MappingProxyType

from vnext.models.config.expert_keys import dense_kinds, sigmoid_experts
from vnext.models.config.json_keys import Json, positive, refuse
from vnext.models.config.latent_config import latent_fields
from vnext.models.config.mamba_config import linear_layers, width_of
from vnext.models.config.model_config import ModelConfig, Recurrent, common_config
from vnext.models.layers.assembly import ExpertNames, Source, gated_mlp, linear, sparse_mlp
from vnext.models.layers.decoder import Mixing, Params, assemble_decoder, forward, logits
from vnext.models.layers.latent import assemble_attention, latent_axes
from vnext.models.layers.layers import GatedMlp, Linear, SparseMlp
from vnext.models.layers.recurrent import KeyDelta
from vnext.models.layers.sharding import Axis, Layout, LayoutTable, Sized, matrix

__all__ = ["WEIGHT_AXES", "assemble", "forward", "logits", "parse"]

KEYS, VALUES = Axis.STATE_KEYS, Axis.STATE_VALUES
SPARSE = "block_sparse_moe."
"""Transformers has all MLPs there, its authors those with experts."""
EXPERTS = ExpertNames(("w1", "w3"), "w2", bias="gate.e_score_correction_bias", shared="shared_experts")
OTHER_KEYS = MappingProxyType(
    {
        "num_experts": "n_routed_experts",
        "num_local_experts": "n_routed_experts",
        "num_experts_per_token": "num_experts_per_tok",
        "num_shared_experts": "n_shared_experts",
        "moe_renormalize": "norm_topk_prob",
        "num_expert_group": "n_group",
        "model_max_length": "max_position_embeddings",
    }
)
"""What its authors call things, and what DeepSeek does."""
LINEAR_KEYS = MappingProxyType(
    {"head_dim": "linear_head_dim", "num_heads": "linear_num_heads", "short_conv_kernel_size": "linear_conv_kernel_dim"}
)
"""What stands in linear_attn_config, and what transformers has in its place."""
DEFAULTS = MappingProxyType(
    {
        "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "max_position_embeddings": 1048576,
        "rms_norm_eps": 1e-5, "n_routed_experts": 256, "num_experts_per_tok": 8, "n_shared_experts": 1, "norm_topk_prob": True,
        "moe_intermediate_size": 1024, "routed_scaling_factor": 2.446, "linear_head_dim": 128, "linear_num_heads": 32,
        "linear_conv_kernel_dim": 4, "first_k_dense_replace": 1,
    }
)  # fmt: skip


def WEIGHT_AXES(config: ModelConfig) -> LayoutTable:  # noqa: N802  (a field of Family)
    """The layouts. Both kinds of layers call their products alike."""
    own = config.recurrent
    assert own is not None
    return {
        **latent_axes(config),
        **key_delta_axes(config, "self_attn.", "o_proj"),
        "A_log": Layout((Axis.ONE,), Sized(own.value_heads), kernel=(own.value_heads, 1)),
        "w1": matrix(Axis.EXPERT_MLP, Axis.HIDDEN),
        "w2": matrix(Axis.HIDDEN, Axis.EXPERT_MLP),
        "w3": matrix(Axis.EXPERT_MLP, Axis.HIDDEN),
    }


def key_delta_axes(config: ModelConfig, name: str, output: str) -> LayoutTable:
    """The layouts of Kimi Delta Attention, which stands where other layers have attention of this `name`."""
    own = config.recurrent
    assert own is not None
    rank, keys, values = Sized(own.step_rank), matrix(KEYS, Axis.HIDDEN), matrix(VALUES, Axis.HIDDEN)
    alike = {"q_proj": keys, "g_proj": values, output: matrix(Axis.HIDDEN, VALUES)}
    return {
        **{f"model.layers.{at}.{name}{part}.weight": layout for at in own.layers for part, layout in alike.items()},
        "k_proj": keys,
        "v_proj": values,
        **dict.fromkeys(("q_conv1d", "k_conv1d"), Layout((KEYS,), Axis.STATE_WIDTH, depthwise=True)),
        "v_conv1d": Layout((VALUES,), Axis.STATE_WIDTH, depthwise=True),
        "f_proj": keys,
        **dict.fromkeys(("f_a_proj", "g_a_proj"), Layout((rank,), Axis.HIDDEN)),
        "f_b_proj": Layout((KEYS,), rank),
        "g_b_proj": Layout((VALUES,), rank),
        "b_proj": matrix(Axis.STATE_HEADS, Axis.HIDDEN),
        "A_log": Layout((Sized(own.value_heads),)),
        "dt_bias": Layout((KEYS,)),
        "o_norm": Layout((Axis.STATE_HEAD_DIM,)),
    }


def parse(raw: Json, generation: Json) -> ModelConfig:
    """The configuration, which its authors and transformers spell otherwise. Raises ModelError."""
    linear = raw.get("linear_attn_config") or {}
    theirs = {ours: raw[key] for key, ours in OTHER_KEYS.items() if raw.get(key) is not None}
    theirs |= {ours: linear[key] for key, ours in LINEAR_KEYS.items() if linear.get(key) is not None}
    raw = raw | {key: value for key, value in DEFAULTS.items() if raw.get(key) is None} | theirs
    refuse(raw, "mla_use_nope", unless=(True,))
    refuse(raw, "moe_router_activation_func", unless=("sigmoid",))
    refuse(raw, "moe_layer_freq", unless=(1,))
    refuse(raw, "use_grouped_topk", unless=(True,))
    refuse(raw, "num_nextn_predict_layers", unless=(0,))
    layers = linear_layers(raw, usual_kinds(raw, linear))
    heads, size = positive(raw, "linear_num_heads"), positive(raw, "linear_head_dim")
    recurrent = Recurrent(
        layers=layers,
        width=width_of(raw, "linear_conv_kernel_dim"),
        key_heads=heads,
        key_dim=size,
        value_heads=heads,
        value_dim=size,
        step_rank=size,
    )
    still = tuple(layer for layer in range(positive(raw, "num_hidden_layers")) if layer not in layers)
    experts = sigmoid_experts(raw, dense_kinds(raw, raw["first_k_dense_replace"]))
    return common_config(raw, generation, recurrent=recurrent, experts=experts, still_layers=still, **latent_fields(raw))


def usual_kinds(raw: Json, linear: Json) -> list[str]:
    """What each layer is where layer_types does not say it: by the lists of its authors, who count from 1, or every fourth."""
    count, named = positive(raw, "num_hidden_layers"), linear.get("full_attn_layers")
    full = [layer for layer in range(count) if (layer + 1 in named if isinstance(named, list) else layer and layer % 4 == 0)]
    return ["full_attention" if layer in full else "linear_attention" for layer in range(count)]


def assemble_key_delta(source: Source, prefix: str, output: str = "o_proj") -> KeyDelta:
    """The Kimi Delta Attention at `prefix`, which ends with a dot; steps and gates are products of products, or products."""

    def exact(*parts: str) -> Linear:
        return Linear(source.packed(tuple(f"{prefix}{part}_proj.weight" for part in parts), exact=True), None)

    is_narrow = prefix + "f_proj.weight" not in source
    return KeyDelta(
        inner=linear(source, prefix, "q_proj", "k_proj", "v_proj", *(() if is_narrow else ("g_proj",))),
        weight=source.fused(tuple(f"{prefix}{part}_conv1d.weight" for part in "qkv")),
        beside=exact(*(("f_a", "g_a", "b") if is_narrow else ("f", "b"))),
        steps=exact("f_b") if is_narrow else None,
        gates=exact("g_b") if is_narrow else None,
        decay_logs=source.share(source.wide(prefix + "A_log").reshape(-1)),
        step_bias=source.wide(prefix + "dt_bias"),
        norm=source.wide(prefix + "o_norm.weight"),
        output=linear(source, prefix, output),
    )


def assemble(source: Source, config: ModelConfig) -> Params:
    assert config.recurrent is not None and config.experts is not None
    recurring, dense = config.recurrent.layers, config.experts.dense_layers

    def mixing(prefix: str, index: int) -> Mixing:
        if index in recurring:
            return assemble_key_delta(source, prefix + "self_attn.")
        return assemble_attention(source, config, prefix)

    def widening(prefix: str, index: int) -> GatedMlp | SparseMlp:
        if index not in dense:
            return sparse_mlp(source, config, prefix + SPARSE, EXPERTS)
        return gated_mlp(source, prefix, name=SPARSE if prefix + SPARSE + "up_proj.weight" in source else "mlp.")

    return assemble_decoder(source, config, lambda prefix, index: (mixing(prefix, index), widening(prefix, index)))
