"""Skeleton: a model of transformers without weights, on the meta device, and what is put into it.

Owns what is asked of the package transformers itself: its classes, its attention interface, its names of a checkpoint's tensors.
"""

from __future__ import annotations

import inspect
import json
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import cast

import torch
import transformers
from torch import nn
from transformers import initialization
from transformers.core_model_loading import revert_weight_conversion
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING
from transformers.pytorch_utils import Conv1D

from vnext.models.errors import ModelError
from vnext.models.hosted.modules import ACTIVATIONS, Activation, Angles, Place, Run, Same, StandIn, attend, run_experts
from vnext.models.hosted.own_code import NOT_SERVED, OWN_CODE, POSITIONS_MAX, has_slopes, replace_own_code
from vnext.models.hosted.own_experts import replace_own_experts
from vnext.models.outside import DECODERS, what_it_needs

ATTENTION = "vnext"
"""The name of steps' functions of attention, which asks for no mask, and of experts."""
LOOKED_AT = 5
"""Tokens of a forward that is looked at."""
OWN_ATTENTION = "attends by code of its own, not by the interface of transformers"
_ONE_AT_A_TIME = threading.Lock()
"""What makes a model without numbers changes torch for all threads meanwhile."""
ALL_ATTENTION_FUNCTIONS.register(ATTENTION, attend)
ALL_EXPERTS_FUNCTIONS.register(ATTENTION, run_experts)


def named(module: nn.Module, name: str) -> str:
    """A module for people."""
    return f"{name} ({type(module).__name__})"


def make_model(settings: str, dtype: torch.dtype) -> PreTrainedModel:
    """The model of a config.json, on the meta device; its parameters have the dtype. Raises ModelError."""
    try:
        with _ONE_AT_A_TIME:
            return _make_model(json.loads(settings), dtype)
    except ModelError:
        raise
    except Exception as error:  # a foreign model may raise anything
        words = str(error).replace("\n", " ")
        raise ModelError(f"transformers {transformers.__version__} cannot make a model of this config.json: {words}") from error


def _make_model(raw: dict[str, object], dtype: torch.dtype) -> PreTrainedModel:
    config = transformers.CONFIG_MAPPING[str(raw["model_type"])].from_dict(with_rope(raw))
    kind = cast(type[PreTrainedModel], MODEL_FOR_CAUSAL_LM_MAPPING[type(config)])
    has_own = kind.__name__ in OWN_CODE
    if not has_own and "ALL_ATTENTION_FUNCTIONS" not in vars(sys.modules[kind.__module__]):
        need = what_it_needs(kind.__name__)
        why = OWN_ATTENTION if need in DECODERS else f"needs {need}"
        raise ModelError(f"{kind.__name__} {why}, {NOT_SERVED}")
    with torch.device("meta"), initialization.no_init_weights(), initialization.meta_device_safe_creation_ops():
        asked = "eager" if has_own else ATTENTION
        model = kind._from_config(config, dtype=dtype, attn_implementation=asked, experts_implementation=ATTENTION)
    model.config._attn_implementation = ATTENTION
    replace_own_code(model, base_of(model))
    replace_own_experts(base_of(model))
    return cast(PreTrainedModel, model.eval())


def with_rope(raw: dict[str, object]) -> dict[str, object]:
    """A config.json with the base of a rope where transformers reads it, though DBRX's files have it among what attention is."""
    inner = raw.get("attn_config")
    theta = inner.get("rope_theta") if isinstance(inner, dict) and raw["model_type"] == "dbrx" else None
    return {"rope_theta": theta, **raw} if theta and not raw.get("rope_parameters") else raw


def base_of(model: PreTrainedModel) -> nn.Module:
    """What is between embedding and head."""
    return model.get_submodule(model.base_model_prefix)


def is_product(module: nn.Module) -> bool:
    """Whether a module is a plain linear layer, and nothing more."""
    return type(module) in (nn.Linear, Conv1D) or type(module).__name__ == "FalconLinear"


def replace_functions(model: PreTrainedModel) -> None:
    """Give a model this tree's activations and angles, and no dropout."""
    for name, module in list(model.named_modules()):
        parent, _, own = name.rpartition(".")
        if type(module).__name__ in ACTIVATIONS and getattr(module, "approximate", "none") == "none":
            model.get_submodule(parent)._modules[own] = Activation(ACTIVATIONS[type(module).__name__])
        elif "RotaryEmbedding" in type(module).__name__:
            model.get_submodule(parent)._modules[own] = Angles(module)
        elif type(module) is nn.Dropout:
            model.get_submodule(parent)._modules[own] = Same()


def position_count(model: PreTrainedModel) -> int:
    """The longest context in tokens. A longrope has its short factors: one table of angles serves all requests. Keys are left out
    behind a window that is kept."""
    ropes = getattr(model.config, "rope_parameters", None) or {}
    each = [ropes, *(value for value in ropes.values() if isinstance(value, dict))]
    short = [rope["original_max_position_embeddings"] for rope in each if rope.get("rope_type") == "longrope"]
    short.append(getattr(model.config, "keep_window_size", None))
    longest = getattr(model.config, "max_position_embeddings", None) or getattr(model.config, "max_seq_len", None) or 2048
    return int(min([longest, *filter(None, short), *([POSITIONS_MAX] if has_slopes(model) else [])]))


def require_numbers(model: PreTrainedModel) -> None:
    """Raise ModelError for what neither checkpoint nor code has given numbers."""
    for name, each in (*model.named_parameters(), *model.named_buffers()):
        if each.is_meta:
            raise ModelError(f"{name} of {type(model).__name__} has no numbers, {NOT_SERVED}")


@contextmanager
def attention_of(model: PreTrainedModel, name: str) -> Iterator[None]:
    """Attend by another function meanwhile."""
    model.config._attn_implementation = name
    try:
        yield
    finally:
        model.config._attn_implementation = ATTENTION


def meta_inputs() -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids and positions without numbers."""
    return torch.zeros((1, LOOKED_AT), dtype=torch.int64, device="meta"), torch.arange(LOOKED_AT, device="meta")[None]


def call_base(base: nn.Module, ids: torch.Tensor, positions: torch.Tensor, **others: object) -> torch.Tensor:
    """The states [1, T, hidden] of token ids and positions [1, T]."""
    where = {"position_ids": positions} if takes_positions(base) else {"attention_mask": ids.new_ones((1, 1, 1, 1))}
    found: torch.Tensor = base(input_ids=ids, use_cache=False, **{**where, **others})[0]
    return found


def takes_positions(base: nn.Module) -> bool:
    """Whether a base takes its tokens' positions. Others have them from attention, and a whole mask, which is not looked at."""
    return "position_ids" in inspect.signature(inspect.unwrap(base.forward)).parameters


def check_base(model: PreTrainedModel) -> None:
    """Raise ModelError for a model that takes no positions of its tokens, or sees tokens behind them."""
    if not takes_positions(base_of(model)) and not has_slopes(model):
        raise ModelError(f"{type(model).__name__} takes no positions of tokens, {NOT_SERVED}")
    if getattr(model.config, "prefix_lm", False):
        raise ModelError(f"{type(model).__name__} reads a prompt in both directions (prefix_lm), {NOT_SERVED}")


def names_in_checkpoint(model: PreTrainedModel) -> dict[str, tuple[str, ...]]:
    """The checkpoint's names of what each parameter and kept buffer is made of: its own, unless transformers converts it."""
    found = {}
    for name, tensor in model.state_dict().items():
        found[name] = tuple(revert_weight_conversion(model, {name: tensor}))
    return found


def place_attention(model: PreTrainedModel, names: tuple[str, ...], run: Run) -> None:
    """Tell the attention modules which layers they are, by the names of those that attend, in their order."""
    for name in set(names):
        layers = tuple(layer for layer, each in enumerate(names) if each == name)
        model.get_submodule(name).__dict__["vnext_place"] = Place(run, layers)


def make_buffers(model: PreTrainedModel, device: torch.device) -> None:
    """Compute what no checkpoint has, such as the frequencies of a rope. Parameters are without numbers still."""
    kept = model.state_dict().keys()
    for name, module in model.named_modules():
        own = {key: each for key, each in module.named_buffers(recurse=False) if each.is_meta and f"{name}.{key}" not in kept}
        for key, each in own.items():
            module._buffers[key] = torch.empty_like(each, device=device)
        if own:
            model._init_weights(module)


def set_weight(module: nn.Module, name: str, weight: StandIn | torch.Tensor) -> None:
    """Put something in the place of a parameter or buffer."""
    if name in module._buffers and isinstance(weight, torch.Tensor):
        module._buffers[name] = weight
    elif isinstance(weight, torch.Tensor):
        module._parameters[name] = nn.Parameter(weight, requires_grad=False)
    else:
        del module._parameters[name]
        module.__dict__[name] = weight
