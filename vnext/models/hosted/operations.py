"""Operations that hosted models may compute themselves: those in which no row depends on how many others there are.

Each row of a tensor has the same bits alone and in a batch: moves, exact arithmetic on elements, functions whose vector form and
leftover lanes agree (tests/models/hosted), and sums over the last axis. All others are refused by name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import TypeAlias

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from vnext.models.errors import ModelError

Check: TypeAlias = "Callable[[tuple[object, ...], Mapping[str, object]], bool]"

MOVES = frozenset(
    """
    view _unsafe_view reshape transpose permute t unsqueeze squeeze slice select split split_with_sizes chunk expand clone
    contiguous _to_copy detach alias cat stack repeat index_select gather unbind arange zeros ones full empty empty_like zeros_like
    ones_like full_like new_empty new_zeros new_ones scalar_tensor lift_fresh copy_ fill_ masked_fill embedding index
    """.split()
)
EXACT = frozenset(
    """
    add sub rsub mul div neg abs sqrt reciprocal square minimum maximum clamp clamp_min clamp_max relu floor
    where gt lt ge le eq ne logical_and logical_or logical_not bitwise_and bitwise_or bitwise_not sign
    """.split()
)
FUNCTIONS = frozenset("exp expm1 tanh erf cos sin log log1p".split())
NORMS = frozenset({"native_layer_norm"})
OVER_LAST = frozenset("mean sum amax amin _softmax softmax topk sort cumsum scatter".split())
POWERS = (2, 3)


def is_wide(args: tuple[object, ...]) -> bool:
    """Whether the first argument is float32."""
    return isinstance(args[0], torch.Tensor) and args[0].dtype is torch.float32


def is_over_last(name: str, args: tuple[object, ...], kwargs: Mapping[str, object]) -> bool:
    """Whether a sum, a choice or an order is over the last axis alone."""
    first = args[0]
    if not isinstance(first, torch.Tensor):
        return False
    place = 2 if name in ("topk",) else 1
    axes = args[place] if len(args) > place else kwargs.get("dim", -1)
    found = list(axes) if isinstance(axes, list | tuple) else [axes]
    return all(axis in (-1, first.dim() - 1) for axis in found) and len(found) == 1


def is_outer(args: tuple[object, ...]) -> bool:
    """Whether a product sums over one number: each result is one exact product."""
    return isinstance(args[0], torch.Tensor) and args[0].shape[-1] == 1


def keeps_rows(name: str, args: tuple[object, ...], kwargs: Mapping[str, object]) -> bool:
    """Whether an operation of torch, by its plain name, gives each row the same bits in any batch."""
    if name in MOVES or name in FUNCTIONS or name in NORMS:
        return True
    if name in EXACT:
        return kwargs.get("alpha", 1) == 1 and kwargs.get("rounding_mode") is None
    if name in OVER_LAST:
        return is_over_last(name, args, kwargs)
    if name == "pow":
        return isinstance(args[1], int | float) and (args[1] in POWERS or (args[1] == -0.5 and is_wide(args)))
    if name == "rsqrt":
        return is_wide(args)
    if name == "bmm":
        return is_outer(args)
    return isinstance(args[0], torch.Tensor) and args[0].numel() == 1 if args else False


OTHERS: Mapping[str, str] = MappingProxyType({"mm": "matmul", "addmm": "a linear layer", "bmm": "matmul"})


class Audit(TorchDispatchMode):
    """While it is entered, raises ModelError for an operation that does not keep rows; `where` names the module that computes."""

    def __init__(self, where: Callable[[], str]) -> None:
        super().__init__()
        self._where = where

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        name = func.overloadpacket.__name__
        name = name if name in MOVES else name.removesuffix("_")
        if not keeps_rows(name, args, kwargs or {}):
            raise ModelError(
                f"{self._where()} computes {OTHERS.get(name, name)} in a way whose rounding may depend on the batch, "
                "so --model-impl transformers does not serve this model"
            )
        return func(*args, **(kwargs or {}))
