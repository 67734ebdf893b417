"""Settings of recurrent layers as families spell them: parsed from config.json, checked once, in vnext's terms."""

from __future__ import annotations

from math import inf
from types import MappingProxyType

from vnext.kernels.calls import WIDTHS
from vnext.models.config.json_keys import Json, flag, positive, refuse, shown
from vnext.models.config.model_config import Recurrent
from vnext.models.errors import ModelError

DEFAULTS = MappingProxyType(
    {
        "mamba_n_heads": 128,
        "mamba_n_groups": 1,
        "mamba_d_state": 256,
        "mamba_d_conv": 4,
        "mamba_expand": 2,
        "mamba_conv_bias": True,
    }
)
NO_LIMITS = ([0.0, inf], [0.0, {"__float__": "Infinity"}])
"""As plain JSON has it, and as transformers writes it."""


def width_of(raw: Json, key: str, default: int | None = None) -> int:
    """How many inputs a convolution sees. Raises ModelError."""
    if (width := positive(raw, key, default)) not in WIDTHS:
        raise ModelError(f"{key} must be {WIDTHS.start} to {WIDTHS.stop - 1} but is {width}; correct config.json")
    return width


def linear_layers(raw: Json, usual: list[str]) -> tuple[int, ...]:
    """The layers that layer_types calls linear_attention, without it those of the usual kinds. Raises ModelError."""
    kinds, count = raw.get("layer_types") or usual, positive(raw, "num_hidden_layers")
    if not isinstance(kinds, list) or len(kinds) != count or set(kinds) != {"full_attention", "linear_attention"}:
        raise ModelError(
            f"layer_types must name full_attention or linear_attention for each of {count} layers, and each of the two once at "
            f"least, but is {shown(kinds)}; correct config.json"
        )
    return tuple(layer for layer, kind in enumerate(kinds) if kind == "linear_attention")


def shared(nets: Recurrent) -> Recurrent:
    """The same delta nets. Raises ModelError where heads of values cannot share those of keys."""
    if nets.value_heads % nets.key_heads:
        raise ModelError(
            f"{nets.value_heads} heads of values cannot share {nets.key_heads} heads of keys evenly; correct "
            "linear_num_key_heads in config.json"
        )
    return nets


def mamba_layers(raw: Json, attending: tuple[int, ...]) -> Recurrent | None:
    """All layers but those that attend, and their sizes; None where all attend."""
    layers = tuple(layer for layer in range(positive(raw, "num_hidden_layers")) if layer not in attending)
    if not layers:
        return None
    raw = raw | {key: value for key, value in DEFAULTS.items() if raw.get(key) is None}
    refuse(raw, "time_step_limit", unless=NO_LIMITS)
    refuse(raw, "mamba_proj_bias", unless=(False,))
    inner, heads = positive(raw, "mamba_expand") * positive(raw, "hidden_size"), positive(raw, "mamba_n_heads")
    if raw.get("mamba_d_ssm") is not None:
        inner = positive(raw, "mamba_d_ssm")
    head_dim = inner // heads if raw.get("mamba_d_head") in (None, "auto") else positive(raw, "mamba_d_head")
    groups = positive(raw, "mamba_n_groups")
    if head_dim * heads != inner or heads % groups:
        raise ModelError(
            f"mamba_n_heads must divide {inner}, and mamba_n_groups it, but they are {heads} and {groups}; correct config.json"
        )
    return Recurrent(
        layers=layers,
        width=width_of(raw, "mamba_d_conv"),
        key_heads=groups,
        key_dim=positive(raw, "mamba_d_state"),
        value_heads=heads,
        value_dim=head_dim,
        has_bias=flag(raw, "mamba_conv_bias"),
    )
