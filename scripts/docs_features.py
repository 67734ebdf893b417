"""The table of what a start refuses together, found by asking the checks that a start asks: every feature with every other."""

from __future__ import annotations

import json
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from msgspec.structs import replace

from vnext.kernels.calls import Router
from vnext.models.config.layer_kinds import Encoder
from vnext.models.config.model_config import Experts, ModelConfig, Recurrent, parse_config
from vnext.options.settings_check import engine_settings
from vnext.runtime.engine.process import SAME_FOR_RANKS
from vnext.runtime.protocol.settings import EngineSettings, RankSettings, SettingsError
from vnext.runtime.protocol.speculation import speculation_of
from vnext.runtime.rank.routed_experts import RoutedExperts
from vnext.runtime.rank.together import require_device, require_model


def drafts(**given: object) -> dict[str, Any]:
    """The setting of drafts by a method."""
    return {"speculative_config": json.dumps({**given, "num_speculative_tokens": 2})}


FEATURES: Mapping[str, dict[str, Any]] = MappingProxyType(
    {
        "a GPU": {"device": "cuda"},
        "stages": {"pipeline_parallel_size": 2},
        "hosts": {"nnodes": 2, "tensor_parallel_size": 2, "cluster_secret_file": "secret"},
        "several engines": {"data_parallel_size": 2},
        "whole experts": {"enable_expert_parallel": True},
        "drafts from texts": drafts(method="ngram"),
        "a draft model": drafts(method="draft_model", model="small"),
        "a draft head": drafts(method="mtp"),
        "LoRA": {"enable_lora": True},
        "the disk tier": {"kv_disk_dir": "folder"},
        "a hand-over": {"data_parallel_size": 2, "prefill_engines": 1},
        "expert ids": {"enable_return_routed_experts": True},
        "guidance": {"enable_guidance": True},
        "int8 weights": {"quantization": "int8"},
        "packed weights": {"packed_weights_dir": "folder"},
        "an own sampler": {"sampler": "own"},
    }
)
"""Features by the settings that turn them on."""
PLAIN = parse_config(
    {
        "architectures": ["LlamaForCausalLM"], "vocab_size": 8, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 2,
        "num_attention_heads": 2,
    },
    {},
)  # fmt: skip
WITH_EXPERTS = replace(PLAIN, experts=Experts(count=4, intermediate_size=8, router=Router(2, True)))
MODELS: Mapping[str, ModelConfig] = MappingProxyType(
    {
        "windows": replace(WITH_EXPERTS, windows=(4, 0)),
        "recurrent layers": replace(WITH_EXPERTS, recurrent=Recurrent(layers=(0,), width=3, value_heads=2)),
        "unlike layers": replace(WITH_EXPERTS, cache_layers=(0, 0)),
        "an encoder": replace(WITH_EXPERTS, encoder=Encoder()),
    }
)
"""Kinds of models, in which some layers or all are of a kind."""


def refusal(settings: Mapping[str, Any], model: ModelConfig = WITH_EXPERTS) -> str:
    """Why an engine with these settings and this model does not start, "" where it does."""
    try:
        engine = engine_settings(**settings)
        rank = rank_of(engine)
        require_device(rank, engine.device)
        require_model(rank, model, engine.device)
        if engine.enable_return_routed_experts:
            RoutedExperts(model, engine.enable_prefix_caching)
    except SettingsError as error:
        return str(error)
    return ""


def rank_of(engine: EngineSettings) -> RankSettings:
    """A rank's part of the settings, as far as checks ask for it."""
    speculation = speculation_of(engine.speculative_config)
    return RankSettings(
        rank=0, world_size=engine.world_size, ring="", results_address="", rendezvous="", model_path="", threads=1,
        kv_cache_bytes=0, draft_method=speculation.method if speculation else "",
        returns_routed_experts=engine.enable_return_routed_experts, role="prefill" if engine.prefill_engines else engine.role,
        **{name: getattr(engine, name) for name in SAME_FOR_RANKS},
    )  # fmt: skip


def refused_together() -> dict[tuple[str, str], str]:
    """Why each pair of features, or of a feature and a kind of model, is refused, "" where it is not. One setting has one value."""
    found = {}
    for name, own in FEATURES.items():
        for other, others in FEATURES.items():
            clash = next((field for field in own if own[field] != others.get(field, own[field])), "")
            found[name, other] = f"{clash} has one value" if clash else refusal({"device": "cpu", **own, **others})
        for kind, model in MODELS.items():
            found[name, kind] = found[kind, name] = refusal({"device": "cpu", **own}, model)
    return found


def features() -> str:
    """The table: a cross where a start refuses both. Each pair stands once."""
    refused, columns = refused_together(), tuple(FEATURES)[:-1]
    lines = ["| |" + "|".join(str(number) for number, _ in enumerate(columns, 1)) + "|", f"|---{'|-' * len(columns)}|"]
    for number, name in enumerate((*FEATURES, *MODELS)):
        cells = "".join("|x" if refused[name, other] else "| " for other in columns[:number]).rstrip("| ")
        lines.append(f"|{number + 1} {name}{cells}|" if name in FEATURES else f"|{name}{cells}|")
    return "\n".join(lines) + "\n"
