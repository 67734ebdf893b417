"""Generation: one call's prompts become requests at the engine core, and their outputs become text.

Owns the names and seeds of the requests, stop strings (abort "stop"), the ending of everything when the client is gone
(abort "client") and the usage. Knows neither of the two APIs; completions and chat translate what comes from here.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncIterator, Sequence
from typing import Any

from vnext.runtime.messages import RequestOutput, SubmitRequest
from vnext.sampling_params import InvalidRequest, SamplingParams, answer_seed, to_sampling, validate
from vnext.server.edge import Edge
from vnext.server.errors import Aborted
from vnext.server.metrics import Stopwatch
from vnext.server.openai_types import GenerationBody
from vnext.server.text.answer import Answer, Delta
from vnext.state.events import pack_tokens

PRIORITY_MAX = 2**31 - 1
CACHE_SALT_CHARACTERS_MAX = 256


class Choice:
    """One answer: number `index` of the call, to prompt `prompt_index`."""

    __slots__ = ("answer", "finished", "index", "prompt_index", "stopwatch")

    def __init__(self, index: int, prompt_index: int, answer: Answer, stopwatch: Stopwatch) -> None:
        self.index = index
        self.prompt_index = prompt_index
        self.answer = answer
        self.stopwatch = stopwatch
        self.finished = False


class Generation:
    """All answers of one call. `kind` begins its id; n answers to each prompt, in the order of the prompts."""

    def __init__(
        self,
        edge: Edge,
        *,
        kind: str,
        body: GenerationBody,
        prompts: Sequence[list[int]],
        params: SamplingParams,
        started_s: float,
    ) -> None:
        validate(params, edge.vocab_size)
        _check_extensions(body)
        self.id = f"{kind}-{uuid.uuid4().hex}"
        self.created_s = int(time.time())
        self.model = edge.model_name(body.model)
        self.prompts = prompts
        self._edge = edge
        self._params = params
        self._priority = body.priority or 0
        self._cache_salt = body.cache_salt or ""
        self.choices = [self._choice(index, index // params.n, started_s) for index in range(len(prompts) * params.n)]
        self._of_name = {self._name(choice): choice for choice in self.choices}
        self._requests = tuple(self._request(choice) for choice in self.choices)

    async def deltas(self) -> AsyncIterator[tuple[Choice, Delta]]:
        """What the answers gain, as it comes; closing it aborts what is live. Raises Refused, EngineDead, Aborted."""
        async with self._edge.client.submit_all(self._requests) as stream:
            async for output in stream:
                choice = self._of_name[output.name]
                if not choice.finished:
                    yield choice, self._push(choice, output)

    def usage(self) -> dict[str, Any]:
        """Tokens so far. A prompt counts once, however many answers it gets."""
        prompt = sum(map(len, self.prompts))
        completion = sum(choice.answer.token_count for choice in self.choices)
        first = self.choices[:: self._params.n]
        cached = sum(choice.answer.cached_token_count for choice in first)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
            "prompt_tokens_details": {"cached_tokens": cached},
        }

    def envelope(self, kind: str, choices: list[dict[str, Any] | None]) -> dict[str, Any]:
        """What both APIs put around their choices; `kind` is the object's type in the API."""
        return {
            "id": self.id,
            "object": kind,
            "created": self.created_s,
            "model": self.model,
            "choices": choices,
        }

    def _push(self, choice: Choice, output: RequestOutput) -> Delta:
        before = choice.answer.token_count
        delta = choice.answer.push(output)
        choice.finished = delta.finish != ""
        choice.stopwatch.tokens(delta.token_count - before, choice.finished)
        if delta.finish == "abort":
            raise Aborted("The engine ended the request before its answer was complete: send it again.")
        if choice.finished and not output.finish:
            self._edge.client.abort((output.name,), "stop")
        return delta

    def _choice(self, index: int, prompt_index: int, started_s: float) -> Choice:
        answer = Answer(self._edge.tokenizer, self.prompts[prompt_index], self._params)
        return Choice(index, prompt_index, answer, Stopwatch(self._edge.metrics, started_s))

    def _name(self, choice: Choice) -> str:
        return f"{self.id}-{choice.index}"

    def _request(self, choice: Choice) -> SubmitRequest:
        """Without a seed its key comes from the engine core, in its event."""
        prompt = self.prompts[choice.prompt_index]
        seed = 0 if self._params.seed is None else answer_seed(self._params.seed, choice.index)
        usual = self._edge.settings.sampling_defaults
        return SubmitRequest(
            name=self._name(choice),
            prompt=pack_tokens(prompt),
            sampling=to_sampling(self._params, seed, len(prompt), self._edge.model_length, usual.max_tokens),
            priority=self._priority,
            cache_salt=self._cache_salt,
            has_seed=self._params.seed is not None,
        )


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
