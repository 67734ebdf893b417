"""Service: the batches of one server: their store, their worker, and the socket on which the worker asks the server itself.

Owns their start and end. A batch's requests go over a Unix socket of this process, through every check that a client's
requests pass, and count for the API key that made the batch; without keys, together as one client.
"""

from __future__ import annotations

import asyncio
import tempfile
from pathlib import Path

import msgspec
from aiohttp import ClientSession, ClientTimeout, UnixConnector, web

from vnext.server.batches.lines import Answer, LineBounds
from vnext.server.batches.store import Store
from vnext.server.batches.worker import Ask, Worker
from vnext.server.context.errors import BatchesOff
from vnext.server.context.identity import REQUEST_ID_HEADER
from vnext.server.context.server_context import ServerContext
from vnext.server.http.bodies import numbers_max

WIDTH_MAX = 64


class Batches:
    """What the views use. `start` it in the event loop, `stop` it there."""

    def __init__(self, context: ServerContext) -> None:
        """Raises StoreUnusable."""
        self.store = Store(Path(context.settings.batch_dir).expanduser())
        self._context = context
        self._folder = tempfile.TemporaryDirectory(prefix="vnext-batches-")
        self._session: ClientSession | None = None
        self._task: asyncio.Task[None] | None = None
        self.worker: Worker | None = None

    async def start(self, runner: web.AppRunner) -> None:
        path = str(Path(self._folder.name) / "self")
        await web.UnixSite(runner, path).start()
        self._session = session("", UnixConnector(path, limit=0))
        width = max(1, min(WIDTH_MAX, self._context.client.ready.config.max_num_seqs // 2))
        self.worker = Worker(self.store, self._asker, width, self._is_free, self._bounds())
        self._task = asyncio.create_task(self.worker.run())

    def its_worker(self) -> Worker:
        """Who works on them since `start`."""
        assert self.worker is not None
        return self.worker

    async def stop(self) -> None:
        if self._task is not None and self._session is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
            await self._session.close()
        self._folder.cleanup()
        self.store.close()

    def _asker(self, owner: str) -> Ask:
        assert self._session is not None, "batches have begun"
        return asker(self._session, "http://self", self._context.keys.own(owner))

    def _bounds(self) -> LineBounds:
        return LineBounds(self._context.settings.body_bytes_max, numbers_max(self._context.bounds.model_length))

    def _is_free(self) -> bool:
        stats = self._context.client.stats
        return stats is None or stats.waiting == 0


BATCHES = web.AppKey("batches", Batches)


def batches_of(request: web.Request) -> Batches:
    """Raises BatchesOff."""
    if BATCHES not in request.app:
        raise BatchesOff("This server keeps no files: start it with --batch-dir FOLDER.")
    return request.app[BATCHES]


def session(api_key: str, connector: UnixConnector | None = None) -> ClientSession:
    """A client of a server that has all the time that an answer takes."""
    headers = {"Content-Type": "application/json"} | _bearer(api_key)
    return ClientSession(connector=connector, headers=headers, timeout=ClientTimeout(total=None))


def asker(client: ClientSession, url: str, api_key: str = "") -> Ask:
    """Sends bodies to the server at `url`, with the session's key or this one."""
    headers = _bearer(api_key)

    async def ask(path: str, body: bytes) -> Answer:
        async with client.post(url + path, data=body, headers=headers) as response:
            data = await response.read()
            return Answer(response.status, response.headers.get(REQUEST_ID_HEADER, ""), _json(data))

    return ask


def _bearer(api_key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {api_key}"} if api_key else {}


def _json(data: bytes) -> object:
    try:
        return msgspec.json.decode(data)
    except (ValueError, RecursionError):
        return data.decode(errors="replace")

