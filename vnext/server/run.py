"""Run: the API process. Binds the port, connects to the engine core, serves, and drains when it is asked to end.

Owns the process's signals, its log level and its exit code. First SIGTERM: no new requests, the live ones may finish
within `drain_s`; second: they are aborted at once. Both end with exit code 0.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
import sys
from types import FrameType

import msgspec
from aiohttp import web

from vnext.exits import DONE, FAILED, REFUSED
from vnext.runtime.client import EngineClient
from vnext.runtime.output_stream import EngineDead, EngineNotStarted
from vnext.server.address import AddressUnusable, bind, unusable
from vnext.server.app import make_app, make_runner
from vnext.server.edge import EDGE, template_of
from vnext.server.say import say
from vnext.server.settings import ServerSettings
from vnext.server.text.files import CheckpointUnreadable
from vnext.server.text.template import TemplateUnreadable
from vnext.server.text.tokenizer import Tokenizer

ABORT_TIMEOUT_S = 2.0
_BACKLOG = 1024


def run_server(settings: ServerSettings, engine_address: str, model_path: str) -> int:
    """Serve until SIGTERM; returns the process's exit code. Says on stderr in one sentence why it could not start."""
    logging.basicConfig(level=settings.log_level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    signal.signal(signal.SIGTERM, _leave)
    settings = msgspec.structs.replace(settings, engine_address=engine_address, model_path=model_path)
    try:
        asyncio.run(_serve(settings))
    except asyncio.CancelledError:
        return DONE  # SIGTERM, see _leave_waiting
    except EngineNotStarted:
        return FAILED  # the launcher says why
    except (AddressUnusable, CheckpointUnreadable, TemplateUnreadable, EngineDead) as error:
        print(f"vnext serve: {str(error).rstrip('.')}.", file=sys.stderr, flush=True)
        return FAILED if isinstance(error, EngineDead) else REFUSED
    return DONE


async def _serve(settings: ServerSettings) -> None:
    with bind(settings.host, settings.port) as listener:
        tokenizer = Tokenizer.load(settings.model_path)
        template = template_of(tokenizer, settings)  # what is wrong with it is said before a model is loaded for nothing
        _leave_waiting()
        client = await EngineClient.connect(settings.engine_address, settings.connect_timeout_s)
        try:
            app = make_app(client, tokenizer, template, settings)
            await _serve_until_signal(app, client, listener, settings)
        finally:
            await client.close()


async def _serve_until_signal(
    app: web.Application, client: EngineClient, listener: socket.socket, settings: ServerSettings
) -> None:
    runner = make_runner(app)
    await runner.setup()
    site = web.SockSite(runner, listener, backlog=_BACKLOG)
    stop = _stop_on_sigterm(client)
    try:
        await _listen(site, settings)
        host, port = listener.getsockname()[:2]
        say(f"vnext: serving {', '.join(app[EDGE].model_names)} on {_url(host, port)}")
        await stop.wait()
        await drain(app, site, settings.drain_s)
    finally:
        await runner.cleanup()


async def drain(app: web.Application, site: web.BaseSite, drain_s: float) -> None:
    """Take nothing new, wait for the live answers, then abort what is left."""
    edge = app[EDGE]
    edge.gate.close()
    await site.stop()
    if not await edge.gate.wait_empty(drain_s):
        edge.client.abort_all("shutdown")
        await edge.gate.wait_empty(ABORT_TIMEOUT_S)


def _leave(number: int, frame: FrameType | None) -> None:
    """SIGTERM before the engine core is asked for: there is nothing to close."""
    raise SystemExit(DONE)


def _leave_waiting() -> None:
    """From now on SIGTERM cancels what this task waits for. A plain handler runs when the interpreter does: one that came right
    before the loop began to wait would not, and its exception might leave a socket half made, for which ZMQ waits for ever."""
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, asyncio.current_task().cancel)


def _stop_on_sigterm(client: EngineClient) -> asyncio.Event:
    stop = asyncio.Event()

    def on_signal() -> None:
        if stop.is_set():
            client.abort_all("shutdown")
        stop.set()

    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, on_signal)
    return stop


async def _listen(site: web.SockSite, settings: ServerSettings) -> None:
    try:
        await site.start()
    except OSError as error:  # another program bound the port as we did, and listened first
        raise unusable(error, settings.host, settings.port) from error


def _url(host: str, port: int) -> str:
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
