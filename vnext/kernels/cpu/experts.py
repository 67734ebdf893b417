"""Experts: how the compiled module chooses them and adds up what they give.

Owns their description, made once, which stacks of layers share; arithmetic and order are those of `products.route` and
`products.experts_by`, but that marks are computed in float64 and rounded once.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from vnext.kernels.arrays import Array, address, address_or_0, torch_dtype
from vnext.kernels.calls import BiasedExperts, Router, parts_of
from vnext.kernels.cpu.native import ACTIVATIONS, KINDS, agree_on_struct, kernels
from vnext.kernels.cpu.packed import PackedExperts

if TYPE_CHECKING:
    import torch

agree_on_struct(
    "Router", ("count", "per_token", "normalise", "sigmoid", "scale", "groups", "kept_groups", "group_best", "bias", "chosen")
)
agree_on_struct("Experts", ("gate_up", "down", "first", "held", "gate_up_biases", "down_biases", "activation"))


class Described(NamedTuple):
    """int64 numbers in the order of a struct, and what they are the addresses of."""

    table: np.ndarray
    kept: tuple[object, ...]

    @property
    def address(self) -> int:
        return int(self.table.ctypes.data)


def describe_router(router: Router, count: int, bias: Array | None) -> Described:
    """What the C++ router needs to know of a layer's experts."""
    scale = int(np.float64(router.scale).view(np.int64))
    numbers = (router.per_token, router.normalise, router.marks == "sigmoid", scale, router.groups, router.kept_groups)
    table = np.array([count, *numbers, router.group_best, address_or_0(bias), 0], dtype=np.int64)
    return Described(table, (bias,))


def count_choices(router: Described, counts: np.ndarray) -> None:
    """From now on the router adds to counts int64 [E], which the caller keeps, how often it chooses each expert."""
    router.table[-1] = counts.ctypes.data


def describe_experts(
    gate_up: PackedExperts | BiasedExperts, down: PackedExperts | BiasedExperts, first: int, activation: str = ""
) -> Described:
    """Experts of which these are held; `first`: the number that ids have for the first of them; `activation`: of a `gate_up` packed
    without its gate, or that has none."""
    (wide, wide_biases), (narrow, narrow_biases) = parts_of(gate_up), parts_of(down)
    places = [np.array([each.linear.address for each in packed.weights], dtype=np.int64) for packed in (wide, narrow)]
    biases = [np.array([address(each) for each in given], dtype=np.int64) for given in (wide_biases, narrow_biases)]
    biases_at = [each.ctypes.data if len(each) else 0 for each in biases]
    fields = [*(each.ctypes.data for each in places), first, len(wide.weights), *biases_at, ACTIVATIONS[activation]]
    return Described(np.array(fields, dtype=np.int64), (*places, *biases, gate_up, down))


def route(scores: torch.Tensor, router: Router, bias: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    """As products.route, of scores float32 [T, E], dense, and not by the mixer."""
    rows, count = scores.shape
    described = describe_router(router, count, bias)
    shares = scores.new_empty((rows, router.per_token))
    ids = scores.new_empty((rows, router.per_token), dtype=torch_dtype("int64"))
    kernels.route_rows(described.address, scores.data_ptr(), rows, shares.data_ptr(), ids.data_ptr())
    return shares, ids


def experts(
    x: torch.Tensor, shares: torch.Tensor, ids: torch.Tensor, gate_up: PackedExperts, down: PackedExperts, alone: str = ""
) -> torch.Tensor:
    """As products.experts of one rank, all dense, of gate and up packed with their gate, or of up whose activation is `alone`."""
    described, (rows, hidden) = describe_experts(gate_up, down, 0, alone), x.shape
    found = x.new_empty((rows, hidden))
    kernels.run_experts(
        KINDS[x.dtype], described.address, x.data_ptr(), rows, hidden, ids.shape[1], shares.data_ptr(), ids.data_ptr(),
        found.data_ptr(),
    )  # fmt: skip
    return found
