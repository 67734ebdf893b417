"""LLM: an engine as a Python object, for programs that need no server.

Turns prompts into requests and outputs into answers, in the order of the prompts. The engine core runs in its own process
with the same settings as under `vnext serve`; tokens become text in this process, by the same code as in the API server.
Several threads may use one LLM; async_llm.py serves programs with event loops.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Generator, Mapping, Sequence
from contextlib import closing, nullcontext
from inspect import Parameter, Signature
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, NoReturn, SupportsIndex, get_type_hints

import msgspec

from vnext.api.chat_tokenizer import ChatTokenizer
from vnext.api.generated import Embedded, Generated, Scored, Slot, Task
from vnext.api.program_input import (
    Message,
    ParamsChoice,
    Prompt,
    as_conversation,
    as_conversations,
    as_count,
    as_prompts,
    as_variables,
)
from vnext.options.settings_check import engine_settings
from vnext.runtime.processes.rank_processes import end_cores, start_cores
from vnext.runtime.protocol.lora_request import AdapterChoice
from vnext.runtime.protocol.operations import (
    TAGS,
    CallRanks,
    Mode,
    PauseEngine,
    Plain,
    PutToSleep,
    Residence,
    ResumeEngine,
    Tag,
    WakeUp,
)
from vnext.runtime.protocol.sampling_params import BeamSearchParams, InvalidRequest, SamplingParams, as_struct
from vnext.runtime.protocol.settings import EngineSettings, reads_generation_config

if TYPE_CHECKING:  # what finds the model, the engine's client and the text code import slowly: the engine starts meanwhile
    from tqdm import tqdm

    from vnext.api.vectors import Asked, Result, Wanted
    from vnext.runtime.client.client_sync import SyncEngineClient
    from vnext.runtime.client.weight_update import Tensors, WeightUpdates
    from vnext.runtime.processes.replicas import RunningEngines, StartingEngines
    from vnext.runtime.processes.subprocesses import Child
    from vnext.runtime.protocol.merged_output import TakenOutput
    from vnext.runtime.protocol.sampling_params import SamplingDefaults
    from vnext.text.answer import Delta
    from vnext.text.tokenizer import Tokenizer


# ---- an engine that runs -----------------------------------------------------------------------------------------
# Names and arguments are vLLM's where it has them. Each call returns when the engine has done what it says, or raises NotDone
# with one sentence, and nothing has changed. docs/weights.md says what happens to requests.


class Running:
    """What holds an engine that runs."""

    def __reduce_ex__(self, protocol: SupportsIndex) -> NoReturn:
        """Neither pickled nor copied. Raises TypeError."""
        name = type(self).__name__
        raise TypeError(f"{name} holds an engine that runs, which is neither pickled nor copied: make another {name} there")


class EngineOperations:
    """`_client` is connected to the engine core at `_address`."""

    _client: SyncEngineClient
    _address: str
    _updates: WeightUpdates | None = None

    def update_weights(
        self, weights: Tensors, *, version: int = 0, mode: Mode = "wait", partial: bool = False
    ) -> dict[str, Any]:
        """Compute with other weights from the next step on; returns {"version", "digest"}.

        `weights`: tensors of the model by their names in the checkpoint (numpy or torch, float32, bfloat16 or float16), or
        SharedTensors, or the folder or safetensors file that has them: every one, or with `partial` some, and the others stay.
        `version` 0 is the next one. `mode`: what becomes of requests that have begun. Behind `start_weight_update` only `weights`
        are given, the engine checks them and goes on as before; returns {}. Raises NotDone, BadTensors, EngineDead.
        """
        return self._weight_updates().update(weights, version, mode, partial)

    def start_weight_update(self, *, partial: bool = False) -> None:
        """The calls of `update_weights` that follow are one change of the weights, which `finish_weight_update` makes. What was
        sent before and not finished is forgotten. `partial`: tensors that are not sent stay as they are."""
        self._weight_updates().start(partial)

    def finish_weight_update(self, *, version: int = 0, mode: Mode = "wait") -> dict[str, Any]:
        """Compute with what was sent since `start_weight_update`, as `update_weights` does. Where it raises NotDone the update is
        over too, and nothing has changed."""
        return self._weight_updates().finish(version, mode)

    def _weight_updates(self) -> WeightUpdates:
        self._client.require_alive()
        if self._updates is None:
            from vnext.runtime.client.weight_update import WeightUpdates
            self._updates = WeightUpdates(self._client.operate, self._address)
        return self._updates

    def pause(self, mode: Mode = "wait") -> None:
        """Let nothing begin until `resume`. "wait": those that have begun finish first; "keep": they stay where they are; "abort":
        they end. Raises NotDone, EngineDead."""
        self._client.operate(PauseEngine(mode=mode))

    def resume(self) -> None:
        """Go on after `pause`. Raises NotDone, EngineDead."""
        self._client.operate(ResumeEngine())

    def sleep(self, level: int = 1, *, mode: Mode = "wait") -> None:
        """Give the memory of cache and weights back, on the CPU. Level 1: `wake_up` reads the weights from their files again.
        Level 2 forgets them: `update_weights` comes before `wake_up`. Raises NotDone, EngineDead."""
        self._client.operate(PutToSleep(level=level, mode=mode))

    def wake_up(self, tags: Sequence[Tag] | None = None) -> None:
        """Take the memory back, of "weights" and "kv_cache" or only of some; the engine goes on when it has all. Raises NotDone,
        EngineDead."""
        self._client.operate(WakeUp(tags=TAGS if tags is None else tuple(tags)))

    def collective_rpc(self, method: str, timeout: float | None = None, args: Sequence[Plain] = (),
                       kwargs: Mapping[str, Plain] | None = None) -> list[Any]:  # fmt: skip
        """Call a function that the ranks know by this name (vnext/runtime/rank/weights.py) on each of them; their values, by
        rank. Arguments go by name. Raises NotDone, EngineDead."""
        from vnext.runtime.client.pending_operations import NotDone
        if not isinstance(method, str):
            raise NotDone("collective_rpc calls functions by their names: code is not sent to ranks")
        if args or timeout is not None:
            raise NotDone("collective_rpc takes arguments by name, in kwargs, and no timeout: leave args and timeout out")
        values: list[Any] = self._client.operate(CallRanks(function=method, arguments=dict(kwargs or {})))
        return values

    def reset_prefix_cache(self) -> None:
        """Forget what the cache holds of requests that have ended."""
        self._client.reset_prefix_cache()

    @property
    def residence(self) -> Residence:
        """Whether the engine is paused or asleep, the version and digest of its weights, and its ranks' resident bytes."""
        stats = self._client.stats
        return stats.residence if stats is not None else Residence()


class _Options:
    """The signature of LLM and AsyncLLM: every option with its type and default."""

    def __get__(self, instance: object, owner: type) -> Signature:
        kinds = get_type_hints(EngineSettings)
        options = [
            Parameter(name, Parameter.KEYWORD_ONLY, default=default, annotation=kinds[name])
            for name, default in msgspec.structs.asdict(EngineSettings()).items()
            if name != "model"
        ]
        return Signature([Parameter("model", Parameter.POSITIONAL_OR_KEYWORD, default="", annotation=str), *options])


class LLM(EngineOperations, Running):
    """`LLM("folder or hub id", max_num_seqs=64, ...)`: every engine option of `vnext serve` is a keyword.

    Raises SettingsError for a setting that cannot work, StartFailed for an engine that cannot start. Close it, or use
    it in a `with`; an LLM that is never closed closes when it is garbage-collected, at the latest when the program ends.
    """

    __signature__ = _Options()

    def __init__(self, model: str = "", **settings: Any) -> None:
        self._settings = engine_settings(model=model, **{"input_tokens": 0} | settings)  # nobody reads a part of an answer
        cores = start_cores(self._settings)
        try:
            model_path, defaults, starting = _started(self._settings, cores)
        except BaseException:
            end_cores(cores)
            raise
        from vnext.api.task_maker import TaskMaker
        from vnext.runtime.client.client_sync import SyncEngineClient

        self.tokenizer = _tokenizer(model_path, starting)
        self._engine = starting.wait()
        self._finalizer = weakref.finalize(self, _stop, os.getpid(), self._engine, None)
        self._address = self._engine.addresses[0]
        own = self._settings
        client = SyncEngineClient.connect(self._engine.addresses, policy=own.data_parallel_policy, roles=own.roles)
        self._finalizer.detach()
        self._finalizer = weakref.finalize(self, _stop, os.getpid(), self._engine, client)
        self._client, self.ready = client, client.ready
        self._maker = TaskMaker(
            self._settings, self.tokenizer, client.ready, defaults, model_path, self._engine.addresses
        )
        self.vocab_size, self.max_model_len = self._maker.vocab_size, self._maker.max_model_len

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
        sampling_params: ParamsChoice = None,
        use_tqdm: bool = True,
        lora_request: AdapterChoice = None,
    ) -> list[Generated]:
        """Answer one prompt or several, in their order.

        `sampling_params` is one for all prompts or a list with one for each. None takes `get_default_sampling_params()`,
        shortened to fit the model's length. `lora_request` is the adapter of all prompts or a list with one, or None, for each.
        Raises InvalidRequest, before it sends anything unless the adapter's weights do not fit, Refused, EngineDead.
        """
        self._client.require_alive()
        tasks = self._maker.tasks(as_prompts(prompts), sampling_params, lora_request)
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
        sampling_params: ParamsChoice = None,
        use_tqdm: bool = True,
        *,
        lora_request: AdapterChoice = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[Generated]:
        """`generate` for one conversation or several, each a list of {"role": ..., "content": ...}.

        The chat template sees `tools` and the variables in `chat_template_kwargs`; calls stay in the answer's text. A content may
        be a list of parts, {"type": "text", "text": ...} and images: "image_url" with a data URL, or "image" with Pillow's image,
        bytes of a file or an array; and sounds: "input_audio", or "audio" with bytes of a file or (samples, their rate).
        """
        variables = as_variables(tools, chat_template_kwargs)
        prompts: list[Any] = [self._maker.render(each, variables) for each in as_conversations(messages)]
        return self.generate(prompts, self._maker.in_chat(sampling_params, variables), use_tqdm, lora_request)

    def stream_chat(
        self, messages: Sequence[Message], sampling_params: SamplingParams | None = None
    ) -> Generator[str, None, int]:
        """Yield one answer to a conversation piece by piece; the generator returns the number of the answer's tokens.
        Closing the generator aborts the answer."""
        tasks = self._maker.tasks([self._maker.render(as_conversation(messages), {})], sampling_params)
        token_count = 0
        with closing(self._deltas(tasks)) as deltas:
            for _, delta in deltas:
                token_count = delta.token_count
                yield delta.text
        return token_count

    def beam_search(self, prompts: Prompt | Sequence[Prompt], params: BeamSearchParams | Mapping[str, Any]) -> list[Generated]:
        """The `params.beam_width` likeliest answers to each prompt, the likeliest first, by the rule of vnext/text/beams.py.
        Raises InvalidRequest, Refused, EngineDead."""
        from vnext.text.beams import BeamSearch

        params = as_struct(BeamSearchParams, params, "params")
        sampling = SamplingParams(
            n=params.beam_width, max_tokens=params.max_tokens, logprobs=0, ignore_eos=params.ignore_eos,
            include_stop_str_in_output=params.include_stop_str_in_output,
        )  # fmt: skip
        tasks = self._maker.tasks(as_prompts(prompts), sampling)
        ends = () if params.ignore_eos else self._client.ready.config.eos_token_ids
        searches = [BeamSearch(task.requests[0].name, task.requests[0].prompt, params, ends) for task in tasks]
        while requests := {each.name: (each, search) for search in searches for each in search.requests()}:
            for output in self._client.run([request for request, _ in requests.values()], whole=True):
                requests[output.name][1].push(output)
        for task, search in zip(tasks, searches):
            for slot, best in zip(task.slots, search.best(params.beam_width)):
                slot.push(slot.answer.push(best))
        return [task.generated(self.tokenizer) for task in tasks]

    def embed(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        pooling: str | None = None,
        dimensions: int | None = None,
        normalize: bool | None = None,
        truncate_prompt_tokens: int | None = None,
        lora_request: AdapterChoice = None,
    ) -> list[Embedded]:
        """One embedding for each prompt: the last hidden state of its last token ("last"), their mean ("mean") or maximum ("max")
        or that of its first token ("cls"), cut to `dimensions` and scaled to length 1. None: as the model's files say, else that of
        the last token, scaled. A prompt keeps its first `truncate_prompt_tokens`, -1: as many as the model takes. Raises
        InvalidRequest, Refused, EngineDead."""
        from vnext.api.vectors import Wanted

        wanted = Wanted(pooling, dimensions, normalize, truncate_prompt_tokens)
        return self._results(self._embeddings(prompts, wanted, lora_request))

    def score(
        self, prompts: Prompt | Sequence[Prompt], answers: Prompt | Sequence[Prompt], *, lora_request: AdapterChoice = None
    ) -> list[Scored]:
        """The log-probabilities of given answers, one for each prompt, by the kernels that generate and in their order
        (docs/rollouts.md). An answer is given as a prompt is; a text gets no special tokens. Prompt and answer together may have
        `max_model_len` tokens. A model that scores pairs of texts does so: `answers` are the documents, `prompts` the query of each
        or one for all. By other models the likeness of two texts, which the server's /score states, is the cosine of their vectors
        from `embed`. Raises InvalidRequest, Refused, EngineDead."""
        return self._results(self._scores(prompts, answers, lora_request))

    def _embeddings(self, prompts: Prompt | Sequence[Prompt], wanted: Wanted, lora: AdapterChoice) -> Asked[Embedded]:
        from vnext.api.vectors import embeddings

        wanted = wanted._replace(dimensions=as_count(wanted.dimensions, "dimensions"))
        return embeddings(self._maker, self._client.ready, as_prompts(prompts), wanted, lora)

    def _scores(
        self, prompts: Prompt | Sequence[Prompt], answers: Prompt | Sequence[Prompt], lora: AdapterChoice
    ) -> Asked[Scored]:
        from vnext.api.vectors import scores

        return scores(self._maker, self._client.ready, as_prompts(prompts), as_prompts(answers, "answers"), lora)

    def _results(self, asked: Asked[Result]) -> list[Result]:
        for output in self._client.run(asked.requests, whole=True) if asked.requests else ():
            asked.push(output)
        return asked.results()

    def get_default_sampling_params(self) -> SamplingParams:
        """The parameters of `generate` without `sampling_params`: SamplingParams() with the defaults of the model's file."""
        return self._maker.default_params()

    def get_tokenizer(self) -> ChatTokenizer:
        """The model's tokenizer, under the names that programs know from transformers."""

        def written(conversation: Sequence[Message], tools: Any, variables: Mapping[str, Any], add_generation_prompt: bool) -> str:
            messages = as_conversation(conversation).messages
            return self._maker.written(messages, as_variables(tools, variables), add_generation_prompt)

        return ChatTokenizer(self.tokenizer, written)

    def close(self) -> None:
        """End the engine. Idempotent. Later calls raise EngineDead."""
        self._finalizer()

    def __enter__(self) -> LLM:
        self._client.require_alive()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _deltas(self, tasks: Sequence[Task], whole: bool = False) -> Generator[tuple[Slot, Delta], None, None]:
        """Yield the answers' deltas as they come or, with `whole`, once an answer has ended, so that a stop string is found late.

        Closing the generator aborts the live answers.
        """
        slots = {name: slot for task in tasks for name, slot in task.slot_of.items()}
        if not slots:
            return
        with closing(self._client.run([request for task in tasks for request in task.requests], whole)) as outputs:
            for output in outputs:
                slot = slots[output.name]
                if not slot.finished:
                    yield slot, self._push(slot, output)

    def _push(self, slot: Slot, output: TakenOutput) -> Delta:
        if output.error:  # an adapter that cannot be read, a grammar that cannot be followed
            raise InvalidRequest(f"{output.error.rstrip('.')}.")
        slot.note_times(output)
        delta = slot.answer.push(output)
        slot.finished = delta.finish != ""
        if slot.finished and not output.finish:
            self._client.abort((output.name,), "stop")
        return delta


def _bar(total: int) -> tqdm:
    from tqdm import tqdm

    return tqdm(total=total, desc="answers", unit="answer", dynamic_ncols=True)


def _started(settings: EngineSettings, cores: Sequence[Child]) -> tuple[Path, SamplingDefaults, StartingEngines]:
    """The folder of the model, its defaults, and the engines of these cores, which begin to load it. Raises StartFailed."""
    from vnext.api.generation_config import sampling_defaults
    from vnext.runtime.processes.launch import find_model
    from vnext.runtime.processes.replicas import start_engines

    model_path = find_model(settings)
    defaults = sampling_defaults(model_path, reads_generation_config(settings))
    return model_path, defaults, start_engines(settings, model_path, cores)


def _tokenizer(model_path: Path, starting: StartingEngines) -> Tokenizer:
    """Load the model's tokenizer while its engine starts. On CheckpointUnreadable it ends the engine first."""
    try:
        from vnext.text.tokenizer import Tokenizer

        return Tokenizer.load(model_path)
    except BaseException:
        starting.abandon()
        raise


def _stop(owner: int, engine: RunningEngines, client: SyncEngineClient | None) -> None:
    if os.getpid() != owner:
        return  # a fork has neither the client's thread nor the engine, which goes on for its owner
    if client is not None:
        client.close()
    engine.stop()
