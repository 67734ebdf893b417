"""What operations with many arguments are given: a value each, with the names and the order that all implementations share.

Knows no device and no dtype; contracts.py says what the fields must be.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    import torch


class RotaryWrite(NamedTuple):
    """What rotary_kv_write does with queries, keys and values [T, heads, D].

    q_norm, k_norm [D]: weights of an rms_norm over each head (None: none). cosine, sine float32 [T, R / 2]: the first R channels of
    each head turn (None: none). Caches [page_count, kv_heads, block_size, D]; slots int64 [T], each block * block_size + offset.
    """

    q_norm: torch.Tensor | None
    k_norm: torch.Tensor | None
    eps: float
    cosine: torch.Tensor | None
    sine: torch.Tensor | None
    key_cache: torch.Tensor
    value_cache: torch.Tensor
    slots: torch.Tensor
    key_scale: float = 1.0
    value_scale: float = 1.0


class AttentionCall(NamedTuple):
    """What queries see in paged_attention. Caches as in RotaryWrite; `metadata` is what attention_metadata made for them.

    `scale` multiplies scores. A query sees the last `window` tokens, itself included (0: all). With a softcap c above 0 a score s
    becomes c * tanh(s / c) (Gemma 2, arXiv 2408.00118). Caches of float8_e4m3fn hold keys and values divided by the scales.
    """

    key_cache: torch.Tensor
    value_cache: torch.Tensor
    metadata: Any
    scale: float
    window: int = 0
    softcap: float = 0.0
    key_scale: float = 1.0
    value_scale: float = 1.0
