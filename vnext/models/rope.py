"""Rotary embedding: the frequencies of a model and the angles of a step. Owns no state; applied by the kernels."""

from __future__ import annotations

import math

import torch

from vnext.models.config import ModelConfig, Rope


def inverse_frequencies(config: ModelConfig) -> torch.Tensor:
    """Radians a position for each pair of a head, float32 [head_dim / 2], stretched as the model asks."""
    exponents = torch.arange(0, config.head_dim, 2, dtype=torch.int64).float() / config.head_dim
    plain = 1.0 / (config.rope.theta**exponents)
    if config.rope.kind == "linear":
        return plain / config.rope.factor
    if config.rope.kind == "llama3":
        return stretch_slow(plain, config.rope)
    return plain


def stretch_slow(frequencies: torch.Tensor, rope: Rope) -> torch.Tensor:
    """Llama 3: short waves stay, waves longer than the trained context are divided by the factor, between: a blend.

    `turns` is how often a wave fits into the original context; the blend is linear in it.
    """
    turns = rope.original_position_count * frequencies / (2 * math.pi)
    share = (turns - rope.low_frequency_factor) / (rope.high_frequency_factor - rope.low_frequency_factor)
    kept = share.clamp(0.0, 1.0)
    return kept * frequencies + (1.0 - kept) * frequencies / rope.factor


def rotary_angles(positions: torch.Tensor, frequencies: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosine and sine, float32 [T, head_dim / 2], of positions int64 [T]."""
    angles = positions.float()[:, None] * frequencies
    return angles.cos(), angles.sin()
