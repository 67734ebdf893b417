"""Grammars: whether each committed token was one that its request's constraint allowed (law G1).

Owns the fold of every constrained request beside the log's. Needs the model's tokenizer and no weights.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from vnext.sampling.constraint import Matcher, Vocabulary
from vnext.state.config import SchedulerConfig
from vnext.state.events import (
    AnyEvent,
    RequestAborted,
    RequestArrived,
    RequestId,
    StepCommitted,
    generated_by,
    unpack_tokens,
)
from vnext.state.outputs import Output, outputs
from vnext.state.params import Constraint
from vnext.state.preempt import row_tokens
from vnext.state.state import State


class GrammarCheck:
    """The constrained requests of one log. Mutable. `tokens` and `requests` count what was checked."""

    def __init__(self, folder: Path, config: SchedulerConfig) -> None:
        """`folder`: the model's."""
        self._vocabulary = Vocabulary(folder, config.vocab_size, config.eos_token_ids)
        self._matchers: dict[RequestId, Matcher] = {}
        self.tokens = self.requests = 0

    def begin(self, state: State) -> None:
        """Take in the requests that live in the state in which the log begins."""
        running = [(id_, row_tokens(state, row)) for row, id_ in enumerate(state.rows.id.tolist())]
        for id_, tokens in (*running, *((entry.id, unpack_tokens(entry.tokens)) for entry in state.waiting)):
            request = state.requests[id_]
            self._take(RequestId(id_), request.sampling.constraint, tokens[request.prompt_length :].tolist())

    def __call__(self, before: State, event: AnyEvent, after: State) -> str:
        """Follow one event; returns what is wrong with it in one sentence, or ""."""
        if isinstance(event, RequestArrived):
            self._take(event.id, event.sampling.constraint, unpack_tokens(generated_by(event)).tolist())
        elif isinstance(event, StepCommitted) and self._matchers:
            return next((why for each in outputs(before, event, after) if (why := self._committed(each))), "")
        elif isinstance(event, RequestAborted):
            for id_ in event.ids:
                self._matchers.pop(id_, None)
        return ""

    def _take(self, id_: RequestId, constraint: Constraint | None, answer: Iterable[int] = ()) -> None:
        if constraint is not None:
            self.requests += 1
            self._matchers[id_] = Matcher(constraint, self._vocabulary, tuple(answer))

    def _committed(self, output: Output) -> str:
        matcher = self._matchers.get(output.id)
        if matcher is None or output.token < 0:
            return ""
        self.tokens += 1
        allowed = matcher.allowed()
        if matcher.error:
            return f"request {output.id}: {matcher.error}"
        if not allowed[output.token]:
            return f"request {output.id} sampled token {output.token}, which its constraint forbids there"
        matcher.take(output.token)
        if output.finish:
            del self._matchers[output.id]
        return ""
