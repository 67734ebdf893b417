"""Products in shards against the shards' own products: each alone, added by one tree, on one rank or by several."""

from __future__ import annotations

import pytest
import torch
from cpu_levels import LEVELS, draw, needs_native, using

from vnext.kernels.contracts import ContractError
from vnext.kernels.cpu import linear as products
from vnext.kernels.cpu.native import Level
from vnext.kernels.format import format_of
from vnext.kernels.formats.floats import PLAIN
from vnext.kernels.shards import joined, joined_along
from vnext.kernels.table import Operations, operations, plain_operations
from vnext.kernels.thin import ThinBlocks, ThinParts, thin_block, thin_rows

DTYPES = [torch.float32, torch.bfloat16]
CUTS = [(8, 256), (8, 104), (4, 192), (3, 99), (2, 62), (7, 7)]
"""Shards and inputs: whole steps of 32, and not; an odd number of pairs."""
ROWS = (1, 2, 7, 16, 33, 70)
CHOICES = [operations("cpu"), plain_operations()]


def pieces(x: torch.Tensor, shards: int) -> list[torch.Tensor]:
    return [piece.contiguous() for piece in x.chunk(shards, 1)]


def test_the_tree_is_one_of_halves_then_of_neighbours() -> None:
    """With numbers whose sums tell the order: what is added to a large one first is lost."""
    one, large = torch.tensor(1.0), torch.tensor(2.0**24)
    assert joined([one, -large, large, one]) == -(2.0**24) + 1 + 2.0**24  # 1 - 2^24 is exact, 2^24 + 1 is not
    assert joined([large, one, one]) == 2.0**24
    assert joined([one, one, large, -large, one, one]) == joined([joined([one, one, large]), joined([-large, one, one])])


@pytest.mark.parametrize("count", range(1, 13))
def test_along_a_dimension_the_tree_is_the_same(count: int) -> None:
    x = draw(9, count)
    assert torch.equal(joined_along(x), joined(x.unbind(1)))


@pytest.mark.parametrize(("whole", "ranks"), [(8, 2), (8, 4), (8, 8), (4, 2), (2, 2), (6, 2), (3, 3)])
def test_ranks_finish_what_each_began(whole: int, ranks: int) -> None:
    parts = list(draw(whole, 500))
    own = whole // ranks
    assert torch.equal(joined([joined(parts[own * rank : own * (rank + 1)]) for rank in range(ranks)]), joined(parts))


@needs_native
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("shards", "inputs"), CUTS)
def test_a_product_is_the_tree_of_its_shards(shards: int, inputs: int, dtype: torch.dtype, level: Level) -> None:
    """Bit for bit: in float32, rounded, with bias; for any number of rows and for rows that lie apart."""
    weight, bias, wide = draw(70, inputs, dtype=dtype), draw(70, dtype=dtype), draw(max(ROWS), inputs + 5, dtype=dtype)
    packed = products.pack(weight, shards=shards)
    alone = [products.pack(piece) for piece in pieces(weight, shards)]
    with using(level, 2):
        for count in ROWS:
            x = wide[:count, :inputs]
            parts = [products.linear(own, piece, torch.float32) for own, piece in zip(pieces(x, shards), alone)]
            assert torch.equal(products.linear(x, packed, torch.float32), joined(parts))
            assert torch.equal(products.linear(x, packed), joined(parts).to(dtype))
            assert torch.equal(products.linear(x, packed, bias=bias), joined(parts).to(dtype) + bias)


@needs_native
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_an_infinity_in_one_row_stays_there(dtype: torch.dtype, level: Level) -> None:
    packed, x = products.pack(draw(40, 104, dtype=dtype), shards=8), draw(20, 104, dtype=dtype)
    with using(level):
        before = products.linear(x, packed)
        x[1::2] = float("inf")
        assert torch.equal(products.linear(x, packed)[::2], before[::2])


@pytest.mark.parametrize("choice", CHOICES, ids=["served", "plain"])
@pytest.mark.parametrize("form", ["plain", "wide"])
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_ranks_give_the_product_of_one(ranks: int, form: str, choice: Operations) -> None:
    dtype = torch.float32 if form == "plain" else torch.bfloat16
    x, weight, bias = draw(20, 64, dtype=dtype), draw(30, 64, dtype=dtype), draw(30, dtype=dtype)
    whole = choice.linear(x, choice.pack_weight(weight, format_of(form), 4), bias)
    parts = [choice.pack_weight(piece, format_of(form), 4 // ranks) for piece in pieces(weight, ranks)]
    sums = [choice.sums(own, piece) for own, piece in zip(pieces(x, ranks), parts)]
    for own, piece in zip(pieces(x, ranks), parts):
        assert torch.equal(choice.row_linear(own, piece, bias, lambda _: joined(sums)), whole)


@pytest.mark.parametrize("choice", CHOICES, ids=["served", "plain"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("ranks", [2, 4])
def test_ranks_give_the_adapter_s_change_of_one(ranks: int, dtype: torch.dtype, choice: Operations) -> None:
    x, down, up, shards = draw(20, 64, dtype=dtype), draw(5, 64), draw(30, 5), 4
    rows = thin_rows(torch.arange(1, 20, 2).numpy())

    def change(down: torch.Tensor, x: torch.Tensor, shards: int, join: object = None) -> torch.Tensor:
        parts = ThinParts([(ThinBlocks([thin_block(down, up, 0, dtype)]), rows)])
        return choice.add_thin(draw(20, 30, dtype=dtype), x, parts, shards, join)

    kept: list[torch.Tensor] = []
    for own, piece in zip(pieces(x, ranks), pieces(down, ranks)):
        change(piece, own, shards // ranks, lambda narrow: kept.append(narrow.clone()) or narrow)
    whole = change(down, x, shards)
    assert not torch.equal(whole, draw(20, 30, dtype=dtype))
    assert torch.equal(change(pieces(down, ranks)[0], pieces(x, ranks)[0], shards // ranks, lambda _: joined(kept)), whole)


def test_shards_of_another_size_are_refused() -> None:
    for choice in CHOICES:
        with pytest.raises(ContractError, match="10 inputs cannot be cut into 4 shards: there are at most 8, of one size"):
            choice.pack_weight(draw(4, 10), PLAIN, 4)
