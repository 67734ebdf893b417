"""Benchmark of the thin products of adapters on a GPU, beside the product that they change, at the sizes of an 8 B model's layer.

Owns the inputs and the check before each timing: the results are those of plain torch, bit for bit.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.nn import functional

from perf.gpu.place import Place, use_cases
from perf.gpu.report import Figure, figure

INPUTS, WIDTHS, RANK = 4096, (4096, 1024, 1024), 16
TOY_INPUTS, TOY_WIDTHS = 600, (40, 16, 16)
CASES = {"1 row": (1, 1), "64 rows, 1 adapter": (64, 1), "64 rows, 8 adapters": (64, 8), "2048 rows, 1 adapter": (2048, 1)}
TOY_ROWS = 9


def run(place: Place, copy_rate: float | None) -> Iterator[tuple[tuple[Figure, ...], dict[str, Any]]]:
    """Figures and details of each number of rows and adapters: the thin product, and the product without it."""
    use_cases()
    for name, (rows, count) in CASES.items():
        yield measured(place, name, min(rows, TOY_ROWS) if place.is_dry else rows, count)


def measured(place: Place, name: str, rows: int, count: int) -> tuple[tuple[Figure, ...], dict[str, Any]]:
    """Row r has adapter r % count."""
    from rows_cases import adapters, tiles_of

    inputs, widths = (TOY_INPUTS, TOY_WIDTHS) if place.is_dry else (INPUTS, WIDTHS)
    generator, device = torch.Generator().manual_seed(4), place.device
    given = adapters(inputs, widths, [[RANK] * len(widths)] * count, torch.bfloat16)
    tiles = tiles_of([(region, range(region, rows, count)) for region in range(min(count, rows))])
    x, weight = (torch.randn(each, inputs, generator=generator).to(device, torch.bfloat16) for each in (rows, sum(widths)))
    product = functional.linear(x, weight)
    arguments = (x, given.memory.to(device), *(part.to(device) for part in tiles), given.lines)
    expected = place.plain.add_tiled(product.clone(), *arguments)
    assert torch.equal(place.operations.add_tiled(product.clone(), *arguments), expected), "results are not those of plain torch"
    times = {
        f"thin product, {name}": place.clock.times(lambda: place.operations.add_tiled(product, *arguments)),
        f"the product beside it, {name}": place.clock.times(lambda: functional.linear(x, weight)),
    }
    return tuple(figure(title, each.best_us, "us") for title, each in times.items()), {k: v._asdict() for k, v in times.items()}
