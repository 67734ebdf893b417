"""Views beside generation: which models there are, whether the server is well, its version and its metrics."""

from __future__ import annotations

from typing import Any

from aiohttp import web

from vnext.runtime.client import EngineDead
from vnext.server.edge import EDGE, Edge
from vnext.version import __version__


async def list_models(request: web.Request) -> web.Response:
    """GET /v1/models."""
    edge = request.app[EDGE]
    return web.json_response({"object": "list", "data": [_model(edge, name) for name in edge.model_names]})


async def get_model(request: web.Request) -> web.Response:
    """GET /v1/models/{model}."""
    edge = request.app[EDGE]
    return web.json_response(_model(edge, edge.model_name(request.match_info["model"])))


async def get_health(request: web.Request) -> web.Response:
    """GET /health, and /ping for who asks by that name: 200 while requests are taken and the engine core lives, else 503."""
    edge = request.app[EDGE]
    edge.gate.check_open()
    if edge.client.death is not None:
        raise EngineDead(edge.client.death)
    return web.json_response({"status": "ok"})


async def get_version(request: web.Request) -> web.Response:
    """GET /version."""
    return web.json_response({"version": __version__})


async def get_metrics(request: web.Request) -> web.Response:
    """GET /metrics."""
    text = request.app[EDGE].metrics.text()
    return web.Response(body=text, headers={"Content-Type": "text/plain; version=0.0.4; charset=utf-8"})


def _model(edge: Edge, name: str) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": edge.started_s,
        "owned_by": "vnext",
        "max_model_len": edge.model_length,
    }
