"""The operations of the prefix index in Python: the plain form, which defines them. Tests compare `_prefix_index.c` to it.

A table has two sides that mirror each other: `blocks` maps a hash to the page with that content, and `keys` maps a page
to its hash, None if it has none. The operations change both in place; a pair is (hash, page).
"""

from __future__ import annotations

import numpy as np

Pair = tuple[bytes, int]
Move = Pair | int
"""A pair that comes, or a page that goes."""


def insert(blocks: dict[bytes, int], keys: list[bytes | None], pairs: list[Pair]) -> list[Pair]:
    """Insert the pairs in order, except those whose hash already has a page. Returns the pairs inserted: `pairs` if all were."""
    came = []
    for key, block in pairs:
        if key not in blocks:
            blocks[key] = block
            keys[block] = key
            came.append((key, block))
    return pairs if len(came) == len(pairs) else came


def remove(blocks: dict[bytes, int], keys: list[bytes | None], taken: np.ndarray) -> list[Pair]:
    """Remove the hashes of these pages (int32[n]). Returns the pairs removed; KeyError if the sides do not mirror each other."""
    gone = []
    for block in taken.tolist():
        key = keys[block]
        if key is not None:
            del blocks[key]
            keys[block] = None
            gone.append((key, block))
    return gone


def move(blocks: dict[bytes, int], keys: list[bytes | None], moves: list[Move]) -> tuple[list[Pair], list[Pair]]:
    """`insert` and `remove`, one move after another. Returns the pairs inserted and those removed."""
    came, gone = list[Pair](), list[Pair]()
    for each in moves:
        if isinstance(each, int):
            gone += remove(blocks, keys, np.array([each], dtype=np.int32))
        else:
            came += insert(blocks, keys, [each])
    return came, gone


def apply(blocks: dict[bytes, int], keys: list[bytes | None], gone: list[Pair], come: list[Pair]) -> None:
    """Remove the pairs in `gone`, then insert those in `come`. KeyError if a pair to be removed is missing."""
    for key, block in gone:
        del blocks[key]
        keys[block] = None
    for key, block in come:
        blocks[key] = block
        keys[block] = key
