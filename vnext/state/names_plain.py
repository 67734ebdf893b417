"""The prefix table's moves in Python: the plain form, which says what each means. Tests compare it with `_names.c`, its twin.

A table is two sides that mirror each other: `blocks` leads from a key to the block with that content, `keys` from a block to
its key, None where it has none. Moves change both in place; a pair is (key, block).
"""

from __future__ import annotations

import numpy as np

Pair = tuple[bytes, int]


def offer(blocks: dict[bytes, int], keys: list[bytes | None], pairs: list[Pair]) -> list[Pair]:
    """Each pair comes in, in order, unless its key has a block already. The pairs that came: `pairs` itself if all did."""
    came = []
    for key, block in pairs:
        if key not in blocks:
            blocks[key] = block
            keys[block] = key
            came.append((key, block))
    return pairs if len(came) == len(pairs) else came


def forget(blocks: dict[bytes, int], keys: list[bytes | None], taken: np.ndarray) -> list[Pair]:
    """These blocks (int32[n]) lose their keys. The pairs that went; KeyError if the sides do not mirror each other."""
    gone = []
    for block in taken.tolist():
        key = keys[block]
        if key is not None:
            del blocks[key]
            keys[block] = None
            gone.append((key, block))
    return gone


def change(blocks: dict[bytes, int], keys: list[bytes | None], gone: list[Pair], come: list[Pair]) -> None:
    """Pairs go, then pairs come. KeyError if one that goes is not here."""
    for key, block in gone:
        del blocks[key]
        keys[block] = None
    for key, block in come:
        blocks[key] = block
        keys[block] = key
