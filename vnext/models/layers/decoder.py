"""The decoder that all families are: token ids in, logits out, with the parts and in the form that its description says.

Owns the order of operations; the parameters' shape is in decoder_params.py, what their presence does not show in DecoderForm
(config/model_config.py). A family gives its layers' attention and MLP, and the names of the rest. The cache is threaded through and
donated: it is updated in place and the returned one is the only one to be used.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

from vnext.kernels.arrays import Array
from vnext.models.config.model_config import ModelConfig, without_windows
from vnext.models.layers import fused
from vnext.models.layers.assembly import Source, embeddings, rms_norm
from vnext.models.layers.batch import ForwardBatch
from vnext.models.layers.decoder_params import LayerParams, Mixing, Params, SideBySide
from vnext.models.layers.heads import attention, reading_attention, shared_block
from vnext.models.layers.kv_cache import KvCache
from vnext.models.layers.latent import LatentAttention, latent_attention
from vnext.models.layers.layer_inputs import add, layer_inputs, with_experts
from vnext.models.layers.layers import (
    Attention,
    LayerCache,
    Mlp,
    Norm,
    ReadingAttention,
    Step,
    add_and_norm,
    embed,
    keep_input,
    keep_output,
    layer_steps,
    mlp,
    norm_of,
    output_logits,
    sparse_mlp,
)
from vnext.models.layers.recurrent import layer_caches, recurrent
from vnext.models.layers.rope import inverse_frequencies
from vnext.models.layers.sharding import Parallel

if TYPE_CHECKING:
    import torch

__all__ = ["Mixing", "Params"]  # decoder_params.py defines them


class Names(NamedTuple):
    """How a checkpoint names what is around attention and MLP. `root` ends with a dot; norms that it has not are "". So many
    layers in turn as `each` says have one number."""

    root: str = "model."
    layers: str = "layers"
    embedding: str = "embed_tokens"
    positions: str = ""
    norm: str = "norm"
    head: str = "lm_head.weight"
    attention_norm: str = "input_layernorm"
    after_attention_norm: str = ""
    mlp_norm: str = "post_attention_layernorm"
    after_mlp_norm: str = ""
    each: int = 1


def assemble_decoder(
    source: Source,
    config: ModelConfig,
    parts: Callable[[str, int], tuple[Mixing | None, Mlp | None]],
    names: Names | Callable[[int], Names] = Names(),
    norm: Callable[[Source, str], Norm] = rms_norm,
) -> Params:
    """The parameters; `parts(prefix, index)` gives attention, or what is in its place, and MLP of a layer, or one of the two,
    `prefix` ends with a dot; `norm` one norm by its name. `names` may differ by layer; the first layer's are those of the rest."""
    names_of = names if callable(names) else lambda _: names
    names = names_of(config.layer_numbers[0])

    def layer(index: int) -> LayerParams:
        own = names_of(index)
        prefix = f"{own.root}{own.layers}.{index // own.each}."
        return assemble_layer(source, prefix, own, parts(prefix, index), norm)

    layers = tuple(layer(index) for index in config.layer_numbers)
    embedding, head = embeddings(source, config, f"{names.root}{names.embedding}.weight", names.head)
    turning, local = None if names.positions else config.rope, config.local_rope
    return Params(
        embedding=embedding,
        layers=layers,
        norm=norm(source, names.root + names.norm),
        head=head,
        frequencies=source.place(inverse_frequencies(turning, without_windows(config).turning_dim)) if turning else None,
        local_frequencies=source.place(inverse_frequencies(local, config.turning_dim)) if local else None,
        positions=source.fused((f"{names.root}{names.positions}.weight",)) if names.positions else None,
        embedding_scale=config.form.embedding_scale,
        stack=fused.describe(layers, config),
    )


def assemble_layer(
    source: Source,
    prefix: str,
    names: Names,
    parts: tuple[Mixing | None, Mlp | None],
    norm: Callable[[Source, str], Norm],
) -> LayerParams:
    """A layer of these parts, with the norms at `prefix`, which ends with a dot."""

    def own(name: str) -> Norm | None:
        return norm(source, prefix + name) if name else None

    mixing, widening = parts
    return LayerParams(
        attention_norm=own(names.attention_norm),
        attention=mixing,
        mlp_norm=own(names.mlp_norm),
        mlp=widening,
        after_attention_norm=own(names.after_attention_norm),
        after_mlp_norm=own(names.after_mlp_norm),
    )


def forward(
    params: Params, kv: KvCache, batch: ForwardBatch, config: ModelConfig, parallel: Parallel
) -> tuple[torch.Tensor, KvCache]:
    """Run one step: (normed hidden states [S, hidden] at batch.sample_at, the cache with this step's tokens)."""
    steps = layer_steps(kv, batch, config, parallel, params.frequencies, params.local_frequencies)
    residual = embedded(params, batch, parallel) if batch.states is None else batch.states
    is_alone = parallel.world_size == 1 and not batch.adapters and batch.adapted is None
    if params.stack is not None and params.local_frequencies is None and params.inputs is None and is_alone and not batch.deep:
        turning = next((step for step in steps if step.cosine is not None), steps[0])
        found = fused.run(params.stack, residual, params.norm, kv, batch, turning)
        if found is not None:
            return found, kv
    if params.inputs is not None:
        own = layer_inputs(params.inputs, batch.token_ids, residual, steps[0])
        steps = tuple(step._replace(own=own[:, layer]) for layer, step in enumerate(steps))
    if config.recurrent is not None and config.recurrent.blocks is not None:
        both = residual.repeat(1, 2)
        steps = tuple(step._replace(own=both) for step in steps)
    if config.experts is not None and config.experts.ahead:
        carried: list[torch.Tensor] = []
        steps = tuple(step._replace(ahead=carried) for step in steps)
    residual = norm_of(residual, params.embedding_norm, steps[0])
    normed = norm_of(residual, params.layers[0].attention_norm, steps[0])
    next_norms = [layer.attention_norm for layer in params.layers[1:]] + [params.norm]
    for at, (layer, cache, next_norm, step) in enumerate(zip(params.layers, layer_caches(kv, batch, config), next_norms, steps)):
        keep_input(residual, step)
        normed, residual = run_layer(layer, cache, normed, residual, next_norm, step)
        for places, added in batch.deep:
            if at < added.shape[1]:
                residual[places] += added[:, at]
                normed[places] = norm_of(residual[places], next_norm, step)
    keep_output(residual, steps[-1])
    return normed.index_select(0, batch.sample_at), kv


def embedded(params: Params, batch: ForwardBatch, parallel: Parallel) -> torch.Tensor:
    """What the first layer gets, [T, hidden]."""
    hidden = embed(params.embedding, batch.token_ids, parallel)
    if params.embedding_scale != 1.0:
        hidden = hidden * params.embedding_scale
    return hidden if params.positions is None else hidden + params.positions.index_select(0, batch.positions)


def run_layer(
    layer: LayerParams,
    cache: tuple[Array, ...],
    normed: torch.Tensor,
    residual: torch.Tensor,
    next_norm: Norm | None,
    step: Step,
) -> tuple[torch.Tensor, torch.Tensor]:
    """One layer on [T, hidden]: (input of the next layer, already normed; residual stream)."""
    form = step.config.form
    if layer.block is not None:
        found = residual + shared_block(layer.block, cache[:2], residual, step)
        normed, cache = norm_of(found, layer.attention_norm, step), cache[2:]
    if layer.attention is None or layer.mlp is None:
        given = mix(layer.attention, cache, normed, step) if layer.attention is not None else widen(layer.mlp, normed, step)
        return add_and_norm(given, residual, next_norm, step)
    if form.shares:
        return run_shared(layer, cache, normed, next_norm, step)
    mixed = norm_of(mix(layer.attention, cache, normed, step), layer.after_attention_norm, step)
    if form.residual_scale != 1.0:
        mixed = mixed * form.residual_scale
    if form.is_parallel:
        normed, residual = normed if layer.mlp_norm is None else norm_of(residual, layer.mlp_norm, step), residual + mixed
    else:
        normed, residual = add_and_norm(mixed, residual, layer.mlp_norm, step)
    widened = widen(layer.mlp, normed, step)
    if layer.ahead is not None:
        assert step.ahead is not None
        step.ahead.append(sparse_mlp(layer.ahead, normed, step))
    elif step.ahead:
        widened = widened + step.ahead.pop()
    if layer.beside is not None:
        widened = with_experts(layer.beside, widened, residual, step)
    widened = norm_of(widened, layer.after_mlp_norm, step)
    if form.residual_scale != 1.0:
        widened = widened * form.residual_scale
    if layer.added is not None:
        residual = add(layer.added, residual + widened, step)
        return norm_of(residual, next_norm, step), residual
    return add_and_norm(widened, residual, next_norm, step)


def run_shared(
    layer: LayerParams, cache: LayerCache, normed: torch.Tensor, next_norm: Norm | None, step: Step
) -> tuple[torch.Tensor, torch.Tensor]:
    """As `run_layer`, where a stream is the normed input."""
    assert layer.attention is not None
    attending, recurring, widening = step.config.form.shares
    own = attending if isinstance(layer.attention, Attention) else recurring
    normed = norm_of(normed * own[0] + mix(layer.attention, cache, normed, step) * own[1], layer.mlp_norm, step)
    residual = normed * widening[0] + widen(layer.mlp, normed, step) * widening[1]
    return norm_of(residual, next_norm, step), residual


def mix(layer: Mixing, cache: tuple[Array, ...], x: torch.Tensor, step: Step) -> torch.Tensor:
    """Attention, or what a layer has in its place, of x [T, hidden]."""
    if isinstance(layer, Attention):
        return attention(layer, cache, x, step)
    if isinstance(layer, ReadingAttention):
        return reading_attention(layer, cache, x, step)
    if isinstance(layer, LatentAttention):
        return latent_attention(layer, cache, x, step)
    if isinstance(layer, SideBySide):
        assert step.config.recurrent is not None and step.config.recurrent.beside is not None
        before, behind, beside = step.config.recurrent.beside
        attended = attention(layer.attention, cache[:2], x * before, step) * behind
        return attended + recurrent(layer.recurring, cache[2:], x, step) * beside
    return recurrent(layer, cache, x, step)


def widen(layer: Mlp | None, x: torch.Tensor, step: Step) -> torch.Tensor:
    """The MLP of x [T, hidden]."""
    assert layer is not None
    scales = step.config.form.mlp_scales
    return mlp(layer, x, step) if scales is None else mlp(layer, x * scales[0], step) * scales[1]


def logits(params: Params, hidden: torch.Tensor, config: ModelConfig, parallel: Parallel) -> torch.Tensor:
    """Hidden states [S, hidden] of `forward` -> float32 [S, vocab_size], whole on every rank."""
    return output_logits(params.head, hidden, config, parallel, params.head_bias)
