"""Bits: small numbers as quantised files hold them, several in a word or a byte, and floats of 8 and 4 bits.

Owns the places of bits; scales, groups and names of tensors are for the formats that read them.
"""

from __future__ import annotations

import ml_dtypes
import numpy as np

WORD = 32
AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)
FLOAT4 = np.array([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0], np.float32)
"""E2M1: the numbers of four bits."""
BYTES = np.arange(256, dtype=np.uint8)
EXPONENTS = BYTES.view(ml_dtypes.float8_e8m0fnu).astype(np.float32)
"""E8M0: powers of two, of which the last is no number."""


def word_unit(bits: int) -> int:
    """How many numbers of so many bits fill whole words: a word's, or of 3 bits those of three words."""
    return WORD if WORD % bits else WORD // bits


def word_slice(part: slice, bits: int, what: str) -> slice:
    """The words that hold the numbers of a part. Raises ValueError where a word would be cut; `what` names the numbers."""
    unit = word_unit(bits)
    if part.start % unit or part.stop % unit:
        raise ValueError(f"{what} {part.start} to {part.stop} cut a word of {unit}")
    return slice(part.start * bits // WORD, part.stop * bits // WORD)


def word_count(count: int, bits: int, what: str) -> int:
    """How many words hold so many numbers. Raises ValueError where they do not fill them."""
    if count % (unit := word_unit(bits)):
        raise ValueError(f"{count} {what} are no whole words of {unit}")
    return count * bits // WORD


def from_words(words: np.ndarray, bits: int) -> np.ndarray:
    """words int32 [N, W] -> uint8 [N, W * 32 / bits], the lowest bits of a word first."""
    count, width = words.shape
    words = np.ascontiguousarray(words).view(np.uint32)
    if WORD % bits:  # one stream of bits
        stream = np.unpackbits(words.view(np.uint8), axis=1, bitorder="little").reshape(count, -1, bits)
        found: np.ndarray = stream @ (1 << np.arange(bits)).astype(np.uint8)
        return found
    if bits == 8:
        return words.view(np.uint8)
    if bits == 4:
        return _from_nibbles(words.astype(np.uint64)).view(np.uint8)
    unit = word_unit(bits)
    numbers = np.empty((count, width, unit), np.uint8)
    for run in range(unit):
        numbers[:, :, run] = (words >> np.uint32(run * bits)) & np.uint32(2**bits - 1)
    return numbers.reshape(count, -1)


def turned_from_awq(words: np.ndarray) -> np.ndarray:
    """words int32 [N, W] of AWQ, which have the even ones of eight numbers first -> uint8 [W * 8, N]. Words are turned before they
    are taken apart: that moves an eighth as many numbers."""
    words = np.ascontiguousarray(words.T).view(np.uint32)
    numbers = np.empty((len(words), len(AWQ_ORDER), words.shape[1]), np.uint8)
    for number, place in enumerate(AWQ_ORDER):
        numbers[:, number] = (words >> np.uint32(4 * place)) & np.uint32(15)
    return numbers.reshape(-1, words.shape[1])


def _from_nibbles(words: np.ndarray) -> np.ndarray:
    """uint64 of which the lower half is a word -> uint64 with a number of it in each byte."""
    for shift, mask in ((16, 0x0000FFFF0000FFFF), (8, 0x00FF00FF00FF00FF), (4, 0x0F0F0F0F0F0F0F0F)):
        words = (words | words << np.uint64(shift)) & np.uint64(mask)
    return words


def unsigned(numbers: np.ndarray, bits: int) -> np.ndarray:
    """int8 of `bits` -> codes uint8, whose zero is 2 ** (bits - 1)."""
    return numbers.view(np.uint8) + np.uint8(2 ** (bits - 1))


def to_words(numbers: np.ndarray, bits: int) -> np.ndarray:
    """uint8 [N, C] of 2, 4 or 8 bits -> words int32 [N, C * bits / 32], the lowest bits of a word first."""
    parts = numbers.reshape(len(numbers), -1, word_unit(bits)).astype(np.uint32)
    shifted = parts << np.arange(0, WORD, bits, dtype=np.uint32)
    words: np.ndarray = np.bitwise_or.reduce(shifted, axis=-1).view(np.int32)
    return words


def ones(bits: int) -> np.uint32:
    """A word of which each number is 1."""
    return np.uint32((2**WORD - 1) // (2**bits - 1))


def nibbles(packed: np.ndarray, high_first: bool = False) -> np.ndarray:
    """uint8 [N, B] -> uint8 [N, 2 * B], of each byte the low half first."""
    found = np.empty((*packed.shape, 2), np.uint8)
    found[..., int(high_first)] = packed & 15
    found[..., 1 - int(high_first)] = packed >> 4
    return found.reshape(len(packed), -1)


def floats_of(numbers: np.ndarray) -> np.ndarray:
    """Numbers of any dtype in float32, those of 8 bits by a table."""
    if numbers.dtype.itemsize > 1:
        return numbers.astype(np.float32)
    table = BYTES.view(numbers.dtype).astype(np.float32)
    found: np.ndarray = table[numbers.view(np.uint8)]
    return found
