"""The thin products of adapters on the host shim: bit for bit the plain form's, the same for a row in any company."""

from __future__ import annotations

import pytest
import torch
from host_shim import ORDERS, HostBackend
from rows_cases import Adapters, adapters, draw, half_step, tiles_of, within

from vnext.kernels import thin_tiles
from vnext.kernels.contracts import ContractError
from vnext.kernels.cuda import thin
from vnext.kernels.table import Operations, plain_operations
from vnext.kernels.thin_tiles import SEGMENT, ThinTiles, make_tiles, names_of, tile_room, tokens_by_region

dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
SIZES = [
    (1, (5,), [[1]]),
    (57, (43, 16, 7), [[3, 0, 17], [16, 16, 16]]),
    (SEGMENT, (64,), [[16], [1]]),
    (SEGMENT * 2 + 65, (1100, 20), [[8, 8], [0, 33], [5, 0]]),
]
"""Inputs, widths of lines, and ranks of each adapter's lines."""
GROUPS = [(0, [0, 2, 3, 5, 7, 9, 10, 11, 12]), (1, [1]), (2, [4, 8])]


def added(given: Adapters, product: torch.Tensor, x: torch.Tensor, tiles: ThinTiles) -> torch.Tensor:
    changed = product.clone()
    thin.add_tiled(changed, x, given.memory, *tiles, given.lines)
    return changed


@dtypes
@pytest.mark.parametrize(("inputs", "widths", "ranks"), SIZES)
def test_the_kernel_has_the_bits_of_the_plain_form(
    shim: HostBackend, inputs: int, widths: tuple[int, ...], ranks: list[list[int]], dtype: torch.dtype
) -> None:
    """Which is right within its rounding; rows and columns of no adapter keep their bits."""
    given = adapters(inputs, widths, ranks, dtype, first=3)
    x, product = draw(14, inputs, dtype=dtype), draw(14, given.columns + 5, dtype=dtype, seed=1)
    groups = GROUPS[: len(ranks)]
    tiles = tiles_of(groups, unused=2)
    expected = thin_tiles.add_tiled(product.clone(), x, given.memory, *tiles, given.lines)
    for shim.order in ORDERS:
        assert torch.equal(added(given, product, x, tiles), expected)
    exact, size = product.double(), torch.zeros(product.shape, dtype=torch.float64)
    for region, rows in groups:
        for block in given.blocks[region]:
            columns, (down, up) = slice(block.first, block.first + block.width), (block.down[:, : block.rank], block.up_matrix())
            exact[rows, columns] += x[rows].double() @ down.double() @ up.double()
            size[rows, columns] = x[rows].double().abs() @ down.double().abs() @ up.double().abs()
    within(expected, exact, size * (inputs + max(map(max, ranks)) + 4) * 2.0**-24 + half_step(exact, dtype) * 1.01)
    assert torch.equal(expected[size == 0], product[size == 0]), "what no adapter changes has other bits"


@dtypes
def test_company_changes_no_bit(shim: HostBackend, dtype: torch.dtype) -> None:
    """Neither other rows, adapters and tiles nor the place of a row in its tile."""
    given = adapters(SEGMENT + 90, (48, 33), [[16, 4], [7, 0], [20, 20]], dtype)
    x, product = draw(40, given.inputs, dtype=dtype), draw(40, given.columns, dtype=dtype, seed=1)
    groups = [(0, range(17)), (2, range(17, 18)), (1, range(20, 40))]
    together = added(given, product, x, tiles_of(groups))
    for region, rows in groups:
        for row in rows:
            alone = added(given, product[row : row + 1], x[row : row + 1], tiles_of([(region, [0])], unused=row % 3))
            assert torch.equal(alone[0], together[row])
    backwards = added(given, product, x, tiles_of([(region, list(rows)[::-1]) for region, rows in groups[::-1]]))
    assert torch.equal(backwards, together) and torch.equal(together[18:20], product[18:20])


@dtypes
def test_bits_do_not_depend_on_alignment(shim: HostBackend, dtype: torch.dtype) -> None:
    given, tiles = adapters(100, (64, 40), [[16, 16]], dtype), tiles_of([(0, range(9))])
    x, product = draw(9, 100, dtype=dtype), draw(9, given.columns, dtype=dtype, seed=1)
    expected, apart, far = added(given, product, x, tiles), draw(9, 120, dtype=dtype, seed=2), draw(9, 111, dtype=dtype, seed=3)
    apart[:, 3:107], far[:, 5:105] = product, x
    beside = apart.clone()
    thin.add_tiled(apart[:, 3:107], far[:, 5:105], given.memory, *tiles, given.lines)
    assert torch.equal(apart[:, 3:107], expected)
    assert torch.equal(apart[:, :3], beside[:, :3]) and torch.equal(apart[:, 107:], beside[:, 107:])


def test_nothing_to_do_launches_nothing(shim: HostBackend) -> None:
    given = adapters(8, (8,), [[1]], torch.float32)
    assert torch.equal(added(given, draw(2, 8), draw(2, 8), tiles_of([])), draw(2, 8))


def test_tiles_hold_every_token_once_in_the_room_that_there_is() -> None:
    groups = [(3, torch.arange(0, 21).numpy()), (0, torch.arange(21, 22).numpy()), (1, torch.arange(30, 38).numpy())]
    tokens, tiles = make_tiles(groups)
    assert tiles.tolist() == [[3, 0, 8], [3, 8, 8], [3, 16, 5], [0, 21, 1], [1, 22, 8]]
    assert {region: its.tolist() for region, its in tokens_by_region(tokens, tiles).items()} == {
        region: its.tolist() for region, its in groups
    }
    assert len(tiles) <= tile_room(30, 3) and [tile_room(*each) for each in ((1, 4), (8, 4), (256, 4))] == [1, 5, 36]
    assert names_of(adapters(8, (8,), [[1], [2]], torch.float32).memory) == ["adapter of ranks [1]", "adapter of ranks [2]"]


def test_what_does_not_fit_is_refused(kernels: Operations) -> None:
    given, tiles = adapters(8, (16,), [[2]], torch.float32), tiles_of([(0, [1])])
    product, x = draw(3, 16), draw(3, 8)
    for add in (kernels.add_tiled, plain_operations().add_tiled):
        assert torch.equal(add(product.clone(), x, given.memory, *tiles, given.lines)[0], product[0])
        for wrong in (
            (product, x.half(), given.memory, *tiles), (product, x[:2], given.memory, *tiles), (product[:, :15], x, given.memory, *tiles),
            (product, x, given.memory.view(torch.int8), *tiles), (product, x, given.memory, tiles.tokens.long(), tiles.tiles),
            (product, x, given.memory, tiles.tokens, tiles.tiles.view(-1)),
        ):  # fmt: skip
            with pytest.raises(ContractError):
                add(*wrong, given.lines)
