"""Own experts: those that decoders of transformers compute in their modules, beside its interface, by the names of their classes.

Owns what takes their place: modules with a weight for all experts, as the interface has them. JetMoe's heads have experts too; of
these each has products of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Protocol, cast

import torch
from torch import nn
from transformers.integrations.moe import _default_apply_gate

from vnext.models.hosted.modules import run_experts


class JoinedExperts(nn.Module):
    """Experts [E, 2 * I, hidden] and [E, hidden, I] in the place of others, of the same sizes and dtype."""

    _apply_gate = _default_apply_gate
    has_gate = is_concatenated = True
    has_bias = is_transposed = has_post_expert_norm = False

    def __init__(self, count: int, inner: int, like: torch.Tensor, activation: nn.Module) -> None:
        """`like`: a weight whose last axis is as wide as the model."""
        super().__init__()
        self.gate_up_proj = nn.Parameter(like.new_empty((count, 2 * inner, like.shape[-1])), requires_grad=False)
        self.down_proj = nn.Parameter(like.new_empty((count, like.shape[-1], inner)), requires_grad=False)
        self.act_fn = activation

    def forward(self, x: torch.Tensor, ids: torch.Tensor, shares: torch.Tensor) -> torch.Tensor:
        """x [..., hidden] through the experts `ids` [T, k] with these shares."""
        return run_experts(self, x.reshape(-1, x.shape[-1]), ids, shares).view(x.shape)


class Theirs(Protocol):
    """What is read of modules of transformers here."""

    num_experts: int
    ffn_hidden_size: int
    hidden_size: int
    mlp: Theirs
    w1: torch.Tensor
    activation: nn.Module
    activation_fn: nn.Module
    input_linear: Theirs
    weight: torch.Tensor


def dbrx(module: nn.Module, own: Theirs) -> nn.Module:
    return JoinedExperts(own.num_experts, own.ffn_hidden_size, own.mlp.w1, own.mlp.activation_fn)


def jetmoe(module: nn.Module, own: Theirs) -> nn.Module:
    weight = own.input_linear.weight
    module.experts = JoinedExperts(weight.shape[0], own.hidden_size, weight, own.activation)
    del module.input_linear, module.output_linear
    return module


def jetmoe_heads(module: nn.Module, own: Theirs) -> nn.Module:
    """Their products are modules 0 to E - 1."""
    weight = own.input_linear.weight
    count, inner, width = weight.shape
    del module.input_linear, module.output_linear
    for index in range(count):
        pair = (nn.Linear(*sizes, bias=False, device="meta", dtype=weight.dtype) for sizes in ((width, inner), (inner, width)))
        module.add_module(str(index), nn.ModuleDict(dict(zip(("input_linear", "output_linear"), pair))))
    return module


OWN_EXPERTS: Mapping[str, Callable[[nn.Module, Theirs], nn.Module]] = MappingProxyType(
    {"DbrxExperts": dbrx, "JetMoeMoE": jetmoe, "JetMoeMoA": jetmoe_heads}
)


def replace_own_experts(base: nn.Module) -> None:
    """Let a model's modules have experts as the interface has them, if they do not."""
    for name, module in list(base.named_modules()):
        if (joined := OWN_EXPERTS.get(type(module).__name__)) is not None:
            parent, _, own = name.rpartition(".")
            base.get_submodule(parent)._modules[own] = joined(module, cast(Theirs, module))
