"""AsyncLLM: an LLM for programs with event loops: answers stream while others are asked.

Owns the names under which a program knows its requests, and the thread that turns texts into requests, in their order. Engine,
settings and answers are those of `LLM`. Any number of event loops, in any threads, may use one at once.
"""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from types import TracebackType
from typing import TYPE_CHECKING, Any

from vnext.api.chat_tokenizer import ChatTokenizer
from vnext.api.generated import Embedded, Generated, Scored, Task
from vnext.api.llm import LLM, Running
from vnext.api.program_input import Message, Params, Prompt, as_conversation, as_prompt, as_variables
from vnext.runtime.protocol.lora_request import AdapterChoice, LoRARequest
from vnext.runtime.protocol.sampling_params import InvalidRequest

if TYPE_CHECKING:  # the client imports slowly: the engine starts meanwhile
    from vnext.api.vectors import Asked, Result
    from vnext.runtime.client.bridged_stream import BridgedStream
    from vnext.runtime.protocol.merged_output import TakenOutput


class _Request:
    """A request that a program knows by its name. `names` are those of its answers in the engine, once they were sent."""

    def __init__(self) -> None:
        self.names: tuple[str, ...] = ()
        self.is_aborted = False


class AsyncLLM(Running):
    """`AsyncLLM("folder or hub id", max_num_seqs=64, ...)`: every engine option of `vnext serve` is a keyword, as for `LLM`.

    Making one waits until the engine is ready; `await AsyncLLM.start(...)` waits without holding the event loop. Raises
    SettingsError for a setting that cannot work, StartFailed for an engine that cannot start. Use it in an `async with`, or close
    it. `llm` is the LLM beneath, whose calls block.
    """

    __signature__ = LLM.__dict__["__signature__"]

    def __init__(self, model: str = "", **settings: Any) -> None:
        self.llm = LLM(model, **settings)
        self._texts = ThreadPoolExecutor(1, "prompts")
        self._lock = threading.Lock()
        self._requests: dict[str, _Request] = {}
        self._numbers = itertools.count()

    @classmethod
    async def start(cls, model: str = "", **settings: Any) -> AsyncLLM:
        """An AsyncLLM whose engine is ready. Raises as making one does."""
        return await asyncio.to_thread(cls, model, **settings)

    def generate(
        self,
        prompt: Prompt,
        sampling_params: Params = None,
        request_id: str | None = None,
        *,
        lora_request: LoRARequest | None = None,
    ) -> AsyncGenerator[Generated, None]:
        """Stream the answers to one prompt: `async for output in engine.generate("The module", params): ...`

        Each output has all of every answer so far, or what `sampling_params.output_kind` says; the last one is `finished`. A
        consumer that is slower than the engine gets fewer outputs, which have more. Leaving the loop aborts the request: by
        `break`, `aclose()` or a cancelled task.
        `sampling_params` None takes the model's defaults, as LLM.generate does. `request_id` is a name for `abort`, of one request
        at a time; None makes one up. Raises InvalidRequest, before it sends anything unless the adapter's weights do not fit,
        Refused, EngineDead.
        """
        return self._stream(lambda: self.llm._maker.tasks([as_prompt(prompt)], sampling_params, lora_request), request_id)

    def chat(
        self,
        messages: Sequence[Message],
        sampling_params: Params = None,
        request_id: str | None = None,
        *,
        lora_request: LoRARequest | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> AsyncGenerator[Generated, None]:
        """`generate` for one conversation, a list of {"role": ..., "content": ...}; `tools` and the variables as in LLM.chat."""
        maker = self.llm._maker

        def make() -> list[Task]:
            variables = as_variables(tools, chat_template_kwargs)
            prompt = maker.render(as_conversation(messages), variables)
            return maker.tasks([prompt], maker.in_chat(sampling_params, variables), lora_request)

        return self._stream(make, request_id)

    async def embed(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        pooling: str | None = None,
        dimensions: int | None = None,
        normalize: bool | None = None,
        truncate_prompt_tokens: int | None = None,
        lora_request: AdapterChoice = None,
    ) -> list[Embedded]:
        """LLM.embed; a cancelled call aborts its requests."""
        from vnext.api.vectors import Wanted

        wanted = Wanted(pooling, dimensions, normalize, truncate_prompt_tokens)
        return await self._results(lambda: self.llm._embeddings(prompts, wanted, lora_request))

    async def score(
        self, prompts: Prompt | Sequence[Prompt], answers: Prompt | Sequence[Prompt], *, lora_request: AdapterChoice = None
    ) -> list[Scored]:
        """LLM.score; a cancelled call aborts its requests."""
        return await self._results(lambda: self.llm._scores(prompts, answers, lora_request))

    async def abort(self, request_id: str | Sequence[str]) -> None:
        """End requests by their names: the loop over each gets one last output, with the finish_reason "abort". Names of requests
        that have ended are ignored. Raises EngineDead."""
        with self._lock:
            for name in [request_id] if isinstance(request_id, str) else request_id:
                if (request := self._requests.get(name)) is not None:
                    request.is_aborted = True
                    self.llm._client.abort(request.names, "client")  # none where it is not sent yet

    async def get_tokenizer(self) -> ChatTokenizer:
        return self.llm.get_tokenizer()

    async def check_health(self) -> None:
        """Raise EngineDead once the engine has ended and none follows."""
        self.llm._client.require_alive()

    def close(self) -> None:
        """End the engine; requests that go on raise EngineDead. From any thread, idempotent."""
        self.llm.close()

    shutdown = close

    async def __aenter__(self) -> AsyncLLM:
        self.llm._client.require_alive()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await asyncio.to_thread(self.close)

    async def _results(self, make: Callable[[], Asked[Result]]) -> list[Result]:
        self.llm._client.require_alive()
        asked = await asyncio.get_running_loop().run_in_executor(self._texts, make)
        if asked.requests:
            stream = self.llm._client.begin(asked.requests)
            try:
                while outputs := await stream.take():
                    for output in outputs:
                        asked.push(output)
            finally:
                stream.close()
        return asked.results()

    async def _stream(self, make: Callable[[], list[Task]], request_id: str | None) -> AsyncGenerator[Generated, None]:
        self.llm._client.require_alive()
        with self._named(request_id) as (name, request):
            (task,) = await asyncio.get_running_loop().run_in_executor(self._texts, make)
            task.request_id = name
            stream = self._sent(request, task)
            try:
                while not task.finished and (outputs := await stream.take()):
                    if self._has_news(task, outputs) and task.is_due:
                        yield task.taken(self.llm.tokenizer)
            finally:
                stream.close()

    @contextmanager
    def _named(self, request_id: str | None) -> Iterator[tuple[str, _Request]]:
        """The name of a request, which `abort` knows meanwhile."""
        request = _Request()
        with self._lock:
            name = request_id or next(each for each in map(str, self._numbers) if each not in self._requests)
            if name in self._requests:
                raise InvalidRequest(f"request_id is {name!r}, which a request that goes on has: give each its own.", "request_id")
            self._requests[name] = request
        try:
            yield name, request
        finally:
            with self._lock:
                del self._requests[name]

    def _sent(self, request: _Request, task: Task) -> BridgedStream:
        """The outputs of a task, which is sent now."""
        with self._lock:
            request.names = tuple(each.name for each in task.requests)
            stream = self.llm._client.begin(task.requests)
            if request.is_aborted:
                self.llm._client.abort(request.names, "client")
        return stream

    def _has_news(self, task: Task, outputs: Sequence[TakenOutput]) -> bool:
        """Take outputs in; returns whether an answer has more tokens, or has ended."""
        changes = []
        for output in outputs:
            slot = task.slot_of[output.name]
            if not slot.finished:
                delta = self.llm._push(slot, output)
                slot.push(delta)
                changes.append(delta)
        return any(delta.token_ids or delta.finish for delta in changes)
