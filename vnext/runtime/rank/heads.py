"""Heads that draft on a rank: EAGLE-3's, which checkpoints can draft for a model, and layers for multi-token prediction of the
target's own checkpoint, with its embedding and head.

Owns what they must be. Every rank computes the same drafts, because it has the same weights and the same tokens.
"""

from __future__ import annotations

from pathlib import Path

from msgspec.structs import replace

from vnext.kernels.arrays import torch_dtype
from vnext.kernels.format import weight_formats
from vnext.models.config.model_config import ModelConfig, load_head_config
from vnext.models.families import llama_eagle3
from vnext.models.layers.kv_cache import kv_groups
from vnext.models.layers.sharding import alone
from vnext.models.loading.weights import load_params
from vnext.models.registry import mtp
from vnext.runtime.protocol.settings import RankSettings, SettingsError
from vnext.runtime.rank.draft_head import DraftHead, Functions
from vnext.runtime.rank.draft_model import require_same_drafts, vocabulary_of
from vnext.runtime.rank.runner import ModelRunner


def load_head(settings: RankSettings, target: ModelRunner) -> DraftHead:
    """That of the settings' method. Raises ModelError, SettingsError."""
    return (load_eagle_head if settings.draft_method == "eagle3" else load_mtp_layer)(settings, target)


def load_eagle_head(settings: RankSettings, target: ModelRunner) -> DraftHead:
    """The head that the settings name. Raises ModelError, SettingsError."""
    path = Path(settings.draft_path)
    config = load_head_config(path)
    if reason := why_not(path, config, target):
        raise SettingsError(f"speculative_config names the EAGLE-3 head {path}, {reason}")
    require_same_drafts(settings, target)
    formats = weight_formats(exact=target.invariance.form)
    params = load_params(path, config, alone(), torch_dtype(target.dtype), target.device, formats=formats)
    if config.hidden_size != target.config.hidden_size and params.embedding is None:
        raise SettingsError(
            f"speculative_config names the EAGLE-3 head {path}, which has no embedding and the width {config.hidden_size}, and the "
            f"model's embedding has {target.config.hidden_size}: name a head that was trained for this model"
        )
    functions = Functions(
        embed=target.parts.embedded if params.embedding is None else lambda token_ids: params.embedding.index_select(0, token_ids),
        combine=lambda states: llama_eagle3.combine(params, states),
        forward=lambda kv, batch: llama_eagle3.forward(params, kv, batch, config, alone()),
        logits=lambda hidden: llama_eagle3.logits(params, hidden, config, alone()),
    )
    return DraftHead(functions, config, layers_of(config, target.config), target)


def layers_of(config: ModelConfig, target: ModelConfig) -> tuple[int, ...]:
    """The target's layers whose inputs the head reads: by default one low, one in the middle and one high."""
    assert config.head is not None
    return config.head.layers or (2, target.layer_count // 2, target.layer_count - 3)


def why_not(path: Path, config: ModelConfig, target: ModelRunner) -> str:
    """Why a head cannot draft for a model, with the remedy; "" where it can."""
    assert config.head is not None
    model, layers, remedy = target.config, layers_of(config, target.config), "name a head that was trained for this model"
    if config.vocab_size != model.vocab_size:
        return f"which has a vocabulary of {config.vocab_size} tokens, and the model has {model.vocab_size}: {remedy}"
    if config.head.target_size != model.hidden_size:
        return f"which reads hidden states of width {config.head.target_size}, and the model's have {model.hidden_size}: {remedy}"
    if not all(0 <= layer < model.layer_count for layer in layers) or len(set(layers)) < len(layers):
        return f"which reads the inputs of layers {', '.join(map(str, layers))} of a model of {model.layer_count} layers: {remedy}"
    if (path / "tokenizer.json").is_file() and vocabulary_of(path) != vocabulary_of(target.path):
        return f"whose tokenizer.json gives tokens other numbers than the model's: {remedy}"
    if any(kv_groups(model).windows):
        return "and the model has attention windows: take another method"
    return ""


def load_mtp_layer(settings: RankSettings, target: ModelRunner) -> DraftHead:
    """The layer that drafts of the model's checkpoint. Raises ModelError, SettingsError."""
    if reason := why_no_layer(target):
        raise SettingsError(f"speculative_config asks for method mtp, and {reason}: take another method")
    require_same_drafts(settings, target)
    config, layer = replace(target.config, layer_count=1, recurrent=None), mtp(target.config.architecture)
    assert layer is not None, "the configuration has such layers"
    params = load_params(
        target.path, config, alone(), torch_dtype(target.dtype), target.device,
        weight_formats(settings.quantization, target.invariance.form, target.settings.activations),
        assemble=lambda source, _: layer.assemble(source, target.config),
    )  # fmt: skip
    functions = Functions(
        embed=target.parts.embedded,
        combine=lambda states: layer.combine(params, states, config),
        forward=lambda kv, batch: layer.forward(params, kv, batch, config),
        logits=target.parts.logits,
    )
    return DraftHead(functions, config, (target.config.layer_count,), target)


def why_no_layer(target: ModelRunner) -> str:
    """Why the model's checkpoint has no layer that drafts for it; "" where it has."""
    if not target.config.mtp_layers:
        known = "MiMo-7B, DeepSeek 3, Qwen 3.5 and Nemotron 3 have"
        return f"the model in {target.path} has no layers for multi-token prediction that vnext reads ({known})"
    return "the model has attention windows" if any(kv_groups(target.config).windows) else ""
