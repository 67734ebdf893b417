"""Kills a server under load and reads what it left: `python scripts/kill_under_load.py --kills 100 --jobs 2 --json RECORD`.

Owns the load (streams, some of which hang up, over the bundled model), the instant and order of the kills, and the judgement:
all processes of a real `vnext serve` get SIGKILL at an instant that the seed draws; then its log must verify under all laws,
and hold every token that any client had been told. Forms of server take turns: without texts and with them, durable or not,
segments of a quarter of a second in a ring, one process, two ranks. A record grows with each call; logs that fail are kept.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import psutil

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from vnext.machine import machine  # noqa: E402
from vnext.replay.folding import Folded, fold  # noqa: E402
from vnext.replay.info import info  # noqa: E402
from vnext.replay.source import Log, open_log  # noqa: E402
from vnext.replay.times import stamps_of  # noqa: E402
from vnext.replay.verify import verify  # noqa: E402
from vnext.state.events import RequestArrived  # noqa: E402
from vnext.state.outputs import outputs  # noqa: E402
from vnext.version import __version__  # noqa: E402

COMMON = ("--dtype", "float32", "--threads", "1", "--digest-interval", "4", "--max-num-batched-tokens", "256")
RING = ("--log-max-age", "1")
FORMS = {
    "shape": (),
    "full": ("--log", "full"),
    "shape, durable": ("--durable",),
    "full, durable": ("--log", "full", "--durable"),
    "shape, ring": RING,
    "full, ring, durable": ("--log", "full", "--durable", *RING),
    "full, one process": ("--log", "full", "--executor", "inproc"),
    "shape, few blocks": ("--num-blocks-override", "80"),
    "full, two ranks": ("--log", "full", "--tensor-parallel-size", "2"),
}
CLIENTS = 24
VOCABULARY = 3000
KILL_AFTER_S = (0.02, 2.5)
START_TIMEOUT_S = 120
FAILURES = "kill-failures"

Told = dict[str, list[int]]


class Killed(msgspec.Struct, frozen=True, kw_only=True):
    """One kill and what was found. `told` tokens had reached clients; `end` is how the log ends; `wrong` is "" if all is well."""

    seed: int
    form: str
    killed_after_s: float
    processes: int
    requests: int
    told: int
    steps: int
    frames: int
    segments: int
    first_event: int
    bytes: int
    stamped_frames: int
    end: str
    ignored_bytes: int
    frames_lost: int
    wrong: str


def main() -> int:
    options = parsed()
    seeds = range(options.seed, options.seed + options.kills)
    forms = [name for name in FORMS if options.form in name]
    before, began_s = machine(), time.monotonic()
    with ProcessPoolExecutor(options.jobs, mp_context=multiprocessing.get_context("spawn")) as pool:
        kills = []
        for killed in pool.map(kill, seeds, (forms[seed % len(forms)] for seed in seeds)):
            kills.append(killed)
            found = f"{killed.steps:5} steps, {killed.told:5} told, {killed.end:8} {killed.wrong}"
            print(f"{killed.seed:5} {killed.form:20} {found}", flush=True)
    if options.json:
        add_to_record(options.json, kills, before, time.monotonic() - began_s)
    wrong = [killed.seed for killed in kills if killed.wrong]
    but = f"; not {wrong}" if wrong else ""
    print(f"{len(kills) - len(wrong)} of {len(kills)} logs verify and hold what clients were told{but}")
    return int(bool(wrong))


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0, help="of the first kill")
    parser.add_argument("--jobs", type=int, default=1, help="servers at once")
    parser.add_argument("--form", default="", help=f"only forms with this in their name: {'; '.join(FORMS)}")
    parser.add_argument("--json", type=Path, help="record to begin or to add to")
    return parser.parse_args()


def kill(seed: int, form: str) -> Killed:
    """Start a server, load it, kill it, judge its log. RuntimeError if it does not start."""
    chance = random.Random(seed)
    folder = Path(tempfile.mkdtemp(prefix="vnext-kill-"))
    process = subprocess.Popen(
        [sys.executable, "-m", "vnext.cli", "serve", "--port", "0", "--log-dir", str(folder), *COMMON, *FORMS[form]],
        stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    try:
        said = said_until_ready(process)
        url, log_dir = re.search(r"http://[\d.:]+", said)[0], Path(re.search(r"^vnext: log +(\S+)$", said, re.MULTILINE)[1])
        after_s, count, told = asyncio.run(load_and_kill(url, process.pid, chance))
    finally:
        process.kill()
        process.wait()
        process.stdout.close()
    killed = judged(open_log(log_dir), told, seed=seed, form=form, killed_after_s=round(after_s, 3), processes=count)
    if killed.wrong:
        shutil.copytree(log_dir, Path(FAILURES) / str(seed), dirs_exist_ok=True)
    shutil.rmtree(folder)
    return killed


def said_until_ready(process: subprocess.Popen[str]) -> str:
    lines = []
    for line in process.stdout:
        lines.append(line)
        if line.startswith("vnext: try"):
            return "".join(lines)
    raise RuntimeError(f"the server did not start: {''.join(lines)}")


# ---- load --------------------------------------------------------------------------------------------------------


async def load_and_kill(url: str, pid: int, chance: random.Random) -> tuple[float, int, Told]:
    """Clients ask until the server is gone: (seconds from their first token to the kill, processes killed, what was told)."""
    server = psutil.Process(pid)
    family = [server, *server.children(recursive=True)]
    chance.shuffle(family)
    told: Told = defaultdict(list)
    flowing, after_s = asyncio.Event(), chance.uniform(*KILL_AFTER_S)
    timeout = aiohttp.ClientTimeout(total=START_TIMEOUT_S)
    async with aiohttp.ClientSession(timeout=timeout, connector=aiohttp.TCPConnector(limit=0)) as session:
        seeds = [chance.random() for _ in range(CLIENTS)]
        clients = [asyncio.create_task(ask(session, url, random.Random(seed), told, flowing)) for seed in seeds]
        await asyncio.wait_for(flowing.wait(), START_TIMEOUT_S)
        await asyncio.sleep(after_s)
        for process in family:
            process.kill()
        await asyncio.gather(*clients)
    psutil.wait_procs(family[1:], timeout=START_TIMEOUT_S)
    return after_s, len(family), told


async def ask(session: aiohttp.ClientSession, url: str, chance: random.Random, told: Told, flowing: asyncio.Event) -> None:
    """One request after the other, until the server is gone."""
    try:
        while True:
            await stream(session, url, chance, told, flowing)
    except (aiohttp.ClientError, ConnectionError):
        return


async def stream(session: aiohttp.ClientSession, url: str, chance: random.Random, told: Told, flowing: asyncio.Event) -> None:
    """One streamed answer; one client in eight hangs up in its midst."""
    shared = [7 + 11 * place % 400 for place in range(chance.choice((0, 0, 40, 90)))]
    body = {
        "prompt": shared + [chance.randrange(5, VOCABULARY) for _ in range(chance.randint(1, 80))], "stream": True,
        "max_tokens": chance.randint(1, 120), "return_token_ids": True, "ignore_eos": chance.random() < 0.5,
        "temperature": chance.choice((0, 0.8)), "seed": chance.getrandbits(32),
    }  # fmt: skip
    leaves_after = chance.randint(1, 30) if chance.random() < 0.125 else body["max_tokens"] + 1
    async with session.post(f"{url}/v1/completions", json=body) as response:
        async for line in response.content:
            if not line.startswith(b"data: {"):
                continue
            chunk = json.loads(line[6:])
            if "error" in chunk:
                return
            for choice in chunk["choices"]:
                name = f"{chunk['id']}-{choice['index']}"
                told[name] += choice.get("token_ids", ())
                flowing.set()
                if len(told[name]) >= leaves_after:
                    return


# ---- judgement ---------------------------------------------------------------------------------------------------


def judged(log: Log, told: Told, **known: Any) -> Killed:
    """The log of a killed server, under all laws and beside what its clients were told."""
    found, verdict, stamps = info(log), verify(log, all_laws=True), stamps_of(log)
    if verdict.difference is not None:
        wrong = verdict.difference.message
    else:
        wrong = untold(log, told) if verdict.same else str(found.end)
    return Killed(
        **known, requests=found.requests, told=sum(map(len, told.values())), steps=verdict.steps, frames=found.frames,
        segments=found.segments, first_event=verdict.first_event, bytes=found.size_bytes,
        stamped_frames=0 if stamps is None else len(stamps.events), end=found.end.kind,
        ignored_bytes=found.end.ignored_bytes, frames_lost=found.frames_lost,
        wrong=wrong,
    )  # fmt: skip


def untold(log: Log, told: Told) -> str:
    """What a client was told and the log does not have, "" if nothing. Of a log without texts it is how much of it."""
    answers, arrived = answers_of(log)
    if log.header.privacy == "full":
        missing = [name for name, tokens in told.items() if name in arrived and answers[name][: len(tokens)] != tokens]
        unknown = [] if log.header.index else [name for name in told if name not in arrived]
        return f"the log lacks what was told of {(missing + unknown)[0]}" if missing + unknown else ""
    have, known = sum(map(len, answers.values())), sum(map(len, told.values()))
    return f"{known} tokens were told, the log has {have}" if have < known and not log.header.index else ""


def answers_of(log: Log) -> tuple[dict[str, list[int]], set[str]]:
    """Tokens by name, and the names of requests that arrive in this log."""
    answers, arrived = defaultdict(list), set()
    for item in fold(log):
        if isinstance(item, Folded):
            if isinstance(item.event, RequestArrived):
                arrived.add(item.event.name)
            for news in outputs(item.before, item.event, item.after):
                if news.token >= 0:
                    answers[news.name].append(news.token)
    return answers, arrived


def add_to_record(path: Path, kills: list[Killed], before: Any, seconds: float) -> None:
    """Begin the record, or add these to it."""
    record = json.loads(path.read_text()) if path.is_file() else {
        "command": "python scripts/kill_under_load.py --kills N --seed N --jobs N --json RECORD, once for each part",
        "measured_at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "vnext": __version__,
        "machine": msgspec.to_builtins(before),
        "seconds": 0.0,
        "kills": [],
    }  # fmt: skip
    record["kills"] += [msgspec.to_builtins(each) for each in kills]
    record["seconds"] = round(record["seconds"] + seconds, 1)
    every = record["kills"]
    record["summary"] = {
        "kills": len(every),
        "verified": sum(not each["wrong"] for each in every),
        "verified_durable": sum(not each["wrong"] for each in every if "durable" in each["form"]),
        "torn_tails": sum(each["end"] == "torn" for each in every),
        "frames_lost": sum(each["frames_lost"] for each in every),
        "steps": sum(each["steps"] for each in every),
        "tokens_told": sum(each["told"] for each in every),
    }
    path.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())
