"""bisect: traces a difference between two ways to run a model to the first step, layer and operation that causes it.

Owns the walk over the recorded steps and the answer. Every operation of a step is repeated on the same inputs, either
for each request alone or with other numerics. The first operation that differs is the cause, because none before it
differed. vnext/replay/rerun owns the comparison.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from vnext.replay.execution.execution import (
    ModelChoice,
    Progress,
    TokenDifference,
    described,
    machine_of,
    numerics_of,
    sentences,
    steps_of,
    token_differences,
)
from vnext.replay.execution.recorded import RecordedStep, Selection, Walk
from vnext.replay.reading.source import UnusableLog
from vnext.replay.rerun.numerics import Ground, grounds

if TYPE_CHECKING:
    from vnext.replay.rerun.machine import Machine
    from vnext.replay.rerun.search import Found, Search

ROWS_SHOWN = 16


class RowDifference(msgspec.Struct, frozen=True, kw_only=True):
    """A row that differs: the request, and the position in it that the row computes."""

    row: int
    request: int
    position: int


class OperationDifference(msgspec.Struct, frozen=True, kw_only=True):
    """The first operation that differs. `layer` counts from 0, -1 outside of the layers; `weight` is its place in the
    parameters.

    `max_rel` is relative to the largest magnitude in a row. `rows_differ` of `shape[0]` rows differ; `rows` are the
    first of them.
    """

    step: int
    layer: int
    operation: str
    weight: str
    part: str
    shape: tuple[int, ...]
    dtype: str
    max_abs: float
    max_rel: float
    elements_differ: int
    rows_differ: int
    rows: list[RowDifference]


class OperationSeen(msgspec.Struct, frozen=True, kw_only=True):
    """An operation over all steps: the number of repeated calls, and the largest relative difference."""

    operation: str
    calls: int
    max_rel: float


class Bisected(msgspec.Struct, frozen=True, kw_only=True):
    """`numerics` are those of the watched run, `against` those of the other; None for each request alone.

    `token` is the first token that differs from the record, in the steps up to the find, if the log had one rank too. `lacking` has
    a sentence for weights that are not here, whose steps are left out.
    """

    same: bool
    model: str
    numerics: dict[str, object]
    against: dict[str, object] | None
    elsewhere: list[Ground]
    tolerance: float
    steps: int
    operations: list[OperationSeen]
    found: OperationDifference | None
    token: TokenDifference | None
    rebuilt_tokens: int
    lacking: list[str]
    end: str


def bisect(
    path: Path,
    selection: Selection,
    chosen: ModelChoice,
    alone: bool | None = None,
    tolerance: float | None = None,
    progress: Progress | None = None,
) -> Bisected:
    """Compare the log's own numerics on one rank with each request alone, with `chosen.changes`, or, if `alone` is
    None, with the log's own ranks if there were several. Raises UnusableLog as `execute` does."""
    walk = Walk(path, selection)
    threads = {"threads": chosen.changes.get("threads"), "ranks": 1}
    if alone is None:
        alone = walk.log.header.started.world_size == 1
    if not alone and numerics_of(walk, chosen.changes) == numerics_of(walk, threads):
        raise UnusableLog("both runs would be the same: give --solo, --kernels, --dtype, --quantization or --tp")
    with sentences():
        machine = machine_of(walk, chosen, threads)
        other = None if alone else machine_of(walk, chosen)
        return _search(walk, machine, other, tolerance, progress)


def _search(
    walk: Walk, machine: Machine, other: Machine | None, tolerance: float | None, progress: Progress | None
) -> Bisected:
    from vnext.replay.rerun.batched import Batched
    from vnext.replay.rerun.search import Search

    batched = Batched(machine, walk.first, walk.whole)
    search = Search(machine, other, tolerance)
    as_recorded = walk.log.header.started.world_size == 1
    steps, token, found = 0, None, None
    for step, can_run in steps_of(walk, batched, other):
        if not can_run:
            continue
        inputs = batched.inputs(step.state, step.placeholders, step.drafts)
        tokens, logits = batched.run(inputs)
        if as_recorded:
            token = token or next(iter(token_differences(step, tokens, logits)), None)
        steps += 1
        if search.step(inputs.forward, logits, batched.caches) and search.found is not None:
            found = _difference(step, search.found)
            break
        if progress is not None:
            progress(steps, sum(seen.calls for seen in search.seen.values()))
    if not steps:
        lacking = next(iter(machine.versions.lacking.values()), "")
        why = lacking or f"{walk.log.paths[0].parent} has no committed step in what was asked for"
        raise UnusableLog(f"nothing was compared: {why}")
    return _answer(walk, machine, other, search, steps, found, token, batched.rebuilt_tokens)


def _difference(step: RecordedStep, found: Found) -> OperationDifference:
    from vnext.replay.rerun.tokens import rows_of, samples_of

    if found.of_samples:
        places = [(sample.request, sample.position - 1) for sample in samples_of(step.state)]
    else:
        places = rows_of(step.state)
    rows = [RowDifference(row=row, request=places[row][0], position=places[row][1]) for row in found.rows[:ROWS_SHOWN]]
    return OperationDifference(
        step=step.step, layer=found.layer, operation=found.operation, weight=found.weight, part=found.part,
        shape=found.shape, dtype=found.dtype, max_abs=found.absolute, max_rel=found.relative,
        elements_differ=found.elements, rows_differ=len(found.rows), rows=rows,
    )  # fmt: skip


def _answer(
    walk: Walk, machine: Machine, other: Machine | None, search: Search, steps: int,
    found: OperationDifference | None, token: TokenDifference | None, rebuilt_tokens: int,
) -> Bisected:  # fmt: skip
    seen = [OperationSeen(operation=name, calls=each.calls, max_rel=each.relative) for name, each in search.seen.items()]
    return Bisected(
        same=found is None and token is None and walk.is_sound,
        model=str(machine.path),
        numerics=described(machine),
        against=None if other is None else described(other),
        elsewhere=grounds(walk.log.header.started.environment, machine.environment()),
        tolerance=search.tolerance,
        steps=steps,
        operations=seen,
        found=found,
        token=token,
        rebuilt_tokens=rebuilt_tokens,
        lacking=list(machine.versions.lacking.values()),
        end=walk.end if found is None else f"the first difference, in step {found.step}",
    )
