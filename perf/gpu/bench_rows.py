"""Benchmark of sampling, logit adjustments and the batch's index kernels on a GPU, at the sizes of a large decode step.

Owns the inputs and the check before each timing: tokens are compared with torch's implementation of the same arithmetic,
indices with plain torch on the same tensors.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from perf.gpu.place import Place
from perf.gpu.report import Figure, figure
from vnext.kernels.cuda.operations import sample_rows
from vnext.runtime.gpu.row_parameters import RowParameters
from vnext.sampling.inputs import SamplingInputs
from vnext.sampling.logits import adjust_rows
from vnext.sampling.sampling import adjust_by_kernel, choose, draw_by_inversion
from vnext.state.params import ROW_DTYPES

VOCABULARY, ROWS, CHECKED_ROWS = 128_256, 256, 8
TOY_VOCABULARY, TOY_ROWS = 300, 4
SEEN = 1000
BLOCK_SIZE, WIDTH, BLOCK_ROUNDS = 16, 512, 16
SAMPLING_US_MAX, BATCH_US_MAX = 250.0, 20.0
CASES = {"top-k 50, top-p 0.95": (50, 0.95), "top-p 0.95": (0, 0.95), "no filter": (0, 1.0)}
INDEX_OPERATIONS = ("write_spans", "index_tokens", "place_tokens")


def run(place: Place, copy_rate: float | None) -> Iterator[tuple[tuple[Figure, ...], dict[str, Any]]]:
    """Figures and details of each measurement."""
    rows, vocabulary = (TOY_ROWS, TOY_VOCABULARY) if place.is_dry else (ROWS, VOCABULARY)
    logits = torch.randn(rows, vocabulary, generator=torch.Generator(place.device).manual_seed(1), device=place.device) * 3
    for name, (top_k, top_p) in CASES.items():
        yield sampling(place, name, logits, inputs_of(rows, top_k, top_p, place.device))
    yield adjusting(place, logits)
    yield batch(place, rows)


def inputs_of(rows: int, top_k: int, top_p: float, device: torch.device) -> SamplingInputs:
    """Return equal sampling parameters for every row, with different seeds and positions."""
    places = torch.arange(rows, device=device)
    return SamplingInputs(
        temperature=torch.full((rows,), 0.8, device=device),
        top_k=torch.full((rows,), top_k, device=device),
        top_p=torch.full((rows,), top_p, device=device),
        min_p=torch.zeros(rows, device=device),
        seed=places * 7919,
        position=places + 100,
    )


def sampling(
    place: Place, name: str, logits: torch.Tensor, inputs: SamplingInputs
) -> tuple[tuple[Figure, ...], dict[str, Any]]:
    columns = inputs.columns()

    def ours() -> torch.Tensor:
        return sample_rows(logits, columns)

    few = SamplingInputs(**{name: column[:CHECKED_ROWS].cpu() for name, column in zip(ROW_DTYPES, columns)})
    expected = choose(logits[:CHECKED_ROWS].cpu(), few, draw_by_inversion)
    assert torch.equal(ours()[:CHECKED_ROWS].cpu(), expected), "tokens are not those of torch's form"
    times = place.clock.times(ours)
    title = f"sampling {VOCABULARY // 1000}k x {ROWS}, {name}"
    return (figure(title, times.best_us, "us", at_most=SAMPLING_US_MAX),), {title: times._asdict()}


def adjusting(place: Place, logits: torch.Tensor) -> tuple[tuple[Figure, ...], dict[str, Any]]:
    """All rows with a bias, stop tokens and penalties over a thousand past tokens; then no row with any."""
    rows, vocabulary = logits.shape
    places, device = torch.arange(rows, device=place.device), place.device
    positions, tables = places + 1, RowParameters(rows + 1, vocabulary, device).tables
    plain = tables._replace(rates=tables.rates.clone(), marks=tables.marks.clone())
    tables.rates[:] = torch.tensor([1.1, 0.2, 0.3], device=device)[:, None]
    tables.marks[:] = torch.tensor([rows + 10, 1], device=device)[:, None]
    tables.history[:, torch.arange(0, vocabulary, -(-vocabulary // SEEN), device=device)] = 1
    found, expected = logits.clone(), logits[:CHECKED_ROWS].clone()
    adjust_by_kernel(found, tables, places, positions)
    adjust_rows(expected, tables, places[:CHECKED_ROWS], positions[:CHECKED_ROWS])
    assert torch.equal(found[:CHECKED_ROWS], expected), "logits are not those of torch's form"
    title = f"bias, bans, penalties 128k x {ROWS}"
    asked = {f"{title}, all rows": tables, f"{title}, none": plain}
    times = {
        name: place.clock.times(lambda of=of: adjust_by_kernel(found, of, places, positions)) for name, of in asked.items()
    }
    figures = tuple(figure(name, each.best_us, "us") for name, each in times.items())
    return figures, {name: each._asdict() for name, each in times.items()}


def batch(place: Place, rows: int) -> tuple[tuple[Figure, ...], dict[str, Any]]:
    """A decode step of all rows: one in BLOCK_ROUNDS gets a block, every token its slot, every row its token."""
    device, generator = place.device, torch.Generator().manual_seed(3)
    table = torch.randint(0, 10_000, (rows, WIDTH), generator=generator, dtype=torch.int32).to(device)
    grown = torch.arange(0, rows, BLOCK_ROUNDS, device=device)
    spans = (grown, grown % WIDTH, torch.arange(len(grown) + 1, device=device), torch.arange(len(grown), device=device).int())
    begins = torch.randint(0, WIDTH * BLOCK_SIZE, (rows,), generator=generator).to(device)
    starts, every = torch.arange(rows + 1, device=device).int(), torch.arange(rows, device=device)
    last = torch.arange(rows, device=device) + 7

    def work(operations: Any, to: tuple[torch.Tensor, ...]) -> None:
        own, positions, slots, contexts, tokens = to
        operations.write_spans(own, *spans)
        operations.index_tokens(begins, starts, every, own, BLOCK_SIZE, positions, slots, contexts)
        operations.place_tokens(last, every, every, tokens)

    def outputs() -> tuple[torch.Tensor, ...]:
        longs = [torch.zeros(rows, dtype=torch.int64, device=device) for _ in range(3)]
        return (table.clone(), longs[0], longs[1], torch.zeros(rows, dtype=torch.int32, device=device), longs[2])

    mine, expected = outputs(), outputs()
    work(place.operations, mine)
    work(place.plain, expected)
    for name, found, wanted in zip(("table", "positions", "slots", "contexts", "tokens"), mine, expected, strict=True):
        assert torch.equal(found, wanted), f"{name} are not those of plain torch"
    times = place.clock.times(lambda: work(place.operations, mine))
    title = f"batch update and slot mapping, {ROWS} rows"
    details = {title: times._asdict() | {"operations": INDEX_OPERATIONS}}
    return (figure(title, times.best_us, "us", at_most=BATCH_US_MAX),), details
