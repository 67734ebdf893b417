"""rollouts: the finished answers of one log or several, as a file for a trainer, and one digest of them all.

Owns the lines and the digest, which is a function of what was asked and answered: a sum over the rollouts, so neither the order
nor the batches nor kills in between change it. Where an engine was killed, its successor's log continues its requests.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

import msgspec

from vnext.log.codec import Frame
from vnext.replay.reading.folding import Broken, Folded, first_state, fold
from vnext.replay.reading.source import Log, UnusableLog, open_log
from vnext.state.events import AnyEvent, RequestArrived, RequestResumed, generated_by, unpack_tokens
from vnext.state.fold_plan import row_tokens
from vnext.state.outputs import outputs
from vnext.state.params import Sampling
from vnext.state.state import Request, State

DIGEST_BYTES = 32
Score = Callable[[Request, list[int]], list[float]]
"""Gives the log-probabilities of a request's answer, from the request and its tokens, the prompt's first."""


class Rollout(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One line. `sampling` has the fields that differ from their defaults; `weights` and `adapter` are digests; `logprobs` are
    float32 values, one for each token of the answer, where they were asked for."""

    name: str
    prompt_token_ids: list[int]
    token_ids: list[int]
    finish_reason: str
    seed: int
    sampling: dict[str, object]
    weights: str
    logprobs: list[float] | None = None

    def word(self) -> int:
        """The digest of what was asked and answered, as a number. Names and log-probabilities do not count."""
        what = (self.prompt_token_ids, self.token_ids, self.finish_reason, self.seed, self.sampling, self.weights)
        return int.from_bytes(hashlib.blake2b(msgspec.msgpack.encode(what), digest_size=DIGEST_BYTES).digest(), "little")


class Rollouts(msgspec.Struct, frozen=True, kw_only=True):
    """What was written. `aborted` and `unfinished` requests were left out: how far they came depends on time."""

    out: str
    digest: str
    rollouts: int
    tokens: int
    aborted: int
    unfinished: int
    weights: list[str]
    ended: str = ""


def digest_of(rollouts: Iterable[Rollout]) -> str:
    """The digest of all, whatever their order: 64 hexadecimal digits."""
    total = sum(rollout.word() for rollout in rollouts) % (1 << 8 * DIGEST_BYTES)
    return f"{total:0{2 * DIGEST_BYTES}x}"


def write_rollouts(paths: Sequence[Path], out: Path, score: Score | None = None) -> Rollouts:
    """Write the finished answers of logs, each the continuation of the one before it, to the new file `out`. Raises UnusableLog."""
    logs = [open_log(path) for path in paths]
    for log in logs:
        if log.header.privacy != "full":
            raise UnusableLog(f"{log.paths[0].parent} keeps no texts: a rollout has token ids, so record with --log full")
    found, walks = [], [_Walk(log, score) for log in logs]
    for place, walk in enumerate(walks):
        later = {name for log in logs[place + 1 :] for name in _resumed(log)}
        found += [rollout for rollout in walk.rollouts() if walk.last[rollout.name] is not rollout or rollout.name not in later]
    _write(found, out)
    return Rollouts(
        out=str(out),
        digest=digest_of(found),
        rollouts=len(found),
        tokens=sum(len(rollout.token_ids) for rollout in found),
        aborted=sum(walk.aborted for walk in walks),
        unfinished=walks[-1].unfinished,
        weights=sorted({rollout.weights for rollout in found}),
        ended=next((walk.broken for walk in walks if walk.broken), ""),
    )


def _resumed(log: Log) -> Iterator[str]:
    """The names of the requests that a log continues for one before it."""
    for item in log.items():
        if isinstance(item, Frame):
            yield from (event.name for event in item.events if isinstance(event, RequestResumed))


def _write(rollouts: Iterable[Rollout], out: Path) -> None:
    try:
        with out.open("xb") as file:
            for rollout in rollouts:
                file.write(msgspec.json.encode(rollout) + b"\n")
    except FileExistsError as error:
        raise UnusableLog(f"{out} is there already: name a new file") from error
    except OSError as error:
        raise UnusableLog(f"{out} cannot be written: {error}") from error


class _Walk:
    """The rollouts of one log. `last` has the last one of each name; the counts are known when `rollouts` is done."""

    def __init__(self, log: Log, score: Score | None) -> None:
        self._log, self._score = log, score
        self._weights = log.header.started.model_digest
        self._live: dict[int, tuple[Request, list[int]]] = {}
        self.last: dict[str, Rollout] = {}
        self.aborted, self.broken = 0, ""

    @property
    def unfinished(self) -> int:
        return len(self._live)

    def rollouts(self) -> list[Rollout]:
        """In the order in which they ended."""
        first = first_state(self._log)
        for row, id_ in enumerate(first.rows.id.tolist()):
            self._live[id_] = first.requests[id_], row_tokens(first, row).tolist()
        for waiting in first.waiting:
            self._live[waiting.id] = first.requests[waiting.id], unpack_tokens(waiting.tokens).tolist()
        found = []
        for item in fold(self._log):
            if isinstance(item, Broken):
                self.broken = f"event {item.number}: {item.message}"
            elif isinstance(item, Folded):
                found += self._folded(item.before, item.event, item.after)
        return found

    def _folded(self, before: State, event: AnyEvent, after: State) -> Iterator[Rollout]:
        if isinstance(event, RequestArrived):
            self._live[event.id] = after.requests[event.id], unpack_tokens(event.prompt + generated_by(event)).tolist()
        for output in outputs(before, event, after):
            request, tokens = self._live[output.id]
            if output.token >= 0:
                tokens.append(output.token)
            if output.finish:
                del self._live[output.id]
                self.aborted += output.finish == "abort"
                if output.finish != "abort":
                    yield self._rollout(request, tokens, output.finish)

    def _rollout(self, request: Request, tokens: list[int], finish: str) -> Rollout:
        found = self.last[request.name] = Rollout(
            name=request.name,
            prompt_token_ids=tokens[: request.prompt_length],
            token_ids=tokens[request.prompt_length :],
            finish_reason=finish,
            seed=request.sampling.seed,
            sampling=_changed(request.sampling),
            weights=self._weights,
            logprobs=None if self._score is None else self._score(request, tokens),
        )
        return found


def _changed(sampling: Sampling) -> dict[str, object]:
    """The fields that are not the defaults, without the seed."""
    fields = [field for field in msgspec.structs.fields(Sampling) if field.name != "seed"]
    given = ((field.name, getattr(sampling, field.name), field.default) for field in fields)
    return {name: msgspec.to_builtins(value) for name, value, default in given if value != default}
