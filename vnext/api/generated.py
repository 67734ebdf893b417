"""What LLM returns, and what is collected for it while an engine answers.

Owns the words for results, which are vLLM's. Sends nothing; imported with the client, while the engine starts.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import msgspec

from vnext.runtime.protocol.sampling_params import RequestOutputKind, SamplingParams

if TYPE_CHECKING:
    import numpy as np

    from vnext.runtime.protocol.merged_output import TakenOutput
    from vnext.runtime.protocol.messages import SubmitRequest, TokenLogprobs
    from vnext.text.answer import Answer, Delta
    from vnext.text.tokenizer import Tokenizer


class Result(msgspec.Struct, frozen=True, kw_only=True):
    """What all results can do."""

    def to_dict(self) -> dict[str, Any]:
        """The fields, and those of what is in them, as plain dictionaries, lists and numbers, which json.dumps takes."""
        found: dict[str, Any] = msgspec.to_builtins(self, enc_hook=lambda array: array.tolist())
        return found


class Metrics(Result, frozen=True, kw_only=True):
    """When a request came and went, as this process saw it: times in seconds since the epoch, None before they are known.

    `arrival_time`: it was read; `first_token_time`: the first answer's first token came (None in a beam search);
    `finished_time`: the last answer ended. `time_in_queue`: the longest that an answer waited in the engine for its first step, in
    seconds. `num_generation_tokens` are those of all answers.
    """

    arrival_time: float
    first_token_time: float | None
    finished_time: float | None
    time_in_queue: float
    num_generation_tokens: int

    @property
    def first_token_latency(self) -> float | None:
        """From arrival to the first token, in seconds."""
        return None if self.first_token_time is None else self.first_token_time - self.arrival_time


class Logprob(Result, frozen=True, kw_only=True):
    """One token's log-probability. `rank` 1 is the likeliest; alternatives are listed likeliest first."""

    logprob: float
    rank: int
    decoded_token: str


class Completion(Result, frozen=True, kw_only=True):
    """One answer. `finish_reason` is "stop", "length" or "abort" (the engine or `AsyncLLM.abort` ended it), None while it goes on.
    `stop_reason` is the stop string or the token of `stop_token_ids` that ended it, None where the model ended it.

    `logprobs` has one dict per token, from token id to Logprob: the sampled token and the requested alternatives.
    `cumulative_logprob` is the sum over the sampled tokens, the one that ended the answer included. Both are None unless
    `SamplingParams.logprobs` was set.
    `routed_experts` int16 [prompt + answer - 1, layers with experts, experts of a token]: where each token but the last, which no
    step computed, was routed. None unless the engine has `enable_return_routed_experts`.
    """

    index: int
    text: str
    token_ids: list[int]
    finish_reason: str | None
    stop_reason: str | int | None
    logprobs: list[dict[int, Logprob]] | None
    cumulative_logprob: float | None
    routed_experts: np.ndarray | None = None


class Generated(Result, frozen=True, kw_only=True):
    """One prompt with its answers. `prompt` is None where the caller passed token ids. `request_id` is the caller's name for it in
    `AsyncLLM.generate`, else a number of its own. `finished`: whether every answer has ended;
    `metrics`: when.

    `prompt_logprobs` has one dict per prompt token as in Completion.logprobs, None for the first; None unless
    `SamplingParams.prompt_logprobs` was set. Of what `SamplingParams.prompt_cache_retention` asks for,
    `num_retained_tokens` are pinned as the first answer ends, and `num_unretained_tokens` gave way, in whole blocks; both are None
    without it, and where a stop string ended the answer.
    """

    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[Completion]
    num_cached_tokens: int
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    num_retained_tokens: int | None = None
    num_unretained_tokens: int | None = None
    request_id: str = ""
    finished: bool = True
    metrics: Metrics | None = None


class Embedding(Result, frozen=True, kw_only=True):
    embedding: list[float]


class Embedded(Result, frozen=True, kw_only=True):
    """One prompt with its embedding, in vLLM's words: `outputs.embedding`."""

    prompt_token_ids: list[int]
    outputs: Embedding


class Score(Result, frozen=True, kw_only=True):
    score: float


class Scored(Result, frozen=True, kw_only=True):
    """A prompt with an answer that the caller gave. `logprobs` has one float32 value per token of the answer, bit for bit what
    `generate` reports for it with `SamplingParams(logprobs=0)`, whatever the temperature; `cumulative_logprob` is their sum.

    Of a model that scores pairs `outputs.score` is how alike the two texts are, `prompt_token_ids` are both, the rest is empty."""

    prompt_token_ids: list[int]
    token_ids: list[int] = []
    logprobs: list[float] = []
    cumulative_logprob: float = 0.0
    outputs: Score | None = None


class Slot:
    """One answer in progress. Collects nothing where the caller keeps nothing (stream_chat)."""

    def __init__(self, index: int, answer: Answer) -> None:
        self.index = index
        self.answer = answer
        self.finished = self.has_news = False
        self.first_s = self.finish_s = self.queue_s = 0.0
        self._text = self._finish = ""
        self._stop_reason: int | str | None = None
        self._tokens: list[int] = []
        self._logprobs: list[TokenLogprobs] = []
        self._named: list[dict[int, Logprob]] = []  # those of the first log-probabilities that were asked for

    def note_times(self, output: TakenOutput) -> None:
        """Keep when its first token and its end came, and how long it had waited."""
        self.first_s, self.finish_s = self.first_s or output.first_s, output.finish_s
        self.queue_s = max(self.queue_s, output.queue_seconds)

    def push(self, delta: Delta) -> None:
        self._text += delta.text
        self._tokens += delta.tokens
        self._logprobs += delta.logprobs
        self._finish, self._stop_reason = delta.finish, delta.stop_reason
        self.has_news = True
        self.finished = delta.finish != ""
        if self.finished:
            self.finish_s = self.finish_s or time.time()  # a stop string, or a beam

    def completion(self, tokenizer: Tokenizer, params: SamplingParams, prompt_length: int) -> Completion:
        """The answer so far, or since `forget`."""
        asked = params.logprobs is not None
        done = len(self._named)
        if asked:
            self._named += [named_logprobs(tokenizer, *pair) for pair in zip(self._tokens[done:], self._logprobs[done:])]
        return Completion(
            index=self.index,
            text=self._text,
            token_ids=self._tokens.copy(),
            finish_reason=self._finish or None,
            stop_reason=self._stop_reason,
            logprobs=self._named.copy() if asked else None,
            cumulative_logprob=self.answer.cumulative_logprob if asked else None,
            routed_experts=self._routed_experts(prompt_length) if self._finish else None,
        )

    def forget(self) -> None:
        """What comes from now on is new: what came before is with the caller."""
        self._text, self._tokens, self._logprobs, self._named, self.has_news = "", [], [], [], False

    def _routed_experts(self, prompt_length: int) -> np.ndarray | None:
        if not any(part.experts for part in self.answer.prompt):
            return None
        from vnext.text.prompt_arrays import routed_experts

        return routed_experts(self.answer.prompt, prompt_length + self.answer.token_count - 1)


class Task:
    """One prompt with its answers in progress. `request_id` is its name in what `generated` returns."""

    def __init__(
        self,
        text: str | None,
        tokens: list[int],
        params: SamplingParams,
        slots: list[Slot],
        requests: list[SubmitRequest],
    ) -> None:
        self.text = text
        self.tokens = tokens
        self.params = params
        self.slots = slots
        self.requests = requests
        self._arrival_s = time.time()
        self.slot_of = {request.name: slot for request, slot in zip(requests, slots)}
        self.request_id = requests[0].name
        self._scores: list[dict[int, Logprob] | None] | None = None
        self._is_scored = False

    @property
    def finished(self) -> bool:
        return all(slot.finished for slot in self.slots)

    @property
    def is_due(self) -> bool:
        """Whether the caller wants an output now, where an answer has more."""
        return self.finished or self.params.output_kind is not RequestOutputKind.FINAL_ONLY

    def taken(self, tokenizer: Tokenizer) -> Generated:
        """The next output for a caller that has had those before, as `params.output_kind` says."""
        found = self.generated(tokenizer)
        if self.params.output_kind is RequestOutputKind.DELTA:
            outputs = [output for output, slot in zip(found.outputs, self.slots) if slot.has_news]
            scores, self._is_scored = None if self._is_scored else found.prompt_logprobs, found.prompt_logprobs is not None
            found = msgspec.structs.replace(found, outputs=outputs, prompt_logprobs=scores)
            for slot in self.slots:
                slot.forget()
        return found

    def generated(self, tokenizer: Tokenizer) -> Generated:
        """The answers so far."""
        pinned, gave_way = self.slots[0].answer.retained or (None, None)
        return Generated(
            prompt=self.text,
            prompt_token_ids=self.tokens,
            outputs=[slot.completion(tokenizer, self.params, len(self.tokens)) for slot in self.slots],
            num_cached_tokens=self.slots[0].answer.cached_token_count,
            prompt_logprobs=None if self.params.prompt_logprobs is None else self._prompt_logprobs(tokenizer),
            num_retained_tokens=pinned,
            num_unretained_tokens=gave_way,
            request_id=self.request_id,
            finished=self.finished,
            metrics=self._metrics(),
        )

    def _metrics(self) -> Metrics:
        began = [slot.first_s for slot in self.slots if slot.first_s]
        return Metrics(
            arrival_time=self._arrival_s,
            first_token_time=min(began, default=None),
            finished_time=max(slot.finish_s for slot in self.slots) if self.finished else None,
            time_in_queue=max(slot.queue_s for slot in self.slots),
            num_generation_tokens=sum(slot.answer.token_count for slot in self.slots),
        )

    def _prompt_logprobs(self, tokenizer: Tokenizer) -> list[dict[int, Logprob] | None] | None:
        """None before all have come, which is with the first answer's first token."""
        first = self.slots[0]
        if self._scores is None and (first.answer.token_count or first.finished):
            from vnext.text.prompt_results import prompt_logprobs

            entries = prompt_logprobs(first.answer.prompt, len(self.tokens))
            self._scores = [
                None if entry is None else named_logprobs(tokenizer, token, entry) for token, entry in zip(self.tokens, entries)
            ]
        return self._scores


def named_logprobs(tokenizer: Tokenizer, token: int, entry: TokenLogprobs) -> dict[int, Logprob]:
    """The alternatives, likeliest first, and the sampled token in any case."""
    named = {
        other: Logprob(logprob=logprob, rank=place + 1, decoded_token=tokenizer.token_text(other).text)
        for place, (other, logprob) in enumerate(entry.top)
    }
    text = tokenizer.token_text(token).text
    named[token] = Logprob(logprob=entry.logprob, rank=entry.rank + 1, decoded_token=text)
    return named
