"""The layer for multi-token prediction as a draft head: of the target's own checkpoint, with the target's embedding and head."""

from __future__ import annotations

from msgspec.structs import replace

from vnext.kernels.arrays import torch_dtype
from vnext.kernels.format import weight_formats
from vnext.models.layers.kv_cache import kv_groups
from vnext.models.layers.sharding import alone
from vnext.models.loading.weights import load_params
from vnext.models.registry import mtp
from vnext.runtime.protocol.settings import RankSettings, SettingsError
from vnext.runtime.rank.draft_head import DraftHead, Functions
from vnext.runtime.rank.draft_model import require_same_drafts
from vnext.runtime.rank.runner import ModelRunner


def load_mtp_layer(settings: RankSettings, target: ModelRunner) -> DraftHead:
    """The layer that drafts of the model's checkpoint. Raises ModelError, SettingsError."""
    if reason := why_not(target):
        raise SettingsError(f"speculative_config asks for method mtp, and {reason}: take another method")
    require_same_drafts(settings, target)
    config, layer = replace(target.config, layer_count=1), mtp(target.config.architecture)
    assert layer is not None, "the configuration has such layers"
    params = load_params(
        target.path, config, alone(), torch_dtype(target.dtype), target.device, None,
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


def why_not(target: ModelRunner) -> str:
    """Why the model's checkpoint has no layer that drafts for it; "" where it has."""
    if not target.config.mtp_layers:
        return f"the model in {target.path} has no layers for multi-token prediction that vnext reads (MiMo-7B and DeepSeek 3 have)"
    return "the model has attention windows" if any(kv_groups(target.config).windows) else ""
