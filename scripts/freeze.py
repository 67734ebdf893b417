"""Freeze processes of a server under load: `python scripts/freeze.py [--seconds 14] [--json RECORD]`.

Owns the load (streams over the bundled model), SIGSTOP and SIGCONT of one process, and the checks: every stream continues
with the tokens it has without a freeze, none lost and none repeated; while the engine core or a rank is frozen, /health
answers 503 with the reason; afterwards it answers 200. Each frozen process gets its own server.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import msgspec
import psutil

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from vnext.base.version import __version__  # noqa: E402
from vnext.commands.bench.load.answers import RequestFailed  # noqa: E402
from vnext.commands.bench.load.client import COMPLETIONS, Client  # noqa: E402
from vnext.commands.machine import machine  # noqa: E402

PROCESSES = {"engine core": "vnext.runtime.engine.main", "API server": "vnext.server", "rank": "vnext.runtime.rank.main"}
WHILE_FROZEN = {
    "engine core": r"The engine core has not answered for \d+ s: its process is stopped",
    "rank": r"The engine is stalled: step \d+ has had no result for \d+ s: rank 0 \(process \d+\) is stopped by a signal\.",
}
"""What /health must report; a frozen API server reports nothing."""
COMMON = ("--dtype", "float32", "--threads", "1")
STREAMS, TOKENS = 6, 400
POLL_S, SOON_S = 0.5, 10.0


class Frozen(msgspec.Struct, frozen=True, kw_only=True):
    """One freeze. `unhealthy_after_s`: when /health first answered 503, None if never. `wrong` is "" if all is well."""

    process: str
    seconds: float
    tokens: int
    unhealthy_after_s: float | None
    said: str
    healthy_after_s: float
    wrong: str


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=14.0)
    parser.add_argument("--json", type=Path, help="record to write")
    options = parser.parse_args()
    before, found = machine(), []
    for process in PROCESSES:
        found.append(frozen := freeze(process, options.seconds))
        print(f"{process:12} {frozen.seconds:g} s, {frozen.tokens} tokens: {frozen.wrong or 'all is well'}", flush=True)
    if options.json:
        record = {
            "command": f"python scripts/freeze.py --seconds {options.seconds:g} --json RECORD",
            "measured_at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            "vnext": __version__,
            "machine": msgspec.to_builtins(before),
            "freezes": msgspec.to_builtins(found),
        }
        options.json.write_text(json.dumps(record, indent=1) + "\n")
    return int(any(frozen.wrong for frozen in found))


def freeze(process: str, seconds: float) -> Frozen:
    """Start a server, load it, freeze one of its processes for `seconds`, and check the outcome."""
    with tempfile.TemporaryDirectory(prefix="vnext-freeze-") as folder:
        server = subprocess.Popen(
            [sys.executable, "-m", "vnext.commands.cli", "serve", "--port", "0", "--log-dir", folder, *COMMON],
            stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env={**os.environ, "PYTHONPATH": str(ROOT)},
        )  # fmt: skip
        try:
            said = "".join(iter(server.stdout.readline, "vnext: Ctrl-C stops\n"))
            family = psutil.Process(server.pid).children(recursive=True)
            target = next(child for child in family if PROCESSES[process] in child.cmdline())
            return asyncio.run(freeze_under_load(re.search(r"http://[\d.:]+", said)[0], process, target, seconds))
        finally:
            server.terminate()
            server.wait()
            server.stdout.close()


async def freeze_under_load(url: str, process: str, target: psutil.Process, seconds: float) -> Frozen:
    async with Client(url) as client:
        usual = await asyncio.gather(*(stream(client, index) for index in range(STREAMS)))
        begun = [asyncio.Event() for _ in range(STREAMS)]
        streams = [asyncio.create_task(stream(client, index, begun[index])) for index in range(STREAMS)]
        await asyncio.gather(*(event.wait() for event in begun))
        os.kill(target.pid, signal.SIGSTOP)
        try:
            unhealthy_after_s, said = await first_trouble(client, seconds)
        finally:
            os.kill(target.pid, signal.SIGCONT)
        began_s = time.monotonic()
        while (await health(client))[0] != 200 and time.monotonic() < began_s + SOON_S:
            await asyncio.sleep(0.05)
        healthy_after_s = time.monotonic() - began_s
        reported = await asyncio.gather(*streams, return_exceptions=True)
    wrong = [
        f"stream {index} differs: {tokens!r:.200}"
        for index, tokens in enumerate(reported) if tokens != usual[index] or len(tokens) != TOKENS
    ]  # fmt: skip
    if not re.match(WHILE_FROZEN.get(process, "$"), said):
        wrong.append(f"/health said {said!r}")
    if healthy_after_s > SOON_S:
        wrong.append(f"/health was not 200 within {SOON_S:g} s")
    return Frozen(
        process=process, seconds=seconds, tokens=STREAMS * TOKENS, unhealthy_after_s=unhealthy_after_s, said=said,
        healthy_after_s=round(healthy_after_s, 2), wrong="; ".join(wrong),
    )  # fmt: skip


async def first_trouble(client: Client, seconds: float) -> tuple[float | None, str]:
    """Poll /health for `seconds`: when it first answered 503, and its last sentence."""
    began_s, after_s, said = time.monotonic(), None, ""
    while (passed_s := time.monotonic() - began_s) < seconds:
        status, sentence = await health(client)
        if status == 503:
            after_s, said = after_s or round(passed_s, 1), sentence
        await asyncio.sleep(POLL_S)
    return after_s, said


async def health(client: Client) -> tuple[int, str]:
    """Return (status, error sentence); status 0 means no answer in time."""
    try:
        status, data = await client.answer("/health", timeout_s=POLL_S)
        return status, json.loads(data).get("error", {}).get("message", "")
    except RequestFailed as error:
        if error.kind != "timeout":
            raise
        return 0, ""


async def stream(client: Client, index: int, begun: asyncio.Event | None = None) -> list[int]:
    """Return the token ids of one streamed answer."""
    body: dict[str, Any] = {
        "prompt": f"def f{index}(", "max_tokens": TOKENS, "ignore_eos": True, "seed": index, "stream": True,
        "return_token_ids": True,
    }  # fmt: skip
    tokens: list[int] = []
    async for chunk in client.stream(COMPLETIONS, body):
        tokens += chunk.token_ids
        if begun is not None:
            begun.set()
    return tokens


if __name__ == "__main__":
    sys.exit(main())
