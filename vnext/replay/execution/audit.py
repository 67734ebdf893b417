"""audit: whether somebody else's log is what this model does, from a sample of its steps.

Owns the findings. What costs little is checked of the whole log: it is folded, every decision is made again (`verify`), and its
digests are compared with those of the model's files. Then randomly chosen steps run again, each from nothing but the log: what they
read is computed anew from the requests' own tokens. `audit_cause.py` looks for what explains a token that differs.
"""

from __future__ import annotations

import math
import random
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from vnext.replay.execution.audit_cause import Cause, causes_of
from vnext.replay.execution.execution import ModelChoice, Progress, machine_of, sentences, token_differences
from vnext.replay.execution.recorded import Asked, Walk
from vnext.replay.reading.folding import first_state
from vnext.replay.reading.source import UnusableLog, open_log
from vnext.replay.reading.verify import Verdict, verify
from vnext.replay.rerun.model_of_log import digests_of, folder_of
from vnext.replay.rerun.numerics import Ground, grounds

if TYPE_CHECKING:
    from vnext.replay.execution.execution import TokenDifference
    from vnext.replay.rerun.versions import Versions
    from vnext.state.state import Weights

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
    walk = Walk(path, Asked(), telling=True)
    verdict = verify(open_log(path))
    findings = [*_of_log(verdict), *_of_files(walk, chosen)]
    first, total = first_state(walk.log).planned, verdict.steps
    steps = sorted(random.Random(seed).sample(range(first, first + total), math.ceil(share * total)))
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
