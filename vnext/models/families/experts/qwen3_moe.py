"""Qwen 2 and 3 with experts; Mellum 2, with windows."""

from __future__ import annotations

from types import MappingProxyType

from vnext.kernels.calls import Router
from vnext.models.config.expert_keys import dense_kinds, dense_layers, first_layers
from vnext.models.config.json_keys import Json, flag, positive, usual
from vnext.models.config.model_config import DecoderForm, Experts, ModelConfig, common_config, layer_windows, same_window
from vnext.models.config.rope_config import two_ropes
from vnext.models.layers.assembly import ExpertNames, Source, any_mlp, own_attention
from vnext.models.layers.decoder import Params, assemble_decoder
from vnext.models.layers.sharding import Axis, matrix, shared_axes

WEIGHT_AXES = MappingProxyType({**shared_axes("shared_expert"), "shared_expert_gate": matrix(Axis.ONE, Axis.HIDDEN)})
NAMES = ExpertNames(shared="shared_expert", shared_gate="shared_expert_gate")
QWEN2, MELLUM = "Qwen2MoeForCausalLM", "MellumForCausalLM"
DEFAULTS = usual(
    num_key_value_heads=4, max_position_embeddings=32768, sliding_window=4096, moe_intermediate_size=768, num_experts_per_tok=8,
)  # fmt: skip
MELLUM_DEFAULTS = usual(
    DEFAULTS, head_dim=128, max_position_embeddings=131072, sliding_window=1024, moe_intermediate_size=896,
    num_local_experts=64, norm_topk_prob=True,
)  # fmt: skip
QWEN2_DEFAULTS = usual(
    num_key_value_heads=16, max_position_embeddings=32768, sliding_window=4096, max_window_layers=28,
    moe_intermediate_size=1408, shared_expert_intermediate_size=5632, num_experts_per_tok=4, num_experts=60, qkv_bias=True,
)  # fmt: skip


def parse(raw: Json, generation: Json) -> ModelConfig:
    """The configuration; newer files say num_local_experts for num_experts. Raises ModelError."""
    is_second, is_mellum = (raw["architectures"][0] == name for name in (QWEN2, MELLUM))
    raw = (QWEN2_DEFAULTS if is_second else MELLUM_DEFAULTS if is_mellum else DEFAULTS) | raw
    windows: tuple[int, ...] = ()
    if flag(raw, "use_sliding_window"):
        windows = every_other(raw) if is_second else same_window(raw)
    turning = turning_by_window(raw) if is_mellum else {"windows": windows}
    count = positive(raw, "num_experts", raw.get("num_local_experts", 128))
    experts = Experts(
        count=count,
        intermediate_size=positive(raw, "moe_intermediate_size"),
        router=Router(positive(raw, "num_experts_per_tok"), flag(raw, "norm_topk_prob")),
        dense_layers=dense_kinds(raw, 0) if is_mellum else dense_layers(raw),
        shared_size=positive(raw, "shared_expert_intermediate_size") if is_second else 0,
    )
    bias = flag(raw, "qkv_bias" if is_second else "attention_bias")
    form = DecoderForm(output_bias=bias and not is_second)
    return common_config(raw, generation, experts=experts, attention_bias=bias, form=form, **turning)


def turning_by_window(raw: Json) -> Json:
    """Mellum's windows, and the ropes of layers without and with one. Raises ModelError."""
    rope, local = two_ropes(raw, positive(raw, "head_dim"), 5e5, 1e4)
    windows = layer_windows(raw, ["full_attention"] * positive(raw, "num_hidden_layers"))
    return {"windows": windows, "rope": rope, "local_rope": local if local != rope and any(windows) else None}


def every_other(raw: Json) -> tuple[int, ...]:
    """Windows of every other layer below max_window_layers."""
    below = first_layers(raw, "max_window_layers")
    kinds = ["full" if index % 2 or index not in below else "sliding" for index in range(positive(raw, "num_hidden_layers"))]
    return layer_windows(raw, [f"{kind}_attention" for kind in kinds])


def assemble(source: Source, config: ModelConfig) -> Params:
    has_norms = config.architecture != QWEN2
    return assemble_decoder(
        source,
        config,
        lambda prefix, index: (
            own_attention(source, config, prefix, head_norms=has_norms),
            any_mlp(source, config, prefix, index, NAMES),
        ),
    )
