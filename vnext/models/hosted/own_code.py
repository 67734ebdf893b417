"""Own code: attention that decoders of transformers compute in their modules, beside its interface, by the names of their classes.

Owns what takes the place of that code: the same queries, keys and values, handed to the interface. A bias that grows with the
distance of a key (ALiBi) is part of the keys: the score of a query q and a key k at position p is

    scale * (q . k + slope / scale * p)        softmax subtracts what is the query's position alone

so that queries have the slope, and keys their position, in elements behind their own. A position is two digits of base 256 and a
slope two summands, which are exact in bfloat16. What else a key adds to its products is two summands in elements behind its own,
where queries have ones.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache, partial
from types import MappingProxyType
from typing import NamedTuple, Protocol, TypeAlias, cast

import torch
from torch import nn
from transformers.configuration_utils import PreTrainedConfig
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, PreTrainedModel
from transformers.models.bloom.modeling_bloom import build_alibi_tensor
from transformers.models.falcon.modeling_falcon import build_alibi_tensor as build_falcon_alibi_tensor
from transformers.models.mpt.modeling_mpt import build_mpt_alibi_tensor

from vnext.models.errors import ModelError

Attend: TypeAlias = Callable[..., torch.Tensor]
"""Query, key and value [1, heads, T, D], a mask, and what the interface takes -> [1, T, heads * D]."""
Found: TypeAlias = tuple[torch.Tensor, None]
SLOPES = "vnext_slopes"
"""The name of a module's slopes [heads], None without a bias."""
DIGIT = 256
POSITIONS_MAX = DIGIT * DIGIT
NOT_SERVED = "which --model-impl transformers does not serve"
MULTIPLE = 32
"""Of the elements of a head, which kernels read together."""


class Theirs(Protocol):
    """What is read of modules of transformers here."""

    config: PreTrainedConfig
    attention_type: str
    head_dim: int
    num_heads: int
    num_kv_heads: int
    num_key_value_heads: int
    scaling: float
    inv_norm_factor: float
    softmax_scale: float
    clip_qkv: float | None
    _reshape: Callable[[torch.Tensor], tuple[torch.Tensor, ...]]
    query_key_value: nn.Module
    Wqkv: nn.Module
    q_proj: nn.Module
    k_proj: nn.Module
    v_proj: nn.Module
    dense: nn.Module
    out_proj: nn.Module
    o_proj: nn.Module
    q_norm: nn.Module
    k_norm: nn.Module
    dt_proj: nn.Module
    A: torch.Tensor
    kv_proj: nn.Module
    experts: nn.Module
    router: nn.Module
    layer: nn.Module
    top_k: int
    bias: torch.Tensor


class OwnCode(NamedTuple):
    """`modules`: what attends, by its class: the method that is replaced, and by what. `slopes`: of the heads' bias, for a model's
    base. `instead`: what a base has in the place of what makes a bias for all keys of a step."""

    modules: Mapping[str, tuple[str, Callable[..., object]]]
    slopes: Callable[[Theirs], torch.Tensor] | None = None
    instead: Mapping[str, object] = MappingProxyType({})


def inner(attend: Attend, module: Theirs, query: torch.Tensor, key: torch.Tensor, *value_mask: torch.Tensor) -> Found:
    """Of GPT-J's kin, behind their rope, which CodeGen computes in float32."""
    query, key = (part.to(value_mask[0].dtype) for part in (query, key))
    return _by_heads(attend(query, key, *value_mask, scaling=float(query.shape[-1]) ** -0.5), query), None


def unscaled(attend: Attend, module: Theirs, *qkv_mask: torch.Tensor) -> Found:
    """Of GPT-Neo: every other layer sees a window."""
    window = module.config.window_size if module.attention_type == "local" else None
    return _by_heads(attend(*qkv_mask, scaling=1.0, window=window), qkv_mask[0]), None


def _by_heads(found: torch.Tensor, query: torch.Tensor) -> torch.Tensor:
    """[1, T, heads * D] -> [1, heads, T, D]."""
    return found.view(1, query.shape[2], query.shape[1], -1).transpose(1, 2)


def bloom(attend: Attend, module: Theirs, x: torch.Tensor, residual: torch.Tensor, *, attention_mask: object, **_: object) -> Found:
    """Of Bloom."""
    qkv = module._reshape(module.query_key_value(x))
    return module.dense(attend(*qkv, attention_mask, scaling=module.inv_norm_factor)) + residual, None


def mpt(attend: Attend, module: Theirs, x: torch.Tensor, *, attention_mask: object, **_: object) -> Found:
    """Of MPT."""
    qkv = module.Wqkv(x)
    if module.clip_qkv:
        qkv = qkv.clamp(min=-module.clip_qkv, max=module.clip_qkv)
    each = (part.view(1, x.shape[1], -1, module.head_dim).transpose(1, 2) for part in qkv.chunk(3, 2))
    return module.out_proj(attend(*each, attention_mask, scaling=module.softmax_scale)), None


def xglm(attend: Attend, module: Theirs, x: torch.Tensor, *, attention_mask: object, **_: object) -> Found:
    """Of XGLM."""
    parts = (module.q_proj(x) * module.scaling, module.k_proj(x), module.v_proj(x))
    each = (part.view(1, x.shape[1], -1, module.head_dim).transpose(1, 2) for part in parts)
    return module.out_proj(attend(*each, attention_mask, scaling=1.0)), None


def falcon(
    attend: Attend, module: Theirs, x: torch.Tensor, *, position_embeddings: Sequence[torch.Tensor],
    position_ids: torch.Tensor, attention_mask: object, **_: object,
) -> Found:
    """Of Falcon, whose newer form has its heads in groups: queries, a key and a value. A bias of distances is bfloat16."""
    qkv = module.query_key_value(x)
    groups, dim = module.num_kv_heads, module.head_dim
    qkv = qkv.view(1, x.shape[1], groups, -1, dim)
    query, key, value = (part.flatten(2, 3).transpose(1, 2) for part in qkv.split((qkv.shape[3] - 2, 1, 1), 3))
    bias = None
    if not module.config.alibi:
        query, key = turned((query, key), position_embeddings)
    elif groups != module.num_heads:
        raise ModelError(f"Falcon shares keys among heads that have biases of their own (alibi), {NOT_SERVED}")
    else:
        bias = (falcon_slopes(groups).to(x.device) * position_ids[0])[None].float()
    return module.dense(attend(query, key, value, attention_mask, scaling=dim**-0.5, bias=bias)), None


@lru_cache
def falcon_slopes(heads: int) -> torch.Tensor:
    """Those of Falcon's heads [heads, 1], in bfloat16."""
    found: torch.Tensor = build_falcon_alibi_tensor(torch.ones((1, 2), dtype=torch.int64), heads, torch.bfloat16)
    return found[:, 0, 1:]


def turned(parts: Sequence[torch.Tensor], angles: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Heads [1, heads, T, D] by the cosines and sines [1, T, D], half against half."""
    cos, sin = (angle[:, None] for angle in angles)
    return [part * cos + torch.cat((-(halves := part.chunk(2, -1))[1], halves[0]), -1) * sin for part in parts]


def doge(
    attend: Attend, module: Theirs, *, hidden_states: torch.Tensor, position_embeddings: Sequence[torch.Tensor],
    attention_mask: object, **_: object,
) -> Found:
    """Of Doge, whose values say what their keys add to scores. Contexts are none of which it would leave keys out."""
    if module.config.is_moe:
        raise ModelError(f"Doge chooses experts by the scores of other tokens (is_moe), {NOT_SERVED}")
    shape, products = (1, hidden_states.shape[1], -1, module.head_dim), (module.q_proj, module.k_proj, module.v_proj)
    query, key, value = (product(hidden_states).view(shape) for product in products)
    heads = [part.transpose(1, 2) for part in (module.q_norm(query), module.k_norm(key))]
    paces = module.dt_proj(value.flatten(2))
    paces = paces.clamp(min=0) + paces.abs().neg().exp().log1p()  # softplus
    bias = (module.A * paces).exp().transpose(1, 2).float() / module.scaling
    found = attend(*turned(heads, position_embeddings), value.transpose(1, 2), attention_mask, scaling=module.scaling, bias=bias)
    return module.o_proj(found), None


def jetmoe(
    attend: Attend, module: Theirs, *, hidden_states: torch.Tensor, position_embeddings: Sequence[torch.Tensor],
    attention_mask: object, **_: object,
) -> tuple[torch.Tensor, None, None]:
    """Of JetMoe, whose tokens have the queries of a few experts, each of as many heads as there are of keys. All experts compute
    all queries, of which these are chosen, so that no product depends on what a step holds."""
    experts, heads, dim = cast(Theirs, module.experts), module.num_key_value_heads, module.head_dim
    each = [cast(Mapping[str, nn.Module], part) for name, part in module.experts.named_children() if name.isdigit()]
    x = hidden_states[0]
    ids, shares = experts.router(x)
    every = torch.stack([part["input_linear"](x) for part in each], 1)
    query = every.gather(1, ids[..., None].expand(*ids.shape, every.shape[-1])).view(*ids.shape, heads, dim)
    query = query.permute(2, 1, 0, 3).flatten(0, 1)[None]
    key, value = (part.view(1, len(x), heads, dim).transpose(1, 2) for part in module.kv_proj(hidden_states).chunk(2, -1))
    found = attend(*turned((query, key), position_embeddings), value, attention_mask, scaling=module.scaling)
    found = found.view(len(x), heads, -1, dim).transpose(2, 3).flatten(1, 2)
    spread = found.new_zeros((*found.shape[:2], len(each))).scatter(-1, ids[:, None].expand_as(found), found)
    rows = spread.permute(2, 0, 1).contiguous()
    gates = shares.new_zeros((len(x), len(each))).scatter(-1, ids, shares)
    outs = [part["output_linear"](rows[index]) * gates[:, index, None] for index, part in enumerate(each)]
    return (sum(outs[1:], outs[0]) + experts.bias)[None], None, None


def jetmoe_router(attend: Attend, module: Theirs, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Which experts x [T, hidden] goes through, and with which shares [T, k]."""
    scores, ids = module.layer(x).float().topk(module.top_k, -1)
    return ids, scores.softmax(-1).to(x.dtype)


def jetmoe_mlp(attend: Attend, module: Theirs, x: torch.Tensor) -> torch.Tensor:
    found: torch.Tensor = module.experts(x, *module.router(x[0])) + module.bias
    return found


def bloom_slopes(base: Theirs) -> torch.Tensor:
    """Of Bloom's heads."""
    return build_alibi_tensor(torch.ones((1, 2), dtype=torch.int64), base.num_heads, torch.float32)[:, 0, 1]


def mpt_slopes(base: Theirs) -> torch.Tensor:
    """Of MPT's heads."""
    made: torch.Tensor = build_mpt_alibi_tensor(base.num_heads, 2, device="cpu")
    return made[:, 0, 1] - made[:, 0, 0]


def no_bias(*_: object, **__: object) -> None:
    """In the place of a bias of all keys."""


OWN_CODE: Mapping[str, OwnCode] = MappingProxyType(
    {
        "GPTJForCausalLM": OwnCode({"GPTJAttention": ("_attn", inner)}),
        "CodeGenForCausalLM": OwnCode({"CodeGenAttention": ("_attn", inner)}),
        "GPTNeoXJapaneseForCausalLM": OwnCode({"GPTNeoXJapaneseAttention": ("_attn", inner)}),
        "GPTNeoForCausalLM": OwnCode({"GPTNeoSelfAttention": ("_attn", unscaled)}),
        "XGLMForCausalLM": OwnCode({"XGLMAttention": ("forward", xglm)}),
        "FalconForCausalLM": OwnCode({"FalconAttention": ("forward", falcon)}, instead={"use_alibi": False}),
        "BloomForCausalLM": OwnCode({"BloomAttention": ("forward", bloom)}, bloom_slopes, {"build_alibi_tensor": no_bias}),
        "MptForCausalLM": OwnCode({"MptAttention": ("forward", mpt)}, mpt_slopes, {"build_mpt_alibi_tensor": no_bias}),
        "DogeForCausalLM": OwnCode({"DogeAttention": ("forward", doge)}),
        "JetMoeForCausalLM": OwnCode(
            {
                "JetMoeAttention": ("forward", jetmoe), "JetMoeTopKGating": ("forward", jetmoe_router),
                "JetMoeMoE": ("forward", jetmoe_mlp),
            }
        ),
    }
)
"""By the names of the classes that write text."""


def replace_own_code(model: PreTrainedModel, base: nn.Module) -> None:
    """Let a model's modules attend by the interface, if they do not."""
    own = OWN_CODE.get(type(model).__name__)
    if own is None:
        return
    slopes = None if own.slopes is None else own.slopes(cast(Theirs, base))
    base.__dict__.update(own.instead)
    for module in base.modules():
        if (replaced := own.modules.get(type(module).__name__)) is not None:
            method, function = replaced
            module.__dict__[method] = partial(function, partial(_attend, model, module), module)
            module.__dict__[SLOPES] = slopes


def _attend(model: PreTrainedModel, module: nn.Module, *qkv_mask: torch.Tensor, **others: object) -> torch.Tensor:
    """By the function of the interface that serves now."""
    function = ALL_ATTENTION_FUNCTIONS[str(model.config._attn_implementation)]
    found: torch.Tensor = function(module, *qkv_mask, **others)[0]
    return found.flatten(2)


def has_slopes(model: PreTrainedModel) -> bool:
    """Whether a model knows its tokens' positions by a bias alone."""
    own = OWN_CODE.get(type(model).__name__)
    return own is not None and own.slopes is not None


def with_bias(size: int) -> int:
    """The elements of a head of `size` and of its bias."""
    return -(-(size + 4) // MULTIPLE) * MULTIPLE


def biased(
    qkv: tuple[torch.Tensor, ...], slopes: torch.Tensor, scale: float, positions: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Query [T, heads, D], key and value [T, kv_heads, D], behind them the bias of slopes [heads] at positions [T]."""
    query, key, value = qkv
    wide = (slopes / scale).to(query.device)
    first = wide.to(query.dtype)
    rest = (wide - first.float()).to(query.dtype)
    digits = torch.stack((positions // DIGIT * DIGIT,) * 2 + (positions % DIGIT,) * 2, -1).to(key.dtype)
    padding = with_bias(query.shape[-1]) - query.shape[-1]
    more = (torch.stack((first, rest, first, rest), -1)[None], digits[:, None], None)
    return tuple(_longer(each, behind, padding) for each, behind in zip((query, key, value), more))  # type: ignore[return-value]


def with_terms(qkv: tuple[torch.Tensor, ...], terms: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Query [T, heads, D], key and value [T, kv_heads, D]; behind the keys what each adds to its products, terms [T, kv_heads]."""
    query, key, _ = qkv
    first = terms.to(key.dtype)
    more = (query.new_ones((1, 1, 2)), torch.stack((first, (terms - first.float()).to(key.dtype)), -1), None)
    padding = with_bias(query.shape[-1]) - query.shape[-1]
    return tuple(_longer(each, behind, padding) for each, behind in zip(qkv, more))  # type: ignore[return-value]


def _longer(x: torch.Tensor, behind: torch.Tensor | None, padding: int) -> torch.Tensor:
    """x [T, heads, D] with these elements behind its own, and zeros: `padding` more."""
    found = x.new_zeros((*x.shape[:-1], x.shape[-1] + padding))
    found[..., : x.shape[-1]] = x
    if behind is not None:
        found[..., x.shape[-1] : x.shape[-1] + behind.shape[-1]] = behind
    return found
