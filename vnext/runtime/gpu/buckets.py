"""Buckets: the fixed shape in which a step is computed, and whether it runs as one graph, in pieces, or eagerly.

Pure. A step of decodes (a sample behind every token) is padded to a number of query rows and, for attention, to a number of
context splits; any other step is padded to a number of tokens. A request's drafts are query rows as its last token is, so one
graph serves any number of drafts of any requests. Padding costs time and changes no result: padded rows write to a null
page that no request holds, and their outputs are dropped.
"""

from __future__ import annotations

from bisect import bisect_left
from typing import Literal, NamedTuple

Variant = Literal["graph", "pieces", "eager"]


class Shapes(NamedTuple):
    """Sizes that may be captured: query rows of decodes, tokens of other steps, both rising; () captures none of that kind."""

    rows: tuple[int, ...]
    tokens: tuple[int, ...]


class Choice(NamedTuple):
    """How a step is computed: by `variant`, padded to `size` rows ("graph") or tokens ("pieces")."""

    variant: Variant
    size: int


def default_rows(row_max: int) -> tuple[int, ...]:
    """1, 2, 4, then every 8 up to 64, every 16 up to 256, every 64 above; the last is `row_max`."""
    sizes = [1, 2, 4, *range(8, 64, 8), *range(64, 256, 16), *range(256, row_max + 1, 64)]
    return (*(size for size in sizes if size < row_max), row_max)


def default_tokens(token_max: int) -> tuple[int, ...]:
    """Powers of two and halfway between them, from 16 on, so at most a third is padding. The last is `token_max`."""
    powers = [16 << place for place in range(token_max.bit_length())]
    sizes = sorted({*powers, *(size * 3 // 2 for size in powers)})
    return (*(size for size in sizes if size < token_max), token_max)


def checked_rows(asked: tuple[int, ...], row_max: int) -> tuple[int, ...]:
    """The sizes asked for as buckets: rising, without repeats, none above `row_max`."""
    return tuple(sorted({min(size, row_max) for size in asked}))


def padded(count: int, sizes: tuple[int, ...]) -> int | None:
    """The smallest size that holds `count`, if any."""
    place = bisect_left(sizes, count)
    return sizes[place] if place < len(sizes) else None


def unit_room(row_count: int, splits: int) -> int:
    """Room for attention's splits beside `row_count` rows: the row count, doubled until all fit, so that graphs stay few."""
    room = row_count
    while room < splits:
        room *= 2
    return room


def choose_variant(token_count: int, is_decode: bool, shares_prefix: bool, shapes: Shapes) -> Choice:
    """`is_decode`: a sample behind every token. `shares_prefix`: attention reads a prefix once for all rows, which has no fixed
    shape and stays outside graphs."""
    size = padded(token_count, shapes.rows)
    if is_decode and not shares_prefix and size is not None:
        return Choice("graph", size)
    size = padded(token_count, shapes.tokens)
    return Choice("eager", token_count) if size is None else Choice("pieces", size)
