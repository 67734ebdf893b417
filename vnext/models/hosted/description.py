"""Description: what is to be loaded for a hosted model, and how its weights are shared by ranks, from its skeleton alone."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from enum import StrEnum
from functools import lru_cache
from math import gcd
from typing import NamedTuple

import torch
from torch import nn
from transformers.integrations.moe import _default_apply_gate
from transformers.modeling_utils import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from vnext.models.errors import ModelError
from vnext.models.hosted.looking import Seen, audit, look
from vnext.models.hosted.modules import Joined, Part, Product, Run, StandIn
from vnext.models.hosted.own_code import NOT_SERVED
from vnext.models.hosted.skeleton import (
    is_product,
    make_model,
    named,
    names_in_checkpoint,
    position_count,
    replace_functions,
    set_weight,
)
from vnext.models.layers.sharding import Axis, Layout, Sized

EXPERT_WEIGHTS = ("gate_up_proj", "down_proj")
EXPERT_ACTIVATIONS = {"SiLUActivation": "silu", "SiLU": "silu", "GELUTanh": "gelu_tanh"}
PLAIN_EXPERTS = {
    "has_gate": True, "is_concatenated": True, "has_bias": False, "has_post_expert_norm": False,
}  # fmt: skip
STYLE_NAMES = {"packed_colwise": "colwise"}
STYLES = ("colwise", "rowwise")
"""Of a plan: which layers' outputs, or inputs, are shared by ranks. Layers of other styles are whole on every rank."""


class Kind(StrEnum):
    """What becomes of a weight."""

    EMBEDDING = "embedding"
    HEAD = "head"
    PRODUCT = "product"
    PART = "part"
    TABLE = "table"
    ROUTER = "router"
    PLAIN = "plain"
    WIDE = "wide"
    SCALAR = "scalar"
    EXPERTS = "experts"


class Weight(NamedTuple):
    """A module's weight, its names in the checkpoint, and those of its bias, "" for none. `style` is of a product. `groups`: of
    experts, the names of each one's parts. `outputs`: of a product, those of each layer that it computes, `others` behind it."""

    kind: Kind
    module: str
    parameter: str
    name: str
    bias: str = ""
    style: str = ""
    groups: tuple[tuple[str, ...], ...] = ()
    outputs: tuple[int, ...] = ()
    others: tuple[Weight, ...] = ()

    @property
    def names(self) -> tuple[str, ...]:
        """Those of all layers' weights."""
        return (self.name, *(each.name for each in self.others))

    @property
    def biases(self) -> tuple[str, ...]:
        """Those of all layers, none without."""
        return (self.bias, *(each.bias for each in self.others)) if self.bias else ()


class Description(NamedTuple):
    """`attention`: the calls of attention in their order, each with its module's name. `width`: of the last layer's states.
    `whole`: why ranks cannot share the model, "" where they can; `shared` is what all sizes that they share are multiples of.
    `members`: what transformers reads of config.json. `activation`: that of the experts. `is_replaced`: functions of torch give way
    to ours in steps."""

    attention: tuple[tuple[str, Seen], ...]
    width: int
    vocab_size: int
    weights: tuple[Weight, ...]
    layouts: Mapping[str, Layout]
    is_tied: bool
    whole: str
    shared: int
    position_count_max: int
    members: tuple[str, ...]
    activation: str
    is_replaced: bool


@lru_cache(maxsize=4)
@torch.inference_mode(False)
@torch.no_grad()
def describe(settings: str) -> Description:
    """The description of the model with this config.json. Raises ModelError."""
    try:
        return _describe(settings, True)
    except ModelError:  # such as of a model that takes no parts of a product
        return _describe(settings, False)


def _describe(settings: str, joins: bool) -> Description:
    """`joins`: layers that read the same become one product."""
    model = make_model(settings, torch.bfloat16)
    names = names_in_checkpoint(model)
    seen, width, alike = look(model)
    weights = list_weights(model, names)
    layouts, shared = lay_out(model, weights)
    whole = whole_reason(weights, tuple(name for name, _ in seen))
    if joins:
        weights = join(model, weights, alike)
    head = model.get_output_embeddings()
    activations = {activation_of(model.get_submodule(each.module)) for each in weights if each.kind is Kind.EXPERTS}
    replace_functions(model)
    empty(model, weights)
    return Description(
        attention=seen,
        width=width,
        vocab_size=head.weight.shape[0],
        weights=weights,
        layouts=layouts,
        is_tied=bool(getattr(model.config, "tie_word_embeddings", False)),
        whole=whole,
        shared=shared,
        position_count_max=position_count(model),
        members=tuple(type(model.config)().to_dict()),
        activation=next(iter(activations), "silu"),
        is_replaced=audit(model),
    )


def list_weights(model: PreTrainedModel, names: Mapping[str, tuple[str, ...]]) -> tuple[Weight, ...]:
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
            if kind is Kind.EXPERTS:
                groups = expert_groups(names[f"{path}.{key}"], f"{path}.{key}", len(getattr(module, key)))
                found.append(Weight(kind, path, key, groups[0][0], style=style_of(model, f"{path}.{key}"), groups=groups))
                continue
            name, theirs = (_only(names[f"{path}.{each}"], named(module, path)) if each else "" for each in (key, bias))
            style = style_of(model, path) if kind is Kind.PRODUCT else ""
            found.append(Weight(kind, path, key, name, theirs, style))
    if shared := [name for name, count in Counter(each.name for each in found).items() if count > 1]:
        raise ModelError(f"{type(model).__name__} cuts {shared[0]} of a checkpoint into parts, {NOT_SERVED}")
    return tuple(found)


def _only(names: tuple[str, ...], what: str) -> str:
    if len(names) != 1:
        raise ModelError(f"{what} is made of {len(names)} tensors of a checkpoint, {NOT_SERVED}")
    return names[0]


def expert_groups(names: tuple[str, ...], weight: str, count: int) -> tuple[tuple[str, ...], ...]:
    """Each expert's tensors of a checkpoint, gate before up. A tensor of all experts is read as tensors of each, whose names are
    those that others have."""
    here, _, key = weight.rpartition(".")
    if not all(places := [re.search(r"experts\.(\d+)\.", name) for name in names]):
        parts = ("gate_proj", "up_proj") if key == EXPERT_WEIGHTS[0] else (key,)
        return tuple(tuple(f"{here}.{index}.{part}.weight" for part in parts) for index in range(count))
    groups: dict[int, list[str]] = {}
    for name, place in zip(names, places):
        groups.setdefault(int(place[1]) if place else 0, []).append(name)
    return tuple(tuple(groups[index]) for index in sorted(groups))


def activation_of(module: nn.Module) -> str:
    """That of experts, by the kernels' name. Raises ModelError for experts that are more than gate, up and down."""
    name = EXPERT_ACTIVATIONS.get(type(getattr(module, "act_fn", None)).__name__, "")
    plain = all(getattr(module, key, not asked) is asked for key, asked in PLAIN_EXPERTS.items())
    if not name or not plain or getattr(type(module), "_apply_gate", None) is not _default_apply_gate:
        raise ModelError(f"{type(module).__name__} has experts of its own kind, {NOT_SERVED}")
    return name


def kind_of(model: PreTrainedModel, path: str, key: str) -> Kind:
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
        if weight.shape[0] == 1:
            return Kind.WIDE
        return Kind.TABLE if isinstance(module, nn.Embedding) else Kind.ROUTER
    if weight.dim() == 3 and key in EXPERT_WEIGHTS and hasattr(module, "is_concatenated"):
        return Kind.EXPERTS
    raise ModelError(f"{named(module, path)} has {key} of the shape {list(weight.shape)}, {NOT_SERVED}")


def style_of(model: PreTrainedModel, path: str) -> str:
    """What the model's own plan says of a linear layer."""
    inner = path.removeprefix(f"{model.base_model_prefix}.")
    plan = getattr(model.config, "base_model_tp_plan", None) or {}
    return STYLE_NAMES.get(found := str(plan.get(re.sub(r"\.\d+\.", ".*.", inner), "")), found)


def lay_out(model: PreTrainedModel, weights: tuple[Weight, ...]) -> tuple[dict[str, Layout], int]:
    """How the checkpoint holds each tensor, and what the sizes that ranks share are multiples of."""
    layouts: dict[str, Layout] = {}
    shared = 0
    for each in weights:
        module = model.get_submodule(each.module)
        shape, flipped = tuple(getattr(module, each.parameter).shape), isinstance(module, Conv1D)
        if each.kind is Kind.EXPERTS:
            turned = shape[:1] + shape[:0:-1] if module.is_transposed else shape
            size = lay_out_experts(layouts, each, turned)
            shared = gcd(shared, size) if each.style else shared
            continue
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


def lay_out_experts(layouts: dict[str, Layout], weight: Weight, shape: tuple[int, ...]) -> int:
    """How the checkpoint holds the parts of experts [E, out, in]; the size that ranks share."""
    out, inner = shape[1] // len(weight.groups[0]), shape[2]
    is_row = weight.parameter == EXPERT_WEIGHTS[1]
    layout = Layout((Sized(out, bool(weight.style) and not is_row),), Sized(inner, bool(weight.style) and is_row))
    layouts.update({name: layout for group in weight.groups for name in group})
    return inner if is_row else out


def whole_reason(weights: tuple[Weight, ...], attention: tuple[str, ...]) -> str:
    """Why ranks cannot share a model, "" where they can."""
    products = [each for each in weights if each.kind is Kind.PRODUCT]
    if not any(each.style in STYLES for each in products):
        return "transformers has no plan by which ranks share it"
    for each in products:
        if each.style not in STYLES and each.module.startswith(tuple(f"{name}." for name in attention)):
            return f"{each.module} is {each.style or 'in no plan'}"
    return ""


def join(model: PreTrainedModel, weights: tuple[Weight, ...], alike: tuple[tuple[str, ...], ...]) -> tuple[Weight, ...]:
    """The weights, products of a module that read the same as one: those that ranks share alike, all with biases or none."""
    places, found = {each.module: place for place, each in enumerate(weights) if each.kind is Kind.PRODUCT}, list(weights)
    for names in alike:
        groups: dict[tuple[object, ...], list[Weight]] = {}
        for each in (weights[places[name]] for name in names if name in places):
            key = (each.module.rpartition(".")[0], each.style, bool(each.bias), type(model.get_submodule(each.module)))
            groups.setdefault(key, []).append(each)
        for first, *others in groups.values():
            if others and first.style != STYLES[1]:
                outputs = tuple(outputs_of(model, each) for each in (first, *others))
                found[places[first.module]] = first._replace(outputs=outputs, others=tuple(others))
                for each in others:
                    found[places[each.module]] = each._replace(kind=Kind.PART)
    return tuple(found)


def outputs_of(model: PreTrainedModel, product: Weight) -> int:
    module = model.get_submodule(product.module)
    return int(getattr(module, product.parameter).shape[1 if isinstance(module, Conv1D) else 0])


def set_product(model: PreTrainedModel, each: Weight, product: Product) -> None:
    """Put a product in the place of the layers that it computes."""
    if not each.others:
        set_module(model, each.module, product)
        return
    joined = Joined(product, each.outputs)
    for place, layer in enumerate((each, *each.others)):
        set_module(model, layer.module, Part(joined, place))


def empty(model: PreTrainedModel, weights: tuple[Weight, ...]) -> None:
    """Give a model without numbers modules of this tree without weights."""
    run = Run()

    def unknown(x: torch.Tensor) -> torch.Tensor:
        raise AssertionError("a weight without numbers")

    for each in weights:
        module = model.get_submodule(each.module)
        if each.kind is Kind.PRODUCT:
            set_product(model, each, Product(run, sum(each.outputs) or outputs_of(model, each)))
        elif each.kind is Kind.EXPERTS:
            module.__dict__["vnext_experts"] = None
        elif each.kind in (Kind.EMBEDDING, Kind.TABLE, Kind.ROUTER):
            weight = getattr(module, each.parameter)
            set_weight(module, each.parameter, StandIn(tuple(weight.shape), weight.dtype, unknown, unknown))


def set_module(model: PreTrainedModel, path: str, module: nn.Module) -> None:
    parent, _, own = path.rpartition(".")
    model.get_submodule(parent)._modules[own] = module
