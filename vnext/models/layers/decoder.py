"""The decoder that most families are: norms before attention and MLP, rotary positions, token ids in, logits out.

Owns the order of operations; the parameters' shape is in decoder_params.py. A family gives its layers' attention and MLP;
the cache is threaded through and donated: it is updated in place and the returned one is the only one to be used.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from vnext.models.config.model_config import ModelConfig
from vnext.models.layers import fused
from vnext.models.layers.assembly import Source, embeddings
from vnext.models.layers.batch import ForwardBatch
from vnext.models.layers.decoder_params import LayerParams, Params
from vnext.models.layers.kv_cache import KvCache
from vnext.models.layers.layers import (
    Attention,
    GatedMlp,
    LayerCache,
    SparseMlp,
    Step,
    attention,
    embed,
    keep_input,
    keep_output,
    layer_steps,
    mlp,
    output_logits,
)
from vnext.models.layers.rope import inverse_frequencies
from vnext.models.layers.sharding import Parallel

if TYPE_CHECKING:
    import torch


def assemble_decoder(
    source: Source, config: ModelConfig, parts: Callable[[str, int], tuple[Attention, GatedMlp | SparseMlp]]
) -> Params:
    """The parameters; `parts(prefix, index)` gives attention and MLP of a layer, `prefix` ends with a dot."""

    def layer(index: int) -> LayerParams:
        prefix = f"model.layers.{index}."
        mixing, widening = parts(prefix, index)
        return LayerParams(
            attention_norm=source.fused((prefix + "input_layernorm.weight",)),
            attention=mixing,
            mlp_norm=source.fused((prefix + "post_attention_layernorm.weight",)),
            mlp=widening,
        )

    layers = tuple(layer(index) for index in config.layer_numbers)
    embedding, head = embeddings(source, config, "model.embed_tokens.weight")
    return Params(
        embedding=embedding,
        layers=layers,
        norm=source.fused(("model.norm.weight",)),
        head=head,
        frequencies=source.place(inverse_frequencies(config.rope, config.head_dim)),
        stack=fused.describe(layers, config),
    )


def forward(
    params: Params, kv: KvCache, batch: ForwardBatch, config: ModelConfig, parallel: Parallel
) -> tuple[torch.Tensor, KvCache]:
    """Run one step: (normed hidden states [S, hidden] at batch.sample_at, the cache with this step's tokens)."""
    steps = layer_steps(kv, batch, config, parallel, params.frequencies)
    residual = embed(params.embedding, batch.token_ids, parallel) if batch.states is None else batch.states
    if params.stack is not None and parallel.world_size == 1 and not batch.adapters and batch.adapted is None:
        turning = next((step for step in steps if step.cosine is not None), steps[0])
        found = fused.run(params.stack, residual, params.norm, kv, batch, turning)
        if found is not None:
            return found, kv
    return run_layers(run_layer, params, kv, residual, steps).index_select(0, batch.sample_at), kv


def run_layers(
    run: Callable[..., tuple[torch.Tensor, torch.Tensor]], params: Any, kv: KvCache, residual: torch.Tensor, steps: Sequence[Step]
) -> torch.Tensor:
    """All layers in turn on [T, hidden], each by `run` (as `run_layer`); returns the last one's output, normed."""
    normed = steps[0].operations.rms_norm(residual, params.layers[0].attention_norm, steps[0].config.rms_norm_eps)
    next_norms = [layer.attention_norm for layer in params.layers[1:]] + [params.norm]
    for layer, cache, next_norm, step in zip(params.layers, kv, next_norms, steps):
        keep_input(residual, step)
        normed, residual = run(layer, cache, normed, residual, next_norm, step)
    keep_output(residual, steps[-1])
    return normed


def run_layer(
    layer: LayerParams,
    cache: LayerCache,
    normed: torch.Tensor,
    residual: torch.Tensor,
    next_norm: torch.Tensor,
    step: Step,
) -> tuple[torch.Tensor, torch.Tensor]:
    """One layer on [T, hidden]: (input of the next layer, already normed; residual stream)."""
    add_rms_norm, eps = step.operations.add_rms_norm, step.config.rms_norm_eps
    mixed = attention(layer.attention, cache, normed, step)
    normed, residual = add_rms_norm(mixed, residual, layer.mlp_norm, eps)
    return add_rms_norm(mlp(layer.mlp, normed, step), residual, next_norm, eps)


def logits(params: Params, hidden: torch.Tensor, config: ModelConfig, parallel: Parallel) -> torch.Tensor:
    """Hidden states [S, hidden] of `forward` -> float32 [S, vocab_size], whole on every rank."""
    return output_logits(params.head, hidden, config, parallel)
