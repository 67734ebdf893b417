"""Measure a viewer's cost in a running server: `python -m perf.viewing --seconds 150 --json RECORD`.

Owns the pairing. A server with `--show-log` decodes full batches (perf.recording). In every second stretch of STRETCH_S the
viewer `vnext-replay ui --live` follows it and is polled twice a second, as its page does. The figures describe the API server's
process, which answers the viewer: its share of one core, and tokens per second. The viewer's own process and the stretch in
which it starts are not counted.
"""

from __future__ import annotations

import contextlib
import json
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from typing import Any

from perf.record import parser_of, record_of, write_record
from perf.recording import BATCH, Server, fresh_prompts
from vnext.commands.bench.load.blocking import BlockingClient
from vnext.commands.machine import machine

STRETCH_S = 10.0
ANSWER_LENGTH = 64
NEWS_S = 0.5
END_S = 20


def main() -> int:
    parser = parser_of(__doc__)
    parser.add_argument("--seconds", type=float, default=150.0)
    options = parser.parse_args()
    before = machine()
    stretches = measured(options.seconds)
    modes = (("alone", False), ("viewed", True))
    found = {name: summary([each for each in stretches if each["viewer"] == viewer]) for name, viewer in modes}
    print(json.dumps(found))
    command = "python -m perf.viewing --seconds N --json RECORD"
    write_record(options.json, record_of(command, before, {"summary": found, "stretches": stretches}))
    return 0


def measured(seconds: float) -> list[dict[str, Any]]:
    """Run alternating stretches without and with a viewer."""
    rng, found = random.Random(0), []
    with tempfile.TemporaryDirectory(prefix="vnext-viewing-") as folder:
        with Server("shape", folder, 1, options=("--show-log",)) as server:
            until_s = time.monotonic() + seconds
            ask(server, rng)
            while time.monotonic() < until_s:
                for viewer in (False, True):
                    with viewing(server.address) if viewer else contextlib.nullcontext() as page:
                        found.append({"viewer": viewer} | stretch(server, rng, page))
    return found


def ask(server: Server, rng: random.Random) -> int:
    server.ask(fresh_prompts(rng), ANSWER_LENGTH)
    return BATCH * ANSWER_LENGTH


def stretch(server: Server, rng: random.Random, page: BlockingClient | None) -> dict[str, float]:
    """Make calls for STRETCH_S; return the API server's processor time in shares of one core."""
    process, tokens = server.api, 0
    began_s, cpu_s = time.perf_counter(), sum(process.cpu_times()[:2])
    news_s, reported = 0.0, {}
    while (now_s := time.perf_counter()) < began_s + STRETCH_S:
        tokens += ask(server, rng)
        if page is not None and now_s - news_s > NEWS_S:
            reported, news_s = page.ask("/api/logs", None, dict), now_s
    took_s = time.perf_counter() - began_s
    assert page is None or reported["logs"][0]["live"]["condition"] == "live", reported
    return {"core_share": (sum(process.cpu_times()[:2]) - cpu_s) / took_s, "tokens_per_s": tokens / took_s}


@contextlib.contextmanager
def viewing(address: str) -> Iterator[BlockingClient]:
    """Start a viewer, wait until it has read the existing log, and yield a client of its page."""
    command = [sys.executable, "-m", "vnext.replay", "ui", f"http://{address}", "--live", "--json"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        page = BlockingClient(json.loads(process.stdout.readline())["address"], timeout_s=END_S)
        while True:
            live = page.ask("/api/logs", None, dict)["logs"][0]["live"]
            if not live["behind"]:
                break
            time.sleep(NEWS_S)
        yield page
    finally:
        process.terminate()
        process.wait(END_S)


def summary(stretches: list[dict[str, Any]]) -> dict[str, Any]:
    return {"stretches": len(stretches)} | {
        name: {"median": round(statistics.median(values), 4), "least": round(min(values), 4), "most": round(max(values), 4)}
        for name in ("core_share", "tokens_per_s")
        for values in [[each[name] for each in stretches]]
    }


if __name__ == "__main__":
    sys.exit(main())
