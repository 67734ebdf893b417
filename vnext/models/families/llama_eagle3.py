"""EAGLE-3 heads: one Llama layer over [embedding of a token, hidden state of the token before], which drafts for another model.

The hidden state is `combine` of the target's states in a few of its layers where the target has computed the token, and behind
them the head's own. The head knows some of the target's tokens. Tensors have the published names, `midlayer.` or `layers.0.`.
Source of the method: Y. Li et al., "EAGLE-3" (2025).
"""

from __future__ import annotations

from types import MappingProxyType
from typing import Any, NamedTuple

import torch

from vnext.kernels.table import operations
from vnext.models.config.json_keys import Json, flag, positive, shown
from vnext.models.config.model_config import DraftHead, ModelConfig, common_config
from vnext.models.errors import ModelError
from vnext.models.layers.assembly import Source, attention, gated_mlp
from vnext.models.layers.head_layer import HeadBatch, HeadLayer, run_head_layer
from vnext.models.layers.kv_cache import KvCache
from vnext.models.layers.rope import inverse_frequencies
from vnext.models.layers.sharding import Axis, Layout, Parallel, matrix

WEIGHT_AXES = MappingProxyType(
    {
        "q_proj": matrix(Axis.HEADS, Axis.TWICE_HIDDEN),
        "k_proj": matrix(Axis.KV_HEADS, Axis.TWICE_HIDDEN),
        "v_proj": matrix(Axis.KV_HEADS, Axis.TWICE_HIDDEN),
        "fc": matrix(Axis.HIDDEN, Axis.TARGET),
        "hidden_norm": Layout((Axis.HIDDEN,)),
        "lm_head": matrix(Axis.DRAFT_VOCAB, Axis.HIDDEN),
    }
)
AUX_LAYERS = "eagle_aux_hidden_state_layer_ids"


class Params(NamedTuple):
    """A head. `combine` packed [hidden, aux layers * target's width]. `embedding` is None where the target's serves. `token_ids`
    int64 [draft vocabulary]: the target's numbers of the tokens, None where they are the head's."""

    combine: Any
    embedding: torch.Tensor | None
    embedding_norm: torch.Tensor
    state_norm: torch.Tensor
    layer: HeadLayer
    head: Any
    token_ids: torch.Tensor | None


def parse(raw: Json, generation: Json) -> ModelConfig:
    """The configuration; one of vLLM's speculators has the layer's apart. Raises ModelError."""
    raw = raw.get("transformer_layer_config", {}) | raw
    if (layers := positive(raw, "num_hidden_layers", 1)) != 1:
        raise ModelError(f"EAGLE-3 heads of {layers} layers are not supported, only those of one; name another head")
    vocab_size, hidden_size = positive(raw, "vocab_size"), positive(raw, "hidden_size")
    head = DraftHead(
        vocab_size=positive(raw, "draft_vocab_size", vocab_size),
        target_size=positive(raw, "target_hidden_size", hidden_size),
        layers=aux_layers(raw),
        norm_before_residual=flag(raw, "norm_before_residual"),
    )
    return common_config(raw | {"num_hidden_layers": 1, "tie_word_embeddings": False}, generation, head=head)


def aux_layers(raw: Json) -> tuple[int, ...]:
    """The target's layers whose inputs the head reads, rising; () for the usual three.

    The member itself counts so. In `eagle_config` it names the layers whose outputs are read, one less (SGLang's meaning).
    """
    inner = raw.get("eagle_config") or {}
    if not isinstance(inner, dict):
        raise ModelError(f"eagle_config must be an object but is {shown(inner)}; correct config.json")
    ids, more = (raw[AUX_LAYERS], 0) if raw.get(AUX_LAYERS) else (inner.get(AUX_LAYERS) or [], 1)
    if not isinstance(ids, list) or any(type(each) is not int for each in ids) or len(set(ids)) < len(ids):
        raise ModelError(f"{AUX_LAYERS} must be a list of different layers but is {shown(ids)}; correct config.json")
    return tuple(sorted(each + more for each in ids))


def assemble(source: Source, config: ModelConfig) -> Params:
    assert config.head is not None
    layer = "midlayer." if "midlayer.hidden_norm.weight" in source else "layers.0."
    same = config.head.vocab_size == config.vocab_size and "d2t" not in source
    return Params(
        combine=source.packed(("fc.weight",), exact=True),
        embedding=source.fused(("embed_tokens.weight",)) if "embed_tokens.weight" in source else None,
        embedding_norm=source.fused((layer + "input_layernorm.weight",)),
        state_norm=source.fused((layer + "hidden_norm.weight",)),
        layer=HeadLayer(
            attention=attention(source, layer, qkv_bias=config.attention_bias, output_bias=config.attention_bias),
            mlp_norm=source.fused((layer + "post_attention_layernorm.weight",)),
            mlp=gated_mlp(source, layer, bias=config.mlp_bias),
            norm=source.fused(("norm.weight",)),
            frequencies=source.place(inverse_frequencies(config.rope, config.head_dim)),
        ),
        head=source.packed(("lm_head.weight",)),
        token_ids=None if same else token_ids(source, config, config.head.vocab_size),
    )


def token_ids(source: Source, config: ModelConfig, count: int) -> torch.Tensor:
    """The target's numbers of the head's tokens: the file has the differences. Raises ModelError."""
    found: torch.Tensor = source.integers("d2t", count)
    found = found + torch.arange(count, device=found.device)
    if bool((found < 0).any()) or bool((found >= config.vocab_size).any()) or len(found.unique()) < count:
        raise ModelError("the tensor 'd2t' of the head names tokens twice, or beyond the vocabulary; download the head again")
    return found


def combine(params: Params, states: torch.Tensor) -> torch.Tensor:
    """The target's states [T, aux layers, width] -> what the head reads, [T, hidden]."""
    combined: torch.Tensor = operations(states.device.type).linear(states.flatten(1), params.combine, None)
    return combined


def forward(
    params: Params, kv: KvCache, batch: HeadBatch, config: ModelConfig, parallel: Parallel
) -> tuple[torch.Tensor, torch.Tensor]:
    """Write the tokens' keys and values, and of those at sample_at give (normed hidden states, states for the next), [S, hidden]
    each."""
    assert config.head is not None
    chosen, eps = operations(batch.states.device.type), config.rms_norm_eps
    normed = chosen.rms_norm(batch.states, params.state_norm, eps)
    joined = torch.cat((chosen.rms_norm(batch.embeddings, params.embedding_norm, eps), normed), dim=1)
    residual = normed if config.head.norm_before_residual else batch.states
    return run_head_layer(params.layer, kv, batch.rows, joined, residual, config)


def logits(params: Params, hidden: torch.Tensor, config: ModelConfig, parallel: Parallel) -> torch.Tensor:
    """Hidden states [S, hidden] -> float32 [S, vocab_size], -inf for tokens that the head does not know."""
    found: torch.Tensor = operations(hidden.device.type).logits(hidden, params.head)
    if params.token_ids is None:
        return found
    whole = found.new_full((len(found), config.vocab_size), float("-inf"))
    return whole.index_copy_(1, params.token_ids, found)
