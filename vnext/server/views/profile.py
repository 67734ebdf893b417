"""Profile views: the kernels' calls of the engine's next steps, within its log's timeline, by vLLM's names.

Owns the files beside the log. A process of its own reads the log and draws, so that answers go on; with --show-log and to viewers
of the log alone. Of several engines the first one is drawn.
"""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path

import msgspec
from aiohttp import web

from vnext.runtime.client.pending_operations import NotDone
from vnext.runtime.protocol.operations import CallRanks
from vnext.server.context.server_context import SERVER_CONTEXT
from vnext.server.views.log_view import log_folder

KEPT = 8
"""Profiles beside a log; the oldest one goes."""
DRAWING_TIMEOUT_S = 300.0


async def start_profile(request: web.Request) -> web.Response:
    """POST /start_profile: {"room": calls of kernels on each rank}. Raises LogHidden, and NotDone where a profile runs already."""
    log_folder(request)
    rooms = await request.app[SERVER_CONTEXT].client.operate(CallRanks(function="start_profile"))
    return web.json_response({"room": min(rooms)})


async def stop_profile(request: web.Request) -> web.Response:
    """POST /stop_profile: what `vnext-replay profile --calls` says, with the path of the timeline. Raises as start_profile."""
    folder, client = log_folder(request), request.app[SERVER_CONTEXT].client
    values = await client.operate(CallRanks(function="stop_profile"))
    calls = await asyncio.to_thread(_write, folder, msgspec.json.encode(values[: client.ready.world_size]))
    words = ("profile", str(folder), "--calls", str(calls), "-o", str(calls.with_suffix(".json")), "--json")
    drawing = await asyncio.create_subprocess_exec(
        sys.executable, "-P", "-m", "vnext.replay", *words, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
        umask=0o077,
    )
    try:
        printed, complaint = await asyncio.wait_for(drawing.communicate(), DRAWING_TIMEOUT_S)
    except TimeoutError:
        raise NotDone(f"the timeline was not drawn within {DRAWING_TIMEOUT_S:g} s; the calls are in {calls}") from None
    finally:
        if drawing.returncode is None:
            drawing.kill()
    if drawing.returncode:
        raise NotDone(f"the timeline was not drawn: {complaint.decode(errors='replace').strip()[-500:].rstrip('.')}")
    return web.Response(body=printed, content_type="application/json")


def _write(folder: Path, data: bytes) -> Path:
    """A file of its own for these calls. Raises NotDone."""
    older = sorted(folder.glob("profile-*.calls"))
    number = int(older[-1].stem.rpartition("-")[2]) + 1 if older else 1
    path = folder / f"profile-{number:06}.calls"
    try:
        with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            file.write(data)
        for each in older[: max(0, len(older) + 1 - KEPT)]:
            each.unlink(missing_ok=True)
            each.with_suffix(".json").unlink(missing_ok=True)
    except OSError as error:
        raise NotDone(f"the calls cannot be written beside the log: {error}") from error
    return path
