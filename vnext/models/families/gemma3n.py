"""Gemma 3n, text only: several streams, inputs by layer, shared caches, sparse gates.

Layers share `gemma4.py`'s parts. Of multimodal models, it serves the language part.
"""

from __future__ import annotations

from math import gcd
from statistics import NormalDist
from typing import Any

from vnext.models.config.json_keys import Json, flag, number, positive, refuse, shown, usual
from vnext.models.config.layer_kinds import LayerInputs
from vnext.models.config.model_config import DecoderForm, ModelConfig, layer_windows, text_part
from vnext.models.config.rope_config import two_ropes
from vnext.models.config.streams import StreamSizes
from vnext.models.errors import ModelError
from vnext.models.families.gemma2 import WEIGHT_AXES as GEMMA2_AXES, gemma_config
from vnext.models.families.gemma4 import (
    ROOTS,
    SLIDING,
    WHOLE,
    assemble_below,
    cache_layers,
    input_axes,
    narrow_gate,
    root_of,
    unlike_axes,
)
from vnext.models.layers.assembly import Source, gated_mlp, linear, wide_norm
from vnext.models.layers.decoder import Params, logits
from vnext.models.layers.decoder_params import LayerParams, LayerStreams, Streams
from vnext.models.layers.layer_inputs import Added
from vnext.models.layers.layers import GatedMlp
from vnext.models.layers.sharding import Axis, Layout, LayoutTable, Sized
from vnext.models.layers.streams import forward

__all__ = ["WEIGHT_AXES", "assemble", "forward", "logits", "parse"]

DEFAULTS = usual(
    vocab_size=262400, intermediate_size=16384, num_attention_heads=8, num_key_value_heads=2, head_dim=256,
    max_position_embeddings=32768, sliding_window=512, tie_word_embeddings=True, final_logit_softcapping=30.0,
    vocab_size_per_layer_input=262144, hidden_size_per_layer_input=256, altup_num_inputs=4, altup_correct_scale=True,
    num_kv_shared_layers=15, laurel_rank=64, eos_token_id=1, bos_token_id=2,
)  # fmt: skip
SPARSE_LAYERS, SPARSITY = 10, 0.95


def parse(raw: Json, generation: Json) -> ModelConfig:
    """The configuration; a multimodal model has that of its language part in text_config. Raises ModelError."""
    if "text_config" in raw:
        raw = text_part(raw)
    refuse(raw, "attention_bias", unless=(False,))
    refuse(raw, "altup_active_idx", unless=(0,))
    refuse(raw, "hidden_activation", unless=("gelu_pytorch_tanh",))
    raw = DEFAULTS | raw
    count = positive(raw, "num_hidden_layers")
    kinds = [SLIDING if (layer + 1) % 5 else WHOLE for layer in range(count)]
    windows = layer_windows(raw, kinds)
    sizes = per_layer(raw, "intermediate_size", count, [raw["intermediate_size"]] * count)
    shared = gcd(*(positive({"intermediate_size": size}, "intermediate_size") for size in sizes))
    raw = raw | {"query_pre_attn_scalar": 1, "intermediate_size": shared}
    theta, local_theta = raw.get("rope_theta") or 1e6, raw.get("rope_local_base_freq") or 1e4
    rope, local_rope = two_ropes(raw, positive(raw, "head_dim"), theta, local_theta)
    return gemma_config(
        raw,
        generation,
        windows=windows,
        rope=rope,
        local_rope=local_rope,
        form=DecoderForm(norms_values=True),
        cache_layers=cache_layers(raw.get("layer_types") or kinds, raw.get("num_kv_shared_layers") or 0),
        mlp_sizes=tuple(sizes) if len(set(sizes)) > 1 else (),
        gate_cutoffs=gate_cutoffs(raw, count),
        layer_inputs=LayerInputs(
            size=positive(raw, "hidden_size_per_layer_input"), vocab_size=positive(raw, "vocab_size_per_layer_input")
        ),
        streams=StreamSizes(
            count=positive(raw, "altup_num_inputs"),
            beside=positive(raw, "laurel_rank"),
            scales_gates=flag(raw, "altup_correct_scale"),
        ),
    )


def per_layer(raw: Json, key: str, count: int, usual: list[Any]) -> list[Any]:
    """A list with something for each of so many layers; `usual` where there is no list. Raises ModelError."""
    found = raw[key] if isinstance(raw.get(key), list) else usual
    if len(found) != count:
        raise ModelError(f"{key} must have one number for each of {count} layers but is {shown(found)}; correct config.json")
    return list(found)


def gate_cutoffs(raw: Json, count: int) -> tuple[float | None, ...]:
    """Per layer how many deviations above their mean gates begin to count, as ModelConfig has it. Raises ModelError."""
    key = "activation_sparsity_pattern"
    sparse = SPARSE_LAYERS if count > SPARSE_LAYERS else 0
    shares = per_layer(raw, key, count, [SPARSITY] * sparse + [0.0] * (count - sparse))
    if not all(share == 0 or number({key: share}, key) < 1 for share in shares):
        raise ModelError(f"{key} must be numbers from 0 to below 1 but is {shown(shares)}; correct config.json")
    return tuple(NormalDist().inv_cdf(share) if share else None for share in shares) if any(shares) else ()


def WEIGHT_AXES(config: ModelConfig) -> LayoutTable:  # noqa: N802  # a field of Family
    """The layouts of all names, and of those of MLPs of other widths by their whole names."""
    sizes = config.streams
    assert sizes is not None
    count, beside = Sized(sizes.count), Sized(sizes.beside)
    unlike = {root + name: layout for root in ROOTS for name, layout in unlike_axes(config)}
    square = Layout((Axis.HIDDEN,), Axis.HIDDEN)
    return {**GEMMA2_AXES, **input_axes(config), **unlike} | {
        "altup_projections": square,
        "altup_unembed_projections": square,
        "correct_output_scale": Layout((Axis.HIDDEN,)),
        "correction_coefs": Layout((count,), count),
        "prediction_coefs": Layout((Sized(sizes.count**2),), count),
        "modality_router": Layout((count,), Axis.HIDDEN),
        "router_norm": Layout((Axis.HIDDEN,)),
        "linear_left": Layout((beside,), Axis.HIDDEN),
        "linear_right": Layout((Axis.HIDDEN,), beside),
        "post_laurel_norm": Layout((Axis.HIDDEN,)),
    }


def assemble(source: Source, config: ModelConfig) -> Params:
    """The parameters, wherever this checkpoint keeps its language part."""
    root = root_of(source)
    found = assemble_below(root, source, config, lambda prefix, at: mlp(source, config, prefix, at), with_streams)
    streams = (ends(source, config, f"{root}altup_{name}projections") for name in ("", "unembed_"))
    return found._replace(streams=Streams(*streams))


def mlp(source: Source, config: ModelConfig, prefix: str, index: int) -> GatedMlp:
    """The MLP of a layer; gates of which few count are multiplied apart from their activation."""
    cutoff = config.gate_cutoffs[index] if config.gate_cutoffs else None
    if cutoff is None:
        return gated_mlp(source, prefix)
    here = prefix + "mlp."
    return GatedMlp(linear(source, here, "gate_proj", "up_proj"), linear(source, here, "down_proj"), cutoff)


def ends(source: Source, config: ModelConfig, name: str) -> tuple[Any, ...]:
    """What makes the streams beside the first one, or takes them back."""
    assert config.streams is not None
    return tuple(source.packed((f"{name}.{at}.weight",)) for at in range(config.streams.count - 1))


def with_streams(layer: LayerParams, source: Source, config: ModelConfig, prefix: str) -> LayerParams:
    """The layer with its streams and its own inputs."""
    assert config.streams is not None
    here = prefix + "altup."
    router, predict, correct = (
        source.packed((f"{here}{name}.weight",), exact=True) for name in ("modality_router", "prediction_coefs", "correction_coefs")
    )
    left, right = (linear(source, prefix + "laurel.", name) for name in ("linear_left", "linear_right"))
    own = LayerStreams(
        router_norm=wide_norm(source, here + "router_norm") * config.hidden_size**-1.0,
        router=router,
        predict=predict,
        correct=correct,
        scale=source.fused((here + "correct_output_scale",)) if config.streams.scales_gates else None,
        left=left,
        right=right,
        norm=wide_norm(source, prefix + "laurel.post_laurel_norm"),
    )
    return layer._replace(added=Added(narrow_gate(source, prefix), None), streams=own)
