"""App: the routes, and the runner under which a client's disconnect cancels its view.

Owns the table of paths. `run` owns the process around it.
"""

from __future__ import annotations

from aiohttp import web

from vnext.runtime.client import EngineClient
from vnext.server.chat import create_chat_completion
from vnext.server.completions import create_completion
from vnext.server.edge import EDGE, Edge
from vnext.server.log_view import READERS, Readers, list_segments, read_segment
from vnext.server.middleware import authorise, observe, translate
from vnext.server.operations import get_health, get_metrics, get_model, get_version, list_models
from vnext.server.settings import ServerSettings
from vnext.server.text.template import ChatTemplate
from vnext.server.text.tokenizer import Tokenizer
from vnext.server.tokens import detokenize, tokenize

CLEANUP_TIMEOUT_S = 2.0  # after the drain only what has been aborted is left


def make_app(
    client: EngineClient, tokenizer: Tokenizer, template: ChatTemplate | None, settings: ServerSettings
) -> web.Application:
    """The application over a connected client. Serve it with `make_runner`."""
    app = web.Application(client_max_size=settings.body_bytes_max, middlewares=[observe, translate, authorise])
    app[EDGE] = Edge(client, tokenizer, template, settings)
    app[READERS] = Readers()
    app.add_routes(
        [
            web.get("/v1/models", list_models),
            web.get("/v1/models/{model:.+}", get_model),
            web.post("/v1/completions", create_completion),
            web.post("/v1/chat/completions", create_chat_completion),
            web.post("/tokenize", tokenize),
            web.post("/detokenize", detokenize),
            web.get("/health", get_health),
            web.get("/ping", get_health),
            web.post("/ping", get_health),
            web.get("/version", get_version),
            web.get("/metrics", get_metrics),
            web.get("/log", list_segments),
            web.get(r"/log/{segment:\d{1,9}}", read_segment),
        ]
    )
    return app


def make_runner(app: web.Application) -> web.AppRunner:
    """A runner that cancels a view when its client disconnects, streaming or not: that aborts its requests."""
    return web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=CLEANUP_TIMEOUT_S)
