"""The thin products of adapters: right within their rounding at every instruction set, the same bits for a row in any company,
and the base of the other rows untouched."""

from __future__ import annotations

import pytest
import torch
from cpu_levels import LEVELS, ROUNDING, draw, needs_native, using, within

from vnext.kernels.calls import GATELESS
from vnext.kernels.contracts import ContractError
from vnext.kernels.products import GATES
from vnext.kernels.table import operations, plain_operations
from vnext.kernels.thin import ThinBlock, ThinBlocks, ThinParts, thin_block, thin_rows

SIZES = ((64, 96, 8), (57, 43, 1), (33, 130, 17), (576, 200, 64))
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])


def some_block(
    inputs: int, width: int, rank: int, first: int = 0, seed: int = 0, dtype: torch.dtype = torch.float32
) -> ThinBlock:
    return thin_block(draw(rank, inputs, seed=seed), draw(width, rank, seed=seed + 1), first, dtype)


def parts(*pairs: tuple[ThinBlock, torch.Tensor]) -> ThinParts:
    return ThinParts([(ThinBlocks([block]), thin_rows(tokens.numpy())) for block, tokens in pairs])


@needs_native
@DTYPES
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("inputs, outputs, rank", SIZES)
def test_the_kernel_is_right(inputs: int, outputs: int, rank: int, level: object, dtype: torch.dtype) -> None:
    x, product, tokens = draw(13, inputs, dtype=dtype), draw(13, outputs + 5, dtype=dtype), torch.tensor([0, 2, 3, 5, 7, 11, 12])
    block = some_block(inputs, outputs, rank, first=3, dtype=dtype)
    down, up = block.down[:, :rank].double(), block.up_matrix().double()
    expected = product.double()
    expected[tokens, 3 : 3 + outputs] += x[tokens].double() @ down @ up
    with using(level, 2):
        found = operations("cpu").add_thin(product.clone(), x, parts((block, tokens)))
    size = torch.zeros_like(expected)
    size[tokens, 3 : 3 + outputs] = x[tokens].double().abs() @ down.abs() @ up.abs()
    within(found, expected, size * (inputs + rank + 4) * 2.0**-24 + expected.abs() * ROUNDING[dtype])
    others = [row for row in range(13) if row not in tokens.tolist()]
    assert torch.equal(found[others], product[others]) and torch.equal(found[:, :3], product[:, :3])
    plain = plain_operations().add_thin(product.clone(), x, parts((block, tokens)))
    within(plain, expected, size * (inputs + rank + 4) * 2.0**-23 + expected.abs() * ROUNDING[dtype])


@needs_native
@DTYPES
@pytest.mark.parametrize("level", LEVELS)
def test_company_changes_no_bit(level: object, dtype: torch.dtype) -> None:
    x, product = draw(40, 96, dtype=dtype), draw(40, 64, dtype=dtype)
    blocks = [some_block(96, 32, 8 + place, first=32 * (place % 2), seed=place, dtype=dtype) for place in range(4)]
    groups = [torch.arange(0, 17), torch.arange(0, 17), torch.arange(17, 18), torch.arange(20, 40)]
    for threads in (1, 3):
        with using(level, threads):
            add = operations("cpu").add_thin
            together = add(product.clone(), x, parts(*zip(blocks, groups)))
            for row in range(40):
                own = [(block, torch.tensor([0])) for block, tokens in zip(blocks, groups) if row in tokens.tolist()]
                assert torch.equal(add(product[row : row + 1].clone(), x[row : row + 1], parts(*own))[0], together[row])


@needs_native
@DTYPES
@pytest.mark.parametrize("activation", [name for name in GATES if name not in GATELESS])
def test_a_gate_that_is_left_out_for_a_while_gives_the_same_bits(activation: str, dtype: torch.dtype) -> None:
    """So a row without an adapter does not see that another has one."""
    chosen, x, weight = operations("cpu"), draw(9, 96, dtype=dtype), draw(2 * 43, 96, dtype=dtype)
    packed, seen = chosen.pack_gated_weight(weight, activation), []
    found = chosen.gated_linear(x, packed, None, activation, lambda product: seen.append(product.clone()) or product)
    assert torch.equal(found, chosen.gated_linear(x, packed, None, activation))
    assert torch.equal(seen[0], chosen.linear(x, chosen.pack_weight(weight), None))


@pytest.mark.parametrize("device", ["kernel", "reference"])
def test_what_does_not_fit_is_refused(device: str) -> None:
    add = (operations("cpu") if device == "kernel" else plain_operations()).add_thin
    product, x, tokens, block = draw(3, 16), draw(3, 8), torch.tensor([1]), some_block(8, 16, 2)
    for wrong, other in ((draw(3, 9), block), (x, block._replace(first=1)), (x, some_block(8, 16, 2, dtype=torch.bfloat16))):
        with pytest.raises(ContractError):
            add(product, wrong, parts((other, tokens)))
