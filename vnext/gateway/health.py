"""Health: whether each server serves, which models, and, of vnext's servers, what they compute with; and the exact views of those
that show their events (`--show-events`).

A server that answers is asked every INTERVAL_S; one that does not, after 0.25 s, 0.5 s and so on up to RETRY_MAX_S; each time
varies, so that many routers do not ask at once. What a request meets counts too: `Backend.failed` brings the next look forward.
When an exact view is lost, or its stream breaks, all of the server's are asked for again; until they have states the server is
known by what it was sent.
"""

from __future__ import annotations

import asyncio
import os
import random
import ssl
from collections.abc import Coroutine, Mapping
from typing import Any

import aiohttp
import msgspec

from vnext.base.spelling import reason
from vnext.gateway.backends import Backend, EngineViews, Fleet, Identity, fingerprint_of
from vnext.routing.view import View
from vnext.server.console import write_line
from vnext.server.context.identity import ENGINES_HEADER

INTERVAL_S = 2.0
RETRY_MIN_S, RETRY_MAX_S = 0.25, 5.0
TIMEOUT_S = 5.0
JITTER = 0.2
ANSWER_BYTES_MAX = 4 * 2**20
AGAIN_S = 0.25
"""Before a stream that has ended is asked for again."""
_UPSTREAM_ERRORS = (aiohttp.ClientError, OSError, TimeoutError)


class NoServer(Exception):
    """What is wrong with a server, as an end of the sentence "it ...". """


class Health:
    """Watches over a fleet. A backend that is added needs `watch`, one that is removed `forget`. `tls`: how the session checks
    certificates, the machine's once there is a server with one."""

    def __init__(self, fleet: Fleet, session: aiohttp.ClientSession, key: str, tls: ssl.SSLContext) -> None:
        self._fleet, self._session, self._tls = fleet, session, tls
        self._headers = {"Authorization": f"Bearer {key}"} if key else {}
        self._tasks: dict[Backend, tuple[asyncio.Task[None], ...]] = {}
        self._reported: dict[Backend, bool] = {}

    def watch(self, backend: Backend) -> None:
        follower = Follower(backend, self._fleet, self._session, self._headers)
        self._tasks[backend] = asyncio.create_task(self._watch(backend)), asyncio.create_task(follower.follow())

    def forget(self, backend: Backend) -> None:
        for task in self._tasks.pop(backend):
            task.cancel()
        self._reported.pop(backend, None)

    def close(self) -> None:
        for backend in tuple(self._tasks):
            self.forget(backend)

    async def look(self, backend: Backend) -> None:
        """Ask a server once; afterwards its trouble and its identity are those of this moment."""
        if backend.url.startswith("https:") and not self._tls.cert_store_stats()["x509"]:
            self._tls.load_default_certs()
        before, was_out = backend.identity, bool(backend.trouble)
        backend.look_now.clear()
        try:
            backend.identity, trouble = await self._identity(backend.url), ""
        except NoServer as error:
            trouble = str(error)
        backend.asked.set()
        if backend.look_now.is_set():
            return  # a request has met a failure meanwhile: the next look decides
        backend.trouble = trouble
        if was_out and not trouble:
            backend.tree.clear()  # it may have begun again, with an empty cache
        if self._reported.get(backend) != bool(trouble):
            self._reported[backend] = bool(trouble)
            words = f"gets no requests: {trouble}" if trouble else f"is ready: {description(backend)}"
            write_line(f"vnext: {backend.url} {words}")
        if was_out != bool(trouble) or before != backend.identity:
            self._fleet.news()

    async def _watch(self, backend: Backend) -> None:
        retry_s = RETRY_MIN_S
        while True:
            await self.look(backend)
            retry_s = min(2 * retry_s, RETRY_MAX_S) if backend.trouble else RETRY_MIN_S
            wait_s = (retry_s if backend.trouble else INTERVAL_S) * random.uniform(1 - JITTER, 1 + JITTER)
            try:
                async with asyncio.timeout(wait_s):
                    await backend.look_now.wait()
                await asyncio.sleep(RETRY_MIN_S / 10)
            except TimeoutError:
                pass

    async def _identity(self, url: str) -> Identity:
        """What the server says of itself. Raises NoServer."""
        status, answer = await self._ask(f"{url}/health")
        if status not in (200, 404, 405):  # a server without the path may serve all the same
            raise NoServer(f"its /health says {status}{_sentence(answer)}")
        status, answer = await self._ask(f"{url}/v1/models")
        if status in (401, 403):
            raise NoServer(f"its /v1/models says {status}: give the key that it wants with --backend-api-key")
        models = _models(answer) if status == 200 else None
        if models is None:
            raise NoServer("it does not answer /v1/models as an OpenAI server does: is the URL right?")
        status, info = await self._ask(f"{url}/server_info")
        if status == 200 and isinstance(info, dict) and isinstance(info.get("system_fingerprint"), str):
            version, role = str(info.get("version", "unknown")), str(info.get("role", "both"))
            return Identity(models=models, version=version, fingerprint=fingerprint_of(info), role=role)
        return Identity(models=models)

    async def _ask(self, url: str) -> tuple[int, Any]:
        """Status and decoded answer, None where it is no JSON. Raises NoServer."""
        try:
            async with asyncio.timeout(TIMEOUT_S), self._session.get(url, headers=self._headers) as response:
                data = await response.content.read(ANSWER_BYTES_MAX)
                while not response.content.at_eof() and len(data) < ANSWER_BYTES_MAX:
                    data += await response.content.read(ANSWER_BYTES_MAX)
        except TimeoutError:
            raise NoServer(f"it has not answered within {TIMEOUT_S:g} s") from None
        except (aiohttp.ClientError, OSError) as error:
            raise NoServer(f"it cannot be reached ({reason_of(error)})") from error
        try:
            return response.status, msgspec.json.decode(data)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            return response.status, None


def description(backend: Backend) -> str:
    """A server in words: what it is and serves, and how well it is known: `Follower` reports if that changes."""
    identity = backend.identity
    kind = f"vnext {identity.version}" if identity.is_vnext else "an OpenAI server"
    return f"{kind}, {', '.join(identity.models)}; its cache is known by the texts that it is sent"


def reason_of(error: BaseException) -> str:
    """An error of a connection in words, without addresses that a client need not know."""
    if isinstance(error, aiohttp.ClientConnectorCertificateError):
        return f"its certificate is not trusted: {getattr(error.certificate_error, 'verify_message', error.certificate_error)}"
    if isinstance(error, aiohttp.ClientConnectorError):
        return os.strerror(error.os_error.errno) if error.os_error.errno else str(error.os_error)
    return reason(error)


def _models(answer: Any) -> dict[str, dict[str, Any]] | None:
    """The models that /v1/models lists, by name; None where it is no such list."""
    entries = answer.get("data") if isinstance(answer, dict) else None
    if not isinstance(entries, list):
        return None
    found = {each["id"]: each for each in entries if isinstance(each, dict) and isinstance(each.get("id"), str)}
    return found if len(found) == len(entries) and found else None


def _sentence(answer: Any) -> str:
    """The sentence of an error object."""
    error = answer.get("error") if isinstance(answer, dict) else None
    message = error.get("message") if isinstance(error, dict) else None
    return f": {str(message)[:200]}" if message else ""


class Follower:
    """Follows one server. `follow` never ends."""

    def __init__(self, backend: Backend, fleet: Fleet, session: aiohttp.ClientSession, headers: Mapping[str, str]) -> None:
        self._backend, self._fleet, self._session, self._headers = backend, fleet, session, headers
        self._engines = EngineViews()
        self._has_reported = False

    async def follow(self) -> None:
        """Follow the server's events whenever it shows them."""
        while True:
            while self._backend.trouble or not self._backend.identity.is_vnext:
                await self._fleet.changed.wait()
            is_shown, out = asyncio.create_task(self._streams()), asyncio.create_task(self._until_out())
            try:
                await asyncio.wait((is_shown, out), return_when=asyncio.FIRST_COMPLETED)
                if is_shown.done() and not is_shown.result():
                    await out  # it does not show them, and another start of it may
            finally:
                is_shown.cancel()
                out.cancel()
                self._engines.begin_again()
            await asyncio.sleep(AGAIN_S)

    async def _until_out(self) -> None:
        while not self._backend.trouble:
            await self._fleet.changed.wait()

    async def _streams(self) -> bool:
        """Take in the events of all the server's engines until one's end or its view is lost; returns whether it makes sense to ask
        again."""
        try:
            async with self._ask(0) as response:
                if response.status != 200:
                    return False
                count = _number(response.headers.get(ENGINES_HEADER, ""))
                if count != len(self._engines.views):
                    self._engines = EngineViews(count)
                self._engines.begin_again()
                self._backend.exact = self._engines
                first, *others = self._engines.views
                return await _first_of(self._take(response, first), *map(self._follow, range(1, count), others))
        except _UPSTREAM_ERRORS:
            return True

    async def _follow(self, number: int, view: View) -> bool:
        async with self._ask(number) as response:
            return response.status != 200 or await self._take(response, view)

    def _ask(self, number: int) -> Any:
        return self._session.get(f"{self._backend.url}/events?engine={number}", headers=self._headers)

    async def _take(self, response: aiohttp.ClientResponse, view: View) -> bool:
        async for data in response.content.iter_any():
            if view.feed(data):
                return True
            if view.is_hopeless:
                write_line(f"vnext: {self._backend.url} cannot be followed: {view.failure}")
                return False
            self._report()
        return True

    def _report(self) -> None:
        if self._engines.is_exact and not self._has_reported:
            self._has_reported = True
            write_line(f"vnext: {self._backend.url} is followed: its cache and its queue are known exactly, by its events")


async def _first_of(*work: Coroutine[Any, Any, bool]) -> bool:
    """The result of what ends first; the rest is cancelled. Raises what it raises."""
    tasks = [asyncio.create_task(each) for each in work]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        return all([each.result() for each in done])
    finally:
        for each in tasks:
            each.cancel()


def _number(text: str) -> int:
    """Of a server's engines: one where it does not say."""
    return max(int(text), 1) if text.isdecimal() and len(text) < 5 else 1
