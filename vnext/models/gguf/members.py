"""What a GGUF file's metadata says of one architecture, and what several architectures read of it alike."""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable, Mapping, Sequence

from vnext.models.errors import ModelError
from vnext.models.gguf.header import Header

Stretches = Sequence[float]
STRETCHES, QUERY_BIAS = "rope_freqs.weight", "blk.0.attn_q.bias"
BY_LENGTH = {"short_factor": "rope_factors_short.weight", "long_factor": "rope_factors_long.weight"}
"""What divides frequencies in texts within the original context, and in longer ones."""
LAYERED = frozenset({"gemma3n", "gemma4"})
"""Architectures whose layers may differ in their sizes."""
LLAMA3 = (1.0, 4.0, 8192)
"""Turns within the original context below which frequencies are stretched, and above which they are not; that context."""


class Members:
    """The metadata of one architecture."""

    def __init__(self, header: Header, stretches: Mapping[str, Stretches]) -> None:
        self.tensors, self._metadata, self.stretches = header.tensors, header.metadata, stretches
        self.architecture = header.metadata.get("general.architecture")

    def number(self, name: str, usual: float | None = None) -> int | float:
        """A member that is one number for all layers, but those that have none of what it counts. Raises ModelError where there is
        none, nor a usual one."""
        found = self._metadata.get(f"{self.architecture}.{name}", usual)
        if isinstance(found, array) and found and len(some := set(found) - {0} or {0}) == 1:
            found = some.pop()
        if isinstance(found, bool) or not isinstance(found, int | float):
            reported = "layers that differ" if isinstance(found, array) else f"{found!r:.120}"
            raise ModelError(f"the file's {self.architecture}.{name} is {reported}, and one number is wanted; take another file")
        return found

    def whole(self, name: str, usual: int | None = None) -> int:
        """`number`, which must be a whole one. Raises ModelError."""
        found = self.number(name, usual)
        if not isinstance(found, int) or found < 0:
            raise ModelError(f"the file's {self.architecture}.{name} is {found}, and a whole number is wanted; take another file")
        return found

    def least(self, name: str, usual: float | None = None) -> int | float:
        """`number`, or the smallest one of layers that differ, of architectures in LAYERED."""
        found = self._metadata.get(f"{self.architecture}.{name}")
        if self.architecture in LAYERED and isinstance(found, array) and (some := set(found) - {0}):
            return min(some)
        return self.number(name, usual)

    def each(self, name: str, usual: float | None = None) -> list[float]:
        """A member as numbers of all layers, of the architecture or of all. Raises ModelError for another count."""
        found = self._metadata.get(f"{self.architecture}.{name}", self._metadata.get(name))
        if not isinstance(found, array):
            return [self.number(name, usual)] * len(self.places)
        if len(found) != len(self.places):
            raise ModelError(f"the file's {name} has {len(found)} numbers for {len(self.places)} layers; download it again")
        return list(found)

    def numbers(self, name: str) -> list[float]:
        """Those of an array, [] where there is none."""
        found = self._metadata.get(f"{self.architecture}.{name}")
        return list(found) if isinstance(found, array) else []

    def shape(self, name: str) -> tuple[int, ...]:
        """A matrix's. Raises ModelError where the file has none."""
        if name not in self.tensors or len(self.tensors[name].shape) != 2:
            raise ModelError(f"the file has no matrix {name}, which the model wants; download it again")
        return self.tensors[name].shape

    def text(self, name: str) -> str:
        return str(self._metadata.get(f"{self.architecture}.{name}", ""))

    def flag(self, name: str, usual: bool = False) -> bool:
        return bool(self._metadata.get(f"{self.architecture}.{name}", usual))

    def has(self, name: str, layer: int = 0) -> bool:
        return f"blk.{layer}.{name}" in self.tensors

    def layers(self, name: str) -> list[int]:
        """Those that have such a tensor."""
        return [layer for layer in range(self.layer_count()) if self.has(name, layer)]

    def layer_count(self) -> int:
        """But those that only draft."""
        return int(self.number("block_count") - self.number("nextn_predict_layers", 0))

    @property
    def places(self) -> range:
        """The numbers of its layers."""
        return range(self.layer_count())

    def __contains__(self, name: str) -> bool:
        return f"{self.architecture}.{name}" in self._metadata



def rope_of(members: Members) -> dict[str, object]:
    rope: dict[str, object] = {"rope_type": "default", "rope_theta": members.number("rope.freq_base", 10000.0)}
    kind = members.text("rope.scaling.type")
    if kind in ("linear", "yarn"):
        rope |= {"rope_type": kind, "factor": members.number("rope.scaling.factor")}
    if kind == "yarn":
        original = members.number("rope.scaling.original_context_length", members.number("context_length"))
        rope |= {"original_max_position_embeddings": original}
    if sections := members.numbers("rope.dimension_sections"):  # a fourth one is for nothing
        rope["mrope_section"] = sections[:3]
    if STRETCHES in members.stretches and members.architecture != "gemma4":  # where pairs turn or do not
        rope |= _llama3(members.stretches[STRETCHES], float(members.number("rope.freq_base", 10000.0)))
    return rope


def long_rope(members: Members) -> dict[str, object]:
    """Phi's, which divides frequencies by numbers of its own where the file has them."""
    original = members.number("rope.scaling.original_context_length", members.number("context_length"))
    rope = {**rope_of(members), "partial_rotary_factor": turning_share(members)}
    if all(name in members.stretches for name in BY_LENGTH.values()):
        rope |= {"rope_type": "longrope"} | {key: list(members.stretches[name]) for key, name in BY_LENGTH.items()}
        if "rope.scaling.attn_factor" in members:
            rope["attention_factor"] = members.number("rope.scaling.attn_factor")
    return {"rope_parameters": rope, "original_max_position_embeddings": original}


def _llama3(stretches: Stretches, theta: float) -> dict[str, object]:
    """The settings of Llama 3.1 and later that stretch positions so: all of these models differ in the factor alone. Raises
    ModelError where none does."""
    factor, (low, high, original) = max(stretches, default=0.0), LLAMA3

    def stretch(share: float) -> float:
        """Of a frequency with so great a share of its turns between the two bounds."""
        return 1 / ((1 - share) / factor + share)

    def share(place: int) -> float:
        turns: float = original * theta ** (-place / len(stretches)) / math.tau
        return min(max((turns - low) / (high - low), 0), 1)

    is_usual = factor >= 1 and theta >= 1
    if not is_usual or not all(math.isclose(found, stretch(share(place)), rel_tol=1e-4) for place, found in enumerate(stretches)):
        raise ModelError(f"the file stretches positions by {STRETCHES} as no Llama does; take the model's safetensors checkpoint")
    names = ("low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
    return {"rope_type": "llama3", "factor": factor} | dict(zip(names, LLAMA3))


def turning_share(members: Members) -> float:
    """The part of a head's channels that turns."""
    head_dim = members.number("attention.key_length", members.number("embedding_length") // members.number("attention.head_count"))
    return members.number("rope.dimension_count", head_dim) / head_dim


def window_of(members: Members) -> int | float | None:
    return members.number("attention.sliding_window") if "attention.sliding_window" in members else None


def per_token(members: Members) -> dict[str, object]:
    return {"num_experts_per_tok": members.number("expert_used_count")}


def plain(architecture: str) -> Callable[[Members], dict[str, object]]:
    return lambda members: {"architectures": [architecture]}


def biased(architecture: str) -> Callable[[Members], dict[str, object]]:
    """Of a family with biases of queries, keys and values where the file has them."""
    return lambda members: {"architectures": [architecture], "attention_bias": QUERY_BIAS in members.tensors}


def multipliers(members: Members) -> dict[str, object]:
    """Granite's."""
    scales = {
        "embedding_multiplier": "embedding_scale", "residual_multiplier": "residual_scale",
        "attention_multiplier": "attention.scale", "logits_scaling": "logit_scale",
    }  # fmt: skip
    return {key: members.number(name, 1.0) for key, name in scales.items()}


def grouped(members: Members) -> dict[str, object]:
    """Experts by the keys that DeepSeek V3 began."""
    return {
        "n_routed_experts": members.number("expert_count"),
        "n_shared_experts": members.number("expert_shared_count", 1),
        "moe_intermediate_size": members.number("expert_feed_forward_length"),
        "first_k_dense_replace": members.number("leading_dense_block_count", 0),
        "routed_scaling_factor": members.number("expert_weights_scale", 1.0) or 1.0,
        "norm_topk_prob": members.flag("expert_weights_norm"),
        "n_group": members.number("expert_group_count", 1),
        "topk_group": members.number("expert_group_used_count", 1),
    } | per_token(members)


def epsilon_of(members: Members) -> int | float:
    """What norms add to the mean square, by either of two names."""
    return members.number("attention.layer_norm_rms_epsilon", members.number("attention.layer_norm_epsilon", 0.0))
