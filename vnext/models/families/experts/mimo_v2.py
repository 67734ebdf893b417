"""MiMo V2 Flash: GLM 4.5's router, sinks, narrow values."""

from __future__ import annotations

from collections.abc import Iterator

from msgspec.structs import replace

from vnext.models.config.expert_keys import dense_kinds, sigmoid_experts
from vnext.models.config.json_keys import Json, number, positive, refuse, usual
from vnext.models.config.layer_kinds import Heads
from vnext.models.config.model_config import DecoderForm, ModelConfig, common_config, layer_windows
from vnext.models.config.rope_config import two_ropes
from vnext.models.layers.assembly import ExpertNames, Source, any_mlp, attention
from vnext.models.layers.decoder import Params, assemble_decoder
from vnext.models.layers.layers import Attention
from vnext.models.layers.sharding import Axis, Layout, LayoutTable, Sized

SINKS = "attention_sink_bias"
EXPERTS = ExpertNames(bias="gate.e_score_correction_bias")
DEFAULTS = usual(
    num_key_value_heads=4, head_dim=192, v_head_dim=128, max_position_embeddings=131072, moe_intermediate_size=2048,
    num_experts_per_tok=8, n_routed_experts=256, sliding_window=129, attention_value_scale=0.707, partial_rotary_factor=0.334,
    norm_topk_prob=True, rope_theta=5e6, swa_rope_theta=1e4,
)  # fmt: skip


def WEIGHT_AXES(config: ModelConfig) -> LayoutTable:  # noqa: N802  (a field of Family)
    """The layouts. A rank has the sinks of its heads; those of layers without a window are by their whole names."""
    heads, (size, _) = config.head_count, config.form.values or (config.head_dim, 1.0)
    return {
        SINKS: Layout((Sized(heads, is_split=True),)),
        "v_proj": Layout((Sized(config.kv_head_count * size, is_split=True, unit=size),), Axis.HIDDEN),
        "o_proj": Layout((Axis.HIDDEN,), Sized(heads * size, is_split=True)),
        **dict(_whole_axes(config, size)),
    }


def _whole_axes(config: ModelConfig, size: int) -> Iterator[tuple[str, Layout]]:
    """The layouts of keys and values of layers with other heads."""
    for layer, window in zip(config.layer_numbers, config.windows if config.whole_heads else ()):
        count = 0 if window or config.whole_heads is None else config.whole_heads.kv_head_count
        for name, width in (("k_proj", config.head_dim), ("v_proj", size)) if count else ():
            layout = Layout((Sized(count * width, is_split=True, unit=width),), Axis.HIDDEN)
            yield f"model.layers.{layer}.self_attn.{name}.weight", layout
            yield f"model.layers.{layer}.self_attn.{name}.bias", Layout(layout.out)


def parse(raw: Json, generation: Json) -> ModelConfig:
    """The configuration, by the keys of transformers or by its authors'. Raises ModelError."""
    raw = DEFAULTS | {"rms_norm_eps": raw.get("layernorm_epsilon") or 1e-5} | raw
    size, heads, few = (positive(raw, key) for key in ("head_dim", "num_attention_heads", "num_key_value_heads"))
    values = positive(raw, "v_head_dim")
    for key, value in (("swa_head_dim", size), ("swa_v_head_dim", values), ("swa_num_attention_heads", heads)):
        refuse(raw, key, unless=(value,))
    refuse(raw, "add_full_attention_sink_bias", unless=(False,))
    refuse(raw, "add_swa_attention_sink_bias", unless=(True,))
    refuse(raw, "n_shared_experts", unless=(0,))
    refuse(raw, "scoring_func", unless=("sigmoid",))
    refuse(raw, "topk_method", unless=("noaux_tc",))
    refuse(raw, "attention_projection_layout", unless=("split",))
    refuse(raw, "attention_chunk_size", unless=(raw.get("sliding_window_size"),))
    if values > size:
        raise ValueError(f"v_head_dim {values} is above head_dim {size}")
    windows = layer_windows(_with_window(raw), _kinds(raw))
    rope, local = two_ropes(raw, size, raw["rope_theta"], raw["swa_rope_theta"], partial=True)
    if any(windows):
        own: Json = {"num_key_value_heads": positive(raw, "swa_num_key_value_heads", 2 * few)}
        whole = Heads(kv_head_count=few, head_dim=size) if own["num_key_value_heads"] != few and 0 in windows else None
    else:
        own, whole = {}, None
    scale = 1.0 if raw["attention_value_scale"] is None else number(raw, "attention_value_scale")
    return common_config(
        raw | own, generation, windows=windows, rope=rope, local_rope=local if any(windows) else None, whole_heads=whole,
        experts=replace(sigmoid_experts(raw, dense_kinds(raw | _dense(raw), 1)), shared_size=0),
        form=DecoderForm(has_sinks=any(windows), values=(values, scale) if (values, scale) != (size, 1.0) else None),
    )  # fmt: skip


def _with_window(raw: Json) -> Json:
    """The same, with how far layers with a window see: a token, and so many before it where its authors say it."""
    before = raw.get("sliding_window_size")
    return raw if before is None else raw | {"sliding_window": positive(raw, "sliding_window_size") + 1}


def _kinds(raw: Json) -> list[str]:
    """What each layer sees where layer_types does not say it."""
    count = positive(raw, "num_hidden_layers")
    usual_ones = [int(0 < layer and (layer + 1) % 6 > 0) for layer in range(count)]
    named = raw.get("hybrid_layer_pattern") or usual_ones
    return ["sliding_attention" if each else "full_attention" for each in named[:count]]


def _dense(raw: Json) -> Json:
    """mlp_layer_types by its authors' key."""
    named = raw.get("moe_layer_freq")
    if raw.get("mlp_layer_types") or not isinstance(named, list):
        return {}
    return {"mlp_layer_types": ["sparse" if each else "dense" for each in named]}


def assemble(source: Source, config: ModelConfig) -> Params:
    windowed = [layer for layer, window in zip(config.layer_numbers, config.windows) if window]

    def mixing(prefix: str, index: int) -> Attention:
        plain, name = attention(source, prefix, qkv_bias=config.attention_bias), f"{prefix}self_attn.{SINKS}"
        return plain._replace(sinks=source.wide(name)) if index in windowed else plain

    return assemble_decoder(
        source, config, lambda prefix, index: (mixing(prefix, index), any_mlp(source, config, prefix, index, EXPERTS))
    )
