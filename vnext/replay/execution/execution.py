"""exec: runs the model again on what a log recorded, and compares every token.

Owns the comparison and its answer. In a batch, each step's rows, tokens and blocks are the recorded ones. So are the
tokens of earlier steps, whatever this run sampled, so that one difference is reported once. Alone, each request has its
own engine. vnext/replay/rerun runs the model; it is imported only after the log has been checked, so no other command
loads torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import msgspec
import numpy as np

from vnext.replay.execution.recorded import RecordedStep, Reported, Selection, Walk
from vnext.replay.reading.source import UnusableLog
from vnext.replay.rerun.model_of_log import KeptAt
from vnext.replay.rerun.numerics import CannotRun, Ground, Numerics, changed, grounds, recorded_numerics
from vnext.state.state import Weights, sample_points

if TYPE_CHECKING:
    import torch

    from vnext.replay.rerun.alone import Alone
    from vnext.replay.rerun.batched import Batched
    from vnext.replay.rerun.machine import Machine
    from vnext.replay.rerun.tokens import Choice

DIFFERENCES_SHOWN = 16
Progress = Callable[[int, int], None]
"""Called with (steps or requests done, tokens compared)."""


class ModelChoice(msgspec.Struct, frozen=True, kw_only=True):
    """The model (None: the one that the log names), what to change from the log's settings, where versions of the weights are that
    the log names elsewhere, or nowhere any more, and the disk tier with vectors of inputs (None: the one that the log names)."""

    model: str | None = None
    any_model: bool = False
    changes: dict[str, object] = {}
    weights: dict[int, Path] = {}
    inputs: Path | None = None


class TokenDifference(msgspec.Struct, frozen=True, kw_only=True):
    """A token that differs from the record. `position` is in its request, `place` among the step's samples (0 alone),
    `event` the commit's number (0 alone). Log-probabilities are this run's; `margin` is by how much it prefers its
    own token.
    """

    step: int
    event: int
    request: int
    position: int
    place: int
    recorded: int
    again: int
    recorded_logprob: float
    again_logprob: float
    margin: float


class Executed(msgspec.Struct, frozen=True, kw_only=True):
    """What was run, what it was compared with, and the outcome.

    `numerics` are those of the run, `elsewhere` are the log's entries that differ here. `steps` were run, or belong to
    what was compared; `unseen` were planned before the run begins, `uncommitted` never ended, `skipped` were computed with weights
    that are not here, which `lacking` names. `rebuilt_tokens` were computed for keys and values older than the run.
    """

    same: bool
    mode: Literal["batch", "alone"]
    model: str
    numerics: dict[str, object]
    invariance: str
    elsewhere: list[Ground]
    steps: int
    requests: int
    tokens: int
    differ: int
    first: TokenDifference | None
    differences: list[TokenDifference]
    unseen: int
    uncommitted: int
    skipped: int
    lacking: list[str]
    rebuilt_tokens: int
    end: str


@contextmanager
def sentences() -> Iterator[None]:
    """Turn a model's errors into the sentence that every command shows."""
    try:
        yield
    except CannotRun as error:
        raise UnusableLog(str(error)) from error


def execute(
    path: Path, selection: Selection, chosen: ModelChoice, alone: bool = False, progress: Progress | None = None
) -> Executed:
    """Compare every requested sampled token. Raises UnusableLog if there is nothing to run or to compare."""
    walk = Walk(path, selection, telling=alone)
    with sentences():
        machine = machine_of(walk, chosen)
        comparing = _Comparing(selection, progress)
        if alone:
            rebuilt = _run_alone(walk, machine, comparing)
        else:
            rebuilt = _run_batches(walk, machine, comparing)
    if not comparing.tokens and walk.is_sound:
        lacking = next(iter(machine.versions.lacking.values()), "")
        raise UnusableLog(f"nothing was compared: {lacking or f'{path} has no sampled token in what was asked for'}")
    return _answer(walk, machine, comparing, alone, rebuilt)


def machine_of(walk: Walk, chosen: ModelChoice, changes: dict[str, object] | None = None) -> Machine:
    """The model, loaded as the log says except for the changes. Raises CannotRun if that is impossible."""
    numerics = numerics_of(walk, chosen.changes if changes is None else changes)
    from vnext.replay.rerun.machine import open_machine

    machine = open_machine(
        walk.log.header.started, chosen.model, numerics, chosen.any_model, walk.adapter_folders(), chosen.weights,
        kept_at(walk, chosen),
    )  # fmt: skip
    walk.begin(machine.config.vocab_size, machine.why_lacking)
    return machine


def kept_at(walk: Walk, chosen: ModelChoice) -> KeptAt:
    """Where the vectors of the log's inputs are."""
    header = walk.log.header
    named = header.started.environment.get("inputs", "")
    return KeptAt(chosen.inputs or (Path(named) if named else None), header.code_version)


def numerics_of(walk: Walk, changes: dict[str, object]) -> Numerics:
    """The log's numerics, with the changes. The stages of a pipeline compute what one rank would."""
    started = walk.log.header.started
    ranks = started.world_size // int(started.environment.get("stages", "1"))
    return changed(recorded_numerics(started.environment, ranks, started.config.max_model_len), changes)


def _run_batches(walk: Walk, machine: Machine, comparing: _Comparing) -> int:
    from vnext.replay.rerun.batched import Batched

    batched = Batched(machine, walk.first, walk.whole)
    for step, can_run in steps_of(walk, batched):
        if not can_run:
            comparing.skipped += 1
            continue
        inputs = batched.inputs(step.state, step.placeholders, step.drafts)
        comparing.step(step, *batched.run(inputs))
    return batched.rebuilt_tokens


def steps_of(walk: Walk, batched: Batched, other: Machine | None = None) -> Iterator[tuple[RecordedStep, bool]]:
    """Each step, and whether it can run now: the weights that it was computed with are here and in use, by `other` too, and
    `batched` knows which pages still hold what was written. Raises CannotRun as `is_ready` does."""
    machines, recoveries = [each for each in (batched.machine, other) if each is not None], 0
    for step in walk.steps():
        if walk.recoveries > recoveries:
            recoveries = walk.recoveries
            batched.forget()
        if not all(is_ready(each, step.state.weights) for each in machines):
            yield step, False
            continue
        if any(promoted := walk.promoted(step.step)):
            batched.distrust(*promoted)
        yield step, True


def is_ready(machine: Machine, weights: Weights | None) -> bool:
    """Have the machine compute with these weights if they are here. Raises CannotRun where the user gives others for them."""
    if not machine.versions.is_here(weights):
        assert weights is not None, "the log's model is here"
        if weights.version in machine.versions.wrong:
            raise CannotRun(machine.versions.lacking[weights.version])
        return False
    machine.versions.take(weights)
    return True


def _run_alone(walk: Walk, machine: Machine, comparing: _Comparing) -> int:
    from vnext.replay.rerun.alone import Alone

    for step in walk.steps():
        is_here = machine.versions.is_here(step.state.weights)
        comparing.steps += is_here
        comparing.skipped += not is_here
    alone = Alone(machine, walk.first.config)
    for reported in walk.reported.values():
        if reported.steps and comparing.selection.wants(reported.request.id):
            comparing.request(reported, alone, machine)
    return 0


class _Comparing:
    """The running comparison."""

    def __init__(self, selection: Selection, progress: Progress | None) -> None:
        self.selection = selection
        self.steps = self.tokens = self.skipped = 0
        self.requests: set[int] = set()
        self.differences: list[TokenDifference] = []
        self.differ = 0
        self._progress = progress

    def step(self, step: RecordedStep, again: np.ndarray, logits: torch.Tensor | None) -> None:
        """Compare the samples of a step, including those of requests that have left since."""
        scheduled = step.state.in_flight[-1]
        sampled = scheduled.ids[sample_points(scheduled).entries].tolist()
        wanted = [id_ for id_ in sampled if self.selection.wants(id_)]
        self.steps += 1
        self.tokens += len(wanted)
        self.requests.update(wanted)
        for found in token_differences(step, again, logits):
            if self.selection.wants(found.request):
                self._differs(found)
        self._tell(self.steps)

    def request(self, reported: Reported, alone: Alone, machine: Machine) -> None:
        """Compare one request's tokens, each computed alone from those before it."""
        from vnext.replay.rerun.tokens import choice

        tokens = np.array(reported.tokens, dtype=np.int32)
        self.requests.add(reported.request.id)
        for begin, end, weights in reported.spans(reported.first):
            if not is_ready(machine, weights):
                continue
            for position, again, logits in alone.answers(reported.request, tokens[:end], begin):
                self.tokens += 1
                recorded = reported.tokens[position]
                if again != recorded:
                    step = reported.steps[position - reported.first]
                    self._differs(_difference(step, 0, reported.request.id, position, choice(0, recorded, again, logits)))
        self._tell(len(self.requests))

    def _differs(self, found: TokenDifference) -> None:
        """Note a difference; the first ones in the order of the log are kept."""
        self.differ += 1
        self.differences.append(found)
        if len(self.differences) > 2 * DIFFERENCES_SHOWN:
            self.differences = self.shown()

    def shown(self) -> list[TokenDifference]:
        ordered = sorted(self.differences, key=lambda each: (each.step, each.place, each.request))
        return ordered[:DIFFERENCES_SHOWN]

    def _tell(self, done: int) -> None:
        if self._progress is not None:
            self._progress(done, self.tokens)


def token_differences(step: RecordedStep, again: np.ndarray, logits: torch.Tensor | None) -> list[TokenDifference]:
    """The differing samples of a step: `again` int64[S], from logits float32 [S, V]."""
    from vnext.replay.rerun.tokens import differing, samples_of

    samples = samples_of(step.state)
    return [
        _difference(step.step, step.event, samples[choice.place].request, samples[choice.place].position, choice)
        for choice in differing(step.tokens, again, logits)
    ]


def _difference(step: int, event: int, request: int, position: int, choice: Choice) -> TokenDifference:
    return TokenDifference(
        step=step, event=event, request=request, position=position, place=choice.place, recorded=choice.recorded,
        again=choice.again, recorded_logprob=choice.recorded_logprob, again_logprob=choice.again_logprob,
        margin=choice.again_logprob - choice.recorded_logprob,
    )  # fmt: skip


def _answer(walk: Walk, machine: Machine, comparing: _Comparing, alone: bool, rebuilt: int) -> Executed:
    here = machine.environment()
    shown = comparing.shown()
    return Executed(
        same=not comparing.differ and walk.is_sound,
        mode="alone" if alone else "batch",
        model=str(machine.path),
        numerics=described(machine),
        invariance=here["batch_invariant"],
        elsewhere=grounds(walk.log.header.started.environment, here),
        steps=comparing.steps,
        requests=len(comparing.requests),
        tokens=comparing.tokens,
        differ=comparing.differ,
        first=next(iter(shown), None),
        differences=shown,
        unseen=walk.unseen,
        uncommitted=walk.uncommitted,
        skipped=comparing.skipped,
        lacking=list(machine.versions.lacking.values()),
        rebuilt_tokens=rebuilt,
        end=walk.end,
    )


def described(machine: Machine) -> dict[str, object]:
    """How a machine stores and multiplies its numbers."""
    here = machine.environment()
    names = ("dtype", "quantization", "activations", "kv_cache_dtype", "kernels")
    return {name: here[name] for name in names} | {"ranks": machine.numerics.ranks, "threads": machine.numerics.threads}
