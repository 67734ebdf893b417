"""Rotary embedding: the frequencies of a model and the angles of a step. Owns no state; applied by the kernels.

Powers, cosines and sines are made in float64 and rounded to float32 once, so that they do not depend on a processor's vector
library. Their arguments are float32, as everywhere.
"""

from __future__ import annotations

import math

import numpy as np

from vnext.kernels.arrays import Array, as_tensor
from vnext.models.config.rope_config import Rope


def inverse_frequencies(rope: Rope, head_dim: int) -> np.ndarray:
    """Radians a position for each pair of a head that turns, float32 [share * head_dim / 2], stretched as asked; of
    "proportional" for each pair, 0 for those that stand."""
    is_whole = rope.kind == "proportional"
    width = 2 * int(head_dim * rope.share / 2) if is_whole else int(head_dim * rope.share)
    exponents = np.arange(0, width, 2, dtype=np.float32) / np.float32(head_dim if is_whole else width)
    powers = np.power(rope.theta, exponents.astype(np.float64)).astype(np.float32)
    plain = np.float32(1) / powers
    match rope.kind:
        case "linear":
            return plain / np.float32(rope.factor)
        case "proportional":
            return np.pad(plain / np.float32(rope.factor), (0, (head_dim - width) // 2))
        case "llama3":
            return stretch_slow(plain, rope)
        case "yarn":
            return stretch_by_turns(plain, rope)
        case "longrope":
            return np.float32(1) / (np.array(rope.divisors, dtype=np.float32) * powers)
        case _:
            return plain


def stretch_slow(frequencies: np.ndarray, rope: Rope) -> np.ndarray:
    """Llama 3: short waves stay, waves longer than the trained context are divided by the factor, between: a blend.

    `turns` is how often a wave fits into the original context; the blend is linear in it.
    """
    turns = frequencies * np.float32(rope.original_position_count) / np.float32(2 * math.pi)
    low, high = np.float32(rope.low_frequency_factor), np.float32(rope.high_frequency_factor)
    with np.errstate(divide="ignore"):  # Llama 4 has one number for both
        kept = ((turns - low) / (high - low)).clip(0, 1)
    found: np.ndarray = kept * frequencies + (1 - kept) * frequencies / np.float32(rope.factor)
    return found


def stretch_by_turns(frequencies: np.ndarray, rope: Rope) -> np.ndarray:
    """YaRN: as Llama 3, but the blend is linear in the pair's index, between the pairs that turn beta_fast and beta_slow
    times in the original context (arXiv 2309.00071, section 3.2)."""
    pairs = len(frequencies)

    def pair_that_turns(count: float) -> float:
        return pairs * math.log(rope.original_position_count / (count * 2 * math.pi)) / math.log(rope.theta)

    low, high = pair_that_turns(rope.beta_fast), pair_that_turns(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, 2 * pairs - 1)
    width = high - low if high != low else 0.001
    stretched = ((np.arange(pairs, dtype=np.float32) - np.float32(low)) / np.float32(width)).clip(0, 1)
    found: np.ndarray = frequencies / np.float32(rope.factor) * stretched + frequencies * (1 - stretched)
    return found


def rotary_angles(positions: Array, frequencies: Array, rope: Rope) -> tuple[Array, Array]:
    """Cosine and sine, float32 [T, frequencies], of positions int64 [T], times the rope's attention factor. With frequencies in an
    array they are made on the host, also of [3, T] for a rope with axes; with a tensor by torch, on its device."""
    if isinstance(positions, np.ndarray):
        return _host_angles(positions, frequencies, rope)
    if isinstance(frequencies, np.ndarray):
        cosine, sine = _host_angles(positions.numpy(), frequencies, rope)
        return as_tensor(cosine), as_tensor(sine)
    angles = (positions.float()[:, None] * frequencies).double()
    if rope.attention_factor == 1.0:
        return angles.cos().float(), angles.sin().float()
    return angles.cos().float().mul_(rope.attention_factor), angles.sin().float().mul_(rope.attention_factor)


def query_factors(positions: Array, growth: tuple[float, int, int], on_host: bool) -> Array:
    """What queries are multiplied by, float32 [T], at positions int64 [T]: 1 + b * log(1 + (p + m) // n) of growth (b, n, m), in
    float64 and rounded once, as in Llama 4. `on_host`: an array, made without torch."""
    rate, span, first = growth
    if on_host:
        given = positions if isinstance(positions, np.ndarray) else positions.numpy()
        return (np.log1p(np.floor((given + first) / span)) * rate + 1).astype(np.float32)
    return ((positions + first).double().div(span).floor().log1p() * rate + 1).float()


def _host_angles(positions: np.ndarray, frequencies: np.ndarray, rope: Rope) -> tuple[np.ndarray, np.ndarray]:
    places = positions[:, None] if positions.ndim == 1 else np.ascontiguousarray(positions[np.array(rope.axes)].T)
    angles = (places.astype(np.float32) * frequencies).astype(np.float64)
    factor = np.float32(rope.attention_factor)
    return np.cos(angles).astype(np.float32) * factor, np.sin(angles).astype(np.float32) * factor
