"""audit: whether somebody else's log is what this model does, from a sample of its steps.

Owns the findings. What costs little is checked of the whole log: it is folded, every decision is made again (`verify`), and its
digests are compared with those of the model's files. Then randomly chosen steps run again, each from nothing but the log: what they
read is computed anew from the requests' own tokens.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from vnext.replay.execution.execution import (
    ModelChoice,
    Progress,
    is_ready,
    kept_at,
    machine_of,
    numerics_of,
    sentences,
    token_differences,
)
from vnext.replay.execution.recorded import Selection, Walk
from vnext.replay.reading.drawn import Answered
from vnext.replay.reading.source import UnusableLog
from vnext.replay.reading.verify import Verdict, verify
from vnext.replay.rerun.model_of_log import digests_of, folder_of
from vnext.replay.rerun.numerics import CannotRun, Ground, grounds
from vnext.state.events import AnyEvent, StepCommitted
from vnext.state.params import DEFAULTS, Sampling

if TYPE_CHECKING:
    from vnext.replay.execution.execution import TokenDifference
    from vnext.replay.execution.recorded import Reported
    from vnext.replay.rerun.alone import Alone
    from vnext.replay.rerun.machine import Machine
    from vnext.replay.rerun.versions import Versions
    from vnext.state.state import State, Weights

FINDINGS_SHOWN = 16
SEED_BITS = 32


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """What is not as it should be: `field` is what was changed, as far as that can be said, and -1 stands for no request, position
    or step. `message` is a sentence."""

    field: str
    message: str
    recorded: str = ""
    found: str = ""
    request: int = -1
    position: int = -1
    step: int = -1


class Audited(msgspec.Struct, frozen=True, kw_only=True):
    """`steps` of `steps_total` ran again, chosen by `seed`; `tokens` of `requests` were compared and `differ` are others.
    `not_audited` more were chosen and computed with weights that are not here, which `lacking` names.

    `missed` is the probability that this sample misses a step, and so a changed token that no later token depends on. `every_byte`:
    the log has a digest of the whole weight files. `elsewhere`: entries of the log's environment that differ here.
    """

    same: bool
    model: str
    seed: int
    steps: int
    steps_total: int
    not_audited: int
    lacking: list[str]
    requests: int
    tokens: int
    differ: int
    missed: float
    every_byte: bool
    findings: list[Finding]
    elsewhere: list[Ground]
    ended: str = ""


def share_of(text: str) -> float:
    """A share as "1%", "0.25" or "all". Raises UnusableLog."""
    try:
        share = 1.0 if text == "all" else float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
    except ValueError:
        share = 0.0
    if not 0 < share <= 1:
        raise UnusableLog(f"--sample {text}: give a share of the steps, as 1% or 0.01, or all")
    return share


def audit(path: Path, share: float, seed: int | None, chosen: ModelChoice, progress: Progress | None = None) -> Audited:
    """Audit the log at `path`. `seed` None draws one, which the answer names. Raises UnusableLog."""
    seed = random.SystemRandom().getrandbits(SEED_BITS) if seed is None else seed
    walk = Walk(path, Selection(), telling=True)
    committed = _Committed()
    verdict = verify(walk.log, also=committed)
    findings = [*_of_log(verdict), *_of_files(walk, chosen)]
    total = len(committed.steps)
    if not (total or findings):
        raise UnusableLog(f"{path} has no step that was computed: there is nothing to audit")
    steps = sorted(random.Random(seed).sample(committed.steps, math.ceil(share * total)))
    run = _Run(walk, steps)
    if not any(finding.field in ("model", "weights") for finding in findings):
        with sentences():
            run.compare(chosen, progress)
    findings += run.findings()
    if run.lacking and not (run.steps or findings):
        raise UnusableLog(f"nothing was audited: {run.lacking[0]}")
    environment = walk.log.header.started.environment
    return Audited(
        same=not findings, model=run.model, seed=seed, steps=run.steps, steps_total=total, requests=len(run.requests),
        not_audited=run.not_audited, lacking=run.lacking,
        tokens=run.tokens, differ=len(run.differences), missed=1 - (len(steps) - run.not_audited) / max(total, 1),
        every_byte="weights_digest" in environment, findings=findings[:FINDINGS_SHOWN], elsewhere=run.elsewhere,
    )  # fmt: skip


class _Committed:
    """Collects the steps that a log plans and commits: those in flight at its end or lost with a rank have no tokens to compare."""

    def begin(self, state: State) -> None:
        self._planned, self.steps = state.planned, list[int]()

    def __call__(self, before: State, event: AnyEvent, after: State) -> str:
        if isinstance(event, StepCommitted) and event.step >= self._planned:
            self.steps.append(event.step)
        return ""


def _of_log(verdict: Verdict) -> list[Finding]:
    """What folding the log and deciding it again finds."""
    if verdict.difference is None:
        return []
    found = verdict.difference
    return [
        Finding(
            field=f"log: {found.field}", step=found.step, recorded=found.recorded, found=found.recomputed,
            message=f"at event {found.event} the log does not follow from what is before it: {found.message}",
        )
    ]  # fmt: skip


def _of_files(walk: Walk, chosen: ModelChoice) -> list[Finding]:
    """How the model's files differ from those that the log names. Empty with `any_model`."""
    started = walk.log.header.started
    if chosen.any_model:
        return []
    recorded = started.environment.get("weights_digest", "")
    with sentences():
        folder = folder_of(started, chosen.model)
        found, whole = digests_of(folder, bool(recorded))
    if started.model_digest and found != started.model_digest:
        why = f"the configuration or the weights in {folder} are not those of the log"
        return [Finding(field="model", recorded=started.model_digest, found=found, message=why)]
    if whole != recorded:
        why = f"a byte of the weights in {folder} is another than the log's, outside of what the shorter digest covers"
        return [Finding(field="weights", recorded=recorded, found=whole, message=why)]
    return []


class _Run:
    """The sampled steps, run again. The counts are known when `compare` is done."""

    def __init__(self, walk: Walk, steps: list[int]) -> None:
        self._walk, self._wanted = walk, set(steps)
        self.model, self.steps, self.not_audited, self.tokens = "", 0, 0, 0
        self.lacking: list[str] = []
        self._wrong: dict[int, Finding] = {}
        self.requests: set[int] = set()
        self.differences: list[TokenDifference] = []
        self.causes: list[Cause] = []
        self.elsewhere: list[Ground] = []

    def compare(self, chosen: ModelChoice, progress: Progress | None) -> None:
        machine = machine_of(self._walk, chosen)
        started = self._walk.log.header.started
        self.model, self.elsewhere = str(machine.path), grounds(started.environment, machine.environment())
        from vnext.replay.rerun.batched import Batched

        batched = Batched(machine, self._walk.first, whole=False)
        for step in self._walk.steps():
            if step.step not in self._wanted:
                continue
            if not self._is_ready(machine.versions, step.state.weights):
                continue
            batched.mistrust()
            again, logits = batched.run(batched.inputs(step.state, step.placeholders, step.drafts))
            found = token_differences(step, again, logits)
            self.differences += found
            self.requests.update(step.state.in_flight[-1].ids[step.state.in_flight[-1].samples].tolist())
            self.steps, self.tokens = self.steps + 1, self.tokens + len(again)
            if progress is not None:
                progress(self.steps, self.tokens)
        self.causes, versions = causes_of(self.differences, self._walk, machine, chosen, len(self.requests)), machine.versions
        self.lacking = [sentence for version, sentence in versions.lacking.items() if version not in versions.wrong]

    def _is_ready(self, versions: Versions, weights: Weights | None) -> bool:
        """Have the machine compute with these weights if they are here. Other ones that the user gives for them are a finding."""
        if versions.is_here(weights):
            versions.take(weights)
            return True
        assert weights is not None, "the log's model is here"
        self.not_audited += 1
        if (found := versions.wrong.get(weights.version)) is not None:
            message = versions.lacking[weights.version]
            self._wrong[weights.version] = Finding(field="weights", recorded=weights.digest, found=found, message=message)
        return False

    def findings(self) -> list[Finding]:
        return [*self._wrong.values(), *(Finding(**msgspec.structs.asdict(cause)) for cause in self.causes)]


# ---- what explains a token that differs --------------------------------------------------------------------------
# What explains tokens that a model does not give again: one changed token, another parameter, or other numbers.
#
# Owns the hypotheses. Each is tried on the whole answer of a request, alone: it explains the answer if every token then comes out
# again. A seed or a prompt leaves nothing to try, and is what remains.


EXPLAINED = 4
"""Requests that are looked at in detail."""
TEMPERATURES = tuple(tenth / 10 for tenth in range(21))
NUMERICS: tuple[dict[str, object], ...] = (
    {"dtype": "float32"}, {"dtype": "bfloat16"}, {"quantization": "int8", "dtype": "bfloat16"}, {"quantization": "none"},
    {"activations": "int8"}, {"activations": "bf16"}, {"kv_cache_dtype": "int8"}, {"kv_cache_dtype": "auto"},
)  # fmt: skip
replace = msgspec.structs.replace


class Cause(msgspec.Struct, frozen=True, kw_only=True):
    """As audit.Finding."""

    field: str
    message: str
    recorded: str
    found: str
    request: int
    position: int
    step: int


def causes_of(
    differences: list[TokenDifference], walk: Walk, machine: Machine, chosen: ModelChoice, sampled: int
) -> list[Cause]:
    """A cause for each of the first requests that differ, the earliest token first. `sampled` requests were compared."""
    from vnext.replay.rerun.alone import Alone

    firsts: dict[int, TokenDifference] = {}
    for found in sorted(differences, key=lambda each: (each.step, each.position)):
        firsts.setdefault(found.request, found)
    alone = Alone(machine, walk.first.config)
    causes = [_cause(found, walk, alone) for found in list(firsts.values())[:EXPLAINED]]
    unknown = [firsts[cause.request] for cause in causes if cause.field == UNKNOWN]
    if unknown and (other := _numerics(unknown, walk, machine, chosen)):
        return [other]
    if len(unknown) == len(causes) and 2 * len(firsts) >= sampled and unknown:
        message = "most requests differ: the weights, the configuration or the numbers of the model are not those of the log"
        first = unknown[0]
        return [_made(first, "model or numerics", message, str(first.recorded), str(first.again), first.position), *causes]
    return causes


UNKNOWN = "seed, prompt or another parameter"


def _cause(first: TokenDifference, walk: Walk, alone: Alone) -> Cause:
    reported = walk.reported[first.request]
    for field, recorded, found, position in (*_token(reported, alone), *_parameters(reported, alone)):
        message = f"with {field} {found} instead of {recorded}, every token of request {first.request} comes out again"
        where = first.position if position < 0 else position
        return _made(first, field, message, recorded, found, where)
    message = (
        f"request {first.request} has token {first.recorded} at position {first.position} where the model gives {first.again}, and "
        "neither one changed token nor a usual value of a parameter explains it"
    )
    return _made(first, UNKNOWN, message, str(first.recorded), str(first.again), first.position)


def _made(first: TokenDifference, field: str, message: str, recorded: str, found: str, position: int) -> Cause:
    return Cause(
        field=field, message=message, recorded=recorded, found=found, request=first.request, position=position, step=first.step
    )


Hypothesis = tuple[str, str, str, int]
"""The field, its recorded value, the value that explains the answer, and the position or -1."""


def _token(reported: Reported, alone: Alone) -> Iterator[Hypothesis]:
    """The first token that differs was another one."""
    tokens, sampling = np.array(reported.tokens, dtype=np.int32), reported.request.sampling
    wrong = next(_wrong(reported, tokens, sampling, alone), None)
    if wrong is None:
        return
    position, again = wrong
    changed = tokens.copy()
    changed[position] = again
    if next(_wrong(reported, changed, sampling, alone), None) is None:
        yield "token", str(tokens[position]), str(again), position


def _parameters(reported: Reported, alone: Alone) -> Iterator[Hypothesis]:
    """A parameter had another value."""
    tokens, recorded = np.array(reported.tokens, dtype=np.int32), reported.request.sampling
    for name, value in _values(recorded):
        if next(_wrong(reported, tokens, replace(recorded, **{name: value}), alone), None) is None:
            yield name, str(getattr(recorded, name)), str(value), -1
            return


def _values(recorded: Sampling) -> Iterator[tuple[str, object]]:
    yield from (("temperature", each) for each in TEMPERATURES if each != recorded.temperature)
    usual = {name: value for name, value in DEFAULTS.items() if name != "temperature"}
    yield from ((name, value) for name, value in (usual | {"logit_bias": ()}).items() if getattr(recorded, name) != value)
    yield from (("top_p", each) for each in (0.9, 0.95, 0.8) if each != recorded.top_p)
    yield from (("top_k", each) for each in (20, 40, 50) if each != recorded.top_k)


def _wrong(reported: Reported, tokens: np.ndarray, sampling: Sampling, alone: Alone) -> Iterator[tuple[int, int]]:
    """(position, the model's token) of each token of the answer that differs."""
    request = replace(reported.request, sampling=sampling)
    for begin, end, weights in reported.spans(request.prompt_length):
        if not alone.versions.is_here(weights):
            continue
        alone.versions.take(weights)
        for position, again, _ in alone.answers(request, tokens[:end], begin):
            if again != tokens[position]:
                yield position, again


def _numerics(unknown: list[TokenDifference], walk: Walk, machine: Machine, chosen: ModelChoice) -> Cause | None:
    """Whether the model computed with other numbers than the log says: those that explain all these requests."""
    from vnext.replay.rerun.alone import Alone
    from vnext.replay.rerun.machine import open_machine

    started, first = walk.log.header.started, unknown[0]
    for change in NUMERICS:
        if all(getattr(machine.numerics, name) == value for name, value in change.items()):
            continue
        try:
            numerics = numerics_of(walk, chosen.changes | change)
            other = open_machine(
                started, chosen.model, numerics, chosen.any_model, walk.adapter_folders(), chosen.weights, kept_at(walk, chosen)
            )
        except CannotRun:
            continue
        alone, (field, value) = Alone(other, walk.first.config), next(iter(change.items()))
        if all(_comes_out(walk.reported[found.request], alone) for found in unknown):
            recorded = str(getattr(machine.numerics, field))
            message = f"with {field} {value} instead of {recorded}, requests that differ come out again"
            return _made(first, field, message, recorded, str(value), first.position)
    return None


def _comes_out(reported: Reported, alone: Alone) -> bool:
    tokens = np.array(reported.tokens, dtype=np.int32)
    return next(_wrong(reported, tokens, reported.request.sampling, alone), None) is None


Scored = tuple[list[list[float] | None], list[str]]


def scores_of(log: Path, chosen: ModelChoice) -> Callable[[Sequence[Answered]], Scored]:
    """A function from answers to the log-probabilities of each, None where weights that drew it are not here, and a sentence for
    each of these. Loads the model, and each version of its weights once. Raises UnusableLog."""
    walk = Walk(log, Selection())
    with sentences():
        machine = machine_of(walk, chosen)
    from vnext.replay.rerun.alone import Alone

    alone = Alone(machine, walk.first.config)

    def score(answers: Sequence[Answered]) -> Scored:
        spans = [(place, span) for place, each in enumerate(answers) for span in each.spans(each.request.prompt_length)]
        found: list[list[float] | None] = [[] for _ in answers]
        with sentences():
            for place, span in sorted(spans, key=lambda each: each[1].weights.version if each[1].weights else 0):
                if (scores := found[place]) is None or not is_ready(machine, span.weights):
                    found[place] = None
                    continue
                tokens = np.array(answers[place].tokens[: span.end], dtype=np.int32)
                scores += alone.logprobs(answers[place].request, tokens, span.begin)
        return found, list(machine.versions.lacking.values())

    return score
