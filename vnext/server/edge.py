"""Edge: what every view works with, built once a process and never changed after.

Owns the engine client, the tokenizer, the chat template, the gate and the metrics, and the questions that several views
ask of them. Knows no HTTP.
"""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

from aiohttp import web

from vnext.runtime.client import EngineClient
from vnext.sampling_params import InvalidRequest
from vnext.server.admission import Gate
from vnext.server.errors import ModelUnknown
from vnext.server.metrics import EdgeMetrics
from vnext.server.settings import ServerSettings
from vnext.server.text.template import ChatTemplate, read_template
from vnext.server.text.tokenizer import Tokenizer
from vnext.state.config import request_length_max

ENCODE_INLINE_CHARACTERS_MAX = 2_000  # a longer text takes milliseconds, in which nobody's tokens would be sent


class Edge:
    """See the module. `template` is what `template_of` gave, read before a client waits for an engine; `tool_form`: how its model
    writes tool calls, None where it knows none."""

    def __init__(
        self, client: EngineClient, tokenizer: Tokenizer, template: ChatTemplate | None, settings: ServerSettings
    ) -> None:
        config = client.ready.config
        self.client = client
        self.tokenizer = tokenizer
        self.settings = settings
        self.template = template
        self.tool_form = None if template is None else template.tool_form
        self.gate = Gate(settings.live_requests_max)
        self.metrics = EdgeMetrics(lambda: client.stats, lambda: client.death is None)
        self.model_names = settings.served_model_names or (Path(settings.model_path or client.ready.model).name,)
        self.model_length = request_length_max(config)
        self.vocab_size = config.vocab_size or tokenizer.vocab_size
        self.started_s = int(time.time())

    def model_name(self, asked: str | None) -> str:
        """The name to answer with. Raises ModelUnknown."""
        if asked is not None and asked not in self.model_names:
            served = ", ".join(self.model_names)
            raise ModelUnknown(f"The model {asked!r} is not served here: ask for {served}.")
        return asked or self.model_names[0]

    async def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        """Token ids; long texts are encoded on another thread."""
        if len(text) <= ENCODE_INLINE_CHARACTERS_MAX:
            return self.tokenizer.encode(text, add_special_tokens)
        return await asyncio.to_thread(self.tokenizer.encode, text, add_special_tokens)

    def check_tokens(self, tokens: list[int], param: str) -> None:
        """Raise InvalidRequest for an id outside the vocabulary."""
        for place, token in enumerate(tokens):
            if not 0 <= token < self.vocab_size:
                name = f"{param}[{place}]"
                raise InvalidRequest(f"{name} is {token}: token ids lie between 0 and {self.vocab_size - 1}.", name)


EDGE = web.AppKey("edge", Edge)


def template_of(tokenizer: Tokenizer, settings: ServerSettings) -> ChatTemplate | None:
    """The user's chat template, else the checkpoint's, if it has one. Raises TemplateUnreadable."""
    source = read_template(settings.chat_template_path) if settings.chat_template_path else tokenizer.chat_template
    return None if source is None else ChatTemplate(source, tokenizer.special_tokens)
