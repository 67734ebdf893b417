"""rollouts: the finished answers of one log or several, as a file for a trainer, and one digest of them all.

Owns the lines and the digest, which is a function of what was asked and answered: a sum over the rollouts, so neither the order
nor the batches nor kills in between change it. Where an engine was killed, its successor's log continues its requests.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

import msgspec

from vnext.base.spelling import reason
from vnext.log.codec import Frame
from vnext.replay.reading.drawn import Answered
from vnext.replay.reading.folding import Broken, Folded, first_state, fold
from vnext.replay.reading.source import Log, UnusableLog, open_log
from vnext.state.events import AnyEvent, RequestArrived, RequestResumed, generated_by, unpack_tokens
from vnext.state.outputs import outputs
from vnext.state.params import Sampling
from vnext.state.preempt import row_tokens
from vnext.state.state import Request, State

DIGEST_BYTES = 32
Score = Callable[[Sequence[Answered]], tuple[list[list[float] | None], list[str]]]
"""Gives the log-probabilities of each answer, None where weights that drew it are not here, and a sentence for each of these."""


class Rollout(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One line. `sampling` has the fields that differ from their defaults. `weights` is the digest of the weights that drew the
    answer, `version` their number. Where they changed meanwhile these are the last ones, and `before` has those before, each with
    the number of tokens at its end. `logprobs` are float32 values, one for each token of the answer, where they were asked for."""

    name: str
    prompt_token_ids: list[int]
    token_ids: list[int]
    finish_reason: str
    seed: int
    sampling: dict[str, object]
    weights: str
    version: int = 0
    before: list[tuple[int, str]] = []
    logprobs: list[float] | None = None

    def word(self) -> int:
        """The digest of what was asked and answered, and with which weights, as a number. Names, versions and log-probabilities do
        not count."""
        what = [self.prompt_token_ids, self.token_ids, self.finish_reason, self.seed, self.sampling, self.weights]
        what += [self.before] if self.before else []
        return int.from_bytes(hashlib.blake2b(msgspec.msgpack.encode(what), digest_size=DIGEST_BYTES).digest(), "little")


class Rollouts(msgspec.Struct, frozen=True, kw_only=True):
    """What was written. `aborted` and `unfinished` requests were left out: how far they came depends on time; so were those
    `with_inputs`, images or sounds, of which a line of token ids has nothing. `not_scored` have no
    log-probabilities, because weights that drew them are not here; `lacking` names these."""

    out: str
    digest: str
    rollouts: int
    tokens: int
    aborted: int
    unfinished: int
    weights: list[str]
    with_inputs: int = 0
    not_scored: int = 0
    lacking: list[str] = []
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
    answers, walks, with_inputs = [], list[_Walk](), 0
    for place, log in enumerate(logs):
        walks.append(_Walk(log, walks[-1].live if walks else ()))
        later = {name for log in logs[place + 1 :] for name in _resumed(log)}
        last = {each.request.name: each for each in walks[-1].answers()}
        ended = [each for each in walks[-1].found if last[each.request.name] is not each or each.request.name not in later]
        answers += [each for each in ended if min(each.tokens) >= 0]
        with_inputs += sum(min(each.tokens) < 0 for each in ended)
    scores, lacking = score(answers) if score else ([None] * len(answers), [])
    found = [_rollout(each, logprobs) for each, logprobs in zip(answers, scores)]
    _write(found, out)
    return Rollouts(
        out=str(out),
        digest=digest_of(found),
        rollouts=len(found),
        tokens=sum(len(rollout.token_ids) for rollout in found),
        aborted=sum(walk.aborted for walk in walks),
        unfinished=walks[-1].unfinished,
        weights=sorted({rollout.weights for rollout in found}),
        with_inputs=with_inputs,
        not_scored=sum(rollout.logprobs is None for rollout in found) if score else 0,
        lacking=lacking,
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
        raise UnusableLog(f"{out} cannot be written ({reason(error)})") from error


class Answer(Answered, kw_only=True):
    """A finished answer. `model`: the digest of the weights that its engine started with."""

    finish: str
    model: str


class _Walk:
    """The answers of one log. The counts are known when `answers` is done."""

    def __init__(self, log: Log, before: Iterable[Answered]) -> None:
        """`before` lived when the log before this one ended."""
        self._log, self._before = log, {each.request.name: each for each in before}
        self._live: dict[int, Answered] = {}
        self.found: list[Answer] = []
        self.aborted, self.broken = 0, ""

    @property
    def unfinished(self) -> int:
        return len(self._live)

    @property
    def live(self) -> Iterable[Answered]:
        return self._live.values()

    def answers(self) -> list[Answer]:
        """In the order in which they ended."""
        first = first_state(self._log)
        for row, id_ in enumerate(first.rows.id.tolist()):
            self._begin(first.requests[id_], row_tokens(first, row).tolist(), first)
        for waiting in first.waiting:
            self._begin(first.requests[waiting.id], unpack_tokens(waiting.tokens).tolist(), first)
        for item in fold(self._log):
            if isinstance(item, Broken):
                self.broken = f"event {item.number}: {item.message}"
            elif isinstance(item, Folded):
                self._fold(item.before, item.event, item.after)
        return self.found

    def _begin(self, request: Request, tokens: list[int], state: State) -> None:
        """A request with tokens, of which those of its answer were drawn before."""
        known = self._before.get(request.name)
        drawn = known.drawn if known and known.drawn else [(request.prompt_length, state.weights)]
        drawn = [(place, weights) for place, weights in drawn if place < len(tokens)]
        self._live[request.id] = Answered(request=request, tokens=tokens, drawn=drawn)

    def _fold(self, before: State, event: AnyEvent, after: State) -> None:
        if isinstance(event, RequestArrived):
            self._begin(after.requests[event.id], unpack_tokens(event.prompt + generated_by(event)).tolist(), after)
        for output in outputs(before, event, after):
            answered = self._live[output.id]
            if output.token >= 0:
                answered.take(output.token, before.weights)
            if output.finish:
                del self._live[output.id]
                self.aborted += output.finish == "abort"
                if output.finish != "abort":
                    self._end(answered, output.finish)

    def _end(self, answered: Answered, finish: str) -> None:
        request, tokens, model = answered.request, answered.tokens, self._log.header.started.model_digest
        self.found.append(Answer(request=request, tokens=tokens, drawn=answered.drawn, finish=finish, model=model))


def _rollout(answer: Answer, logprobs: list[float] | None) -> Rollout:
    request, begin = answer.request, answer.request.prompt_length
    spans = [
        (span.end - begin, span.weights.digest if span.weights else answer.model, span.weights) for span in answer.spans(begin)
    ]
    _, digest, weights = spans[-1] if spans else (0, answer.model, None)
    return Rollout(
        name=request.name,
        prompt_token_ids=answer.tokens[:begin],
        token_ids=answer.tokens[begin:],
        finish_reason=answer.finish,
        seed=request.sampling.seed,
        sampling=_changed(request.sampling),
        weights=digest,
        version=weights.version if weights else 0,
        before=[(end, digest) for end, digest, _ in spans[:-1]],
        logprobs=logprobs,
    )


def _changed(sampling: Sampling) -> dict[str, object]:
    """The fields that are not the defaults, without the seed."""
    fields = [field for field in msgspec.structs.fields(Sampling) if field.name != "seed"]
    given = ((field.name, getattr(sampling, field.name), field.default) for field in fields)
    return {name: msgspec.to_builtins(value) for name, value, default in given if value != default}
