"""Looking: what a model's forward says of it before any weight is read, and whether it keeps the promise of bits.

The forward is run once with an attention that notes its calls: how many heads there are, what each layer sees. A second run asks of
each operation of torch whether it keeps rows. Raises ModelError, which names the module, for what is not served.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import MappingProxyType
from typing import NamedTuple, TypeAlias

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, PreTrainedModel

from vnext.models.errors import ModelError
from vnext.models.hosted.modules import Replaced
from vnext.models.hosted.own_code import NOT_SERVED, SLOPES, with_bias
from vnext.models.hosted.skeleton import (
    LOOKED_AT,
    OWN_ATTENTION,
    attention_of,
    base_of,
    call_base,
    check_base,
    is_product,
    meta_inputs,
    named,
)

NOTED = "vnext_noted"
"""The name of the attention function that notes its calls."""
FAR = 1 << 18
"""Tokens of the context in which windows are looked for."""
HARMLESS = frozenset(
    """dropout scaling softcap sliding_window position_ids use_cache is_causal output_attentions layer_head_mask cache_position
    output_router_logits output_hidden_states return_dict training window bias""".split()
)
"""Arguments of attention that change nothing here, or that are read."""
Attended: TypeAlias = tuple[torch.Tensor, None]


class Seen(NamedTuple):
    """A call of attention: heads and their size, and the tokens that each one sees (0: all). `is_biased`: keys hold what they
    add to scores."""

    heads: int
    kv_heads: int
    head_dim: int
    window: int
    is_biased: bool = False


class Mask(NamedTuple):
    """A mask by its rule: whether query `q` sees key `k`."""

    sees: Callable[..., torch.Tensor]


class Looked(NamedTuple):
    """The calls of attention in their order, each with its module's name; the width of what comes out; linear layers that read the
    same, by their names and in their order."""

    attention: tuple[tuple[str, Seen], ...]
    width: int
    alike: tuple[tuple[str, ...], ...]


def look(model: PreTrainedModel) -> Looked:
    """What one forward shows."""
    names = {id(module): name for name, module in model.named_modules()}
    seen: list[tuple[str, Seen]] = []
    masks: dict[int, Mask] = {}

    def rule(mask_function: Callable[..., torch.Tensor], q_length: int, kv_length: int, **_: object) -> torch.Tensor:
        found = torch.empty((1, 1, q_length, kv_length), dtype=torch.bool, device="meta")
        masks[id(found)] = Mask(mask_function)
        kept.append(found)
        return found

    def note(module: nn.Module, *qkv_mask: torch.Tensor, **others: object) -> Attended:
        query, key, value, *given = qkv_mask
        mask = given[0] if given else others.pop("attention_mask", None)
        name = names[id(module)]
        found = _seen(named(module, name), (query, key, value), masks.get(id(mask)), others)
        if module.__dict__.get(SLOPES) is not None or others.get("bias") is not None:
            found = found._replace(head_dim=with_bias(found.head_dim), is_biased=True)
        seen.append((name, found))
        return query.transpose(1, 2).contiguous(), None

    kept: list[torch.Tensor] = []
    ALL_ATTENTION_FUNCTIONS.register(NOTED, note)
    ALL_MASK_ATTENTION_FUNCTIONS.register(NOTED, rule)
    ones = torch.ones((1, LOOKED_AT), dtype=torch.bool, device="meta")
    check_base(model)
    with attention_of(model, NOTED), watched(model), inputs_of(model) as inputs:
        out = call_base(base_of(model), *meta_inputs(), attention_mask=ones)
    if not seen:
        raise ModelError(f"{type(model).__name__} {OWN_ATTENTION}, {NOT_SERVED}")
    return Looked(tuple(seen), out.shape[-1], alike(inputs))


class Input(NamedTuple):
    """What a linear layer reads, and how often that was changed in place before."""

    name: str
    x: torch.Tensor
    version: int


@contextmanager
def inputs_of(model: PreTrainedModel) -> Iterator[list[Input]]:
    """What linear layers between embedding and head read meanwhile."""
    noted: list[Input] = []

    def note(name: str, x: torch.Tensor) -> None:
        noted.append(Input(name, x, x._version))

    base, prefix = base_of(model), f"{model.base_model_prefix}."
    products = [(prefix + name, module) for name, module in base.named_modules() if is_product(module)]
    handles = [module.register_forward_pre_hook(lambda _, args, name=name: note(name, *args)) for name, module in products]
    try:
        yield noted
    finally:
        for handle in handles:
            handle.remove()


def alike(inputs: list[Input]) -> tuple[tuple[str, ...], ...]:
    """Layers, each of which computes once, that read one tensor of the same numbers."""
    counts, groups = Counter(each.name for each in inputs), dict[tuple[int, int], list[str]]()
    for each in inputs:
        if counts[each.name] == 1:
            groups.setdefault((id(each.x), each.version), []).append(each.name)
    return tuple(tuple(names) for names in groups.values() if len(names) > 1)


def _seen(name: str, qkv: tuple[torch.Tensor, ...], mask: Mask | None, others: Mapping[str, object]) -> Seen:
    query, key, value = qkv
    unknown = [key for key, value in others.items() if value is not None and key not in HARMLESS]
    if unknown:
        raise ModelError(f"{name} attends with {unknown[0]}, {NOT_SERVED}")
    if key.shape != value.shape or query.shape[-1] != key.shape[-1] or query.shape[1] % key.shape[1]:
        sizes = f"{list(query.shape[1::2])}, {list(key.shape[1::2])} and {list(value.shape[1::2])}"
        raise ModelError(f"{name} has queries, keys and values of unlike heads and sizes {sizes}, {NOT_SERVED}")
    if mask is None:
        raise ModelError(f"{name} attends by a mask of its own, {NOT_SERVED}")
    if isinstance(others.get("scaling"), torch.Tensor) or isinstance(others.get("softcap"), torch.Tensor):
        raise ModelError(f"{name} changes scores by a tensor, {NOT_SERVED}")
    window = others.get("window")
    return Seen(query.shape[1], key.shape[1], query.shape[-1], window if isinstance(window, int) else window_of(name, mask))


def window_of(name: str, mask: Mask) -> int:
    """How many tokens back a mask sees, 0 for all."""
    keys, widths = torch.arange(FAR), []
    for query in (FAR - 1, FAR // 2 + 1):
        sees = mask.sees(torch.tensor(0), torch.tensor(0), torch.tensor(query), keys)
        places = torch.as_tensor(sees).expand(FAR).nonzero()[:, 0]
        if not len(places) or int(places[-1]) != query or len(places) != query + 1 - int(places[0]):
            raise ModelError(f"{name} does not see the tokens before it and no others, {NOT_SERVED}")
        widths.append(0 if int(places[0]) == 0 else len(places))
    if widths[0] != widths[1]:
        raise ModelError(f"{name} sees {widths[0]} tokens at one place and {widths[1]} at another, {NOT_SERVED}")
    return widths[0]


@contextmanager
def watched(model: PreTrainedModel) -> Iterator[list[str]]:
    """The names of the modules that compute now, the innermost last. What transformers raises is a ModelError with it."""
    stack, handles = [type(model).__name__], []
    for name, module in base_of(model).named_modules():
        label = named(module, name) if name else type(module).__name__
        handles.append(module.register_forward_pre_hook(lambda *_, label=label: stack.append(label)))
        handles.append(module.register_forward_hook(lambda *_: stack.pop() and None))
    try:
        yield stack
    except ModelError:
        raise
    except Exception as error:  # a foreign model may raise anything
        is_without = "meta" in str(error)  # the device of tensors without numbers
        why = "computes by numbers, where vnext knows shapes alone" if is_without else f"fails with {type(error).__name__}"
        raise ModelError(f"{stack[-1]} {why}, {NOT_SERVED}") from error
    finally:
        for handle in handles:
            handle.remove()


def audit(model: PreTrainedModel) -> bool:
    """Whether functions of torch must give way to ours for rows that do not depend on others. Raises ModelError where that does not
    suffice. The model's weights are replaced by now."""
    try:
        _audit(model)
    except ModelError:
        with Replaced():
            _audit(model)
        return True
    return False


def _audit(model: PreTrainedModel) -> None:
    with watched(model) as stack, Audit(lambda: stack[-1]):
        call_base(base_of(model), *meta_inputs())


# ---- operations that keep rows -------------------------------------------------------------------------------------
# Operations that hosted models may compute themselves: those in which no row depends on how many others there are.
# Each row of a tensor has the same bits alone and in a batch: moves, exact arithmetic on elements, functions whose vector form
# and leftover lanes agree (tests/models/hosted), and sums over the last axis. All others are refused by name.

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
OVER_LAST = frozenset("mean sum amax amin linalg_vector_norm _softmax softmax topk sort cumsum scatter".split())
POWERS = (2, 3)


def is_wide(args: tuple[object, ...]) -> bool:
    """Whether the first argument is float32."""
    return isinstance(args[0], torch.Tensor) and args[0].dtype is torch.float32


def is_over_last(name: str, args: tuple[object, ...], kwargs: Mapping[str, object]) -> bool:
    """Whether a sum, a choice or an order is over the last axis alone."""
    first = args[0]
    if not isinstance(first, torch.Tensor):
        return False
    place = 2 if name in ("topk", "linalg_vector_norm") else 1
    axes = args[place] if len(args) > place else kwargs.get("dim", -1)
    found = list(axes) if isinstance(axes, list | tuple) else [axes]
    return all(axis in (-1, first.dim() - 1) for axis in found) and len(found) == 1


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
        return isinstance(args[0], torch.Tensor) and args[0].shape[-1] == 1  # each result is one exact product
    return isinstance(args[0], torch.Tensor) and args[0].numel() == 1 if args else False


OTHERS: Mapping[str, str] = MappingProxyType({"mm": "matmul", "addmm": "a linear layer", "bmm": "matmul"})


class Audit(TorchDispatchMode):
    """While it is entered, raises ModelError for an operation that does not keep rows; `where` names the module that computes."""

    def __init__(self, where: Callable[[], str]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
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
