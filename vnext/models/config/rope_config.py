"""Settings of rotary embeddings: parsed from the two spellings of config.json, checked once, in vnext's terms."""

from __future__ import annotations

import math
from typing import Literal

import msgspec

from vnext.models.config.json_keys import Json, flag, number, numbers, positive, shown
from vnext.models.errors import ModelError

RopeKind = Literal["default", "linear", "llama3", "yarn", "longrope", "proportional"]
ROPE_KINDS = ("default", "linear", "llama3", "yarn", "longrope", "proportional", "dynamic")
"""Supported names. "dynamic" stretches only contexts longer than max_position_embeddings, which are not served."""
ASKED_LENGTH = "asked_length"
"""Key beside those of config.json: tokens of one request that the user asks for, 0 for as many as is usual."""


class Rope(msgspec.Struct, frozen=True, kw_only=True):
    """Rotary embedding: base `theta` and how its frequencies are stretched.

    `share` of a head's channels turn, the first ones; of "proportional", of its pairs, at the speeds that they would have if all
    turned. `attention_factor` multiplies cosines and sines (yarn, longrope).
    `original_position_count`: the context of the training before the stretching. The other numbers belong to the kinds
    that their names and `rope.py` tell; `divisors` are longrope's, one a frequency, for contexts beyond the original one
    if `beyond`. `axes`: by which of three numbers each pair turns where tokens of images have a place in time, a row and a column,
    () where tokens have one place.
    """

    theta: float
    kind: RopeKind = "default"
    share: float = 1.0
    factor: float = 1.0
    low_frequency_factor: float = 1.0
    high_frequency_factor: float = 4.0
    original_position_count: int = 8192
    attention_factor: float = 1.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    divisors: tuple[float, ...] = ()
    beyond: bool = False
    axes: tuple[int, ...] = ()


def scaling_of(raw: Json) -> Json:
    """The object with the scaling: rope_parameters (newer, holds theta too) or rope_scaling; {} when absent."""
    scaling = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    if not isinstance(scaling, dict):
        raise ModelError(f"rope scaling must be an object but is {shown(scaling)}; correct config.json")
    return scaling


def as_default(raw: Json) -> Json:
    """The same, with the rope of older files, whose kind is "mrope", as newer ones spell it: the default one, with sections."""
    scaling = scaling_of(raw)
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    return raw | {"rope_parameters": {**scaling, "rope_type": "default" if kind == "mrope" else kind}}


def parse_rope(raw: Json, scaling: Json, head_dim: int, *, partial: bool = False) -> Rope:
    """One rope from its object and what stands beside it. A head that turns in part is refused unless `partial`."""
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if kind not in ROPE_KINDS:
        raise ModelError(f"rope type {shown(kind)} is not supported; supported are {', '.join(ROPE_KINDS)}")
    beside = raw | {key: value for key, value in scaling.items() if value is not None}
    theta, share = number(beside, "rope_theta", 10000.0), number(beside, "partial_rotary_factor", 1.0)
    if theta < 1.0:
        raise ModelError(f"rope_theta must be at least 1 but is {theta}; correct config.json")
    if share > 1.0 or (share != 1.0 and not partial and kind != "proportional"):
        raise ModelError(f"partial_rotary_factor {share} is not supported; supported is {'at most ' * partial}1.0")
    if kind in ("default", "dynamic"):
        return Rope(theta=theta, share=share)
    if kind in ("linear", "proportional"):
        usual = 1.0 if kind == "proportional" else None
        return Rope(theta=theta, share=share, kind=kind, factor=number(scaling, "factor", usual))
    longest = positive(raw, "max_position_embeddings", 2048)
    holder = scaling if raw.get("original_max_position_embeddings") is None else raw
    original = positive(holder, "original_max_position_embeddings", longest)
    plain = Rope(theta=theta, share=share, kind=kind, original_position_count=original)
    if kind == "llama3":
        return parse_llama3(plain, scaling)
    if kind == "yarn":
        return parse_yarn(plain, scaling, longest)
    beyond = (raw.get(ASKED_LENGTH) or 0) > original
    return parse_longrope(plain, scaling, longest, int(head_dim * share) // 2, beyond)


def two_ropes(raw: Json, head_dim: int, theta: float, local_theta: float, *, partial: bool = False) -> tuple[Rope, Rope]:
    """The ropes of layers without and with a window: side by side in rope_parameters, or by older keys that stretch the first.
    `partial`: as in `parse_rope`."""
    scaling = scaling_of(raw)
    if "full_attention" in scaling or "sliding_attention" in scaling:
        full, local = scaling.get("full_attention") or {}, scaling.get("sliding_attention") or {}
    else:
        full, local = scaling, {}
    whole = parse_rope(raw | {"rope_theta": theta}, full, head_dim, partial=partial)
    return whole, parse_rope(raw | {"rope_theta": local_theta}, local, head_dim, partial=partial)


def turned_layers(raw: Json) -> list[int]:
    """For each layer whether it has positions; the key that says it is called for the opposite."""
    count, interval = positive(raw, "num_hidden_layers"), positive(raw, "no_rope_layer_interval", 4)
    named = raw.get("no_rope_layers")
    if named is None:
        return [int((index + 1) % interval != 0) for index in range(count)]
    if not isinstance(named, list) or len(named) < count:
        raise ModelError(f"no_rope_layers must be a list with one number for each of {count} layers; correct config.json")
    return named[:count]


def parse_llama3(rope: Rope, scaling: Json) -> Rope:
    """Llama 3.1's stretching."""
    return msgspec.structs.replace(
        rope,
        factor=number(scaling, "factor"),
        low_frequency_factor=number(scaling, "low_freq_factor"),
        high_frequency_factor=number(scaling, "high_freq_factor"),
    )


def parse_yarn(rope: Rope, scaling: Json, longest: int) -> Rope:
    """YaRN (arXiv 2309.00071), with DeepSeek's mscale."""
    factor = number(scaling, "factor", longest / rope.original_position_count)

    def warmth(mscale: float) -> float:
        return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1.0 else 1.0

    if scaling.get("mscale") and scaling.get("mscale_all_dim"):
        usual = warmth(number(scaling, "mscale")) / warmth(number(scaling, "mscale_all_dim"))
    else:
        usual = warmth(1.0)
    return msgspec.structs.replace(
        rope,
        factor=factor,
        attention_factor=number(scaling, "attention_factor", usual),
        beta_fast=number(scaling, "beta_fast", 32.0),
        beta_slow=number(scaling, "beta_slow", 1.0),
        truncate=flag(scaling, "truncate", True),
    )


def with_axes(rope: Rope, scaling: Json, pair_count: int, *, takes_turns: bool = False) -> Rope:
    """The rope, whose pairs turn by time, by rows and by columns, so many each as mrope_section says, one behind the others or, as
    long as there are enough, in turn. Raises ModelError."""
    sections = scaling.get("mrope_section", [16, 24, 24])
    counts = sections if isinstance(sections, list) else []
    if len(counts) != 3 or not all(isinstance(each, int) and each >= 0 for each in counts) or sum(counts) != pair_count:
        raise ModelError(f"mrope_section is {shown(sections)} and must be three numbers of sum {pair_count}; correct config.json")
    if takes_turns:
        axes = [pair % 3 if pair % 3 and pair < 3 * counts[pair % 3] else 0 for pair in range(pair_count)]
    else:
        axes = [axis for axis, count in enumerate(counts) for _ in range(count)]
    return msgspec.structs.replace(rope, axes=tuple(axes))


def parse_longrope(rope: Rope, scaling: Json, longest: int, pair_count: int, beyond: bool) -> Rope:
    """LongRoPE (arXiv 2402.13753): short factors within the original context, long ones where longer requests are asked for.

    Its authors take the long factors for all of a sequence, early tokens too, once it is longer: a token's key would
    depend on how long its sequence becomes, which no cache of keys can honour. So an engine has one of the two.
    """
    factor = number(scaling, "factor", longest / rope.original_position_count)
    usual = math.sqrt(1.0 + math.log(factor) / math.log(rope.original_position_count)) if factor > 1.0 else 1.0
    return msgspec.structs.replace(
        rope,
        factor=factor,
        attention_factor=number(scaling, "attention_factor", usual),
        divisors=numbers(scaling, "long_factor" if beyond else "short_factor", pair_count),
        beyond=beyond,
    )


def reach(rope: Rope, longest: int) -> int:
    """Positions that a model with `longest` as max_position_embeddings can use with this rope."""
    if rope.kind == "yarn":
        return max(longest, int(rope.factor * rope.original_position_count))
    short = rope.kind == "longrope" and not rope.beyond
    return min(longest, rope.original_position_count) if short else longest
