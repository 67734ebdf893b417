"""Laguna: GLM 4.5's router, windows, gates by softplus."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from msgspec.structs import replace

from vnext.models.config.expert_keys import dense_kinds, sigmoid_experts
from vnext.models.config.json_keys import Json, positive, refuse, shown, usual
from vnext.models.config.layer_kinds import Heads
from vnext.models.config.model_config import DecoderForm, ModelConfig, common_config, layer_windows, without_windows
from vnext.models.config.rope_config import two_ropes
from vnext.models.layers.assembly import ExpertNames, Source, any_mlp, linear, own_attention
from vnext.models.layers.decoder import Params, assemble_decoder
from vnext.models.layers.layers import Attention
from vnext.models.layers.sharding import Axis, Layout, LayoutTable, Sized, shared_axes

EXPERTS = ExpertNames(bias="experts.e_score_correction_bias", shared="shared_expert")
DEFAULTS = usual(
    num_attention_heads=48, num_key_value_heads=8, head_dim=128, max_position_embeddings=131072, sliding_window=512,
    num_experts=256, num_experts_per_tok=8, moe_intermediate_size=512, shared_expert_intermediate_size=512, gating=True,
    moe_routed_scaling_factor=1.0,
)  # fmt: skip
ROPES = usual(
    full_attention={"rope_type": "default", "rope_theta": 500000.0, "partial_rotary_factor": 0.5},
    sliding_attention={"rope_type": "default", "rope_theta": 10000.0},
)


def WEIGHT_AXES(config: ModelConfig) -> LayoutTable:  # noqa: N802  (a field of Family)
    """The layouts; those of layers with other heads by their whole names."""
    whole = dict(_by_heads(config, without_windows(config).head_count))
    layers = [layer for layer, window in zip(config.layer_numbers, config.windows) if config.whole_heads and not window]
    return {
        **shared_axes("shared_expert"),
        **dict(_by_heads(config, config.head_count)),
        **{f"model.layers.{at}.self_attn.{name}.{kind}": _of(layout, kind) for at in layers for name, layout in whole.items()
           for kind in ("weight", "bias")},
    }  # fmt: skip


def _by_heads(config: ModelConfig, count: int) -> Iterator[tuple[str, Layout]]:
    """The layouts of what so many query heads have."""
    heads = Sized(count * config.head_dim, is_split=True)
    yield "q_proj", Layout((heads,), Axis.HIDDEN)
    yield "g_proj", Layout((Sized(count, is_split=True) if config.form.gates_heads else heads,), Axis.HIDDEN)
    yield "o_proj", Layout((Axis.HIDDEN,), heads)


def _of(layout: Layout, kind: str) -> Layout:
    return layout if kind == "weight" else Layout(layout.out)


def parse(raw: Json, generation: Json) -> ModelConfig:
    raw = DEFAULTS | raw
    raw = raw | {"rope_parameters": raw.get("rope_parameters") or dict(ROPES), "partial_rotary_factor": 1.0}
    refuse(raw, "moe_apply_router_weight_on_input", unless=(False,))
    refuse(raw, "moe_router_logit_softcapping", unless=(0.0,))
    refuse(raw, "gating", unless=(True, "per-head", "per-element"))
    count, size = positive(raw, "num_hidden_layers"), positive(raw, "head_dim")
    positive(raw, "sliding_window")  # read also where no layer has a window
    windows = layer_windows(raw, ["full_attention"] * count)
    rope, local = two_ropes(raw, size, 5e5, 1e4, partial=True)
    near, far = _head_counts(raw, windows)
    named = {
        "n_routed_experts": raw["num_experts"], "norm_topk_prob": True, "routed_scaling_factor": raw["moe_routed_scaling_factor"],
        "num_attention_heads": near or far,
    }  # fmt: skip
    shared = positive(raw, "shared_expert_intermediate_size")
    experts = replace(sigmoid_experts(raw | named, dense_kinds(raw, 1)), shared_size=shared)
    is_unlike = near and far and near != far
    return common_config(
        raw | named, generation, windows=windows, rope=rope, local_rope=local if any(windows) else None, experts=experts,
        whole_heads=Heads(kv_head_count=positive(raw, "num_key_value_heads"), head_dim=size, head_count=far) if is_unlike else None,
        form=DecoderForm(
            output_bias=bool(raw.get("attention_bias")), is_gated=True, softplus_gates=True,
            gates_heads=raw["gating"] != "per-element", gates_apart=raw["gating"] == "per-element",
        ),
    )  # fmt: skip


def _head_counts(raw: Json, windows: Sequence[int]) -> tuple[int, int]:
    """The query heads of layers with a window and of those without, 0 where there are no such layers."""
    key = "num_attention_heads_per_layer"
    given = raw.get(key) or [positive(raw, "num_attention_heads")] * len(windows)
    kinds = [{count for count, window in zip(given, windows) if bool(window) == near} or {0} for near in (True, False)]
    if len(given) != len(windows) or any(len(kind) > 1 for kind in kinds):
        raise ValueError(f"{key} has one number for all layers with a window and one for all without, and not {shown(given)}")
    near, far = (kind.pop() for kind in kinds)
    return near, far


def assemble(source: Source, config: ModelConfig) -> Params:
    def mixing(prefix: str) -> Attention:
        here = prefix + "self_attn."
        joined = linear(source, here, "q_proj", "g_proj", "k_proj", "v_proj")
        return own_attention(source, config, prefix, head_norms=True)._replace(qkv=joined)

    return assemble_decoder(source, config, lambda prefix, index: (mixing(prefix), any_mlp(source, config, prefix, index, EXPERTS)))
