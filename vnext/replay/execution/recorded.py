"""What a log provides for running its model again: each step's state, its samples, and each request's tokens.

Owns the walk that `exec` and `bisect` share, the requested range of steps and requests, and the rejection of logs
without texts. Knows no tensors.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np

from vnext.log.codec import Frame, LogEnd
from vnext.replay.console.commands import index_of
from vnext.replay.reading.drawn import Answered
from vnext.replay.reading.folding import Broken, Fold, Folded, first_state, fold_items
from vnext.replay.reading.source import Log, UnusableLog, open_log
from vnext.state.events import (
    AdapterLoaded,
    EngineRecovered,
    MemoryRanShort,
    PromotionEnded,
    RequestArrived,
    StepCommitted,
    generated_by,
    unpack_tokens,
)
from vnext.state.outputs import outputs
from vnext.state.preempt import row_tokens
from vnext.state.state import Request, State, runs_in, with_kept_drafts
from vnext.state.store.inputs import has_inputs, inputs_in


class Selection(msgspec.Struct, frozen=True, kw_only=True):
    """Steps [first, end) and requests, None for all."""

    first: int = 0
    end: int | None = None
    requests: frozenset[int] | None = None

    def holds(self, step: int) -> bool:
        return step >= self.first and (self.end is None or step < self.end)

    def wants(self, request: int) -> bool:
        return self.requests is None or request in self.requests


class RecordedStep(msgspec.Struct, frozen=True, kw_only=True):
    """A committed step: the state in which it ran, its samples int32[S], the number of the event that committed it, and
    what earlier steps sampled that were still in flight: (step, request, preemption count) -> tokens.

    Of the step's drafts only those that were kept count: `drafts` has them by request, and the state's newest step no other.
    """

    step: int
    event: int
    state: State
    tokens: np.ndarray
    placeholders: dict[tuple[int, int, int], list[int]]
    drafts: dict[int, list[int]]


class Reported(Answered, kw_only=True):
    """A request of a log: its reported tokens, and the steps in which those from `first` on were sampled."""

    first: int
    steps: list[int] = []


class Promoted(NamedTuple):
    """What transfers have filled: pages, and state pages."""

    pages: tuple[int, ...] = ()
    states: tuple[int, ...] = ()


def promoted_pages(before: State, event: PromotionEnded) -> Promoted:
    """What this event's transfer has filled."""
    for each in before.tier.transfers if before.tier else ():
        if each.number == event.transfer:
            came = each.state >= 0 and event.count == each.count
            return Promoted(each.pages[each.hits : each.hits + event.count], (each.state,) if came else ())
    return Promoted()


def require_texts(log: Log) -> None:
    """Raises UnusableLog for a log without token ids to compare with."""
    if log.header.privacy != "full":
        raise UnusableLog(
            f"{log.paths[0].parent} keeps the shapes of texts and no token ids, so there is nothing to run again: record with "
            "--log full (a redacted log stays without)"
        )


class Walk:
    """The requested part of a log, folded once. `end`, `unseen` and `uncommitted` are known when `steps` is done.

    `whole`: the walk begins with the engine's start. `recoveries` of ranks were met so far, with all steps behind each among
    the requested. `unseen` steps were planned before the walk begins. `reported` has every request by its number, if that was
    requested.
    """

    def __init__(self, path: Path, selection: Selection, *, telling: bool = False) -> None:
        self.log = open_log(path)
        require_texts(self.log)
        self._selection, self._telling = selection, telling
        self.whole = selection.first == 0 and self.log.header.index == 0
        if selection.first:
            place = index_of(path).at_step(selection.first)
            self.first, self._items = place.state, place.items
        else:
            self.first, self._items = first_state(self.log), self.log.items()
        self.reported: dict[int, Reported] = {}
        self.end = "the end of the steps that were asked for"
        self.is_sound = True
        self.uncommitted = self.unseen = self.recoveries = 0
        self._promoted: list[tuple[int, Promoted]] = []
        self._vocab_size: int | None = None
        self._why_lacking: Callable[[bytes], str] = lambda digest: ""

    def adapter_folders(self) -> dict[str, str]:
        """Where the log's LoRA adapters were read from, by digest."""
        if not self.first.config.max_loras:
            return {}
        events = (event for item in self.log.items() if isinstance(item, Frame) for event in item.events)
        return {event.digest: event.path for event in events if isinstance(event, AdapterLoaded)}

    def begin(self, vocab_size: int, why_lacking: Callable[[bytes], str]) -> None:
        """Call before `steps`, for a model of this vocabulary size. A token outside of the vocabulary raises
        UnusableLog, here or in `steps`, as does an image or a sound of which `why_lacking` says why it is not here."""
        self._vocab_size, self._why_lacking = vocab_size, why_lacking
        for request, tokens in _living(self.first):
            self._meet(request, tokens)

    def steps(self) -> Iterator[RecordedStep]:
        """Committed steps in order, from the first requested one to the last."""
        states: dict[int, State] = {}
        placeholders: dict[tuple[int, int, int], list[int]] = {}
        for item in fold_items(self.first, self._items):
            if type(item) is not Folded:
                self._note(item)
            elif isinstance(item.event, RequestArrived):
                self._meet(item.after.requests[item.event.id], unpack_tokens(item.event.prompt + generated_by(item.event)))
            elif (plan := item.plan) is not None and self._selection.holds(plan.step):
                states[plan.step] = item.after
            elif isinstance(item.event, PromotionEnded):
                self._promoted += [(item.after.planned, promoted_pages(item.before, item.event))]
            elif isinstance(item.event, EngineRecovered | MemoryRanShort):
                self.uncommitted += len(states)
                states.clear()
                self.recoveries += isinstance(item.event, EngineRecovered) and self._selection.holds(item.after.planned)
            elif isinstance(item.event, StepCommitted):
                step = item.event.step
                if self._selection.end is not None and step >= self._selection.end:
                    break
                if found := self._committed(item, states.pop(step, None), placeholders):
                    yield found
        self.uncommitted += len(states)

    def promoted(self, step: int) -> Promoted:
        """What was read from a disk tier before this step was planned, and not returned for an earlier one."""
        found = [each for planned, each in self._promoted if planned <= step]
        self._promoted = [each for each in self._promoted if each[0] > step]
        states = tuple(page for each in found for page in each.states)
        return Promoted(tuple(page for each in found for page in each.pages), states)

    def _committed(
        self, item: Folded, state: State | None, placeholders: dict[tuple[int, int, int], list[int]]
    ) -> RecordedStep | None:
        """The step, if it was requested. Remembers its samples for steps that were planned ahead."""
        event = item.event
        assert isinstance(event, StepCommitted)
        scheduled = with_kept_drafts(item.before.in_flight[0], event)
        tokens, sampled = unpack_tokens(event.tokens), scheduled.samples
        self._require_tokens(tokens, f"step {scheduled.step} sampled")
        if self._telling:
            self._tell(item, event.step)
        before = {
            key: sampled
            for key, sampled in placeholders.items()
            if key[0] >= scheduled.step - item.before.config.pipeline_depth
        }
        counts, _ = runs_in(event, int(np.count_nonzero(sampled)))
        runs = [run.tolist() for run in np.split(tokens, np.cumsum(counts)[:-1])]
        owners = list(zip(scheduled.ids[sampled].tolist(), scheduled.preemption_counts[sampled].tolist()))
        placeholders.clear()
        placeholders.update(before | {(scheduled.step, *owner): run for owner, run in zip(owners, runs)})
        if state is None:
            self.unseen += self._selection.holds(scheduled.step)
            return None
        state = msgspec.structs.replace(state, in_flight=(*state.in_flight[:-1], scheduled))
        drafts = {id_: run[:-1] for (id_, _), run in zip(owners, runs)}
        return RecordedStep(
            step=scheduled.step, event=item.number, state=state, tokens=tokens, placeholders=before, drafts=drafts
        )

    def _meet(self, request: Request, tokens: np.ndarray) -> None:
        if self._vocab_size is not None and has_inputs(request.prompt):
            self._require_inputs(request)
            tokens = np.concatenate((tokens[: request.prompt_length].clip(0), tokens[request.prompt_length :]))
        self._require_tokens(tokens, f"request {request.id} holds")
        sampling = request.sampling
        named = [token for token, _ in sampling.logit_bias] + list(sampling.stop_token_ids)
        self._require_tokens(np.array(named, dtype=np.int64), f"request {request.id} names")
        if self._telling:
            self.reported[request.id] = Reported(request=request, tokens=tokens.tolist(), first=len(tokens))

    def _tell(self, item: Folded, step: int) -> None:
        for output in outputs(item.before, item.event, item.after):
            reported = self.reported[output.id]
            reported.take(output.token, item.before.weights)
            if self._selection.holds(step):
                reported.steps.append(step)
            else:
                reported.first += 1

    def _require_inputs(self, request: Request) -> None:
        for _, _, digest in inputs_in(unpack_tokens(request.prompt)):
            if why := self._why_lacking(digest):
                raise UnusableLog(
                    f"request {request.id} has an image or a sound, {digest.hex()}, whose vectors are not kept ({why}): give the "
                    "folder of a server's --kv-disk-dir, which keeps them, with --inputs; `vnext-replay verify` replays every "
                    "decision without, and --steps chooses steps without such requests"
                )

    def _require_tokens(self, tokens: np.ndarray, what: str) -> None:
        if self._vocab_size is None or not len(tokens):
            return
        least, most = int(tokens.min()), int(tokens.max())
        if least < 0 or most >= self._vocab_size:
            found = most if least >= 0 else least
            why = f"the model knows {self._vocab_size}: the log is damaged, or another model's"
            raise UnusableLog(f"{what} token {found}, and {why}")

    def _note(self, item: Fold) -> None:
        if isinstance(item, LogEnd):
            self.end, self.is_sound = str(item), item.kind in ("complete", "torn")
        elif isinstance(item, Broken):
            self.end, self.is_sound = f"event {item.number}: {item.message}", False


def _living(state: State) -> Iterator[tuple[Request, np.ndarray]]:
    """Requests that live in a state, with their known tokens."""
    for row, id_ in enumerate(state.rows.id.tolist()):
        yield state.requests[id_], row_tokens(state, row)
    for waiting in state.waiting:
        yield state.requests[waiting.id], unpack_tokens(waiting.tokens)


# ---- what a command line asks for --------------------------------------------------------------------------------


def add_range(parser: argparse.ArgumentParser) -> None:
    """The options that `selection_of` reads."""
    add_steps(parser)
    parser.add_argument("--requests", metavar="ID,ID", default="", help="compare only these requests")


def add_steps(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--steps", metavar="A:B", default="", help="steps from A up to, not including, B; a number is one step")


def selection_of(steps: str, requests: str) -> Selection:
    """Raises UnusableLog if a text is no range or no list of numbers."""
    try:
        first, colon, end = steps.partition(":")
        low = int(first or 0)
        high = (int(end) if end else None) if colon or not steps else low + 1
        ids = frozenset(int(each) for each in requests.split(",")) if requests else None
    except ValueError as error:
        wrong = " ".join(f"--{name} {text}" for name, text in (("steps", steps), ("requests", requests)) if text)
        raise UnusableLog(f"{wrong}: write whole numbers, as --steps 10:20 or --requests 3,4") from error
    if low < 0 or (high is not None and high <= low):
        raise UnusableLog(f"--steps {steps} holds no step: write A:B with A from 0 on and before B")
    return Selection(first=low, end=high, requests=ids)
