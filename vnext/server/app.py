"""App: the application over the table of routes, and the runner that cancels a view when its client disconnects.

`run` owns the process.
"""

from __future__ import annotations

import logging
from pathlib import Path

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

from vnext.runtime.client.engines import AnyEngineClient
from vnext.server.batches.service import BATCHES, Batches
from vnext.server.console import curl_line
from vnext.server.context.server_context import SERVER_CONTEXT, ServerContext
from vnext.server.http.background import BACKGROUND, Background, close_background
from vnext.server.http.connections import CONNECTIONS, Connections, Runner
from vnext.server.http.middleware import FRONT, OPEN, OPERATORS, Front, add_headers, observe, translate
from vnext.server.http.siblings import SIBLINGS, Siblings, close_siblings
from vnext.server.http.streaming import TURN, Turn
from vnext.server.load_line import report_load
from vnext.server.responses.store import ResponseStore
from vnext.server.routes import ROUTES
from vnext.server.settings import ServerSettings
from vnext.server.views import welcome
from vnext.server.views.log_view import FOLLOWERS, READERS, Readers, end_streams
from vnext.server.views.responses import RESPONSES
from vnext.server.views.weights import TRAINER, Trainer
from vnext.text.template import ChatTemplate
from vnext.text.tokenizer import Tokenizer

CLIENT_FAULTS = (HttpProcessingError, web.RequestPayloadError, OSError)
KEPT_BY_FIRST = ("/v1/files", "/v1/batches")
CLEANUP_TIMEOUT_S = 2.0  # after the drain, only aborted requests are left


def make_app(
    client: AnyEngineClient, tokenizer: Tokenizer, template: ChatTemplate | None, settings: ServerSettings
) -> web.Application:
    """The application over a connected engine client. Serve it with `make_runner`."""
    app = web.Application(middlewares=[observe, translate])
    app.on_response_prepare.append(add_headers)
    app[SERVER_CONTEXT] = ServerContext(client, tokenizer, template, settings)
    app[FRONT] = _front(app[SERVER_CONTEXT])
    app[RESPONSES] = ResponseStore(settings.responses_bytes_max, _stored_at(settings))
    app[BACKGROUND] = Background(settings.responses_bytes_max)
    app[SIBLINGS] = Siblings(settings)
    app.on_cleanup.extend((close_background, close_siblings))
    app[CONNECTIONS] = Connections(settings, app[SERVER_CONTEXT].metrics.closed.add)
    if settings.batch_dir and app[SIBLINGS].is_first:
        app[BATCHES] = Batches(app[SERVER_CONTEXT])
    app.on_cleanup.append(_close_work)
    app[TRAINER] = Trainer(client, settings)
    app[READERS], app[FOLLOWERS] = Readers(), set()
    app.on_shutdown.append(end_streams)
    app[TURN] = Turn(settings.sse_ping_interval_s)
    app.cleanup_ctx.append(report_load)
    app[welcome.ROUTES] = ROUTES
    app[welcome.EXAMPLE] = lambda url: curl_line(url, chat=template is not None, has_key=settings.needs_key)
    for prefix in dict.fromkeys(("", settings.root_path)):
        for route in ROUTES:
            is_kept = route.path.startswith(KEPT_BY_FIRST) and not app[SIBLINGS].is_first
            app.add_routes([getattr(web, route.method.lower())(prefix + route.path, _of_first if is_kept else route.view)])
    return app


async def _of_first(request: web.Request) -> web.StreamResponse:
    return await request.app[SIBLINGS].first(request)


def make_runner(app: web.Application) -> web.AppRunner:
    """A runner that cancels a view when its client disconnects, streaming or not; the view then aborts its requests."""
    return _Runner(
        app,
        app[CONNECTIONS],
        handler_cancellation=True,
        access_log=None,
        keepalive_timeout=app[SERVER_CONTEXT].settings.keepalive_timeout_s,
        auto_decompress=False,  # `bodies` decompresses within the bound
        logger=protocol_log(),
        shutdown_timeout=CLEANUP_TIMEOUT_S,
    )


class _Runner(Runner):
    """A runner that also serves siblings, and runs the application's batches, which ask the server that it serves."""

    async def setup(self) -> None:
        await super().setup()
        await self.app[SIBLINGS].start(self)
        if BATCHES in self.app:
            await self.app[BATCHES].start(self)

    async def cleanup(self) -> None:
        if BATCHES in self.app:
            await self.app[BATCHES].stop()
        await super().cleanup()


def _stored_at(settings: ServerSettings) -> Path | None:
    """The folder of the responses that this API server and those before it in its place have stored."""
    place = settings.number % settings.api_server_count
    return Path(settings.shared_dir) / f"api-{place}.responses" if settings.shared_dir else None


def _front(context: ServerContext) -> Front:
    log, count = logging.getLogger("vnext.server"), context.metrics.http_request
    open_paths = OPEN | welcome.PAGE_PATHS
    return Front(context.settings, context.keys, bool(context.keys), log, count, open_paths, OPERATORS)


async def _close_work(app: web.Application) -> None:
    app[SERVER_CONTEXT].work.close()
    if (images := app[SERVER_CONTEXT].images) is not None:
        images.close()
    if (traces := app[SERVER_CONTEXT].traces) is not None:
        await traces.close()


def protocol_log() -> logging.Logger:
    """The logger of aiohttp for everything below the views. A client's faults are not logged as errors of this server."""
    logger = logging.getLogger("vnext.server.http")
    logger.addFilter(_own_faults)
    return logger


def _own_faults(record: logging.LogRecord) -> bool:
    """Whether to log the record. A client's faults are logged at the level debug at most."""
    fault = record.exc_info[1] if record.exc_info else None
    if not isinstance(fault, CLIENT_FAULTS):
        return True
    record.levelno, record.levelname, record.exc_info = logging.DEBUG, "DEBUG", None
    record.msg, record.args = f"{record.getMessage()}: {' '.join(str(fault).split())[:200]!r}", ()
    return logging.getLogger(record.name).isEnabledFor(logging.DEBUG)
