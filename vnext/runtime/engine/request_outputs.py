"""What clients read of their requests, from the outputs of the state and the results of ranks, and the drafts of each live request:
how many of them became tokens of its answer and how many did not. Reads no clock."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from vnext.runtime.engine.facility import NO_ERRORS
from vnext.runtime.engine.owners import News
from vnext.runtime.protocol.messages import PromptResult, RequestOutput, TokenLogprobs
from vnext.sched.engine import Ready
from vnext.state.fold_commit import MatchedSamples
from vnext.state.outputs import Output
from vnext.state.state import State

NO_DRAFTS = 0, 0


class Beside(NamedTuple):
    """What the clients of an event's requests get beside its outputs: `prompts` before them; `logprobs`, one entry per sample of a
    step; `errors`, why requests are aborted."""

    prompts: Sequence[RequestOutput] = ()
    logprobs: Sequence[TokenLogprobs | None] = ()
    errors: Mapping[int, str] = NO_ERRORS


NOTHING_BESIDE = Beside()


class ClientNews:
    """Makes what clients are sent of an engine's news. Mutable: counts the drafts of live requests."""

    def __init__(self) -> None:
        self._drafts = DraftCounts()

    def of(self, ready: Ready) -> tuple[list[News], list[int]]:
        """What clients are sent of these events, and the requests that end with them."""
        if ready.state.config.speculation is not None:
            for before, matched in zip(ready.befores, ready.matched):
                if matched is not None:
                    self._drafts.take(before, matched)
        found: list[News] = []
        ended: list[int] = []
        for going, outputs, note in ready.news:
            if note is None and not outputs:
                if going is not None:
                    found.append((going, ()))
                continue
            beside = note if isinstance(note, Beside) else NOTHING_BESIDE
            if beside.prompts:
                found.append((None, beside.prompts))
            if going is not None or outputs:
                found.append((going, to_clients(outputs, self._drafts, beside) if outputs else ()))
            ended += [each.id for each in outputs if each.finish]
        return found, ended


class DraftCounts:
    """Counts by request number. Mutable."""

    def __init__(self) -> None:
        self._counts: dict[int, tuple[int, int]] = {}

    def take(self, before: State, matched: MatchedSamples) -> None:
        """A commit that was folded into `before`. A draft behind the answer's end did not become a token."""
        runs = matched.runs
        if runs is None or not runs.drafted.any():
            return
        taken = np.bincount(matched.rows, minlength=len(before.rows))[runs.rows]
        for id_, count, drafted in zip(before.rows.id[runs.rows].tolist(), taken.tolist(), runs.drafted.tolist()):
            accepted, rejected = self._counts.get(id_, NO_DRAFTS)
            self._counts[id_] = accepted + count - 1, rejected + drafted - count + 1

    def pop(self, id_: int) -> tuple[int, int]:
        """The accepted and the rejected drafts of a request that ends."""
        return self._counts.pop(id_, NO_DRAFTS)


def prompt_outputs(state: State, results: Sequence[PromptResult]) -> list[RequestOutput]:
    """What the requests that are live get of their prompts. It precedes the outputs of the step that computed it."""
    return [
        RequestOutput(name=state.requests[each.id].name, tokens=b"", number=each.id, prompt=(each,))
        for each in results
        if each.id in state.requests
    ]


def to_clients(news: Sequence[Output], drafts: DraftCounts, note: Beside = NOTHING_BESIDE) -> list[RequestOutput]:
    """What clients read of these outputs. `drafts` forgets the requests that end."""
    made = []
    for output in news:
        counts = drafts.pop(output.id) if output.finish else NO_DRAFTS
        made.append(to_client(output, note.logprobs, note.errors.get(output.id, ""), counts))
    return made


def to_client(
    output: Output, logprobs: Sequence[TokenLogprobs | None] | None, error: str = "", drafts: tuple[int, int] = NO_DRAFTS
) -> RequestOutput:
    """A request's output as its client reads it; `logprobs` has one entry per sample of the step, `error` says why the engine
    aborts the request, and `drafts` are those accepted and rejected."""
    scored = logprobs[output.sample] if logprobs and output.sample >= 0 else None
    return RequestOutput(
        name=output.name,
        tokens=b"" if output.token < 0 else output.token.to_bytes(4, "little"),
        finish=output.finish,
        stop_token=output.stop_token,
        cached_tokens=output.cached_tokens,
        logprobs=() if scored is None else (scored,),
        number=output.id,
        error=error,
        accepted_drafts=drafts[0],
        rejected_drafts=drafts[1],
        retained=output.retained,
    )
