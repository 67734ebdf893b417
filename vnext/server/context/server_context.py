"""Server context: the objects that every view uses, built once per process and never changed afterwards.

Owns the engine client, the tokenizer, the chat template, the request limiter and the metrics, and the operations on them
that several views share. Knows no HTTP.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Collection, Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
from aiohttp import web

from vnext.runtime.client.engines import AnyEngineClient
from vnext.runtime.client.output_stream import EngineDead, EngineStalled
from vnext.runtime.protocol.messages import AdapterFiles
from vnext.runtime.protocol.reasons import IMAGES, SOUNDS
from vnext.runtime.protocol.sampling_params import InvalidRequest, UncheckedParams, context_exceeded
from vnext.server.context.adapters import ServedAdapters
from vnext.server.context.admission import Quota, RequestLimiter
from vnext.server.context.api_keys import ApiKeys, Tenant
from vnext.server.context.conversation import prompt_text, text_size
from vnext.server.context.errors import ModelUnknown
from vnext.server.context.identity import KEY_CLIENT, Identity
from vnext.server.context.metrics import ServerMetrics
from vnext.server.context.openai_types import ChatBody, GenerationBody
from vnext.server.context.structure import Grammars, asked_structure, asking
from vnext.server.context.tallies import TallyFile
from vnext.server.context.text_work import TextWork
from vnext.server.context.traces import traces_to
from vnext.server.settings import ServerSettings
from vnext.state.config import request_length_max
from vnext.state.params import Constraint
from vnext.text.dialects.dialect import Dialect
from vnext.text.infill import Infill, infill_of
from vnext.text.prompt_results import pair_prompt
from vnext.text.reasoning import Marks
from vnext.text.template import ChatTemplate, TemplateSlow, TemplateUnreadable, read_template
from vnext.text.tokenizer import Tokenizer, TooManyTokens

if TYPE_CHECKING:
    from vnext.server.context.images import PromptImages
    from vnext.server.context.sounds import PromptSounds

RENDER_INLINE_S = 0.005
RENDER_INLINE_CHARACTERS_MAX = 2**16
TOKENS_READ_MIN = 4_096  # the error for a prompt that is a little too long states its exact number of tokens
TOKENS_LISTED_MIN = 2**16


class Bounds(msgspec.Struct, frozen=True):
    """Of what a request holds: `model_length` tokens of prompt and answer, `prompt_tokens_max` of a prompt that is read at all, and
    `listed_tokens_max` of one that is listed or cut; ids below `vocab_size`."""

    model_length: int
    prompt_tokens_max: int
    listed_tokens_max: int
    vocab_size: int


class ServerContext:
    """See the module. `template` is the result of `template_of`, read before a client waits for an engine."""

    def __init__(
        self, client: AnyEngineClient, tokenizer: Tokenizer, template: ChatTemplate | None, settings: ServerSettings
    ) -> None:
        config = client.ready.config
        self.client, self.tokenizer, self.settings, self.template = client, tokenizer, settings, template
        self.keys = ApiKeys(settings)
        self.limiter = RequestLimiter(
            settings.live_requests_max, settings.request_answers_max, settings.client_answers_max, settings.waiting_tokens_max,
            self.keys.limits,
        )  # fmt: skip
        size = settings.body_bytes_max
        self.body_bytes = Quota(8 * size, 4 * size, "{} bytes of bodies are being read")
        self.work = TextWork(settings.characters_max)
        self.model_names = settings.served_model_names or (Path(settings.model_path or client.ready.model).name,)
        self.adapters = ServedAdapters(settings, self.model_names, config.max_loras > 0, client.ready.linear_layers)
        self.images = self._images(template)
        length, vocab_size = request_length_max(config), config.vocab_size or tokenizer.vocab_size
        self.bounds = Bounds(length, max(2 * length, TOKENS_READ_MIN), max(2 * length, TOKENS_LISTED_MIN), vocab_size)
        place = settings.number % settings.api_server_count
        tallies = TallyFile(settings.shared_dir, place, settings.api_server_count)
        shown = self.adapters.everyones if self.keys.are_tenants else list
        self.metrics = ServerMetrics(self.model_names[0], length, client.engines, tallies, shown)
        self.traces = traces_to(settings.otlp_traces_endpoint, self.model_names)
        self.identity = Identity(client, settings.number, settings.client_secret)

    @property
    def dialect(self) -> Dialect | None:
        """How the model writes tool calls, None where it writes none."""
        return None if self.template is None else self.template.dialect

    @property
    def marks(self) -> Marks | None:
        """The marks around its reasoning."""
        return None if self.template is None else self.template.marks

    @property
    def sees(self) -> bool:
        """Whether the model reads images."""
        return "image" in self.shown

    @property
    def shown(self) -> Collection[str]:
        """The kinds of inputs that the model reads in chats."""
        return () if self.images is None else self.images.shown

    @cached_property
    def mark_tokens(self) -> tuple[list[int], list[int]] | None:
        """Their tokens."""
        marks, encode = self.marks, partial(self.tokenizer.encode, add_special_tokens=False)
        return None if marks is None else (encode(marks.open), encode(marks.close))

    @cached_property
    def infill(self) -> Infill | None:
        """The model's tokens for a gap between a prompt and a suffix, None where it has none."""
        return infill_of(self.tokenizer.added_tokens.get)

    @cached_property
    def grammars(self) -> Grammars:
        return Grammars(self.tokenizer, self.work)

    @cached_property
    def sampling_defaults(self) -> dict[str, float]:
        return self.settings.sampling_defaults.sampling()

    def _images(self, template: ChatTemplate | None) -> PromptImages | None:
        """For a model that reads images, or sounds as it reads images, whose template then marks them. Raises MediaError."""
        if (sizes := self.client.ready.environment.get(IMAGES)) is None or template is None or not self.settings.engine_address:
            return None
        from vnext.server.context.images import PromptImages  # needs numpy

        images = PromptImages(self.settings, sizes, self.work)
        template.mark_media(images.shown)
        return images

    @cached_property
    def sounds(self) -> PromptSounds | None:
        """For a model that writes what it hears."""
        if (sizes := self.client.ready.environment.get(SOUNDS)) is None or not self.settings.engine_address:
            return None
        from vnext.server.context.sounds import PromptSounds  # needs numpy

        return PromptSounds(sizes, (self.settings.engine_address, *self.settings.other_engines), self.work)

    def model_name(self, asked: str | None, client: str) -> str:
        """The name to answer a client with. Raises ModelUnknown."""
        if asked is None or asked in self.model_names:
            return asked or self.model_names[0]
        if self.adapter(asked, client) is None:
            served = ", ".join((*self.model_names, *self.adapters.names(self.keys.tenant(client))))
            raise ModelUnknown(f"The model {asked!r} is not served here: ask for {served}.")
        return asked

    def adapter(self, name: str, client: str) -> AdapterFiles | None:
        """The adapter that a client means by the name of a model; None for the model itself."""
        return None if name in self.model_names else self.adapters.files(name, self.keys.tenant(client))

    def check_engine(self) -> None:
        """Raise EngineDead, or EngineStalled for an engine that does not answer at present: waiting requests keep waiting, but
        no new ones queue. An engine that recovers will answer soon, and they wait for that."""
        if self.client.trouble is not None and not self.client.recovering:
            self.check_health()

    def check_health(self) -> None:
        """Raise EngineDead, or EngineStalled while no answers come for whatever reason."""
        if self.client.death is not None:
            raise EngineDead(self.client.death)
        if self.client.trouble is not None:
            raise EngineStalled(self.client.trouble)

    async def encode(
        self,
        texts: Sequence[str],
        add_special_tokens: bool,
        client: str,
        params: Sequence[str],
        what: str = "prompt",
        count_max: int = 0,
    ) -> list[list[int]]:
        """Token ids of each text. `params` are the names of the texts, `what` names them together. Raises InvalidRequest for a
        text of more than `count_max` tokens (0: far more than a request may have), without tokenizing where the length alone
        proves it, and Overloaded."""
        count_max = count_max or self.bounds.prompt_tokens_max
        size_max = self.tokenizer.characters_per_token * count_max
        for text, param in zip(texts, params):
            if len(text) > size_max:
                raise self._too_long(len(text), what, param)
        encode = partial(self._encode, add_special_tokens=add_special_tokens, what=what, count_max=count_max)
        return await self.work.run(sum(map(len, texts)), client, partial(list, map(encode, texts, params)))

    async def encode_pairs(
        self, pairs: Sequence[tuple[str, str]], template: ChatTemplate | None, client: str, params: Sequence[str], asked: int | None
    ) -> list[list[int]]:
        """Token ids of each pair of texts, as `pair_prompt` makes them. `params` are the names of the pairs. Raises InvalidRequest,
        Overloaded."""
        count_max = self.bounds.prompt_tokens_max if asked is None else self.bounds.listed_tokens_max
        sizes = [len(one) + len(other) for one, other in pairs]
        for size, param in zip(sizes, params):
            if size > self.tokenizer.characters_per_token * count_max:
                raise self._too_long(size, "pair", param)
        encode = partial(pair_prompt, self.tokenizer, template, model_length=self.bounds.model_length, asked=asked)
        run = self.work.run if template is None else self.work.run_template
        return await run(sum(sizes), client, lambda: list(map(encode, pairs)))

    def _too_long(self, size: int, what: str, param: str) -> InvalidRequest:
        """The error for a text whose characters prove too many tokens."""
        longest = self.tokenizer.characters_per_token
        asked = f"there are {size} characters in the {what}, and a token stands for at most {longest}"
        return context_exceeded(self.bounds.model_length, asked, what, param, size // longest)

    async def decode(self, prompts: Sequence[list[int]], client: str, skip_special_tokens: bool = True) -> list[str]:
        """The text of each. Raises Overloaded."""
        work = partial(self.tokenizer.decode, skip_special_tokens=skip_special_tokens)
        return await self.work.run(2 * sum(map(len, prompts)), client, lambda: list(map(work, prompts)))

    async def render(self, body: ChatBody, tools: list[dict[str, Any]] | None, client: str) -> str:
        """The conversation as the template renders it. Raises InvalidRequest, Overloaded."""
        if len(body.messages) > self.bounds.model_length:
            asked = f"there are {len(body.messages)} messages, each of at least one token"
            raise context_exceeded(self.bounds.model_length, asked, "messages", "messages", len(body.messages))
        size, template = text_size(body), self.template
        assert template is not None, "who renders has looked for one"
        if size <= RENDER_INLINE_CHARACTERS_MAX:
            try:
                return prompt_text(template, body, tools, RENDER_INLINE_S)
            except TemplateSlow:
                pass  # retry on the slow thread, where no other request waits
        limit_s = self.settings.template_limit_s
        try:
            return await self.work.run_template(size, client, lambda: prompt_text(template, body, tools, limit_s))
        except TemplateSlow as error:
            sentence = f"The model's chat template computes for more than {limit_s:g} s with these messages: send fewer of them."
            raise InvalidRequest(sentence, "messages") from error

    def end_tokens(self, params: UncheckedParams) -> frozenset[int]:
        ends = () if params.ignore_eos else self.client.ready.config.eos_token_ids
        return frozenset((*ends, *params.stop_token_ids))

    async def constraint(self, body: GenerationBody, client: str) -> Constraint | None:
        """What the body's answers must look like; None for free text. Raises InvalidRequest, Overloaded."""
        asked = asked_structure(body) if any(asking(body)) else None
        return None if asked is None else Constraint(grammar=await self.grammars.grammar(asked, client))

    def check_tokens(self, tokens: list[int], param: str, count_max: int) -> None:
        """Raise InvalidRequest for more than `count_max` ids, or for one outside the vocabulary."""
        if len(tokens) > count_max:
            asked = f"there are {len(tokens)} tokens in {param}"
            raise context_exceeded(self.bounds.model_length, asked, param, param, len(tokens))
        if tokens and (min(tokens) < 0 or max(tokens) >= self.bounds.vocab_size):
            place = next(place for place, token in enumerate(tokens) if not 0 <= token < self.bounds.vocab_size)
            name = f"{param}[{place}]"
            raise InvalidRequest(f"{name} is {tokens[place]}: token ids lie between 0 and {self.bounds.vocab_size - 1}.", name)

    def _encode(self, text: str, param: str, add_special_tokens: bool, what: str, count_max: int) -> list[int]:
        try:
            return self.tokenizer.encode(text, add_special_tokens, count_max)
        except TooManyTokens as error:
            asked = f"there are {error.count} tokens or more in the {what}"
            raise context_exceeded(self.bounds.model_length, asked, what, param, error.count) from error


log = logging.getLogger(__name__)
SERVER_CONTEXT = web.AppKey("edge", ServerContext)


async def follow_keys(app: web.Application) -> AsyncIterator[None]:
    """For `cleanup_ctx`: follows the file of keys while the app serves."""
    context = app[SERVER_CONTEXT]
    if context.settings.api_key_file:
        if context.keys.weights and context.client.ready.config.policy != "fair":
            log.warning("The weights of --api-key-file do nothing here: --scheduling-policy fair takes turns between keys.")
        following = asyncio.create_task(context.keys.follow_file())
        yield
        following.cancel()
    else:
        yield


def tenant_of(request: web.Request) -> Tenant:
    """Whose the things are that a request makes, and which of those that are there it sees."""
    return request.app[SERVER_CONTEXT].keys.tenant(request.get(KEY_CLIENT, ""))


def template_of(tokenizer: Tokenizer, settings: ServerSettings) -> ChatTemplate | None:
    """The user's chat template, else the checkpoint's, if it has one. Raises TemplateUnreadable, also for an unknown parser."""
    own, theirs = settings.chat_template_path, (tokenizer.chat_template, tokenizer.tool_template)
    source, tool_source = (read_template(own), "") if own else theirs
    if source is None:
        return None
    parsers = settings.tool_call_parser, settings.reasoning_parser
    try:
        return ChatTemplate(source, tokenizer.special_tokens, tokenizer.added_tokens, *parsers, tool_source)
    except ValueError as error:
        raise TemplateUnreadable(str(error)) from error
