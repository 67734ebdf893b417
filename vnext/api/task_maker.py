"""Prompts and sampling parameters as the requests of an engine: what LLM and AsyncLLM have in common before anything is sent.

Owns the checks of what a program passes, the names of its requests and the chat template. Sends nothing, and any thread may call
it.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from vnext.api.generated import Slot, Task
from vnext.api.program_input import (
    MARKS,
    Conversation,
    Message,
    ParamsChoice,
    ReadPrompt,
    Sound,
    Video,
    WithImages,
    as_adapters,
    as_params,
    of_each,
)
from vnext.runtime.protocol.adapter_files import KnownAdapters
from vnext.runtime.protocol.lora_request import AdapterChoice
from vnext.runtime.protocol.reasons import IMAGES, SOUNDS
from vnext.runtime.protocol.sampling_params import (
    InvalidRequest,
    SamplingDefaults,
    SamplingParams,
    answer_seed,
    guided,
    restricted,
    to_sampling,
    validate,
)
from vnext.runtime.protocol.settings import EngineSettings
from vnext.state.config import request_length_max
from vnext.state.events import pack_tokens

if TYPE_CHECKING:  # the engine's client and the text code import slowly: the engine starts meanwhile
    from vnext.media.reader import ImageReader, Shown
    from vnext.media.sounds import SoundReader
    from vnext.runtime.protocol.messages import AdapterFiles, EngineReady, SubmitRequest
    from vnext.state.params import Constraint
    from vnext.text.template import ChatTemplate
    from vnext.text.tokenizer import Tokenizer


class TaskMaker:
    """Makes the tasks of one program with one engine, which is `ready`. `defaults` are those of the model's file."""

    def __init__(
        self,
        settings: EngineSettings,
        tokenizer: Tokenizer,
        ready: EngineReady,
        defaults: SamplingDefaults,
        model_path: Path,
        addresses: Sequence[str],
    ) -> None:
        """`addresses`: of the engines."""
        self.tokenizer, self._defaults = tokenizer, defaults
        self._environment, self._model_path, self._addresses = ready.environment, model_path, addresses
        self.names = map(str, itertools.count())
        self.adapters = KnownAdapters(settings, ready.linear_layers)
        self.vocab_size = ready.config.vocab_size or tokenizer.vocab_size
        self.max_model_len = request_length_max(ready.config)

    def default_params(self) -> SamplingParams:
        """SamplingParams() with the defaults of the model's file."""
        given: dict[str, Any] = dict(self._defaults.sampling())
        if self._defaults.max_tokens is not None:
            given["max_tokens"] = self._defaults.max_tokens
        return SamplingParams(**given)

    @cached_property
    def template(self) -> ChatTemplate:
        source = self.tokenizer.chat_template
        if source is None:
            raise InvalidRequest("This model has no chat template: use generate() with a text of your own.", "messages")
        from vnext.text.template import ChatTemplate

        return ChatTemplate(source, self.tokenizer.special_tokens, tool_source=self.tokenizer.tool_template)

    def render(self, conversation: Conversation, variables: Mapping[str, Any]) -> ReadPrompt:
        """A conversation as a prompt. The template sees the `variables`."""
        if not conversation.images:
            return self.tokenizer.encode(self.written(conversation.messages, variables), add_special_tokens=False)
        shown, (names, images) = self._reader.shown, zip(*conversation.images)

        def marked(text: str) -> str:
            for kind, mark in shown.items():
                text = text.replace(MARKS[kind], mark)
            return text

        self.template.mark_media(shown)
        messages = [
            {**each, "content": marked(text)} if isinstance(text := each.get("content"), str) else each
            for each in conversation.messages
        ]
        return WithImages(self.written(messages, variables), [*images], names, is_talk=True)

    def written(self, messages: Sequence[Message], variables: Mapping[str, Any], add_generation_prompt: bool = True) -> str:
        """The text of a conversation, with the beginning of the model's turn or without."""
        tools = variables.get("tools")
        template = self.template.for_tools(tools)
        named = [{**each, "role": template.developer_role} if each["role"] == "developer" else each for each in messages]
        return template.render(template.arranged(template.with_words(named, tools)), variables, add_generation_prompt)

    def in_chat(self, params: ParamsChoice, variables: Mapping[str, object]) -> ParamsChoice:
        """The parameters with texts of negative prompts as the template writes a user's message."""
        if isinstance(params, Sequence):
            return [self.in_chat(each, variables) for each in params]  # type: ignore[misc]  # one for each
        [made] = as_params(params, 1)
        if made is None or not isinstance(made.negative_prompt, str):
            return made
        text = self.written([{"role": "user", "content": made.negative_prompt}], variables)
        return msgspec.structs.replace(made, negative_prompt=self.tokenizer.encode(text, add_special_tokens=False))

    def tasks(self, prompts: Sequence[ReadPrompt], params: ParamsChoice, lora: AdapterChoice = None) -> list[Task]:
        """One for each prompt, which as_prompts has made. Raises InvalidRequest."""
        adapters, params = self.adapters.of(len(prompts), as_adapters(lora)), as_params(params, len(prompts))
        constraints = {key: self._constraint(one) for key, one in {id(one): one for one in params}.items()}
        each = [(prompt, one, constraints[id(one)], adapter) for prompt, one, adapter in zip(prompts, params, adapters)]
        return of_each(self._task, each)

    def _sizes(self, key: str, kind: str) -> str:
        """What the engine says of the media that it takes. Raises InvalidRequest."""
        if (found := self._environment.get(key)) is None:
            raise InvalidRequest(f"This model reads no {kind}: leave them out.", "multi_modal_data")
        return found

    @cached_property
    def _reader(self) -> ImageReader:
        sizes = self._sizes(IMAGES, "images")
        from vnext.media.reader import ImageReader  # needs numpy

        return ImageReader(self._model_path, sizes, self._addresses)

    @cached_property
    def _sounds(self) -> SoundReader:
        sizes = self._sizes(SOUNDS, "sounds")
        from vnext.media.sounds import SoundReader  # needs numpy

        return SoundReader(sizes, self._addresses)

    def _with_media(self, prompt: WithImages) -> tuple[list[int], bytes]:
        """The tokens of a prompt with images or sounds, and these as the engine gets them. Raises InvalidRequest."""
        is_heard = IMAGES not in self._environment and all(isinstance(each, Sound) for each in prompt.images)
        try:
            return self._behind_sound(prompt) if is_heard else self._with_images(prompt)
        except InvalidRequest:
            raise
        except ValueError as error:  # MediaError, whose module needs numpy
            raise InvalidRequest(f"{error}.", "messages" if prompt.is_talk else "multi_modal_data") from error

    def _with_images(self, prompt: WithImages) -> tuple[list[int], bytes]:
        reader = self._reader
        is_alone = sum(not isinstance(image, Video | Sound) for image in prompt.images) == 1

        def shown(image: object, name: str) -> Shown:
            if isinstance(image, Video | Sound):
                return reader.film(image.content, name) if isinstance(image, Video) else reader.heard(image.content, name)
            return reader.seen(image, name, is_alone)

        images = list(map(shown, prompt.images, prompt.names))
        text = reader.written(prompt.text, images)
        tokens = self.tokens(self.tokenizer.encode(text, add_special_tokens=False) if prompt.is_talk else text)
        return tokens, reader.packed(tokens, images)

    def _behind_sound(self, prompt: WithImages) -> tuple[list[int], bytes]:
        """Of a model whose prompts begin with a sound."""
        reader, tokens = self._sounds, self.tokens(self.tokenizer.encode(prompt.text, add_special_tokens=False))
        if len(prompt.images) != 1:
            raise InvalidRequest(f"multi_modal_data['audio'] has {len(prompt.images)} sounds: give one.", "multi_modal_data")
        samples = reader.seen(prompt.images[0].content, name := "multi_modal_data['audio']")  # type: ignore[attr-defined]  # Sound
        return [0] * reader.span + tokens, reader.packed(samples, tokens, name)

    def tokens(self, prompt: ReadPrompt, is_prompt: bool = True) -> list[int]:
        """The tokens of a prompt, or of an answer, which gets no special ones. Raises InvalidRequest."""
        if isinstance(prompt, WithImages):
            raise InvalidRequest("multi_modal_data is for generate(): give a text or token ids here.", "multi_modal_data")
        tokens = self.tokenizer.encode(prompt, add_special_tokens=is_prompt) if isinstance(prompt, str) else prompt
        what, highest = "prompt" if is_prompt else "answer", self.vocab_size - 1
        if not tokens:
            raise InvalidRequest(f"The {what} has no tokens: a request needs at least one.", what)
        for token in tokens:
            if not 0 <= token <= highest:
                raise InvalidRequest(f"The {what} holds {token}: token ids lie between 0 and {highest}.", what)
        return tokens

    def _constraint(self, params: SamplingParams | None) -> Constraint | None:
        """What answers by `params` must look like. Raises InvalidRequest."""
        if params is None or params.structured_outputs is None:
            return None
        from vnext.text.structured.asked import asked_of
        from vnext.text.structured.grammar import constraint_of

        return constraint_of(asked_of(params.structured_outputs), self.tokenizer)

    def _task(
        self, prompt: ReadPrompt, params: SamplingParams | None, limits: Constraint | None, lora: AdapterFiles | None
    ) -> Task:
        text = prompt if isinstance(prompt, str) else None
        if isinstance(prompt, WithImages):
            text = prompt.text
            tokens, packed = self._with_media(prompt)
        else:
            tokens, packed = self.tokens(prompt), b""
        params = self._fitting_params(len(tokens)) if params is None else params
        validate(params, self.vocab_size)
        from vnext.text.answer import Answer

        negative = self.tokens(params.negative_prompt) if params.negative_prompt else tokens[-1:]
        slots = [Slot(index, Answer(self.tokenizer, tokens, params, negative)) for index in range(params.n)]
        requests = [self._request(tokens, packed, negative, params, slot.index, limits) for slot in slots]
        return Task(text, tokens, params, slots, [msgspec.structs.replace(each, adapter=lora) for each in requests])

    def _fitting_params(self, prompt_length: int) -> SamplingParams:
        """The default parameters, with `max_tokens` cut to fit the model's length."""
        params = self.default_params()
        room = max(1, self.max_model_len - prompt_length)
        return msgspec.structs.replace(params, max_tokens=room if params.max_tokens is None else min(params.max_tokens, room))

    def _request(
        self, tokens: list[int], packed: bytes, negative: list[int], params: SamplingParams, index: int, limits: Constraint | None
    ) -> SubmitRequest:
        """One answer's request. Without a seed, the engine core derives its key from the LLM's seed."""
        from vnext.runtime.protocol.messages import SubmitRequest
        from vnext.text.tokenizer import banned_sequences

        seed = 0 if params.seed is None else answer_seed(params.seed, index)
        longer, prompt = max(len(tokens), len(negative)), packed or pack_tokens(tokens)
        sampling = to_sampling(params, seed, longer, self.max_model_len, constraint=limits)
        if params.guidance_scale != 1.0:
            prompt, sampling = guided(sampling, params, prompt, negative)
        return SubmitRequest(
            name=next(self.names),
            prompt=prompt,
            sampling=restricted(sampling, params, banned_sequences(params.bad_words, self.tokenizer)),
            has_seed=params.seed is not None,
        )
