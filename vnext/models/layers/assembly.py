"""Assembly: the shared layers from a source of checkpoint tensors under Hugging Face's usual names."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import numpy as np

from vnext.kernels.arrays import Array
from vnext.models.config.model_config import ModelConfig
from vnext.models.layers.layers import Attention, GatedMlp, GatedNorm, LayerNorm, Linear, PlainMlp, SparseMlp

JOINED = "gate_up_proj"
"""Gate and up of experts that one tensor holds."""


class Source(Protocol):
    """Where weights come from: this rank's part of named tensors, in the wanted dtype and place. `dtype` is the activations'."""

    dtype: np.dtype

    def __contains__(self, name: str) -> bool:
        """Whether there is such a tensor."""

    def is_tied(self, embedding: str, head: str) -> bool:
        """Whether a head that config.json ties is the embedding: there is one of the two only, or they hold the same numbers."""

    def go_without(self, head: str) -> None:
        """There is no such head, and the embedding stands in for it. Raises ModelError where that cannot be."""

    def fused(self, names: tuple[str, ...]) -> Array:
        """The parts of these tensors, one below the other."""

    def table(self, name: str) -> Array:
        """One tensor's part, plain or packed, to look rows up in."""

    def wide(self, name: str) -> Array:
        """One tensor's part in float32."""

    def packed(self, names: tuple[str, ...], *, exact: bool = False) -> Any:
        """`fused`, packed for the products; `exact`: never quantised."""

    def packed_wide(self, name: str) -> object:
        """One tensor's part, packed in float32 for products with float32."""

    def packed_gated(self, names: tuple[str, ...]) -> Any:
        """`fused` gate and up, packed for the product that applies the model's activation."""

    def stacked(self, groups: tuple[tuple[str, ...], ...], gated: bool) -> Any:
        """The fused weights of each expert, packed; `gated`: gate and up."""

    def by_head(self, names: tuple[str, ...], sizes: tuple[int, int]) -> tuple[Any, Any]:
        """A tensor [heads * (K + V), in], K and V the sizes, packed head by head and never quantised: [heads, in, K] of its upper
        rows, turned about, and [heads, V, in] of the others; or two tensors that hold these. Where V is 0, [heads, K, K]."""

    def integers(self, name: str, count: int) -> Array:
        """A tensor of whole numbers, int64 [count]."""

    def scalar(self, name: str) -> Array:
        """A tensor of one number and no axes, float32 [1]."""

    def share(self, whole: Array) -> Array:
        """This rank's of equal parts of what all ranks have, along its one axis."""

    def place(self, array: np.ndarray) -> Array:
        """A computed array: as it is on the host, where angles are made of it, else a tensor on the device."""


def rms_norm(source: Source, name: str) -> Array:
    """The weight of a norm, in the model's dtype, in which it multiplies."""
    return source.fused((name + ".weight",))


def wide_norm(source: Source, name: str) -> Array:
    """The weight of a norm that multiplies in float32, before rounding."""
    return source.wide(name + ".weight")


def shifted_norm(source: Source, name: str) -> Array:
    """As `wide_norm`, of a norm that multiplies by 1 + weight."""
    return source.wide(name + ".weight") + 1


def layer_norm(source: Source, name: str) -> LayerNorm:
    return LayerNorm(source.wide(name + ".weight"), source.wide(name + ".bias"))


def bare_layer_norm(source: Source, name: str) -> LayerNorm:
    """A layer norm without a bias."""
    weight = source.wide(name + ".weight")
    return LayerNorm(weight, weight * 0)


def shifted_layer_norm(source: Source, name: str) -> LayerNorm:
    """A layer norm that multiplies by 1 + weight."""
    return LayerNorm(source.wide(name + ".weight") + 1, source.wide(name + ".bias"))


def gated_norm(source: Source, name: str) -> GatedNorm:
    """A norm with a gate, which is never quantised."""
    inner, outer = (Linear(source.packed((f"{name}.{part}.weight",), exact=True), None) for part in ("W_down", "W_up"))
    return GatedNorm(rms_norm(source, name + ".norm"), inner, outer)


def linear(source: Source, prefix: str, *modules: str, bias: bool = False) -> Linear:
    """The modules' weights, fused, with their biases if they have any; `prefix` ends with a dot."""
    weight = source.packed(tuple(f"{prefix}{module}.weight" for module in modules))
    return Linear(weight, source.fused(tuple(f"{prefix}{module}.bias" for module in modules)) if bias else None)


def gated(source: Source, prefix: str, *modules: str, bias: bool = False) -> Linear:
    """As `linear`, of gate and up. A bias comes between product and activation, so it keeps the two apart."""
    if bias:
        return linear(source, prefix, *modules, bias=True)
    return Linear(source.packed_gated(tuple(f"{prefix}{module}.weight" for module in modules)), None)


def embeddings(source: Source, config: ModelConfig, name: str, head: str = "lm_head.weight") -> tuple[Any, Any]:
    """The embedding and the head; tied, they are one packed weight, which is quantised with the others.

    An embedding apart is looked up and not multiplied: quantising it would round more and read no less. A stage that does not
    begin, or end, with it has None in its place. Where config.json ties the two and the file has a head that differs, the file
    counts, as in transformers; where it has one of the two only, that is both.
    """
    if not (config.is_first or config.is_last):
        return None, None
    if config.tie_embeddings:
        is_tied = source.is_tied(name, head)
    else:
        is_tied = head not in source
        if is_tied:
            source.go_without(head)
    if is_tied:
        packed = source.packed((name if name in source or head not in source else head,))
        return packed if config.is_first else None, packed if config.is_last else None
    return source.table(name) if config.is_first else None, source.packed((head,)) if config.is_last else None


def attention(
    source: Source, prefix: str, *, qkv_bias: bool = False, output_bias: bool = False, head_norms: bool = False
) -> Attention:
    """The attention of the layer at `prefix`; `head_norms`: q_norm and k_norm over each head, in the model's dtype."""
    here = prefix + "self_attn."
    return Attention(
        qkv=linear(source, here, "q_proj", "k_proj", "v_proj", bias=qkv_bias),
        output=linear(source, here, "o_proj", bias=output_bias),
        q_norm=source.fused((here + "q_norm.weight",)) if head_norms else None,
        k_norm=source.fused((here + "k_norm.weight",)) if head_norms else None,
    )


def own_attention(source: Source, config: ModelConfig, prefix: str, *, head_norms: bool = False) -> Attention:
    """As `attention`, with the biases that the configuration says."""
    return attention(
        source, prefix, qkv_bias=config.attention_bias, output_bias=config.form.output_bias, head_norms=head_norms
    )


def plain_mlp(source: Source, here: str, up: str, down: str, *, bias: bool = False) -> PlainMlp:
    """The MLP without a gate at `here`, which ends with a dot."""
    return PlainMlp(linear(source, here, up, bias=bias), linear(source, here, down, bias=bias))


def gated_mlp(
    source: Source, prefix: str, *, bias: bool = False, name: str = "mlp.", gate: str = "gate_proj"
) -> GatedMlp:
    here = prefix + name
    return GatedMlp(gated(source, here, gate, "up_proj", bias=bias), linear(source, here, "down_proj", bias=bias))


Parts = Callable[[str, int], tuple[Attention, GatedMlp]]
"""What `assemble_decoder` asks for, by a layer's prefix and number."""


def llama_parts(
    source: Source, *, qkv_bias: bool = False, output_bias: bool = False, head_norms: bool = False, mlp_bias: bool = False
) -> Parts:
    """`attention` and `gated_mlp` of each layer."""

    def parts(prefix: str, index: int) -> tuple[Attention, GatedMlp]:
        own = attention(source, prefix, qkv_bias=qkv_bias, output_bias=output_bias, head_norms=head_norms)
        return own, gated_mlp(source, prefix, bias=mlp_bias)

    return parts


def own_parts(source: Source, config: ModelConfig) -> Parts:
    """As `llama_parts`, with the biases that the configuration says."""
    return llama_parts(
        source, qkv_bias=config.attention_bias, output_bias=config.form.output_bias, mlp_bias=config.mlp_bias
    )


class ExpertNames(NamedTuple):
    """How a checkpoint names what its experts have: `gate_up` of each, one below the other, or up alone, and `down`; the router;
    its bias; the shared MLP and its gate, "" for none; and the gate in that MLP and those without experts."""

    gate_up: tuple[str, ...] = ("gate_proj", "up_proj")
    down: str = "down_proj"
    router: str = "gate"
    bias: str = ""
    shared: str = ""
    shared_gate: str = ""
    gate: str = "gate_proj"


MIXTRAL = ExpertNames(("w1", "w3"), "w2")
MIXTRAL_PREFIX = "block_sparse_moe."


def sparse_mlp(source: Source, config: ModelConfig, here: str, names: ExpertNames = ExpertNames()) -> SparseMlp:
    """The experts at `here`, which ends with a dot.

    The router stays exact: it is small, and a score that is rounded sends a token elsewhere.
    """
    assert config.experts is not None
    experts = [f"{here}experts.{index}." for index in range(config.experts.count)]
    first, joined = (f"{experts[0]}{part}.weight" for part in (names.gate_up[0], JOINED))
    parts = names.gate_up if first in source or joined not in source else (JOINED,)
    has_shared, gate = config.experts.shared_size > 0 and names.shared != "", names.shared_gate
    return SparseMlp(
        router=source.packed((f"{here}{names.router}.weight",), exact=True),
        gate_up=source.stacked(
            tuple(tuple(f"{expert}{part}.weight" for part in parts) for expert in experts), len(names.gate_up) > 1
        ),
        down=source.stacked(tuple((f"{expert}{names.down}.weight",) for expert in experts), False),
        shared=gated_mlp(source, here, name=names.shared + ".", gate=names.gate) if has_shared else None,
        shared_gate=source.packed((f"{here}{gate}.weight",), exact=True) if has_shared and gate else None,
        bias=source.wide(here + names.bias).reshape(-1) if names.bias else None,
    )


def any_mlp(
    source: Source, config: ModelConfig, prefix: str, index: int, names: ExpertNames = ExpertNames(), *, name: str = "mlp."
) -> GatedMlp | SparseMlp:
    """The experts of layer `index`, which is at `prefix`, or the gated MLP of one that has none."""
    if config.experts is None or index in config.experts.dense_layers:
        return gated_mlp(source, prefix, name=name, gate=names.gate)
    return sparse_mlp(source, config, prefix + name, names)
