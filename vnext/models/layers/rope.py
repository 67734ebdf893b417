"""Rotary embedding: the frequencies of a model and the angles of a step. Owns no state; applied by the kernels."""

from __future__ import annotations

import math

import torch

from vnext.models.config.rope_config import Rope


def inverse_frequencies(rope: Rope, head_dim: int) -> torch.Tensor:
    """Radians a position for each pair of a head that turns, float32 [share * head_dim / 2], stretched as asked."""
    width = int(head_dim * rope.share)
    exponents = torch.arange(0, width, 2, dtype=torch.int64).float() / width
    plain = 1.0 / (rope.theta**exponents)
    match rope.kind:
        case "linear":
            return plain / rope.factor
        case "llama3":
            return stretch_slow(plain, rope)
        case "yarn":
            return stretch_by_turns(plain, rope)
        case "longrope":
            return 1.0 / (torch.tensor(rope.divisors) * rope.theta**exponents)
        case _:
            return plain


def stretch_slow(frequencies: torch.Tensor, rope: Rope) -> torch.Tensor:
    """Llama 3: short waves stay, waves longer than the trained context are divided by the factor, between: a blend.

    `turns` is how often a wave fits into the original context; the blend is linear in it.
    """
    turns = rope.original_position_count * frequencies / (2 * math.pi)
    share = (turns - rope.low_frequency_factor) / (rope.high_frequency_factor - rope.low_frequency_factor)
    kept = share.clamp(0.0, 1.0)
    return kept * frequencies + (1.0 - kept) * frequencies / rope.factor


def stretch_by_turns(frequencies: torch.Tensor, rope: Rope) -> torch.Tensor:
    """YaRN: as Llama 3, but the blend is linear in the pair's index, between the pairs that turn beta_fast and beta_slow
    times in the original context (arXiv 2309.00071, section 3.2)."""
    pairs = frequencies.shape[0]

    def pair_that_turns(count: float) -> float:
        return pairs * math.log(rope.original_position_count / (count * 2 * math.pi)) / math.log(rope.theta)

    low, high = pair_that_turns(rope.beta_fast), pair_that_turns(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, 2 * pairs - 1)
    width = high - low if high != low else 0.001
    stretched = ((torch.arange(pairs, dtype=torch.float32) - low) / width).clamp(0.0, 1.0)
    return frequencies / rope.factor * stretched + frequencies * (1.0 - stretched)


def rotary_angles(positions: torch.Tensor, frequencies: torch.Tensor, rope: Rope) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosine and sine, float32 [T, frequencies], of positions int64 [T], times the rope's attention factor."""
    angles = positions.float()[:, None] * frequencies
    if rope.attention_factor == 1.0:
        return angles.cos(), angles.sin()
    return angles.cos().mul_(rope.attention_factor), angles.sin().mul_(rope.attention_factor)
