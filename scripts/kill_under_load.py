"""Kill a server under load and check what it left: `python scripts/kill_under_load.py --kills 100 --json RECORD`.

With `--survive` the kills hit parts of one server, whose streams must go on as if nothing had happened (kills_survived.py).
Without it they hit all of a server, again and again, and its log is checked; that part is here.
Owns the load (streams over the bundled model; some clients hang up), the instant and order of the kills, and the checks.
All processes of a real `vnext serve` get SIGKILL at an instant drawn from the seed. Afterwards the log must verify under all
laws and contain every token that a client received. The server's settings rotate: without and with texts, durable or not,
segments of a quarter of a second in a ring, one process, two ranks. Each call adds to the record; failing logs are kept.
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

import msgspec
import psutil

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "scripts")]

from kills_record import Recording  # noqa: E402
from kills_survived import KINDS, OPTIONS, logs_verified, survive  # noqa: E402

from vnext.base.version import __version__  # noqa: E402
from vnext.commands.bench.load.answers import RequestFailed  # noqa: E402
from vnext.commands.bench.load.client import COMPLETIONS, Client  # noqa: E402
from vnext.commands.machine import machine  # noqa: E402
from vnext.replay.reading.folding import Folded, fold  # noqa: E402
from vnext.replay.reading.info import info  # noqa: E402
from vnext.replay.reading.source import Log, open_log  # noqa: E402
from vnext.replay.reading.times import timestamps_of  # noqa: E402
from vnext.replay.reading.verify import verify  # noqa: E402
from vnext.state.events import RequestArrived  # noqa: E402
from vnext.state.outputs import outputs  # noqa: E402

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

Reported = dict[str, list[int]]


class Killed(msgspec.Struct, frozen=True, kw_only=True):
    """One kill and what was found. `reported` tokens had reached clients; `end` is how the log ends; `wrong` is "" if
    all is well."""

    seed: int
    form: str
    killed_after_s: float
    processes: int
    requests: int
    reported: int
    steps: int
    frames: int
    segments: int
    first_event: int
    bytes: int
    timestamped_frames: int
    end: str
    ignored_bytes: int
    frames_lost: int
    wrong: str


def main() -> int:
    options = parsed()
    if options.survive:
        return survive_kills(options)
    seeds = range(options.seed, options.seed + options.kills)
    forms = [name for name in FORMS if options.form in name]
    before, began_s = machine(), time.monotonic()
    with ProcessPoolExecutor(options.jobs, mp_context=multiprocessing.get_context("spawn")) as pool:
        kills = []
        for killed in pool.map(kill, seeds, (forms[seed % len(forms)] for seed in seeds)):
            kills.append(killed)
            found = f"{killed.steps:5} steps, {killed.reported:5} received, {killed.end:8} {killed.wrong}"
            print(f"{killed.seed:5} {killed.form:20} {found}", flush=True)
    if options.json:
        add_to_record(options.json, kills, before, time.monotonic() - began_s)
    wrong = [killed.seed for killed in kills if killed.wrong]
    but = f"; not {wrong}" if wrong else ""
    print(f"{len(kills) - len(wrong)} of {len(kills)} logs verify and contain what clients received{but}")
    return int(bool(wrong))


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0, help="of the first kill")
    parser.add_argument("--jobs", type=int, default=1, help="servers at once")
    parser.add_argument("--survive", action="store_true", help="kill parts of one server, whose streams must go on")
    parser.add_argument("--rested", action="store_true", help="with --survive, kill only when processes stand by again")
    parser.add_argument("--tier", action="store_true", help="with --survive, the prefix cache has a disk tier in shared memory")
    parser.add_argument("--model", default="", help="with --survive, in place of the demo model; five streams need no chats")
    parser.add_argument("--ranks", type=int, default=2, help="with --survive")
    parser.add_argument("--streams", type=int, default=64, help="with --survive")
    parser.add_argument("--kind", default="", help=f"with --survive, only kinds with this in their name: {'; '.join(KINDS)}")
    parser.add_argument("--form", default="", help=f"only forms with this in their name: {'; '.join(FORMS)}")
    parser.add_argument("--json", type=Path, help="record to begin or to add to")
    return parser.parse_args()


def survive_kills(options: argparse.Namespace) -> int:
    """Run --survive; returns the exit status."""
    kinds = tuple(kind for kind in KINDS if options.kind in kind)
    folder = Path(tempfile.mkdtemp(prefix="vnext-kill-"))
    fields = {name: getattr(options, name) for name in ("seed", "streams", "ranks", "rested", "tier")}
    recording = Recording(options.json, **fields, model=Path(options.model or "demo").name)
    tier = tempfile.TemporaryDirectory(prefix="vnext-tier-", dir="/dev/shm")
    more = ("--kv-disk-dir", tier.name, "--kv-disk-bytes", "2G") if options.tier else ()
    more = (*filter(None, [options.model]), *OPTIONS, *more)
    process = started(folder, (*more, "--tensor-parallel-size", str(options.ranks), "--served-model-name", "demo"))
    stand_by = 1 + 2 * options.ranks if options.rested else 0  # an engine core with its ranks, and those beside the present ones
    try:
        url = re.search(r"http://[\d.:]+", said_until_ready(process))[0]
        load, _ = asyncio.run(
            survive(url, process.pid, options.kills, options.streams, options.seed, kinds, recording.note, stand_by)
        )
        process.terminate()
        status = process.wait(START_TIMEOUT_S)
    finally:
        process.kill()
        process.stdout.close()
        tier.cleanup()
    logs, wrong = logs_verified(folder)
    wrong += [f"the server ended with status {status}"] if status else []
    recording.end(logs, wrong)
    print(json.dumps(recording.summary, indent=1))
    if is_wrong := bool(wrong or load.wrong):
        print(f"the logs are kept in {folder}")
    else:
        shutil.rmtree(folder)
    return int(is_wrong)


def started(folder: Path, arguments: tuple[str, ...]) -> subprocess.Popen[str]:
    """A server that logs into `folder`."""
    return subprocess.Popen(
        [sys.executable, "-m", "vnext.commands.cli", "serve", "--port", "0", "--log-dir", str(folder), *arguments],
        stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip


def kill(seed: int, form: str) -> Killed:
    """Start a server, load it, kill it and check its log. Raises RuntimeError if it does not start."""
    rng = random.Random(seed)
    folder = Path(tempfile.mkdtemp(prefix="vnext-kill-"))
    process = started(folder, (*COMMON, *FORMS[form]))
    try:
        said = said_until_ready(process)
        url, log_dir = re.search(r"http://[\d.:]+", said)[0], Path(re.search(r"^vnext: log +(\S+)$", said, re.MULTILINE)[1])
        after_s, count, reported = asyncio.run(load_and_kill(url, process.pid, rng))
    finally:
        process.kill()
        process.wait()
        process.stdout.close()
    killed = checked_events(
        open_log(log_dir), reported, seed=seed, form=form, killed_after_s=round(after_s, 3), processes=count
    )
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


async def load_and_kill(url: str, pid: int, rng: random.Random) -> tuple[float, int, Reported]:
    """Send requests until the server is gone: (seconds from the first token to the kill, processes killed, tokens received)."""
    server = psutil.Process(pid)
    family = [server, *server.children(recursive=True)]
    rng.shuffle(family)
    reported: Reported = defaultdict(list)
    flowing, after_s = asyncio.Event(), rng.uniform(*KILL_AFTER_S)
    async with Client(url, timeout_s=START_TIMEOUT_S) as client:
        seeds = [rng.random() for _ in range(CLIENTS)]
        clients = [asyncio.create_task(ask(client, random.Random(seed), reported, flowing)) for seed in seeds]
        await asyncio.wait_for(flowing.wait(), START_TIMEOUT_S)
        await asyncio.sleep(after_s)
        for process in family:
            process.kill()
        await asyncio.gather(*clients)
    psutil.wait_procs(family[1:], timeout=START_TIMEOUT_S)
    return after_s, len(family), reported


async def ask(client: Client, rng: random.Random, reported: Reported, flowing: asyncio.Event) -> None:
    """Send one request after the other until the server is gone."""
    while True:
        try:
            await stream(client, rng, reported, flowing)
        except RequestFailed as error:
            if error.kind == "timeout":
                raise
            if error.kind in ("connect", "broken"):
                return


async def stream(client: Client, rng: random.Random, reported: Reported, flowing: asyncio.Event) -> None:
    """Read one streamed answer; one client in eight hangs up midway."""
    shared = [7 + 11 * place % 400 for place in range(rng.choice((0, 0, 40, 90)))]
    body = {
        "prompt": shared + [rng.randrange(5, VOCABULARY) for _ in range(rng.randint(1, 80))], "stream": True,
        "max_tokens": rng.randint(1, 120), "return_token_ids": True, "ignore_eos": rng.random() < 0.5,
        "temperature": rng.choice((0, 0.8)), "seed": rng.getrandbits(32),
    }
    leaves_after = rng.randint(1, 30) if rng.random() < 0.125 else body["max_tokens"] + 1
    async for chunk in client.stream(COMPLETIONS, body):
        for choice in chunk.choices or ():
            name = f"{chunk.id}-{choice.index}"
            reported[name] += choice.token_ids or ()
            flowing.set()
            if len(reported[name]) >= leaves_after:
                return


# ---- judgement ---------------------------------------------------------------------------------------------------


def checked_events(log: Log, reported: Reported, **known: Any) -> Killed:
    """Check the log of a killed server under all laws and against the tokens its clients received."""
    found, verdict, timestamps = info(log), verify(log, all_laws=True), timestamps_of(log)
    if verdict.difference is not None:
        wrong = verdict.difference.message
    else:
        wrong = missing_tokens(log, reported) if verdict.same else str(found.end)
    return Killed(
        **known, requests=found.requests, reported=sum(map(len, reported.values())), steps=verdict.steps, frames=found.frames,
        segments=found.segments, first_event=verdict.first_event, bytes=found.size_bytes,
        timestamped_frames=0 if timestamps is None else len(timestamps.events), end=found.end.kind,
        ignored_bytes=found.end.ignored_bytes, frames_lost=found.frames_lost,
        wrong=wrong,
    )  # fmt: skip


def missing_tokens(log: Log, reported: Reported) -> str:
    """Describe what a client received and the log lacks, "" if nothing. A log without texts is compared by token counts."""
    answers, arrived = answers_of(log)
    if log.header.privacy == "full":
        missing = [name for name, tokens in reported.items() if name in arrived and answers[name][: len(tokens)] != tokens]
        unknown = [] if log.header.index else [name for name in reported if name not in arrived]
        return f"the log lacks tokens that clients received of {(missing + unknown)[0]}" if missing + unknown else ""
    have, known = sum(map(len, answers.values())), sum(map(len, reported.values()))
    return f"clients received {known} tokens, the log has {have}" if have < known and not log.header.index else ""


def answers_of(log: Log) -> tuple[dict[str, list[int]], set[str]]:
    """Return the tokens by request name, and the names of the requests that arrive in this log."""
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
    """Begin the record, or add these kills to it."""
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
        "tokens_received": sum(each["reported"] for each in every),
    }
    path.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())
