"""LLM: an engine as a Python object, for programs that need no server.

Turns prompts into requests and outputs into answers, in the order of the prompts. The engine core runs in its own process
with the same settings as under `vnext serve`; tokens become text in this process, by the same code as in the API server.
Only one thread may use an LLM at a time.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import closing, nullcontext
from functools import cached_property
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

import msgspec

from vnext.engine_operations import EngineOperations
from vnext.generated import Embedded, Embedding, Generated, Scored, Slot, Task
from vnext.generation_config import sampling_defaults
from vnext.lora_request import AdapterChoice, KnownAdapters
from vnext.options.settings_check import engine_settings
from vnext.runtime.processes.launch import find_model
from vnext.runtime.processes.replicas import RunningEngines, StartingEngines, start_engines
from vnext.runtime.settings import reads_generation_config
from vnext.sampling_params import (
    BeamSearchParams,
    InvalidRequest,
    SamplingParams,
    answer_seed,
    restricted,
    to_sampling,
    validate,
    validate_beams,
)
from vnext.state.config import request_length_max

if TYPE_CHECKING:  # the engine's client and the text code import slowly: the engine starts meanwhile
    from tqdm import tqdm

    from vnext.runtime.client.client_sync import SyncEngineClient
    from vnext.runtime.messages import AdapterFiles, PromptResult, RequestOutput, SubmitRequest
    from vnext.state.params import Constraint
    from vnext.text.answer import Delta
    from vnext.text.template import ChatTemplate
    from vnext.text.tokenizer import Tokenizer

Prompt = str | Sequence[int] | Mapping[str, Any]
"""A text, token ids, or {"prompt": a text} or {"prompt_token_ids": token ids}."""
Message = Mapping[str, Any]


class LLM(EngineOperations):
    """`LLM("folder or hub id", max_num_seqs=64, ...)`: every engine option of `vnext serve` is a keyword.

    Raises SettingsError for a setting that cannot work, StartFailed for an engine that cannot start. Close it, or use
    it in a `with`; an LLM that is never closed closes when it is garbage-collected, at the latest when the program ends.
    """

    def __init__(self, model: str = "", **settings: Any) -> None:
        self._settings = engine_settings(model=model, **settings)
        model_path = find_model(self._settings)
        self._defaults = sampling_defaults(model_path, reads_generation_config(self._settings))
        starting = start_engines(self._settings, model_path)
        from vnext.runtime.client.client_sync import SyncEngineClient

        self.tokenizer = _tokenizer(model_path, starting)
        self._engine = starting.wait()
        self._finalizer = weakref.finalize(self, _stop, self._engine, None)
        self._address = self._engine.addresses[0]
        policy, prefill_engines = self._settings.data_parallel_policy, self._settings.prefill_engines
        client = SyncEngineClient.connect(self._engine.addresses, policy=policy, prefill_engines=prefill_engines)
        self._finalizer.detach()
        self._finalizer = weakref.finalize(self, _stop, self._engine, client)
        self._client, self.ready = client, client.ready
        self._names = itertools.count()
        self._adapters = KnownAdapters(self._settings, client.ready.linear_layers)
        self.vocab_size = client.ready.config.vocab_size or self.tokenizer.vocab_size
        self.max_model_len = request_length_max(client.ready.config)

    @property
    def log_dir(self) -> str:
        """The folder of the engine's log: the latest one, where an engine core has followed another; the first engine's, where
        there are several."""
        return self._engine.log_dir

    @property
    def log_dirs(self) -> tuple[str, ...]:
        """`log_dir` of each engine; empty with the log off."""
        return self._engine.log_dirs

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
        lora_request: AdapterChoice = None,
    ) -> list[Generated]:
        """Answer one prompt or several, in their order.

        `sampling_params` is one for all prompts or a list with one for each. None takes `get_default_sampling_params()`,
        shortened to fit the model's length. `lora_request` is the adapter of all prompts or a list with one, or None, for each.
        Raises InvalidRequest, before it sends anything unless the adapter's weights do not fit, Refused, EngineDead.
        """
        tasks = self._tasks(_as_prompts(prompts), sampling_params, lora_request)
        total = sum(len(task.slots) for task in tasks)
        with _bar(total) if use_tqdm else nullcontext() as bar:
            for slot, delta in self._deltas(tasks, whole=not any(task.params.stop for task in tasks)):
                slot.push(delta)
                if delta.finish and bar is not None:
                    bar.update()
        return [task.generated(self.tokenizer) for task in tasks]

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
        *,
        lora_request: AdapterChoice = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[Generated]:
        """`generate` for one conversation or several, each a list of {"role": ..., "content": ...}.

        The chat template sees `tools` and the variables in `chat_template_kwargs`; calls stay in the answer's text.
        """
        conversations = [messages] if messages and isinstance(messages[0], Mapping) else messages
        variables = {"tools": tools, **(chat_template_kwargs or {})}
        return self.generate([self._render(each, variables) for each in conversations], sampling_params, use_tqdm, lora_request)

    def stream_chat(
        self, messages: Sequence[Message], sampling_params: SamplingParams | None = None
    ) -> Generator[str, None, int]:
        """Yield one answer to a conversation piece by piece; the generator returns the number of the answer's tokens.
        Closing the generator aborts the answer."""
        tasks = self._tasks([self._render(messages, {})], sampling_params)
        token_count = 0
        with closing(self._deltas(tasks)) as deltas:
            for _, delta in deltas:
                token_count = delta.token_count
                yield delta.text
        return token_count

    def beam_search(self, prompts: Prompt | Sequence[Prompt], params: BeamSearchParams) -> list[Generated]:
        """The `params.beam_width` likeliest answers to each prompt, the likeliest first, by the rule of vnext/text/beams.py.
        Raises InvalidRequest, Refused, EngineDead."""
        from vnext.text.beams import BeamSearch

        validate_beams(params)
        sampling = SamplingParams(
            n=params.beam_width, max_tokens=params.max_tokens, logprobs=0, ignore_eos=params.ignore_eos,
            include_stop_str_in_output=params.include_stop_str_in_output,
        )  # fmt: skip
        tasks = self._tasks(_as_prompts(prompts), sampling)
        ends = () if params.ignore_eos else self._client.ready.config.eos_token_ids
        searches = [BeamSearch(task.requests[0].name, task.tokens, params, ends) for task in tasks]
        while requests := {each.name: (each, search) for search in searches for each in search.requests()}:
            for output in self._client.run([request for request, _ in requests.values()], whole=True):
                requests[output.name][1].push(output)
        for task, search in zip(tasks, searches):
            for slot, output in zip(task.slots, search.best(params.beam_width)):
                slot.push(slot.answer.push(output))
        return [task.generated(self.tokenizer) for task in tasks]

    def embed(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        pooling: str = "last",
        dimensions: int | None = None,
        normalize: bool = True,
    ) -> list[Embedded]:
        """One embedding for each prompt: the last hidden state of its last token, their mean ("mean") or that of its first
        token ("cls"), cut to `dimensions` and scaled to length 1. Raises InvalidRequest, Refused, EngineDead."""
        from vnext.text.prompt_arrays import embedding
        from vnext.text.prompt_results import embedding_request

        tokens = [self._tokens(_plain(prompt)) for prompt in _as_prompts(prompts)]
        requests = [embedding_request(str(next(self._names)), each, pooling, self.max_model_len) for each in tokens]
        found: dict[str, list[PromptResult]] = {request.name: [] for request in requests}
        for output in self._client.run(requests, whole=True) if requests else ():
            found[output.name] += output.prompt
        embeddings = [embedding(parts, dimensions, normalize).tolist() for parts in found.values()]
        return [
            Embedded(prompt_token_ids=each, outputs=Embedding(embedding=vector)) for each, vector in zip(tokens, embeddings)
        ]

    def score(
        self, prompts: Prompt | Sequence[Prompt], answers: Prompt | Sequence[Prompt], *, lora_request: AdapterChoice = None
    ) -> list[Scored]:
        """The log-probabilities of given answers, one for each prompt, by the kernels that generate and in their order
        (docs/rollouts.md). An answer is given as a prompt is; a text gets no special tokens. Prompt and answer together may have
        `max_model_len` tokens. Raises InvalidRequest, Refused, EngineDead."""
        from vnext.text.prompt_results import Scoring

        prompts, answers = _as_prompts(prompts), _as_prompts(answers)
        if len(prompts) != len(answers):
            raise InvalidRequest(f"There are {len(prompts)} prompts and {len(answers)} answers: give one for each.", "answers")
        adapters = self._adapters.of(len(prompts), lora_request)
        pairs = [(self._tokens(_plain(prompt)), self._tokens(_plain(answer), False)) for prompt, answer in zip(prompts, answers)]
        scorings = {
            name: Scoring(name, *pair, self.max_model_len, adapter)
            for pair, adapter, name in zip(pairs, adapters, map(str, self._names))
        }
        for output in self._client.run([each.request for each in scorings.values()], whole=True) if scorings else ():
            if output.error:
                raise InvalidRequest(f"{output.error}.")
            scorings[output.name].push(output)
        found = [each.logprobs() for each in scorings.values()]
        return [
            Scored(prompt_token_ids=prompt, token_ids=answer, logprobs=each, cumulative_logprob=sum(each))
            for (prompt, answer), each in zip(pairs, found)
        ]

    def get_default_sampling_params(self) -> SamplingParams:
        """The parameters of `generate` without `sampling_params`: SamplingParams() with the defaults of the model's file."""
        length = {} if self._defaults.max_tokens is None else {"max_tokens": self._defaults.max_tokens}
        return SamplingParams(**self._defaults.sampling(), **length)

    def close(self) -> None:
        """End the engine. Idempotent."""
        self._finalizer()

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @cached_property
    def _template(self) -> ChatTemplate:
        source = self.tokenizer.chat_template
        if source is None:
            raise InvalidRequest("This model has no chat template: use generate() with a text of your own.", "messages")
        from vnext.text.template import ChatTemplate

        return ChatTemplate(source, self.tokenizer.special_tokens)

    def _render(self, messages: Sequence[Message], variables: Mapping[str, Any]) -> list[int]:
        return self.tokenizer.encode(self._template.render(messages, variables), add_special_tokens=False)

    def _tasks(
        self, prompts: Sequence[Prompt], params: SamplingParams | Sequence[SamplingParams] | None, lora: AdapterChoice = None
    ) -> list[Task]:
        adapters = self._adapters.of(len(prompts), lora)
        if params is None or isinstance(params, SamplingParams):
            params = [params] * len(prompts)
        if len(params) != len(prompts):
            counts = f"There are {len(prompts)} prompts and {len(params)} sampling_params"
            raise InvalidRequest(f"{counts}: give one, or one for each.", "sampling_params")
        constraints = {key: self._constraint(one) for key, one in {id(one): one for one in params}.items()}
        each = zip(prompts, params, adapters)
        return [self._task(prompt, one, constraints[id(one)], adapter) for prompt, one, adapter in each]

    def _constraint(self, params: SamplingParams | None) -> Constraint | None:
        """What answers by `params` must look like. Raises InvalidRequest."""
        if params is None or params.structured_outputs is None:
            return None
        from vnext.text.structured.asked import asked_of
        from vnext.text.structured.grammar import constraint_of

        return constraint_of(asked_of(params.structured_outputs), self.tokenizer)

    def _task(self, prompt: Prompt, params: SamplingParams | None, limits: Constraint | None, lora: AdapterFiles | None) -> Task:
        prompt = _plain(prompt)
        text = prompt if isinstance(prompt, str) else None
        tokens = self._tokens(prompt)
        params = self._fitting_params(len(tokens)) if params is None else params
        validate(params, self.vocab_size)
        from vnext.text.answer import Answer

        slots = [Slot(index, Answer(self.tokenizer, tokens, params)) for index in range(params.n)]
        requests = [msgspec.structs.replace(self._request(tokens, params, slot.index, limits), adapter=lora) for slot in slots]
        return Task(text, tokens, params, slots, requests)

    def _fitting_params(self, prompt_length: int) -> SamplingParams:
        """The default parameters, with `max_tokens` cut to fit the model's length."""
        params = self.get_default_sampling_params()
        room = max(1, self.max_model_len - prompt_length)
        return msgspec.structs.replace(params, max_tokens=min(params.max_tokens, room))

    def _tokens(self, prompt: str | Sequence[int], is_prompt: bool = True) -> list[int]:
        tokens = self.tokenizer.encode(prompt, add_special_tokens=is_prompt) if isinstance(prompt, str) else list(prompt)
        what, highest = "prompt" if is_prompt else "answer", self.vocab_size - 1
        if not tokens:
            raise InvalidRequest(f"The {what} has no tokens: a request needs at least one.", what)
        for token in tokens:
            if not 0 <= token <= highest:
                raise InvalidRequest(f"The {what} holds {token}: token ids lie between 0 and {highest}.", what)
        return tokens

    def _request(
        self, tokens: Sequence[int], params: SamplingParams, index: int, constraint: Constraint | None
    ) -> SubmitRequest:
        """One answer's request. Without a seed, the engine core derives its key from the LLM's seed."""
        from vnext.runtime.messages import SubmitRequest
        from vnext.state.events import pack_tokens
        from vnext.text.bad_words import banned_sequences

        seed = 0 if params.seed is None else answer_seed(params.seed, index)
        sampling = to_sampling(params, seed, len(tokens), self.max_model_len, constraint=constraint)
        return SubmitRequest(
            name=str(next(self._names)),
            prompt=pack_tokens(tokens),
            sampling=restricted(sampling, params, banned_sequences(params.bad_words, self.tokenizer)),
            has_seed=params.seed is not None,
        )

    def _deltas(self, tasks: Sequence[Task], whole: bool = False) -> Iterator[tuple[Slot, Delta]]:
        """Yield the answers' deltas as they come or, with `whole`, once an answer has ended, so that a stop string is found late.

        Closing the generator aborts the live answers.
        """
        slots = {request.name: slot for task in tasks for slot, request in zip(task.slots, task.requests)}
        if not slots:
            return
        with closing(self._client.run([request for task in tasks for request in task.requests], whole)) as outputs:
            for output in outputs:
                slot = slots[output.name]
                if not slot.finished:
                    yield slot, self._push(slot, output)

    def _push(self, slot: Slot, output: RequestOutput) -> Delta:
        if output.error:  # an adapter that cannot be read, a grammar that cannot be followed
            raise InvalidRequest(f"{output.error}.")
        delta = slot.answer.push(output)
        slot.finished = delta.finish != ""
        if slot.finished and not output.finish:
            self._client.abort((output.name,), "stop")
        return delta


def _as_prompts(prompts: Prompt | Sequence[Prompt]) -> Sequence[Prompt]:
    """The prompts as a list; a single prompt becomes a list of one."""
    one = isinstance(prompts, str | Mapping) or (len(prompts) > 0 and isinstance(prompts[0], int))
    return [prompts] if one else prompts


def _bar(total: int) -> tqdm:
    from tqdm import tqdm

    return tqdm(total=total, desc="answers", unit="answer", dynamic_ncols=True)


def _plain(prompt: Prompt) -> str | Sequence[int]:
    """The text or the token ids of a prompt. Raises InvalidRequest for a dictionary with other content."""
    if not isinstance(prompt, Mapping):
        return prompt
    if len(prompt) != 1 or not prompt.keys() <= {"prompt", "prompt_token_ids"}:
        raise InvalidRequest(
            f"A prompt has the keys {', '.join(map(repr, prompt))}: give a text, token ids, or one of prompt and "
            "prompt_token_ids.",
            "prompt",
        )
    return next(iter(prompt.values()))


def _tokenizer(model_path: Path, starting: StartingEngines) -> Tokenizer:
    """Load the model's tokenizer while its engine starts. On CheckpointUnreadable it ends the engine first."""
    try:
        from vnext.text.tokenizer import Tokenizer

        return Tokenizer.load(model_path)
    except BaseException:
        starting.abandon()
        raise


def _stop(engine: RunningEngines, client: SyncEngineClient | None) -> None:
    if client is not None:
        client.close()
    engine.stop()
