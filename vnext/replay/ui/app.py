"""The page's server: files of the page and answers about one or two logs, or one that grows, to this machine only.

Owns routes, bounds and errors. Reads and never writes but for the caches beside a log. It answers only requests that name
a loopback host, so that no page of another site reaches it through the browser (DNS rebinding).
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable
from importlib import resources
from pathlib import Path

import msgspec
from aiohttp import web

from vnext.replay.diff import diff
from vnext.replay.source import UnusableLog
from vnext.replay.ui.lanes import WINDOW_MAX, lanes
from vnext.replay.ui.live import LiveLog
from vnext.replay.ui.opened import Opened
from vnext.replay.ui.overview import COLUMNS
from vnext.replay.ui.questions import Indexing
from vnext.replay.ui.step import step_view
from vnext.replay.ui.walk import Kind, Walk

POINTS_MAX = 4000
PAGE = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
HOSTS = ("127.0.0.1", "localhost", "[::1]")
POLICY = "default-src 'self'; img-src 'self' data:; style-src 'self'; base-uri 'none'; form-action 'none'"


Shown = Opened | LiveLog


class Pages:
    """The answers, each a JSON object."""

    def __init__(self, opened: list[Shown]) -> None:
        self.opened = opened

    async def logs(self, request: web.Request) -> web.Response:
        """All logs; while one is read for the first time, only how far that is: {"opening": [done, total bytes]}."""
        opening = [each.indexed for each in self.opened if each.opening]
        if opening:
            return _json({"opening": opening[0]})
        for each in self.opened:
            if each.error:
                raise UnusableLog(each.error)
        return _json({"logs": [await each.ask(lambda _, each=each: each.about()) for each in self.opened], "columns": COLUMNS})

    async def overview(self, request: web.Request) -> web.Response:
        found = self._log(request)
        first, last = _whole(request, "first", found.walk.first_step), _whole(request, "last", found.walk.last_step)
        points = max(1, min(POINTS_MAX, _whole(request, "points", 1000)))
        return _json(found.overview.points(first, last, points))

    async def step(self, request: web.Request) -> web.Response:
        found, step = self._log(request), _whole(request, "step")
        return _json(await found.ask(lambda walk: step_view(walk.moment(step))))

    async def lanes(self, request: web.Request) -> web.Response:
        found, first = self._log(request), _whole(request, "first")
        last = min(_whole(request, "last"), first + WINDOW_MAX - 1)
        return _json({"lanes": await found.ask(lambda walk: lanes(walk.moments(first, last)))})

    async def find(self, request: web.Request) -> web.Response:
        """A step by something else: `event`, `request` (its arrival), or the next one with something in `column`."""
        found = self._log(request)
        if "column" in request.query:
            column, step = request.query["column"], _whole(request, "step")
            if column not in COLUMNS:
                raise UnusableLog(f"there is no column {column}: ask for one of {', '.join(COLUMNS)}")
            return _json({"step": found.overview.next_with(column, step, "back" not in request.query)})
        if "request" in request.query:
            what, wanted, last = "request", _whole(request, "request"), found.walk.requests
        else:
            what, wanted, last = "event", _whole(request, "event"), found.walk.events
        if not 0 <= wanted < last:
            raise UnusableLog(f"{what} {wanted} is not in this log: it has {last} of them")
        return _json({"step": await found.ask(lambda walk: _step_after(walk, what, wanted))})

    async def difference(self, request: web.Request) -> web.Response:
        """The first step in which two logs differ, None where they do not."""
        if len(self.opened) < 2:
            raise UnusableLog("one log has nothing to differ from: open a second one beside it")
        one, other = (each.log for each in self.opened[:2])
        found = await asyncio.to_thread(diff, one, other)
        return _json({"step": None if found.same else found.step})

    def _log(self, request: web.Request) -> Shown:
        number = _whole(request, "log", 0)
        if not 0 <= number < len(self.opened):
            raise UnusableLog(f"there is no log {number}: {len(self.opened)} are open, counted from 0")
        return self.opened[number]


def _step_after(walk: Walk, what: Kind, wanted: int) -> int:
    """The first step whose state has passed an event or a request; the last one if none has."""
    for number in range(max(walk.place(what, wanted).state.planned, walk.first_step), walk.last_step + 1):
        after = walk.moment(number).after
        if (after.next_id if what == "request" else after.sequence) > wanted:
            return number
    return walk.last_step


def _whole(request: web.Request, name: str, default: int | None = None) -> int:
    text = request.query.get(name)
    if text is None and default is not None:
        return default
    try:
        return int(text or "")
    except ValueError:
        raise UnusableLog(f"{name} must be a whole number, not {text!r}") from None


def _json(value: object) -> web.Response:
    return web.Response(body=msgspec.json.encode(value), content_type="application/json")


@functools.cache
def page_file(name: str) -> bytes | None:
    """A file of the page, None if it has none of this name."""
    found = resources.files("vnext.replay.ui") / "page" / name
    return found.read_bytes() if Path(name).suffix in PAGE and found.is_file() else None


async def _page(request: web.Request) -> web.Response:
    name = request.match_info.get("name") or "index.html"
    body = page_file(name)
    if body is None:
        raise web.HTTPNotFound(text=f"the page has no file {name}")
    return web.Response(body=body, content_type=PAGE[Path(name).suffix], charset="utf-8")


@web.middleware
async def guard(request: web.Request, handler: Callable) -> web.StreamResponse:
    """Loopback hosts only; one sentence for what cannot be answered, how far the index is for what cannot be answered yet;
    headers that keep the page to itself."""
    host = request.host.rsplit(":", 1)[0] if not request.host.endswith("]") else request.host
    if host not in HOSTS:
        raise web.HTTPForbidden(text=f"ask for 127.0.0.1, not for {host}")
    try:
        response = await handler(request)
    except UnusableLog as error:
        response = web.json_response({"error": str(error)}, status=400)
    except Indexing as waiting:
        response = web.json_response({"indexing": [waiting.done, waiting.total]}, status=202)
    response.headers["Content-Security-Policy"] = POLICY
    response.headers["Cache-Control"] = "no-store"
    response.headers["X-Content-Type-Options"] = "nosniff"
    return response


def make_app(opened: list[Shown]) -> web.Application:
    """The application for these logs."""
    pages, app = Pages(opened), web.Application(middlewares=[guard])
    for name in ("logs", "overview", "step", "lanes", "find", "difference"):
        app.router.add_get(f"/api/{name}", getattr(pages, name))
    app.router.add_get("/", _page)
    app.router.add_get("/{name}", _page)
    return app


async def serve(opened: list[Shown], port: int, ready: Callable[[str], None]) -> None:
    """Serve until cancelled. `ready` gets the address once it can be opened. UnusableLog if the port is taken."""
    runner = web.AppRunner(make_app(opened), access_log=None)
    await runner.setup()
    try:
        site = web.TCPSite(runner, "127.0.0.1", port)
        try:
            await site.start()
        except OSError as error:
            raise UnusableLog(f"port {port} cannot be used ({error.strerror}): choose another with --port") from error
        ready(f"http://127.0.0.1:{runner.addresses[0][1]}/")
        await asyncio.Event().wait()
    finally:
        await runner.cleanup()
