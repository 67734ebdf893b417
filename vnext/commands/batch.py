"""`vnext batch FILE -o OUT`: answers a file of requests with an engine of its own, and ends.

The lines are those of /v1/batches. The requests go through an API server on a port of this machine that only this program
knows the key of. An OUT that exists already is continued: what it answers is not asked again.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import sys
import time
from contextlib import closing
from pathlib import Path

from aiohttp import ClientError
from tqdm import tqdm

from vnext.base.exits import DONE, FAILED, INTERRUPTED, REFUSED
from vnext.commands.api_servers import ApiServers
from vnext.commands.serve import fail, start
from vnext.options.reader import BatchCommand, ServeCommand
from vnext.runtime.processes.launch import StartFailed
from vnext.runtime.processes.replicas import RunningEngines
from vnext.runtime.processes.subprocesses import ChildDied
from vnext.server.batches.lines import Answer, LineBounds, Request, answered, faults_of, requests_of, result_line
from vnext.server.batches.service import asker, session
from vnext.server.batches.worker import run_requests
from vnext.server.settings import ServerSettings

POLL_S = 0.05
BOUNDS = LineBounds(ServerSettings().body_bytes_max, ServerSettings().body_bytes_max)
"""Of a line: as many values as there is room for; the server judges them."""


def batch(command: BatchCommand) -> int:
    """Run the command; returns the exit status (exits.py)."""
    source, target = Path(command.file).expanduser(), Path(command.output).expanduser()
    if (why := _unusable(source, target)) is not None:
        print(f"vnext batch: {why}", file=sys.stderr)
        return REFUSED
    server = ServerSettings(host="127.0.0.1", port=0, api_keys=(secrets.token_hex(),), log_level="error")
    try:
        engines, edges = start(ServeCommand(engine=command.engine, server=server))
    except (StartFailed, ChildDied) as error:
        return fail(error)
    try:
        while not edges.is_healthy():
            edges.check_alive()
            time.sleep(POLL_S)
        in_batches = len(engines.engines) * engines.ready.config.max_num_seqs
        width = max(1, min(edges.settings.live_requests_max // 2, 2 * in_batches))
        bad, lost = asyncio.run(_answer(source, target, edges.settings, (engines, edges), width))
    except ChildDied as error:
        return fail(error, engines.log_dir)
    except ClientError:
        raise  # some are an OSError, of a connection
    except OSError as error:
        why = f"{target} cannot be written ({error.strerror})"
        print(f"vnext batch: {why}: make room, and the same command goes on where it ends", file=sys.stderr)
        return FAILED
    except KeyboardInterrupt:
        print(f"vnext batch: stopped; the same command goes on where {target} ends", file=sys.stderr)
        return INTERRUPTED
    finally:
        edges.end()
        engines.stop()
    new_errors = f"; {bad} of the new ones are errors" if bad else ""
    no_answers = f"; the server failed on {lost} others, and the same command asks them again" if lost else ""
    print(f"vnext batch: {target} has {len(answered(target))} answers{new_errors}{no_answers}", file=sys.stderr)
    return FAILED if lost else DONE


def _unusable(source: Path, target: Path) -> str | None:
    """Why the files cannot be used, before a model is loaded for them."""
    try:
        count, faults = faults_of(source, BOUNDS, "")
        if faults:
            return f"{source}: {faults[0].message}"
        answered(target)
        target.open("ab").close()
    except OSError as error:
        return f"{error.filename} cannot be used ({error.strerror}): name another file."
    except (ValueError, RecursionError):
        return f"{target} holds something else than answers of a batch: name another file with -o."
    return None if count else f"{source} holds no request."


async def _answer(
    source: Path, target: Path, settings: ServerSettings, watched: tuple[RunningEngines, ApiServers], width: int
) -> tuple[int, int]:
    """Answer what `target` does not answer yet; returns the number of errors among the new answers, and of requests on which the
    server failed, which are left out. Raises ChildDied."""
    done, bad, lost = answered(target), 0, 0
    left = [each for each in requests_of(source, BOUNDS) if isinstance(each, Request) and each.custom_id not in done]
    client = session(settings.api_keys[0])
    with target.open("ab") as file, closing(tqdm(total=len(left), desc="answers", unit="answer", disable=None)) as bar:

        def keep(request: Request, answer: Answer) -> None:
            nonlocal bad, lost
            if answer.is_fault:
                lost += 1
                return
            bad += not answer.is_good
            file.write(result_line(request.custom_id, answer))
            file.flush()
            bar.update()

        def is_free() -> bool:
            for each in watched:
                each.check_alive()
            return True

        async with client:
            ask = asker(client, f"http://{settings.host}:{settings.port}")
            await run_requests(left, ask, keep, width, is_free)
        os.fsync(file.fileno())
    return bad, lost
