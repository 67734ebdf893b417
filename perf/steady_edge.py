"""A steady API server in one process, driven by `count_instructions`.

Owns a substitute for the engine core, which sends the same tokens to every stream, and clients that only read. Everything
else is real: the aiohttp application, its connection to the engine core, its tokenizer (the bundled model's), the sockets.
"""

from __future__ import annotations

import asyncio
import json
import socket
import tempfile

import zmq
from aiohttp import web

from vnext.runtime.client.client import EngineClient
from vnext.runtime.engine.clients import client_decoder
from vnext.runtime.processes.launch import DEMO_MODEL
from vnext.runtime.protocol.messages import EngineReady, Message, Outputs, RequestOutput, SubmitRequest, encoder
from vnext.server.context.server_context import template_of
from vnext.server.run import make_app, make_runner
from vnext.server.settings import ServerSettings
from vnext.state.config import SchedulerConfig
from vnext.state.events import pack_tokens
from vnext.text.tokenizer import Tokenizer

CONFIG = SchedulerConfig(
    block_size=16, page_count=1 << 16, max_num_batched_tokens=2048, max_num_seqs=256, max_model_len=1 << 14, vocab_size=3072,
    eos_token_ids=(0,),
)  # fmt: skip
PROMPT = list(range(5, 21))
HEAD = "POST {} HTTP/1.1\r\nHost: here\r\nContent-Type: application/json\r\nContent-Length: {}\r\n\r\n"
BODIES = {
    "/v1/completions": {"prompt": PROMPT},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "Tell me of the sea."}]},
}


class SteadyEdge:
    """A context manager: an API server and `count` open streams of one API."""

    def __init__(self, count: int, path: str = "/v1/completions") -> None:
        self._count, self._path = count, path
        self._step = 0

    def __enter__(self) -> SteadyEdge:
        self._folder = tempfile.TemporaryDirectory(prefix="vnext-edge-")
        self._context, self._loop = zmq.Context(), asyncio.new_event_loop()
        self._core = self._context.socket(zmq.ROUTER)
        self._core.bind(f"ipc://{self._folder.name}/engine")
        self._loop.run_until_complete(self._begin(f"ipc://{self._folder.name}/engine"))
        self._readers: list[socket.socket] = []
        self._numbers = b""
        for _ in range(self._count):
            self.ask()
        return self

    async def _begin(self, address: str) -> None:
        connecting = asyncio.create_task(EngineClient.connect(address))
        while not self._core.poll(0):
            await asyncio.sleep(0.001)
        self._peer, _ = self._core.recv_multipart()
        self._tell(EngineReady(config=CONFIG, model="demo", world_size=1, log_dir=""))
        self._client = await connecting
        settings = ServerSettings(served_model_names=("demo",), model_path=str(DEMO_MODEL))
        tokenizer = Tokenizer.load(DEMO_MODEL)
        self._words = [id_ for id_ in range(300, 2000) if tokenizer.token_text(id_).text.strip().isalpha()]
        runner = make_runner(make_app(self._client, tokenizer, template_of(tokenizer, settings), settings))
        await runner.setup()
        listener = socket.create_server(("127.0.0.1", 0))
        self._address = listener.getsockname()
        await web.SockSite(runner, listener).start()

    def ask(self) -> None:
        """Open one more stream and read its first token."""
        body = json.dumps(BODIES[self._path] | {"max_tokens": 9999, "stream": True, "ignore_eos": True}).encode()
        reader = socket.create_connection(self._address)
        reader.setblocking(False)
        reader.sendall(HEAD.format(self._path, len(body)).encode() + body)
        (request,) = self._submitted(1)
        number = len(self._readers)
        self._tell(Outputs(outputs=(RequestOutput(name=request.name, tokens=pack_tokens([11]), number=number),)))
        self._await(reader)
        self._readers.append(reader)
        self._numbers += number.to_bytes(8, "little")

    def run(self, steps: int) -> None:
        """Run `steps` steps, each of which gives every stream a token."""
        for _ in range(steps):
            self._step += 1
            token = self._words[self._step % len(self._words)]
            self._tell(Outputs(numbers=self._numbers, tokens=pack_tokens([token] * len(self._readers))))
            self._await(self._readers[-1])
            for reader in self._readers[:-1]:
                assert reader.recv(1 << 16).count(b"data: ") == 1

    def visit(self, count: int) -> None:
        """Answer `count` new streams, which come at once, with two tokens each, and read them to their end."""
        body = json.dumps(BODIES[self._path] | {"max_tokens": 2, "stream": True, "ignore_eos": True}).encode()
        head = HEAD.format(self._path, len(body)).replace("\r\n\r\n", "\r\nConnection: close\r\n\r\n").encode()
        readers = [socket.create_connection(self._address) for _ in range(count)]
        for reader in readers:
            reader.setblocking(False)
            reader.sendall(head + body)
        names = [request.name for request in self._submitted(count)]
        for finish in ("", "length"):
            outputs = (RequestOutput(name=name, tokens=pack_tokens([300]), finish=finish) for name in names)
            self._tell(Outputs(outputs=tuple(outputs)))
            last = self._await(readers[-1])
        while not last.endswith(b"[DONE]\n\n\r\n0\r\n\r\n"):
            last = self._await(readers[-1])
        for reader in readers:
            reader.close()

    def _submitted(self, count: int) -> list[SubmitRequest]:
        """Wait for `count` requests."""
        found: list[SubmitRequest] = []
        while len(found) < count:
            self._loop.run_until_complete(asyncio.sleep(0 if self._core.poll(1) else 0.001))
            if self._core.poll(0):
                messages = map(client_decoder.decode, self._core.recv_multipart()[1:])
                found += [message for message in messages if isinstance(message, SubmitRequest)]
        return found

    def _tell(self, message: Message) -> None:
        self._core.send_multipart((self._peer, encoder.encode(message)))

    def _await(self, reader: socket.socket) -> bytes:
        """What the server writes to `reader` next; it writes to the last stream last."""
        has_come = self._loop.create_future()
        self._loop.add_reader(reader, lambda: has_come.done() or has_come.set_result(None))
        self._loop.run_until_complete(has_come)
        self._loop.remove_reader(reader)
        data = reader.recv(1 << 16)
        assert data.count(b"data: ") >= 1
        return data

    def __exit__(self, *_: object) -> None:
        """Do nothing: the process exits next."""
