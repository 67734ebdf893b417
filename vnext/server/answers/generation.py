"""Generation: turns one call's prompts into requests to the engine core, and their outputs into text.

Owns the requests' names and seeds, stop strings (abort "stop"), the abort of everything when the client is gone (abort "client"),
the usage, and what a call holds between its admission and its end: the tokens it waits with, its time, and what its key pays.
Knows neither API: the completions and chat views translate its results.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from typing import Any, Protocol

import msgspec

from vnext.runtime.protocol.messages import RequestOutput, SubmitRequest
from vnext.runtime.protocol.sampling_params import (
    InvalidRequest,
    SamplingParams,
    answer_seed,
    restricted,
    to_sampling,
    validate_ranges,
)
from vnext.server.answers.resuming import TOKEN_BYTES, Call, EventIds, Replay, split
from vnext.server.context.adapters import failed
from vnext.server.context.admission import WaitingPrompts
from vnext.server.context.errors import Aborted, RequestTimedOut
from vnext.server.context.identity import ticket
from vnext.server.context.metrics import Stopwatch
from vnext.server.context.openai_types import ChatBody, GenerationBody, continuous_usage, include_usage
from vnext.server.context.server_context import ServerContext
from vnext.server.context.traces import call_trace, usage_attributes
from vnext.state.events import pack_tokens
from vnext.state.params import Constraint
from vnext.text.answer import Answer, Delta
from vnext.text.bad_words import banned_sequences

PRIORITY_MAX = 2**31 - 1
CACHE_SALT_CHARACTERS_MAX = 256

RETAINED = ("retained_tokens", "unretained_tokens")
"""The members of a usage that say what stays in the cache and what has found no room there."""

Usage = Callable[[], dict[str, Any]]


@asynccontextmanager
async def admitted(
    context: ServerContext, client: str, prompts: Sequence[list[int]], started_s: float
) -> AsyncIterator[WaitingPrompts]:
    """Reserve the tokens of `prompts`, and end the body when the time since `started_s` (monotonic) is over. Raises Overloaded,
    RequestTimedOut."""
    limit_s = context.settings.request_timeout_s
    left_s = started_s + limit_s - time.monotonic() if limit_s else None
    with context.limiter.prompts(sum(map(len, prompts)), client) as waiting:
        try:
            async with asyncio.timeout(left_s):
                yield waiting
        except TimeoutError:
            sentence = f"The answer was not complete within {limit_s:g} s, which is this server's --request-timeout"
            raise RequestTimedOut(f"{sentence}: ask for fewer tokens, or later.") from None


class Choice:
    """One answer: number `index` of the call, to prompt `prompt_index`. `plain`: its text is not searched, and its reader
    needs no deltas."""

    __slots__ = ("answer", "finished", "index", "plain", "prompt_index", "stopwatch")

    def __init__(self, index: int, prompt_index: int, answer: Answer, stopwatch: Stopwatch) -> None:
        self.index = index
        self.prompt_index = prompt_index
        self.answer = answer
        self.stopwatch = stopwatch
        self.finished = self.plain = False


class Reader(Protocol):
    """Receives the answers: as a stream's events, or as one whole response. `delta` and `text` return whether it can take
    more at once; if it cannot, `room` returns when it can."""

    def delta(self, choice: Choice, delta: Delta) -> bool:
        """Take in an answer's delta."""

    def text(self, choice: Choice, text: str) -> bool:
        """Take in the text, possibly empty, of one token of a choice whose `plain` this reader has set."""

    async def room(self) -> None:
        """Wait until the reader can take more. Raises ClientGone."""


class Taker:
    """Passes an output stream on to a reader: a token of a plain choice as text, everything else as a delta."""

    def __init__(self, generation: Generation, reader: Reader, by_token: bool) -> None:
        """`by_token`: no delta has several tokens."""
        self._push, self._of_name, self._reader = generation.push, generation.of_name, reader
        self._by_token = by_token

    def choice_of(self, name: str) -> Choice:
        return self._of_name[name]

    def output(self, output: RequestOutput) -> bool:
        return self.take(self._of_name[output.name], output)

    def take(self, choice: Choice, output: RequestOutput) -> bool:
        """Take an output of a choice."""
        if output.prompt and not (output.tokens or output.finish):
            self._push(choice, output)  # no part of the answer yet
            return True
        while self._by_token and len(output.tokens) > TOKEN_BYTES and not choice.finished:
            head, output = split(output, 1)
            self._reader.delta(choice, self._push(choice, head))
        return choice.finished or self._reader.delta(choice, self._push(choice, output))

    def token(self, name: str, token: int) -> bool:
        choice = self._of_name[name]
        if not choice.plain:
            return self.output(RequestOutput(name=name, tokens=token.to_bytes(4, "little")))
        choice.stopwatch.tokens(1)
        return self._reader.text(choice, choice.answer.plain_text(token))


class Generation:
    """All answers of a call: n answers to each prompt, in the order of the prompts."""

    def __init__(
        self,
        context: ServerContext,
        *,
        call: Call,
        body: GenerationBody,
        prompts: Sequence[list[int]],
        params: SamplingParams,
        started_s: float,
        client: str,
        constraint: Constraint | None = None,
        retention: tuple[tuple[int, int], ...] = (),
        usual_max_tokens: int | None = None,
    ) -> None:
        """`retention`: (tokens, seconds) of the prompts' beginnings that stay in the cache, beside what the body wants.
        `usual_max_tokens`: of an answer without `max_tokens`, where they fit; None for the server's own."""
        context.check_engine()
        validate_ranges(params, context.vocab_size)
        _check_extensions(body)
        self._call = call
        self.id, self.created_s = call.id, call.created_s
        self.model = context.model_name(body.model, client)
        self._adapter = context.adapters.files(self.model)
        most, length = params.max_tokens or usual_max_tokens, context.model_length
        self.prompts = [truncated(prompt, body.truncate_prompt_tokens, most, length) for prompt in prompts]
        self._context = context
        self._client = client
        self._operation = "chat" if isinstance(body, ChatBody) else "text_completion"
        self._started_s = started_s
        self._params, self._usual_max_tokens = params, usual_max_tokens
        self._banned = banned_sequences(params.bad_words, context.tokenizer)
        self._priority = body.priority or 0
        self._cache_salt = context.keys.salt(client, body.cache_salt or "")
        self._client_number = context.client_number(client)
        self._constraint = constraint
        self._retention = tuple((tokens, seconds) for tokens, seconds in retention if tokens)
        self.choices = [self._choice(index, index // params.n, started_s) for index in range(len(prompts) * params.n)]
        self.of_name = {self._name(choice): choice for choice in self.choices}
        self._requests = tuple(self._request(choice) for choice in self.choices)

    async def answer(self, reader: Reader, ids: EventIds | None = None) -> None:
        """Pass each delta to `reader` as it comes, until all answers are complete. `ids`: of a stream's events. Aborts the live
        answers when cancelled. Raises Refused, EngineDead, Aborted, Overloaded, RequestTimedOut, and the errors of `reader`."""
        self._context.adapters.take(self.model)
        try:
            async with self._admitted():
                taker: Taker | Replay = Taker(self, reader, ids is not None and ids.by_token)
                if ids is not None and ids.lacking:
                    taker = Replay(taker, ids)
                for requests in self._context.limiter.waves(self._requests):
                    async with self._context.client.submit_all(requests) as stream:
                        while await stream.feed(taker):
                            await reader.room()
        finally:
            self._context.adapters.give(self.model)

    @asynccontextmanager
    async def _admitted(self) -> AsyncIterator[None]:
        """Within `admitted`; at the end the answers' tokens are counted, and those that have not finished are ended."""
        with call_trace(self._context.traces, self._operation, self.model, self._started_s, self._asked()) as (trace, added):
            try:
                async with admitted(self._context, self._client, self.prompts, self._started_s) as waiting:
                    for choice in self.choices:
                        choice.stopwatch.trace = trace
                        if choice.index % self._params.n == 0:  # the answers to one prompt share its blocks
                            choice.stopwatch.waiting = waiting
                    yield
            finally:
                self._context.limiter.spend(sum(choice.answer.token_count for choice in self.choices), self._client)
                for choice in self.choices:
                    if not choice.finished:
                        choice.stopwatch.end("abort")
                if trace is not None:
                    added |= usage_attributes(self.usage())

    def _asked(self) -> dict[str, Any]:
        """What a trace says of the parameters. None is left out."""
        params = self._params
        return {
            "gen_ai.request.choice.count": params.n if params.n > 1 else None,
            "gen_ai.request.max_tokens": params.max_tokens,
            "gen_ai.request.temperature": params.temperature,
            "gen_ai.request.top_p": params.top_p,
            "gen_ai.request.seed": params.seed,
            "gen_ai.response.id": self.id,
            "gen_ai.response.model": self.model,
        }

    def best(self, count: int) -> list[Choice]:
        """The `count` likeliest answers to each prompt, the likeliest first; in their own order where there are no more."""
        if count == self._params.n:
            return self.choices
        groups = [self.choices[start : start + self._params.n] for start in range(0, len(self.choices), self._params.n)]
        return [
            choice
            for group in groups
            for choice in sorted(group, key=lambda choice: -choice.answer.cumulative_logprob)[:count]
        ]

    def usage(self) -> dict[str, Any]:
        """Tokens so far. A prompt counts once, however many answers it gets."""
        prompt = sum(map(len, self.prompts))
        completion = sum(choice.answer.token_count for choice in self.choices)
        first = self.choices[:: self._params.n]
        cached = sum(choice.answer.cached_token_count for choice in first)
        accepted = sum(choice.answer.accepted_drafts for choice in self.choices)
        rejected = sum(choice.answer.rejected_drafts for choice in self.choices)
        drafts = {"accepted_prediction_tokens": accepted, "rejected_prediction_tokens": rejected}
        retained = retained_usage([choice.answer for choice in first])
        return {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
            "prompt_tokens_details": {"cached_tokens": cached},
        } | ({"completion_tokens_details": drafts} if accepted or rejected else {}) | retained

    def chunk_usage(self, body: GenerationBody, usage: Usage | None = None) -> Usage:
        """A function that returns the usage member of each chunk of a stream: absent, null before the last, or the count so far.
        `usage` counts, where that is not this object's own."""
        if continuous_usage(body):
            return lambda: {"usage": (usage or self.usage)()}
        usual = {"usage": None} if include_usage(body) else {}
        return lambda: usual

    def envelope(self, kind: str, choices: list[dict[str, Any] | None]) -> dict[str, Any]:
        """The object that both APIs put around their choices; `kind` is its type in the API."""
        return {
            "id": self.id,
            "object": kind,
            "created": self.created_s,
            "model": self.model,
            "system_fingerprint": self._context.fingerprint,
            "choices": choices,
        }

    def push(self, choice: Choice, output: RequestOutput) -> Delta:
        """Add an output to an answer; returns the delta. Raises Aborted."""
        before = choice.answer.token_count
        delta = choice.answer.push(output)
        choice.finished = delta.finish != ""
        choice.plain = choice.plain and not choice.finished
        if output.queue_seconds:
            choice.stopwatch.waited(output.queue_seconds)
        if delta.token_count > before:
            choice.stopwatch.tokens(delta.token_count - before)
        if choice.finished:
            choice.stopwatch.end(delta.finish)
        if output.error:  # the request's own doing: another try meets it again
            raise failed(output.error, self._adapter)
        if delta.finish == "abort":
            raise Aborted("The engine ended the request before its answer was complete: send it again.")
        if choice.finished and not output.finish:
            self._context.client.abort((output.name,), "stop")
        return delta

    def _choice(self, index: int, prompt_index: int, started_s: float) -> Choice:
        prompt = self.prompts[prompt_index]
        answer = Answer(self._context.tokenizer, prompt, self._params)
        return Choice(index, prompt_index, answer, Stopwatch(self._context.metrics, started_s, len(prompt)))

    def _name(self, choice: Choice) -> str:
        return f"{self._call.names}-{choice.index}"

    def computed(self) -> Iterator[bytes]:
        """What decides on the answers' tokens, but for their seeds."""
        first = self._requests[0]
        adapter = first.adapter.digest if first.adapter else ""
        sampling = msgspec.structs.replace(first.sampling, seed=0)
        yield msgspec.msgpack.encode((sampling, first.cache_salt, adapter, len(self.prompts)))
        for request in self._requests[:: self._params.n]:
            yield request.prompt

    def _request(self, choice: Choice) -> SubmitRequest:
        """The request of one answer. Without a seed, the engine core puts a key into the request's event."""
        prompt = self.prompts[choice.prompt_index]
        given = self._call.seed if self._params.seed is None else self._params.seed
        seed = 0 if given is None else answer_seed(given, choice.index)
        usual = self._usual_max_tokens or self._context.settings.sampling_defaults.max_tokens
        sampling = to_sampling(self._params, seed, len(prompt), self._context.model_length, usual, self._constraint)
        sampling = msgspec.structs.replace(sampling, retention=(*self._retention, *sampling.retention))
        return SubmitRequest(
            name=self._name(choice),
            prompt=pack_tokens(prompt),
            sampling=restricted(sampling, self._params, self._banned),
            priority=self._priority,
            cache_salt=self._cache_salt,
            has_seed=given is not None,
            adapter=self._adapter,
            ticket=ticket(),
            client=self._client_number,
        )

    @property
    def kept_tokens(self) -> int:
        """The tokens of the first prompt that the client wants to stay in the cache."""
        return max((min(tokens, len(self.prompts[0])) for tokens, _ in self._requests[0].sampling.retention), default=0)


def retained_usage(answers: Sequence[Answer]) -> dict[str, int]:
    """RETAINED in whole blocks; nothing unless the engine has said it of all answers: one that a stop string ends is aborted."""
    found = [answer.retained for answer in answers if answer.retained is not None]
    if not found or len(found) < len(answers):
        return {}
    return dict(zip(RETAINED, map(sum, zip(*found))))


def truncated(prompt: list[int], asked: int | None, max_tokens: int | None, model_length: int) -> list[int]:
    """The last `asked` tokens of a prompt; -1 asks for as many as leave room for the answer's `max_tokens`. Raises
    InvalidRequest."""
    if asked is None:
        return prompt
    if asked != -1 and not 1 <= asked <= model_length:
        raise InvalidRequest(
            f"truncate_prompt_tokens is {asked}: it must lie between 1 and the model's length of {model_length}, or be -1.",
            "truncate_prompt_tokens",
        )
    return prompt[-(asked if asked > 0 else max(1, model_length - (max_tokens or 1))) :]


def _check_extensions(body: GenerationBody) -> None:
    if body.priority is not None and not -PRIORITY_MAX <= body.priority <= PRIORITY_MAX:
        raise InvalidRequest(
            f"priority is {body.priority}: it must lie between {-PRIORITY_MAX} and {PRIORITY_MAX}.", "priority"
        )
    if body.cache_salt is not None and len(body.cache_salt) > CACHE_SALT_CHARACTERS_MAX:
        raise InvalidRequest(
            f"cache_salt has {len(body.cache_salt)} characters: at most {CACHE_SALT_CHARACTERS_MAX} are allowed.",
            "cache_salt",
        )
