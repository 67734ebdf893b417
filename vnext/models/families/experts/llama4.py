"""Llama 4, text only: experts with scaled inputs, attention in chunks.

Heads of layers that turn are normed; queries of the others grow with their position.
"""

from __future__ import annotations

from types import MappingProxyType

from vnext.kernels.calls import Router
from vnext.models.config.json_keys import Json, flag, number, positive, refuse, usual
from vnext.models.config.model_config import DecoderForm, Experts, ModelConfig, common_config, layer_windows, text_part
from vnext.models.config.rope_config import turned_layers
from vnext.models.layers.assembly import ExpertNames, Source, any_mlp, own_attention
from vnext.models.layers.decoder import Names, Params, assemble_decoder
from vnext.models.layers.layers import Attention, Mlp
from vnext.models.layers.sharding import Axis, matrix, shared_axes

WEIGHT_AXES = MappingProxyType({**shared_axes("shared_expert"), "router": matrix(Axis.EXPERTS, Axis.HIDDEN)})
NAMES = ExpertNames(router="router", shared="shared_expert")
ROOTS = ("model.", "language_model.model.", "model.language_model.")
HEADS = ("lm_head.weight", "language_model.lm_head.weight")
DEFAULTS = usual(
    vocab_size=202048, hidden_size=5120, intermediate_size=8192, num_hidden_layers=48, num_attention_heads=40,
    num_key_value_heads=8, head_dim=128, max_position_embeddings=131072, rms_norm_eps=1e-5, rope_theta=5e5,
    num_local_experts=16, intermediate_size_mlp=16384, attention_chunk_size=8192, use_qk_norm=True, floor_scale=8192,
    attn_scale=0.1, bos_token_id=1, eos_token_id=2,
)  # fmt: skip


def parse(raw: Json, generation: Json) -> ModelConfig:
    """The configuration; a multimodal model has that of its language part in text_config. Raises ModelError."""
    raw = DEFAULTS | (text_part(raw) if "text_config" in raw else raw)
    refuse(raw, "num_experts_per_tok", unless=(1,))
    turned = turned_layers(raw | {"no_rope_layers": raw.get("no_rope_layers") or None})
    grows = bool(raw.get("attn_temperature_tuning", True))  # files say how often, too
    growth = number(raw, "attn_scale"), positive(raw, "floor_scale"), 1
    return common_config(
        raw | {"intermediate_size": positive(raw, "intermediate_size_mlp")},
        generation,
        windows=windows(raw, turned),
        still_layers=tuple(layer for layer, turns in enumerate(turned) if not turns),
        experts=experts(raw),
        form=DecoderForm(
            turns_neighbours=True,
            output_bias=flag(raw, "attention_bias"),
            query_growth=growth if grows else None,
            grows_still=True,
            sees_runs=True,
            head_norms="bare" if flag(raw, "use_qk_norm") else "each",
        ),
    )


def windows(raw: Json, turned: list[int]) -> tuple[int, ...]:
    """Those of layers with chunks, which are the turned ones where layer_types is not there. Raises ModelError."""
    kinds = raw.get("layer_types") or ["chunked_attention" if turns else "full_attention" for turns in turned]
    if raw["attention_chunk_size"] is None:
        return ()
    named = {"layer_types": [kind.replace("chunked", "sliding") for kind in kinds]}
    return layer_windows(raw | named | {"sliding_window": positive(raw, "attention_chunk_size")}, ["full_attention"] * len(turned))


def experts(raw: Json) -> Experts | None:
    """The experts: in the layers named, or in every n-th. Raises ModelError."""
    count, wide = positive(raw, "num_hidden_layers"), positive(raw, "intermediate_size")
    step = positive(raw, "interleave_moe_layer_step", 1)
    named = raw.get("moe_layers")
    sparse = range(step - 1, count, step) if named is None else named
    if not sparse:
        return None
    return Experts(
        count=positive(raw, "num_local_experts"),
        intermediate_size=wide,
        router=Router(1, False, marks="sigmoid"),
        dense_layers=tuple(layer for layer in range(count) if layer not in sparse),
        shared_size=wide,
        scales_inputs=True,
    )


def assemble(source: Source, config: ModelConfig) -> Params:
    """The parameters, wherever this checkpoint keeps its language part."""
    still = {config.layer_numbers[layer] for layer in config.still_layers}
    root = next((root for root in ROOTS if root + "norm.weight" in source), ROOTS[0])

    def mixing(prefix: str, index: int) -> Attention:
        plain = own_attention(source, config, prefix)
        if index in still or config.form.head_norms != "bare":
            return plain
        ones = source.wide(prefix + "input_layernorm.weight")[: config.head_dim] * 0 + 1  # the norms have no weights
        return plain._replace(q_norm=ones, k_norm=ones)

    def widening(prefix: str, index: int) -> Mlp:
        return any_mlp(source, config, prefix, index, NAMES, name="feed_forward.")

    head = next((name for name in HEADS if name in source), HEADS[0])
    return assemble_decoder(
        source, config, lambda prefix, index: (mixing(prefix, index), widening(prefix, index)), Names(root=root, head=head)
    )
