"""What drafts on a rank: a draft model, which is a smaller checkpoint with the target's vocabulary, whole on every rank; EAGLE-3
heads, which checkpoints can draft for a model; and layers for multi-token prediction of the target's own checkpoint, with its
embedding and head.

Owns what they must be. Every rank computes the same drafts, because it has the same weights and the same tokens.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from vnext.base.tokenizer_files import VOCABULARY, tokenizer_json
from vnext.kernels.arrays import torch_dtype
from vnext.kernels.format import weight_formats
from vnext.models.config.model_config import ModelConfig, load_config, load_head_config
from vnext.models.families import llama_eagle3
from vnext.models.layers.kv_cache import kv_groups
from vnext.models.layers.sharding import alone
from vnext.models.loading.weights import load_params
from vnext.models.registry import mtp
from vnext.runtime.protocol.settings import RankSettings, SettingsError
from vnext.runtime.rank.draft_head import DraftHead, Functions
from vnext.runtime.rank.runner import ModelRunner


def load_draft_model(settings: RankSettings, target: ModelRunner) -> ModelRunner:
    """The draft model that the settings name. Raises ModelError, SettingsError."""
    path = Path(settings.draft_path)
    config = load_config(path)
    if reason := why_no_draft_model(path, config, target.path, target.config, settings.max_model_len):
        raise SettingsError(f"speculative_config names the draft model {path}, {reason}")
    own = replace(settings, max_lora_rank=0, kv_cache_dtype="auto")
    runner = ModelRunner(path, own, target.device, alone(), config=config)
    require_same_drafts(settings, runner)
    return runner


def require_same_drafts(settings: RankSettings, runner: ModelRunner) -> None:
    """Raise SettingsError where ranks that draft by what `runner` computes may draft differently."""
    if settings.world_size > 1 and not runner.invariance.holds:
        raise SettingsError(
            f"speculative_config asks for method {settings.draft_method}, whose drafts may differ between ranks "
            f"({runner.invariance.why}): take --deterministic, or another method"
        )


def why_no_draft_model(path: Path, draft: ModelConfig, target_path: Path, target: ModelConfig, max_model_len: int | None) -> str:
    """Why a checkpoint cannot draft for another, with the remedy; "" where it can."""
    longest = max_model_len or target.position_count_max
    if draft.vocab_size != target.vocab_size:
        return (
            f"which has a vocabulary of {draft.vocab_size} tokens, and the model has {target.vocab_size}: name one with the "
            "model's tokenizer"
        )
    if vocabulary_of(path) != vocabulary_of(target_path):
        return "whose tokenizer.json gives tokens other numbers than the model's: name one with the model's tokenizer"
    if draft.position_count_max < longest:
        return f"which knows {draft.position_count_max} positions of {longest}: take --max-model-len {draft.position_count_max}"
    if draft.recurrent is not None:
        return "which has recurrent layers: name one whose layers all attend"
    if any((*kv_groups(draft).windows, *kv_groups(target).windows)):
        return "and it or the model has attention windows: name models with full attention, or another method"
    return ""


def vocabulary_of(path: Path) -> Any:
    """The numbers of a checkpoint's tokens; None without a tokenizer.json."""
    if not (path / VOCABULARY).is_file():
        return None
    read = json.loads(tokenizer_json(path))
    added = {each["content"]: each["id"] for each in read.get("added_tokens", ())}
    return read.get("model", {}).get("vocab"), added


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
    config, layer = replace(target.config, layer_count=1), mtp(target.config.architecture)
    assert layer is not None, "the configuration has such layers"
    params = load_params(
        target.path, config, alone(), torch_dtype(target.dtype), target.device,
        weight_formats(settings.quantization, target.invariance.form),
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
        return f"the model in {target.path} has no layers for multi-token prediction that vnext reads (MiMo-7B and DeepSeek 3 have)"
    return "the model has attention windows" if any(kv_groups(target.config).windows) else ""
