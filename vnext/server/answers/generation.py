"""Generation: turns one call's prompts into requests to the engine core, and their outputs into text.

Owns the requests' names and seeds, stop strings (abort "stop"), the abort of everything when the client is gone (abort "client"),
the usage, and what a call holds between its admission and its end: the tokens it waits with, its time, and what its key pays.
Knows neither API: the completions and chat views translate its results.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, closing, contextmanager, nullcontext
from functools import partial
from operator import attrgetter
from typing import Any, Protocol

import msgspec
from msgspec.structs import replace

from vnext.runtime.protocol.messages import RequestOutput, SubmitRequest
from vnext.runtime.protocol.sampling_params import (
    InvalidRequest,
    answer_seed,
    guided,
    restricted,
    to_sampling,
    validate_ranges,
)
from vnext.runtime.protocol.stats import CacheMiss
from vnext.server.answers.resuming import TOKEN_BYTES, EventIds, Replay, split
from vnext.server.call import Call
from vnext.server.context.adapters import failed
from vnext.server.context.admission import WaitingPrompts
from vnext.server.context.conversation import KINDS, content_of
from vnext.server.context.errors import Aborted, RequestTimedOut, RoutesClosed
from vnext.server.context.metrics import Stopwatch
from vnext.server.context.openai_types import ChatBody
from vnext.server.context.traces import CallTrace, call_trace, usage_attributes
from vnext.state.events import pack_tokens
from vnext.text.answer import Answer, Delta
from vnext.text.tokenizer import Tokenizer, banned_sequences

RETAINED = ("retained_tokens", "unretained_tokens")
"""The members of a usage that say what stays in the cache and what has found no room there."""
OWN_USAGE = (*RETAINED, "cache_miss")
"""Members of a usage that are vnext's own, in every API."""
_token_count = attrgetter("answer.token_count")


@asynccontextmanager
async def admitted(call: Call, prompts: Sequence[list[int]]) -> AsyncIterator[WaitingPrompts | None]:
    """Reserve the tokens of `prompts`, and end the body when the call's time is over. None where waiting tokens have no bound.
    Raises Overloaded, RequestTimedOut."""
    limit_s = call.context.settings.request_timeout_s
    left_s = call.started_s + limit_s - time.monotonic() if limit_s else None
    waiting = call.context.limiter.prompts(sum(map(len, prompts)), call.client)
    try:
        async with asyncio.timeout(left_s):
            yield waiting
    except TimeoutError:
        sentence = f"The answer was not complete within {limit_s:g} s, which is this server's --request-timeout"
        raise RequestTimedOut(f"{sentence}: ask for fewer tokens, or later.") from None
    finally:
        if waiting is not None:
            waiting.end()


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
        if output.prompt and not (output.tokens or output.finish):
            self._push(choice, output)  # no part of the answer yet
            return True
        while self._by_token and len(output.tokens) > TOKEN_BYTES and not choice.finished:
            head, rest = split(output, 1)
            assert rest is not None, "it has more tokens"
            self._reader.delta(choice, self._push(choice, head))
            output = rest
        return choice.finished or self._reader.delta(choice, self._push(choice, output))

    def token(self, name: str, token: int) -> bool:
        choice = self._of_name[name]
        if not choice.plain:
            return self.output(RequestOutput(name=name, tokens=token.to_bytes(4, "little")))
        choice.stopwatch.tokens(1)
        return self._reader.text(choice, choice.answer.plain_text(token))


class OnlyEncodes(RoutesClosed):
    """This server encodes images and sounds for others, and answers nobody: `request` is what the call would ask its engine for."""

    def __init__(self, call: Call, request: SubmitRequest) -> None:
        super().__init__("This server only encodes images and sounds for others: ask one of another role.")
        self.call, self.request = call, request


class Generation:
    """All answers of a call: n answers to each prompt, in the order of the prompts."""

    def __init__(self, call: Call) -> None:
        """Raises InvalidRequest, ModelUnknown, EngineDead, EngineStalled, OnlyEncodes."""
        context, asked, params = call.context, call.asked, call.params
        context.check_engine()
        validate_ranges(params, context.bounds.vocab_size)
        self.call, self.prompts = call, call.prompts
        self.model = context.model_name(asked.model, call.client)
        self._adapter = context.adapter(self.model, call.client)
        if asked.truncate_prompt_tokens is not None:
            most = params.max_tokens or call.usual_max_tokens
            self.prompts = [
                truncated(prompt, asked.truncate_prompt_tokens, most, context.bounds.model_length) for prompt in call.prompts
            ]
            if call.packed and self.prompts != call.prompts:
                name = "truncate_prompt_tokens"
                raise InvalidRequest(f"{name} does not go with images: leave one of them out.", name)
        self._miss_usage: dict[str, Any] = {}
        self.choices: list[Choice] = []
        self.of_name: dict[str, Choice] = {}
        self._requests: list[SubmitRequest] = []
        seed = call.seed if params.seed is None else params.seed
        request = partial(
            SubmitRequest, priority=asked.priority or 0,
            cache_salt=context.keys.salts.get(call.client, "") + (asked.cache_salt or ""),
            has_seed=seed is not None, adapter=self._adapter, ticket=call.ticket, inputs_ticket=call.inputs_ticket,
            client=context.identity.client_number(call.client), weight=context.keys.weights.get(call.client, 1),
        )  # fmt: skip
        banned = banned_sequences(params.bad_words, context.tokenizer) if params.bad_words else ()
        for place in range(len(self.prompts)):
            self._begin(place, request, banned, seed)
        if context.settings.role == "encode":
            raise OnlyEncodes(call, self._requests[0])

    def _begin(
        self, place: int, request: Callable[..., SubmitRequest], banned: tuple[tuple[int, ...], ...], seed: int | None
    ) -> None:
        """Add the answers to one prompt, and their requests. Without a `seed`, the engine core puts a key into each one's event."""
        call, context, params, prompt = self.call, self.call.context, self.call.params, self.prompts[place]
        usual = call.usual_max_tokens or context.settings.sampling_defaults.max_tokens
        first = len(self.choices)
        own_seed = 0 if seed is None else answer_seed(seed, first)
        longer, packed = max(len(prompt), len(call.negative)), call.packed or pack_tokens(prompt)
        sampling = to_sampling(params, own_seed, longer, context.bounds.model_length, usual, call.constraint)
        if params.guidance_scale != 1.0:
            packed, sampling = guided(sampling, params, packed, call.negative or prompt[-1:])
        if call.retention:
            kept = tuple((tokens, seconds) for tokens, seconds in call.retention if tokens)
            sampling = replace(sampling, retention=(*kept, *sampling.retention))
        if banned or params.allowed_token_ids is not None:
            sampling = restricted(sampling, params, banned)
        for index in range(first, first + params.n):
            name = f"{call.names}-{index}"
            watch = Stopwatch(context.metrics, call.started_s, len(prompt))
            self.of_name[name] = choice = Choice(index, place, Answer(context.tokenizer, prompt, params, call.negative), watch)
            self.choices.append(choice)
            own = sampling if seed is None or index == first else replace(sampling, seed=answer_seed(seed, index))
            self._requests.append(request(name=name, prompt=packed, sampling=own))

    async def answer(self, reader: Reader, ids: EventIds | None = None) -> None:
        """Pass each delta to `reader` as it comes, until all answers are complete. `ids`: of a stream's events. Aborts the live
        answers when cancelled. Raises Refused, EngineDead, Aborted, Overloaded, RequestTimedOut, and the errors of `reader`."""
        context = self.call.context
        async with self._held():
            plain = Taker(self, reader, ids is not None and ids.by_token)
            taker: Taker | Replay[Choice] = Replay(plain, ids) if ids is not None and ids.lacking else plain
            wave = context.limiter.request_max
            for start in range(0, len(self._requests), wave):
                with closing(context.client.submit_all(self._requests[start : start + wave])) as stream:
                    while await stream.feed(taker):
                        await reader.room()

    @asynccontextmanager
    async def _held(self) -> AsyncIterator[None]:
        """Within `admitted`, with the adapter in use; at the end the answers' tokens are counted, and those that have not finished
        are ended."""
        call, context = self.call, self.call.context
        used = nullcontext() if self._adapter is None else context.adapters.used(self.model, context.keys.tenant(call.client))
        with used, nullcontext() if context.traces is None else self._traced() as trace:
            try:
                async with admitted(call, self.prompts) as waiting:
                    for choice in self.choices:
                        choice.stopwatch.trace = trace
                        if choice.index % call.params.n == 0:  # the answers to one prompt share its blocks
                            choice.stopwatch.waiting = waiting
                    yield
            finally:
                context.limiter.spend(sum(map(_token_count, self.choices)), call.client)
                for choice in self.choices:
                    if not choice.finished:
                        choice.stopwatch.end("abort")

    @contextmanager
    def _traced(self) -> Iterator[CallTrace | None]:
        """The call's trace. None is left out of what it says of the parameters."""
        call, params = self.call, self.call.params
        operation = "chat" if isinstance(call.asked, ChatBody) else "text_completion"
        described = {
            "gen_ai.request.choice.count": params.n if params.n > 1 else None,
            "gen_ai.request.max_tokens": params.max_tokens,
            "gen_ai.request.temperature": params.temperature,
            "gen_ai.request.top_p": params.top_p,
            "gen_ai.request.seed": params.seed,
            "gen_ai.response.id": call.id,
            "gen_ai.response.model": self.model,
        }
        with call_trace(call.context.traces, operation, self.model, call.started_s, described) as (trace, added):
            try:
                yield trace
            finally:
                added |= usage_attributes(self.usage())

    def best(self, count: int) -> list[Choice]:
        """The `count` likeliest answers to each prompt, the likeliest first; in their own order where there are no more."""
        if count == self.call.params.n:
            return self.choices
        groups = [self.choices[start : start + self.call.params.n] for start in range(0, len(self.choices), self.call.params.n)]
        return [
            choice
            for group in groups
            for choice in sorted(group, key=lambda choice: -choice.answer.cumulative_logprob)[:count]
        ]

    def usage(self) -> dict[str, Any]:
        """Tokens so far. A prompt counts once, however many answers it gets."""
        prompt = sum(map(len, self.prompts))
        completion = sum(choice.answer.token_count for choice in self.choices)
        first = self.choices[:: self.call.params.n]
        cached = sum(choice.answer.cached_token_count for choice in first)
        accepted = sum(choice.answer.accepted_drafts for choice in self.choices)
        rejected = sum(choice.answer.rejected_drafts for choice in self.choices)
        drafts = {"accepted_prediction_tokens": accepted, "rejected_prediction_tokens": rejected}
        more = retained_usage([choice.answer for choice in first]) | self._missed()
        return {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
            "prompt_tokens_details": {"cached_tokens": cached},
        } | ({"completion_tokens_details": drafts} if accepted or rejected else {}) | more

    def _missed(self) -> dict[str, Any]:
        """What the cache lacked of the prompts, looked up once."""
        misses = [choice.answer.missed for choice in self.choices[:: self.call.params.n]]
        if not self._miss_usage and any(misses):
            self._miss_usage = missed_usage(self.call, self.prompts, misses)
        return self._miss_usage

    def envelope(self, kind: str, choices: Sequence[dict[str, Any] | None]) -> dict[str, Any]:
        """The object that both APIs put around their choices; `kind` is its type in the API."""
        return {
            "id": self.call.id,
            "object": kind,
            "created": self.call.created_s,
            "model": self.model,
            "system_fingerprint": self.call.context.identity.fingerprint,
            "choices": choices,
        }

    def push(self, choice: Choice, output: RequestOutput) -> Delta:
        """Add an output to an answer; returns the delta. Raises Aborted."""
        before = choice.answer.token_count
        delta = choice.answer.push(output)
        choice.finished = delta.finish != ""
        choice.plain = choice.plain and not choice.finished
        if output.queue_seconds:
            choice.stopwatch.queue_s = output.queue_seconds
        if delta.token_count > before:
            choice.stopwatch.tokens(delta.token_count - before)
        if choice.finished:
            choice.stopwatch.end(delta.finish)
        if output.error:  # the request's own doing: another try meets it again
            raise failed(output.error, self._adapter)
        if delta.finish == "abort":
            raise Aborted("The engine ended the request before its answer was complete: send it again.")
        if choice.finished and not output.finish:
            self.call.context.client.abort((output.name,), "stop")
        return delta

    def computed(self) -> Iterator[bytes]:
        """What decides on the answers' tokens, but for their seeds."""
        first = self._requests[0]
        adapter = first.adapter.digest if first.adapter else ""
        sampling = msgspec.structs.replace(first.sampling, seed=0)
        yield msgspec.msgpack.encode((sampling, first.cache_salt, adapter, len(self.prompts)))
        for request in self._requests[:: self.call.params.n]:
            yield request.prompt

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


def truncated(prompt: list[int], asked: int, max_tokens: int | None, model_length: int) -> list[int]:
    """The last `asked` tokens of a prompt; -1 asks for as many as leave room for the answer's `max_tokens`. Raises
    InvalidRequest."""
    if asked != -1 and not 1 <= asked <= model_length:
        raise InvalidRequest(
            f"truncate_prompt_tokens is {asked}: it must lie between 1 and the model's length of {model_length}, or be -1.",
            "truncate_prompt_tokens",
        )
    return prompt[-(asked if asked > 0 else max(1, model_length - (max_tokens or 1))) :]


# ---- what the cache missed -----------------------------------------------------------------------------------------
# Missed: what an answer's usage says of a prompt that the prefix cache had less of than it could have had, and of which
# message.
# The template has written the messages into the prompt, mostly as they are: a message begins where its first words are found
# behind the message before it.

WORDS = 200
"""Characters of a message that are looked for."""
SETTING = "template"
"""What stands before the first message: tools, and the template's own words."""
NEVER = "\0"
"""Stands for images, whose tokens are no text."""


def missed_usage(call: Call, prompts: Sequence[Sequence[int]], misses: Sequence[CacheMiss | None]) -> dict[str, Any]:
    """`cache_miss` of the prompt of `call` that lost most; nothing where none lost a block."""
    place, miss = max(enumerate(misses), key=lambda each: each[1].lost_tokens if each[1] else 0, default=(0, None))
    if miss is None:
        return {}
    found: dict[str, Any] = {"reason": miss.reason, "at_token": miss.at_token, "lost_tokens": miss.lost_tokens}
    if isinstance(call.asked, ChatBody):
        found["in"] = message_at(call.asked, call.context.tokenizer, prompts[place], miss.at_token)
    return {"cache_miss": found}


def message_at(body: ChatBody, tokenizer: Tokenizer, prompt: Sequence[int], token: int) -> str:
    """The message that a prompt's token (counted from 0) belongs to, as messages[2]; SETTING for one before all."""
    text = tokenizer.decode(prompt, skip_special_tokens=False)
    offset = len(tokenizer.decode(prompt[:token], skip_special_tokens=False))
    end, found = 0, SETTING
    for number, message in enumerate(body.messages):
        words = max(content_of(message, "", dict.fromkeys(KINDS, NEVER)).split(NEVER), key=len).strip()
        begin = text.find(words[:WORDS], end) if words else -1
        if begin > offset:
            break
        if begin >= 0:
            end, found = begin + len(words), f"messages[{number}]"
    return found
