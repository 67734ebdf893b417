"""Gemma 1 to 3, VaultGemma: scaled embeddings; Gemma 2 has norms on both sides, soft caps, windows.

A norm multiplies by 1 + weight, in float32 before rounding: the sum is made once at load and kept in float32. Gemma 3 has norms
over heads and no soft caps; five layers of six have a window and a rope of their own. EmbeddingGemma sees to both sides and writes
nothing. VaultGemma is Gemma 2 without norms behind attention and MLP.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from vnext.models.config.json_keys import Json, number, positive, refuse, usual
from vnext.models.config.layer_kinds import Encoder
from vnext.models.config.model_config import ModelConfig, common_config, layer_windows, text_part
from vnext.models.config.rope_config import two_ropes
from vnext.models.layers import decoder, encoder
from vnext.models.layers.assembly import Source, attention, gated_mlp, shifted_norm
from vnext.models.layers.decoder import Names, Params, assemble_decoder
from vnext.models.layers.layers import Attention
from vnext.models.layers.sharding import Axis, Layout, Parallel

if TYPE_CHECKING:
    import torch

WEIGHT_AXES = MappingProxyType(
    {"pre_feedforward_layernorm": Layout((Axis.HIDDEN,)), "post_feedforward_layernorm": Layout((Axis.HIDDEN,))}
)
HEADS = ("lm_head.weight", "language_model.lm_head.weight")
DEFAULTS = usual(
    num_attention_heads=8, num_key_value_heads=4, head_dim=256, hidden_activation="gelu_pytorch_tanh",
    max_position_embeddings=8192, tie_word_embeddings=True, query_pre_attn_scalar=256, sliding_window=4096,
    final_logit_softcapping=30.0, attn_logit_softcapping=50.0,
)  # fmt: skip
BOTH_SIDES = Names(
    after_attention_norm="post_attention_layernorm",
    mlp_norm="pre_feedforward_layernorm",
    after_mlp_norm="post_feedforward_layernorm",
)
BEFORE = Names(mlp_norm="pre_feedforward_layernorm")
FIRST, VAULT, THIRD = "GemmaForCausalLM", "VaultGemmaForCausalLM", "Gemma3"
"""The last is how architectures of Gemma 3 begin."""
FIRST_DEFAULTS = usual(
    num_attention_heads=16, num_key_value_heads=16, head_dim=256, max_position_embeddings=8192, tie_word_embeddings=True,
)  # fmt: skip
THIRD_DEFAULTS = usual(
    DEFAULTS, vocab_size=262208, max_position_embeddings=131072, final_logit_softcapping=None, attn_logit_softcapping=None,
    sliding_window_pattern=6,
)  # fmt: skip
ROOTS = ("model.", "model.language_model.", "language_model.model.")


def parse(raw: Json, generation: Json) -> ModelConfig:
    """The configuration; a multimodal model has that of its language part in text_config. Raises ModelError."""
    if raw["architectures"][0].startswith(THIRD):
        return _third(THIRD_DEFAULTS | (text_part(raw) if "text_config" in raw else raw), generation)
    if raw["architectures"][0] == FIRST:
        raw = FIRST_DEFAULTS | raw
        return gemma_config(raw | {"query_pre_attn_scalar": positive(raw, "head_dim")}, generation)
    raw = DEFAULTS | raw
    count = positive(raw, "num_hidden_layers")
    kinds = ["full_attention" if index % 2 else "sliding_attention" for index in range(count)]
    return gemma_config(raw, generation, windows=layer_windows(raw, kinds))


def _third(raw: Json, generation: Json) -> ModelConfig:
    count, pattern = positive(raw, "num_hidden_layers"), positive(raw, "sliding_window_pattern")
    kinds = ["sliding_attention" if (index + 1) % pattern else "full_attention" for index in range(count)]
    theta, local_theta = raw.get("rope_theta") or 1e6, raw.get("rope_local_base_freq") or 1e4
    rope, local_rope = two_ropes(raw, positive(raw, "head_dim"), theta, local_theta)
    windows = layer_windows(raw, kinds)
    if not raw.get("use_bidirectional_attention"):
        return gemma_config(raw, generation, windows=windows, rope=rope, local_rope=local_rope)
    raw = raw | {"use_bidirectional_attention": False, "max_position_embeddings": positive(raw, "max_position_embeddings") + 1}
    seen = Encoder(reaches=tuple(window // 2 for window in windows))
    return gemma_config(raw, generation, rope=rope, local_rope=local_rope, encoder=seen)


def gemma_config(raw: Json, generation: Json, **own: Any) -> ModelConfig:
    """The configuration fields that both versions share."""
    refuse(raw, "use_bidirectional_attention", unless=(False,))
    named = {"hidden_act": raw.get("hidden_activation") or DEFAULTS["hidden_activation"]}
    return common_config(
        raw | named,
        generation,
        query_scale=number(raw, "query_pre_attn_scalar") ** -0.5,
        attention_softcap=number(raw, "attn_logit_softcapping") if raw.get("attn_logit_softcapping") else 0.0,
        logits_softcap=number(raw, "final_logit_softcapping") if raw.get("final_logit_softcapping") else 0.0,
        **own,
    )


def assemble(source: Source, config: ModelConfig) -> Params:
    """The parameters, wherever this checkpoint keeps its language part. What multiplies the embedding is rounded to the model's
    dtype."""
    is_third = config.architecture.startswith(THIRD)
    root = next((root for root in ROOTS if root + "norm.weight" in source), ROOTS[0])

    def mixing(prefix: str) -> Attention:
        plain = attention(source, prefix, qkv_bias=config.attention_bias, output_bias=config.attention_bias)
        if not is_third:
            return plain
        query, key = (shifted_norm(source, f"{prefix}self_attn.{name}_norm") for name in "qk")
        return plain._replace(q_norm=query, k_norm=key)

    names = {FIRST: Names(), VAULT: BEFORE}.get(config.architecture, BOTH_SIDES)
    names = names._replace(root=root, head=next((name for name in HEADS if name in source), HEADS[0]))
    found = assemble_decoder(
        source, config, lambda prefix, index: (mixing(prefix), gated_mlp(source, prefix)), names, shifted_norm
    )
    found = found._replace(embedding_scale=float(source.dtype.type(config.hidden_size**0.5)))
    return found._replace(stack=None) if config.encoder else found


def logits(params: Params, hidden: torch.Tensor, config: ModelConfig, parallel: Parallel) -> torch.Tensor:
    """The logits of a decoder; those of an encoder are zeros, which no request reads."""
    return (encoder.logits if config.encoder else decoder.logits)(params, hidden, config, parallel)
