"""The edge on a port of its own over a fake engine core, for tests: real HTTP, real messages, answers known beforehand.

The fake answers a prompt with the text after its last "say:", then end-of-text; a prompt without it with "x" until
max_tokens.
"""

from __future__ import annotations

import asyncio
import json
import threading
import urllib.error
import urllib.request
from typing import Any

import msgspec
import openai
from aiohttp import web
from fake_engine import FakeEngine
from toy_tokenizers import byte_level

from vnext.runtime.client.client import EngineClient
from vnext.runtime.messages import SubmitRequest
from vnext.server.app import make_app, make_runner
from vnext.server.context.server_context import SERVER_CONTEXT, ServerContext, template_of
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


class EdgeServer:
    """Runs the app in a thread; `settings` are fields of ServerSettings."""

    def __init__(self, tokenizer: Tokenizer = TOKENIZER, engine: Any = None, **settings: Any) -> None:
        """`engine` has an address and `close`; None for a fake."""
        self.engine = engine or FakeEngine(echo_answer, refuse_marked)
        self._tokenizer = tokenizer
        self.settings = msgspec.structs.replace(ServerSettings(served_model_names=("toy", "other-name")), **settings)
        self.port = 0
        self.app: web.Application | None = None
        self.site: web.TCPSite | None = None
        self.runner: web.AppRunner | None = None
        self._loop = asyncio.new_event_loop()
        self._stop = asyncio.Event()
        self._started = threading.Event()
        self._thread = threading.Thread(target=self._loop.run_until_complete, args=(self._serve(),), daemon=True)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def context(self) -> ServerContext:
        return self.app[SERVER_CONTEXT]

    def openai(self, **options: Any) -> openai.OpenAI:
        options = {"api_key": "none", "max_retries": 0} | options
        return openai.OpenAI(base_url=f"{self.url}/v1", **options)

    def post(self, path: str, body: bytes | dict[str, Any], **headers: str) -> tuple[int, dict[str, Any], Any]:
        """Status, decoded answer, headers."""
        headers = {"Content-Type": "application/json"} | headers
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        return self._open(urllib.request.Request(self.url + path, data=data, headers=headers, method="POST"))

    def get(self, path: str, **headers: str) -> tuple[int, Any, Any]:
        return self._open(urllib.request.Request(self.url + path, headers=headers))

    def in_loop(self, work: Any) -> Any:
        """Run a coroutine in the server's event loop."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(10)

    def __enter__(self) -> EdgeServer:
        self._thread.start()
        assert self._started.wait(10)
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(10)
        self.engine.close()
        self._loop.close()

    async def _serve(self) -> None:
        client = await EngineClient.connect(self.engine.address, 5.0)
        self.app = make_app(client, self._tokenizer, template_of(self._tokenizer, self.settings), self.settings)
        self.runner = runner = make_runner(self.app)
        await runner.setup()
        self.site = web.TCPSite(runner, "127.0.0.1", 0)
        await self.site.start()
        self.port = self.site.port
        self._started.set()
        await self._stop.wait()
        await runner.cleanup()
        await client.close()

    def _open(self, request: urllib.request.Request) -> tuple[int, Any, Any]:
        try:
            with urllib.request.urlopen(request, timeout=20) as response:
                return response.status, _decode(response.read()), response.headers
        except urllib.error.HTTPError as error:
            return error.code, _decode(error.read()), error.headers


def _decode(data: bytes) -> Any:
    try:
        return json.loads(data)
    except ValueError:
        return data.decode()
