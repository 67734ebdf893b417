"""Layer inputs: what tokens give to each layer beside the stream, and what layers of Gemma 3n and 4 add behind or beside their MLP.

Every token has a vector for each layer, from a table and from its embedding (per-layer embeddings, Google, "Gemma 3n", 2025).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from vnext.kernels.arrays import Array
from vnext.models.layers.layers import Linear, SparseMlp, Step, embed, norm_of, sparse_mlp

if TYPE_CHECKING:
    import torch


class InputTable(NamedTuple):
    """`table` [V_local, L * P] of `known` tokens, the first one for all others, times `scale`; `projection` packed [L * P, hidden]
    of embeddings, whole on every rank, times `projection_scale`, then normed by `norm` [P]; a layer's input is their sum times
    `sum_scale`."""

    table: Array
    known: int
    scale: float
    projection: Any
    projection_scale: float
    norm: Array
    sum_scale: float = 2.0**-0.5


class Narrow(NamedTuple):
    """`gate` [P, hidden] and `projection` [hidden, P], whole on every rank, and the norm [hidden] of what they give."""

    gate: Linear
    projection: Linear
    norm: Array


class Added(NamedTuple):
    """What follows a layer's MLP: its own inputs through a narrow gate, None for none; then `scale` [1] multiplies the stream."""

    narrow: Narrow | None
    scale: Array | None


class Beside(NamedTuple):
    """Experts that read the stream as the MLP does: `router_norm` float32 [hidden] makes what the router reads, `norm` what experts
    read; `after_mlp` and `after_experts` norm either part before they are added."""

    experts: SparseMlp
    router_norm: Array
    norm: Array
    after_mlp: Array
    after_experts: Array


def layer_inputs(inputs: InputTable, token_ids: torch.Tensor, embedded: torch.Tensor, step: Step) -> torch.Tensor:
    """What tokens of these embeddings [T, hidden] give to layers, [T, L, P]."""
    chosen, width = step.operations, inputs.norm.shape[0]
    looked_up = embed(inputs.table, token_ids.where(token_ids < inputs.known, 0), step.parallel) * inputs.scale
    projected = chosen.linear(embedded, inputs.projection, None) * inputs.projection_scale
    normed = chosen.rms_norm(projected.view(-1, width), inputs.norm, step.config.rms_norm_eps)
    return ((normed + looked_up.view(-1, width)) * inputs.sum_scale).view(len(token_ids), -1, width)


def narrowed(layer: Narrow, x: torch.Tensor, step: Step) -> torch.Tensor:
    """The layer's own inputs, gated by x [T, hidden], as what is added to the stream [T, hidden]."""
    chosen = step.operations
    assert step.own is not None
    gates = chosen.activate(chosen.linear(x, layer.gate.weight, layer.gate.bias), None, None, "gelu_tanh")
    found = chosen.linear(gates * step.own, layer.projection.weight, layer.projection.bias)
    return norm_of(found, layer.norm, step)


def add(layer: Added, x: torch.Tensor, step: Step) -> torch.Tensor:
    """The stream [T, hidden] behind the MLP, as it goes to the next layer."""
    if layer.narrow is not None:
        x = x + narrowed(layer.narrow, x, step)
    return x if layer.scale is None else x * layer.scale


def with_experts(layer: Beside, widened: torch.Tensor, x: torch.Tensor, step: Step) -> torch.Tensor:
    """What the MLP gives [T, hidden] and what experts give of the stream x [T, hidden], each normed, added."""
    routed, read = norm_of(x, layer.router_norm, step), norm_of(x, layer.norm, step)
    found = sparse_mlp(layer.experts, read, step, routed)
    return norm_of(widened, layer.after_mlp, step) + norm_of(found, layer.after_experts, step)
