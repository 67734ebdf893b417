"""The edge on a port of its own over a fake engine core, for tests: real HTTP, real messages, answers known beforehand.

The fake answers a prompt with the text after its last "say:", then end-of-text; a prompt without it with "x" until
max_tokens.
"""

from __future__ import annotations

from typing import Any

import msgspec
import openai
from aiohttp import web
from fake_engine import FakeEngine
from in_thread import InThread
from toy_tokenizers import byte_level

from vnext.runtime.client.client import EngineClient
from vnext.runtime.protocol.messages import SubmitRequest
from vnext.server.context.server_context import SERVER_CONTEXT, ServerContext, template_of
from vnext.server.run import make_app, make_runner
from vnext.server.settings import ServerSettings
from vnext.state.events import unpack_tokens
from vnext.text.tokenizer import Tokenizer

EOS = 1
TOKENIZER = byte_level()


def echo_answer(request: SubmitRequest) -> list[int]:
    """What the fake samples for a prompt."""
    prompt = TOKENIZER.decode(unpack_tokens(request.prompt).tolist())
    if "say:" not in prompt:
        return TOKENIZER.encode("x") * request.sampling.max_tokens
    return [*TOKENIZER.encode(prompt.rpartition("say:")[2]), EOS]


def refuse_marked(request: SubmitRequest) -> str | None:
    prompt = TOKENIZER.decode(unpack_tokens(request.prompt).tolist())
    return "the engine has no room for 5 tokens: ask for 4" if "refuse me" in prompt else None


class EdgeServer(InThread):
    """Runs the app in a thread; `settings` are fields of ServerSettings."""

    def __init__(self, tokenizer: Tokenizer = TOKENIZER, engine: Any = None, **settings: Any) -> None:
        """`engine` has an address and `close`; None for a fake."""
        super().__init__()
        self.engine = engine or FakeEngine(echo_answer, refuse_marked)
        self._tokenizer = tokenizer
        self.settings = msgspec.structs.replace(ServerSettings(served_model_names=("toy", "other-name")), **settings)
        self.app: web.Application | None = None
        self._client: EngineClient | None = None

    @property
    def context(self) -> ServerContext:
        return self.app[SERVER_CONTEXT]

    def openai(self, **options: Any) -> openai.OpenAI:
        options = {"api_key": "none", "max_retries": 0} | options
        return openai.OpenAI(base_url=f"{self.url}/v1", **options)

    def post(self, path: str, body: bytes | dict[str, Any], **headers: str) -> tuple[int, dict[str, Any], Any]:
        """Status, decoded answer, headers."""
        return self.call("POST", path, body, **headers)

    def get(self, path: str, **headers: str) -> tuple[int, Any, Any]:
        return self.call("GET", path, **headers)

    async def begin(self) -> web.AppRunner:
        self._client = await EngineClient.connect(self.engine.address, 60.0)
        self.app = make_app(self._client, self._tokenizer, template_of(self._tokenizer, self.settings), self.settings)
        return make_runner(self.app)

    async def end(self) -> None:
        if self._client is not None:
            await self._client.close()

    def __exit__(self, *exception: object) -> None:
        super().__exit__(*exception)
        self.engine.close()
