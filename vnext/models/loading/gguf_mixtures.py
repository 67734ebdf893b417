"""Which type each tensor of a written GGUF file gets.

A scheme names the type of most matrices. Those of K-blocks are mixtures: the head, values, and in some layers the MLP's last matrix
have more bits. A row that is no whole number of a type's blocks gets another of about as many bits.
Source: llama_tensor_get_type in src/llama-quant.cpp of llama.cpp.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from types import MappingProxyType

import gguf
from gguf import GGMLQuantizationType

from vnext.models.gguf.config import EMBEDDING, HEAD

FILE_TYPES = MappingProxyType(
    {
        "Q8_0": 7, "Q5_1": 9, "Q5_0": 8, "Q4_1": 3, "Q4_0": 2, "BF16": 32, "F16": 1, "MXFP4": 38,
        "Q6_K": 18, "Q5_K_M": 17, "Q4_K_M": 15, "Q3_K_M": 12, "Q2_K": 10,
    }
)  # fmt: skip
"""llama.cpp's number of a file of mostly this type, by schemes."""
FEW = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "MXFP4")
INSTEAD = MappingProxyType({"Q2_K": "Q4_0", "Q3_K": "Q4_0", "Q4_K": "Q5_0", "Q5_K": "Q5_1", "Q6_K": "Q8_0"})
"""Of blocks of 32, where a row is no whole number of those of 256. For the first two llama.cpp takes IQ4_NL, of as many bits."""
EXPERTS = re.compile(r".*_exps\.weight")
"""What alone becomes MXFP4; all else has 8 bits then, as in llama.cpp."""
HELD_EXACT = re.compile(
    r".*(_norm|ffn_gate_inp|ffn_gate_inp_shexp|ssm_conv1d(_[qkv])?|shortconv\.conv|position_embd|token_types|per_layer_model_proj"
    r"|laurel_[lr]|altup_.*|rope_.*|ssm_[adx]|ssm_dt|attn_sinks)(\.weight|\.bias)?|.*\.bias|.*\.scale"
)
"""Tensors that llama.cpp keeps exact, too."""
PART = re.compile(r"blk\.(\d+)\.(.*)\.weight")
LAYERS_OF_70B = 80
"""Layers of the models of 70 B, of whose heads eight share values."""


class Mixture:
    """Of a file with tensors of these `shapes`. `scheme`: of FILE_TYPES; `experts`: how many a layer has."""

    def __init__(self, scheme: str, shapes: Mapping[str, tuple[int, ...]], experts: int) -> None:
        self._scheme, self._base = scheme, scheme.removesuffix("_M")
        self._shapes, self._experts = shapes, experts
        found = [match for match in map(PART.fullmatch, shapes) if match]
        self._layers = sorted({int(match[1]) for match in found})
        self._valued = sorted({int(match[1]) for match in found if match[2] in ("attn_v", "attn_qkv")})

    def type_of(self, name: str) -> str:
        """What a tensor is to have, F32 for what stays exact."""
        shape = self._shapes[name]
        if len(shape) < 2 or HELD_EXACT.fullmatch(name):
            return "F32"
        type_ = self._wanted(name)
        return next((each for each in (type_, INSTEAD.get(type_)) if each and _is_whole(shape[-1], each)), "F16")

    def _wanted(self, name: str) -> str:
        """By the scheme, whatever the shape."""
        if self._scheme in FEW:
            has_eight = name in (EMBEDDING, HEAD) or (self._scheme == "MXFP4" and not EXPERTS.fullmatch(name))
            return "Q8_0" if has_eight else self._scheme
        if not self._base.endswith("_K"):
            return self._base
        if name == (HEAD if HEAD in self._shapes else EMBEDDING):
            return "Q6_K"
        match = PART.fullmatch(name)
        return self._of_part(match[2], int(match[1])) if match else self._base

    def _of_part(self, part: str, layer: int) -> str:
        """By a mixture."""
        if part in ("attn_v", "attn_k") and self._experts == 8:
            return "Q8_0"
        if part == "attn_v":
            found = self._of_values(self._valued.index(layer), layer)
            is_shared = len(self._layers) == LAYERS_OF_70B and self._shared_by(layer) > 1
            return "Q5_K" if is_shared and found in ("Q3_K", "Q4_K") else found
        if part.startswith("ffn_down"):
            return self._of_last(self._layers.index(layer))
        if part == "attn_output":
            of_eight = {"Q2_K": "Q5_K", "Q3_K_M": "Q5_K", "Q4_K_M": "Q5_K"}
            return (of_eight if self._experts == 8 else {"Q2_K": "Q3_K", "Q3_K_M": "Q4_K"}).get(self._scheme, self._base)
        if part == "attn_qkv":
            return {"Q3_K_M": "Q4_K", "Q4_K_M": "Q5_K", "Q5_K_M": "Q6_K"}.get(self._scheme, self._base)
        return self._base

    def _of_values(self, place: int, layer: int) -> str:
        match self._scheme:
            case "Q2_K":
                return "Q4_K" if self._shared_by(layer) >= 4 else "Q3_K"
            case "Q3_K_M":
                return "Q5_K" if place < 2 else "Q4_K"
        return "Q6_K" if self._scheme.endswith("_M") and _gets_more(place, len(self._valued)) else self._base

    def _of_last(self, place: int) -> str:
        """Of the MLP's last matrix."""
        match self._scheme:
            case "Q2_K":
                return "Q3_K"
            case "Q3_K_M":
                return "Q5_K" if place < len(self._layers) // 16 else "Q4_K"
        return "Q6_K" if self._scheme.endswith("_M") and _gets_more(place, len(self._layers)) else self._base

    def _shared_by(self, layer: int) -> int:
        """The heads of queries for each of values."""
        queries, values = (self._shapes.get(f"blk.{layer}.attn_{each}.weight", (1,))[0] for each in ("q", "v"))
        return queries // max(values, 1)


def _gets_more(place: int, count: int) -> bool:
    """The first and the last eighth of `count` layers have more bits, and of the others each third."""
    eighth = count // 8
    return place < eighth or place >= 7 * count // 8 or (place - eighth) % 3 == 2


def _is_whole(inputs: int, type_: str) -> bool:
    return inputs % gguf.GGML_QUANT_SIZES[GGMLQuantizationType[type_]][0] == 0
