"""Description: what is to be loaded for a hosted model, and how its weights are shared by ranks, from its skeleton alone."""

from __future__ import annotations

import re
from collections.abc import Mapping
from enum import StrEnum
from functools import lru_cache
from math import gcd
from typing import NamedTuple

import torch
from torch import nn

from vnext.models.errors import ModelError
from vnext.models.hosted.looking import Seen, audit, look
from vnext.models.hosted.modules import Product, Run, StandIn
from vnext.models.hosted.skeleton import (
    NOT_SERVED,
    Conv1D,
    is_product,
    make_model,
    named,
    names_in_checkpoint,
    position_count,
    replace_functions,
    set_weight,
)
from vnext.models.layers.sharding import Axis, Layout, Sized

STYLES = ("colwise", "rowwise")
"""Of a plan: which layers' outputs, or inputs, are shared by ranks. Layers of other styles are whole on every rank."""


class Kind(StrEnum):
    """What becomes of a weight."""

    EMBEDDING = "embedding"
    HEAD = "head"
    PRODUCT = "product"
    TABLE = "table"
    ROUTER = "router"
    PLAIN = "plain"
    WIDE = "wide"
    SCALAR = "scalar"


class Weight(NamedTuple):
    """A module's weight, its names in the checkpoint, and those of its bias, "" for none. `style` is of a product."""

    kind: Kind
    module: str
    parameter: str
    name: str
    bias: str = ""
    style: str = ""


class Description(NamedTuple):
    """`attention`: each attention module's call, in their order. `width`: of the last layer's states. `whole`: why ranks cannot
    share the model, "" where they can; `shared` is what all sizes that they share are multiples of. `members`: what transformers
    reads of config.json."""

    attention: Mapping[str, Seen]
    width: int
    vocab_size: int
    weights: tuple[Weight, ...]
    layouts: Mapping[str, Layout]
    is_tied: bool
    whole: str
    shared: int
    position_count_max: int
    members: tuple[str, ...]


@lru_cache(maxsize=4)
@torch.inference_mode(False)
@torch.no_grad()
def describe(settings: str) -> Description:
    """The description of the model with this config.json. Raises ModelError."""
    model = make_model(settings, torch.bfloat16)
    names = names_in_checkpoint(model)
    seen, width = look(model)
    weights = list_weights(model, names)
    layouts, shared = lay_out(model, weights)
    head = model.get_output_embeddings()
    replace_functions(model)
    empty(model, weights)
    audit(model)
    return Description(
        attention=seen,
        width=width,
        vocab_size=head.weight.shape[0],
        weights=weights,
        layouts=layouts,
        is_tied=bool(getattr(model.config, "tie_word_embeddings", False)),
        whole=whole_reason(weights, tuple(seen)),
        shared=shared,
        position_count_max=position_count(model),
        members=tuple(type(model.config)().to_dict()),
    )


def list_weights(model: nn.Module, names: Mapping[str, tuple[str, ...]]) -> tuple[Weight, ...]:
    """All that a checkpoint has of the model."""
    head, first = model.get_output_embeddings(), model.get_input_embeddings()
    if not isinstance(head, nn.Linear) or first is None:
        raise ModelError(f"{type(model).__name__} has no plain head that writes text, {NOT_SERVED}")
    found = []
    for path, module in model.named_modules():
        own = [key for key in (*module._parameters, *module._buffers) if f"{path}.{key}" in names]
        own = [key for key in own if getattr(module, key) is not None]
        kinds = {key: kind_of(model, path, key) for key in own}
        for key, kind in kinds.items():
            if key == "bias" and kinds.get("weight") in (Kind.PRODUCT, Kind.HEAD):
                continue
            bias = "bias" if kind in (Kind.PRODUCT, Kind.HEAD) and "bias" in own else ""
            name, theirs = (_only(names[f"{path}.{each}"], named(module, path)) if each else "" for each in (key, bias))
            style = style_of(model, path) if kind is Kind.PRODUCT else ""
            found.append(Weight(kind, path, key, name, theirs, style))
    return tuple(found)


def _only(names: tuple[str, ...], what: str) -> str:
    if len(names) != 1:
        raise ModelError(f"{what} is made of {len(names)} tensors of a checkpoint, {NOT_SERVED}")
    return names[0]


def kind_of(model: nn.Module, path: str, key: str) -> Kind:
    """What becomes of a module's own parameter or buffer."""
    module = model.get_submodule(path)
    head, first = model.get_output_embeddings(), model.get_input_embeddings()
    weight = getattr(module, key)
    if module is head:
        return Kind.HEAD
    if module is first:
        return Kind.EMBEDDING
    if is_product(module):
        return Kind.PRODUCT
    if weight.dim() == 0:
        return Kind.SCALAR
    if weight.dim() == 1 and weight.is_floating_point():
        strict = any(re.search(rf"\b{part}\b", f"{path}.{key}") for part in model._keep_in_fp32_modules_strict or ())
        return Kind.WIDE if strict or key in module._buffers else Kind.PLAIN
    if weight.dim() == 2 and isinstance(weight, nn.Parameter):
        return Kind.TABLE if isinstance(module, nn.Embedding) else Kind.ROUTER
    raise ModelError(f"{named(module, path)} has {key} of the shape {list(weight.shape)}, {NOT_SERVED}")


def style_of(model: nn.Module, path: str) -> str:
    """What the model's own plan says of a linear layer."""
    inner = path.removeprefix(f"{model.base_model_prefix}.")
    plan = getattr(model.config, "base_model_tp_plan", None) or {}
    return str(plan.get(re.sub(r"\.\d+\.", ".*.", inner), ""))


def lay_out(model: nn.Module, weights: tuple[Weight, ...]) -> tuple[dict[str, Layout], int]:
    """How the checkpoint holds each tensor, and what the sizes that ranks share are multiples of."""
    layouts, shared = {}, 0
    for each in weights:
        module = model.get_submodule(each.module)
        shape, flipped = tuple(getattr(module, each.parameter).shape), isinstance(module, Conv1D)
        if not shape:
            continue
        if len(shape) < 2:
            layouts[each.name] = Layout((Sized(shape[0]),))
            continue
        out, inner = shape[::-1] if flipped else shape
        first = Axis.VOCAB if each.kind in (Kind.EMBEDDING, Kind.HEAD) else Sized(out, each.style == STYLES[0])
        layouts[each.name] = Layout((first,), Sized(inner, each.style == STYLES[1]), flipped)
        if each.bias:
            layouts[each.bias] = Layout((first,))
        if each.style in STYLES:
            shared = gcd(shared, out if each.style == STYLES[0] else inner)
    return layouts, shared or 1


def whole_reason(weights: tuple[Weight, ...], attention: tuple[str, ...]) -> str:
    """Why ranks cannot share a model, "" where they can."""
    products = [each for each in weights if each.kind is Kind.PRODUCT]
    if not any(each.style in STYLES for each in products):
        return "transformers has no plan by which ranks share it"
    for each in products:
        if each.style not in STYLES and each.module.startswith(tuple(f"{name}." for name in attention)):
            return f"{each.module} is {each.style or 'in no plan'}"
    return ""


def empty(model: nn.Module, weights: tuple[Weight, ...]) -> None:
    """Give a model without numbers modules of this tree without weights."""
    run = Run()

    def unknown(x: torch.Tensor) -> torch.Tensor:
        raise AssertionError("a weight without numbers")

    for each in weights:
        module = model.get_submodule(each.module)
        if each.kind is Kind.PRODUCT:
            weight = getattr(module, each.parameter)
            set_module(model, each.module, Product(run, weight.shape[1 if isinstance(module, Conv1D) else 0]))
        elif each.kind in (Kind.EMBEDDING, Kind.TABLE, Kind.ROUTER):
            weight = getattr(module, each.parameter)
            set_weight(module, each.parameter, StandIn(tuple(weight.shape), weight.dtype, unknown, unknown))


def set_module(model: nn.Module, path: str, module: nn.Module) -> None:
    """Put a module in the place of one of a model."""
    parent, _, own = path.rpartition(".")
    model.get_submodule(parent)._modules[own] = module
