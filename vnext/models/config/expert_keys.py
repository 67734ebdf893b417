"""Experts by the keys of config.json that families share: those of Mixtral and DeepSeek V3, which others took over."""

from __future__ import annotations

from typing import Literal

from vnext.kernels.calls import Router
from vnext.models.config.json_keys import Json, flag, number, positive, shown
from vnext.models.config.model_config import Experts, ModelConfig
from vnext.models.errors import ModelError

GROUPED = "group_limited_greedy"
"""The topk_method of DeepSeek V2 by groups."""


def mixtral_experts(raw: Json, *, marks: Literal["softmax", "sigmoid"] = "softmax") -> Experts:
    """Experts in each layer, of which the shares sum to one. Raises ModelError."""
    router = Router(positive(raw, "num_experts_per_tok"), True, marks=marks)
    count, wide = positive(raw, "num_local_experts"), positive(raw, "intermediate_size")
    return checked(Experts(count=count, intermediate_size=wide, router=router))


def sigmoid_experts(raw: Json, dense_layers: tuple[int, ...] = ()) -> Experts:
    """Experts marked by sigmoids, chosen with a bias, in groups, beside shared ones. Raises ModelError."""
    wide, count = positive(raw, "moe_intermediate_size"), positive(raw, "n_routed_experts")
    router = Router(
        positive(raw, "num_experts_per_tok"),
        flag(raw, "norm_topk_prob"),
        marks="sigmoid",
        scale=number(raw, "routed_scaling_factor", 1.0),
        groups=positive(raw, "n_group", 1),
        kept_groups=positive(raw, "topk_group", 1),
    )
    shared_size = wide * positive(raw, "n_shared_experts", 1)
    return checked(
        Experts(count=count, intermediate_size=wide, router=router, dense_layers=dense_layers, shared_size=shared_size)
    )


def softmax_experts(raw: Json, dense_layers: tuple[int, ...], group_best: int = 1) -> Experts:
    """Experts marked by softmax, in groups if topk_method says so or is not there, beside shared ones. `group_best`: by how many of
    its best a group is marked. Raises ModelError."""
    has_groups = raw.get("topk_method", GROUPED) == GROUPED
    groups = (positive(raw, "n_group", 1), positive(raw, "topk_group", 1)) if has_groups else (1, 1)
    count, wide = positive(raw, "n_routed_experts"), positive(raw, "moe_intermediate_size")
    normalise, scale = flag(raw, "norm_topk_prob"), number(raw, "routed_scaling_factor", 1.0)
    router = Router(positive(raw, "num_experts_per_tok"), normalise, "softmax", scale, *groups, group_best=group_best)
    shared = wide * positive(raw, "n_shared_experts", 1)
    return checked(Experts(count=count, intermediate_size=wide, router=router, dense_layers=dense_layers, shared_size=shared))


def expert_activation(config: ModelConfig) -> str:
    """That of the gates of experts, or the model's."""
    return (config.experts.activation if config.experts else "") or config.activation


def first_layers(raw: Json, key: str) -> tuple[int, ...]:
    """The layers with a plain MLP where a key counts the first ones, which may be 0. Raises ModelError."""
    return tuple(range(positive(raw, key) if raw.get(key) else 0))


def dense_kinds(raw: Json, first: int) -> tuple[int, ...]:
    """The layers that mlp_layer_types calls dense, without it the first ones. Raises ModelError."""
    count = positive(raw, "num_hidden_layers")
    kinds = raw.get("mlp_layer_types") or ["dense" if layer < first else "sparse" for layer in range(count)]
    if len(kinds) != count or not set(kinds) <= {"dense", "sparse"}:
        raise ModelError(f"mlp_layer_types must name dense or sparse for each of {count} layers but is {shown(kinds)}")
    return tuple(layer for layer, kind in enumerate(kinds) if kind == "dense")


def dense_layers(raw: Json) -> tuple[int, ...]:
    """Layers with a plain MLP: those named, and those between every decoder_sparse_step-th."""
    named, step = raw.get("mlp_only_layers") or [], positive(raw, "decoder_sparse_step", 1)
    if not isinstance(named, list):
        raise ModelError(f"mlp_only_layers must be a list of layers but is {shown(named)}; correct config.json")
    count = positive(raw, "num_hidden_layers")
    return tuple(index for index in range(count) if index in named or (index + 1) % step)


def checked(experts: Experts) -> Experts:
    """The same experts. Raises ModelError if they are too few for what the router chooses."""
    router, count = experts.router, experts.count
    size = count // router.groups
    whole = count % router.groups == 0 and router.kept_groups <= router.groups
    enough = router.per_token <= size * router.kept_groups and (router.groups == 1 or size >= router.group_best)
    if not (whole and enough):
        raise ModelError(
            f"{count} experts in {router.groups} groups, of which {router.kept_groups} are kept, cannot give each token "
            f"{router.per_token}; correct config.json"
        )
    return experts
