"""What a log tells a model that is to run again: each step's state, what it sampled, and each request's tokens.

Owns the walk that `exec` and `bisect` share, the range of steps and requests asked for, and the refusal of logs without
texts. Knows no tensors.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np

from vnext.replay.commands import index_of
from vnext.replay.folding import Broken, Fold, Folded, first_state, fold_items
from vnext.replay.source import Log, UnusableLog, open_log
from vnext.state.events import RequestArrived, StepCommitted, StepPlanned, unpack_tokens
from vnext.state.log import LogEnd
from vnext.state.outputs import outputs
from vnext.state.planning import row_tokens
from vnext.state.state import Request, State


class Asked(msgspec.Struct, frozen=True, kw_only=True):
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
    what the steps before it sampled that were still in flight: (step, request, epoch) -> token."""

    step: int
    event: int
    state: State
    tokens: np.ndarray
    pending: dict[tuple[int, int, int], int]


class Told(msgspec.Struct):
    """A request of a log: its tokens as far as they are told, and the steps in which those from `first` on were sampled."""

    request: Request
    tokens: list[int]
    first: int
    steps: list[int]


def require_texts(log: Log) -> None:
    """UnusableLog for a log that has no token ids to compare with."""
    if log.header.privacy != "full":
        raise UnusableLog(
            f"{log.paths[0].parent} keeps the shapes of texts and no token ids, so there is nothing to run again: record with "
            "--log full (a redacted log stays without)"
        )


class Walk:
    """The part of a log that was asked for, folded once. `end`, `unseen` and `uncommitted` are known when `steps` is done.

    `whole`: the walk begins with the engine's start. `unseen` steps were planned before the walk begins. `told` has every
    request by its number, if that was wished for.
    """

    def __init__(self, path: Path, asked: Asked, *, telling: bool = False) -> None:
        self.log = open_log(path)
        require_texts(self.log)
        self._asked, self._telling = asked, telling
        self.whole = asked.first == 0 and self.log.header.index == 0
        if asked.first:
            place = index_of(path).at_step(asked.first)
            self.first, self._items = place.state, place.items
        else:
            self.first, self._items = first_state(self.log), self.log.items()
        self.told: dict[int, Told] = {}
        self.end = "the end of the steps that were asked for"
        self.is_sound = True
        self.uncommitted = self.unseen = 0
        self._vocab_size: int | None = None

    def begin(self, vocab_size: int) -> None:
        """Before `steps`, for a model of this vocabulary: UnusableLog is raised, now or then, where a token is none of its."""
        self._vocab_size = vocab_size
        for request, tokens in _living(self.first):
            self._meet(request, tokens)

    def steps(self) -> Iterator[RecordedStep]:
        """Committed steps in their order, from the first one asked for to the last."""
        states: dict[int, State] = {}
        pending: dict[tuple[int, int, int], int] = {}
        for item in fold_items(self.first, self._items):
            if type(item) is not Folded:
                self._note(item)
            elif isinstance(item.event, RequestArrived):
                self._meet(item.after.requests[item.event.id], unpack_tokens(item.event.prompt))
            elif isinstance(item.event, StepPlanned) and self._asked.holds(item.event.step):
                states[item.event.step] = item.after
            elif isinstance(item.event, StepCommitted):
                step = item.event.step
                if self._asked.end is not None and step >= self._asked.end:
                    break
                if found := self._committed(item, states.pop(step, None), pending):
                    yield found
        self.uncommitted = len(states)

    def _committed(self, item: Folded, state: State | None, pending: dict[tuple[int, int, int], int]) -> RecordedStep | None:
        """The step, if it is one that was asked for; what it sampled is remembered for the steps that ran ahead."""
        flight, tokens = item.before.flights[0], unpack_tokens(item.event.tokens)
        self._require_tokens(tokens, f"step {flight.step} sampled")
        if self._telling:
            self._tell(item)
        before = {key: token for key, token in pending.items() if key[0] >= flight.step - item.before.config.pipeline_depth}
        entries = zip(flight.ids[flight.samples].tolist(), flight.epochs[flight.samples].tolist(), tokens.tolist())
        pending.clear()
        pending.update(before | {(flight.step, id_, epoch): token for id_, epoch, token in entries})
        if state is None:
            self.unseen += self._asked.holds(flight.step)
            return None
        return RecordedStep(step=flight.step, event=item.number, state=state, tokens=tokens, pending=before)

    def _meet(self, request: Request, tokens: np.ndarray) -> None:
        self._require_tokens(tokens, f"request {request.id} holds")
        sampling = request.sampling
        named = [token for token, _ in sampling.logit_bias] + list(sampling.stop_token_ids)
        self._require_tokens(np.array(named, dtype=np.int64), f"request {request.id} names")
        if self._telling:
            self.told[request.id] = Told(request, tokens.tolist(), len(tokens), [])

    def _tell(self, item: Folded) -> None:
        for output in outputs(item.before, item.event, item.after):
            told = self.told[output.id]
            told.tokens.append(output.token)
            if self._asked.holds(item.event.step):
                told.steps.append(item.event.step)
            else:
                told.first += 1

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
    """Requests that live in a state, with what is known of their tokens."""
    for row, id_ in enumerate(state.rows.id.tolist()):
        yield state.requests[id_], row_tokens(state, row)
    for waiting in state.waiting:
        yield state.requests[waiting.id], unpack_tokens(waiting.tokens)


# ---- what a command line asks for --------------------------------------------------------------------------------


def add_range(parser: argparse.ArgumentParser) -> None:
    """The options that `asked_of` reads."""
    parser.add_argument("--steps", metavar="A:B", default="", help="steps from A to before B; a number is one step")
    parser.add_argument("--requests", metavar="ID,ID", default="", help="compare these requests only")


def asked_of(steps: str, requests: str) -> Asked:
    """UnusableLog for what is no range or no list of numbers."""
    try:
        first, colon, end = steps.partition(":")
        low = int(first or 0)
        high = (int(end) if end else None) if colon or not steps else low + 1
        ids = frozenset(int(each) for each in requests.split(",")) if requests else None
    except ValueError as error:
        raise UnusableLog(f"--steps {steps or 'A:B'} --requests {requests or 'ID,ID'}: write whole numbers") from error
    if low < 0 or (high is not None and high <= low):
        raise UnusableLog(f"--steps {steps} holds no step: write A:B with A from 0 on and before B")
    return Asked(first=low, end=high, requests=ids)
