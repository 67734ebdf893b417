"""Together: which settings a rank refuses beside each other and beside its model.

Owns the refusals that depend on the model or on the device, and the trial of the functions that installed packages have; refusals
of settings alone are in options/settings_check.py. docs/options.md has the table of both.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from vnext.kernels.arrays import torch_dtype
from vnext.kernels.format import AUTO, is_served
from vnext.models.config.model_config import ModelConfig
from vnext.models.layers.kv_cache import kv_groups
from vnext.models.layers.sharding import Parallel
from vnext.runtime.protocol.settings import OFF, RankSettings, SettingsError

if TYPE_CHECKING:
    from vnext.models.hosted.own_attention import OwnAttention
    from vnext.sampling.sampling import Choose

HEADS = ("eagle3", "mtp")
"""Methods whose drafts a head makes, which keeps states of its own."""


def require_device(settings: RankSettings, device: str) -> None:
    """Raise SettingsError for what works on a CPU so far, on another device."""
    if device == "cpu":
        return
    given = {
        "--pipeline-parallel-size": settings.pipeline_parallel_size > 1, "--nnodes": settings.nnodes > 1,
        "--enable-expert-parallel": settings.enable_expert_parallel, "--enable-expert-load": settings.enable_expert_load,
        "--sampler": bool(settings.sampler), "--enable-guidance": settings.enable_guidance,
        "--role (or --prefill-engines)": settings.role != "both",
        "--enable-return-routed-experts": settings.returns_routed_experts,
        f"--quantization {settings.quantization}": not is_served(settings.quantization, device),
        f"--activations {settings.activations}": settings.activations != AUTO,
        "--packed-weights-dir": settings.packed_weights_dir not in ("", OFF),
    }  # fmt: skip
    for option, is_given in given.items():
        if is_given:
            raise SettingsError(f"{option} works on a CPU so far: leave it out, or add --device cpu")


def require_model(settings: RankSettings, config: ModelConfig, device: str) -> None:
    """Raise SettingsError for what does not go with recurrent layers, encoders, unlike layers, or pages that windows empty."""
    kinds = {
        "models with recurrent layers": config.recurrent is not None, "encoders": config.encoder is not None,
        "models with unlike layers": config.has_unlike_layers,
    }  # fmt: skip
    pages = {"--kv-disk-dir": bool(settings.kv_disk_dir), "a hand-over": settings.role in ("prefill", "decode")}
    served = next((kind for kind, is_one in kinds.items() if is_one), "")
    others = {
        "--device cuda": device != "cpu", "--pipeline-parallel-size": settings.pipeline_parallel_size > 1,
        "--speculative-config": bool(settings.draft_method) and config.encoder is not None,
    }  # fmt: skip
    for option, is_given in others.items():
        if served and is_given:
            raise SettingsError(f"{option} does not serve {served} so far, and this is one: leave it out")
    if settings.enable_guidance:
        _require_plain_rows(settings, config)
    for who, is_given in pages.items():
        if is_given:
            _require_plain_pages(who, settings, config)


def _require_plain_rows(settings: RankSettings, config: ModelConfig) -> None:
    """Raise SettingsError unless a step may have rows that no request of the state knows."""
    others = {
        "a disk tier": settings.kv_disk_dir, "a hand-over": settings.role != "both", "expert ids": settings.returns_routed_experts,
        "drafts by a model": settings.draft_method in (*HEADS, "draft_model"), "recurrent layers": config.recurrent,
        "an encoder": config.encoder, "unlike layers": config.has_unlike_layers,
    }  # fmt: skip
    if found := next((what for what, is_there in others.items() if is_there), ""):
        raise SettingsError(f"--enable-guidance does not go with {found}: leave one of the two out")


def _require_plain_pages(who: str, settings: RankSettings, config: ModelConfig) -> None:
    """Raise SettingsError unless a page holds all that belongs to a block."""
    if settings.draft_method in HEADS or settings.returns_routed_experts:
        raise SettingsError(f"{who} keeps no state of a draft head and no expert ids: leave one of the two out")
    if any(kv_groups(config).windows):
        raise SettingsError(f"{who} serves models with full attention so far, and this one has windows: leave it out")


class Own(NamedTuple):
    """A user's sampler and attention, which installed packages have; None: vnext's."""

    sampler: Choose | None = None
    attention: OwnAttention | None = None


def load_own(settings: RankSettings, config: ModelConfig, parallel: Parallel, dtype: str, device: str) -> Own:
    """What the settings name, after its trial. Raises SettingsError."""
    sampler = _load_sampler(settings.sampler, config.vocab_size) if settings.sampler else None
    name = settings.attention_function
    return Own(sampler, _load_attention(name, config, parallel, dtype, device) if name else None)


def _load_attention(name: str, config: ModelConfig, parallel: Parallel, dtype: str, device: str) -> OwnAttention:
    from vnext.models.hosted.own_attention import AttentionError, heads_of, own_attention  # attention is torch's

    try:
        return own_attention(name, heads_of(config, parallel, torch_dtype(dtype)), device)
    except AttentionError as error:
        raise SettingsError(f"--attention-function: {error}") from error


def _load_sampler(name: str, vocab_size: int) -> Choose:
    from vnext.sampling.outside import SamplerError, own_sampler  # samplers are torch's

    try:
        return own_sampler(name, vocab_size)
    except SamplerError as error:
        raise SettingsError(f"--sampler: {error}") from error
