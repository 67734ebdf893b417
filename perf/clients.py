"""`vnext-bench serve` beside guidellm and `vllm bench serve`: `python -m perf.clients --peers VENV [--url URL] --json RECORD`.

VENV has guidellm and vLLM; of vLLM its client alone is run, so that its wheel suffices, without what it asks for. Each round has the same
load from each client, one after another. Without a URL the server is paced by a clock: the first token comes FIRST_S after a request, each
other one GAP_S later, so that what a client should print is known. The figures are medians of the rounds' medians; the time between tokens
is that of a request, from its first token to its last.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from aiohttp import web

from perf.record import machine, parser_of, record_of, write_record
from vnext.commands.bench.load.blocking import BlockingClient
from vnext.runtime.processes.launch import DEMO_MODEL

PROMPT, ANSWER, REQUESTS, STREAMS = 64, 64, 120, 8
FIRST_S, GAP_S = 0.2, 0.02
NAMES = {"ttft_ms": "median_ttft_ms", "itl_ms": "median_tpot_ms", "tokens_s": "output_throughput"}
VLLM = """
import asyncio
from vllm.benchmarks.serve import add_cli_args, main_async
from vllm.utils.argparse_utils import FlexibleArgumentParser
parser = FlexibleArgumentParser()
add_cli_args(parser)
asyncio.run(main_async(parser.parse_args()))
"""


async def paced(request: web.Request) -> web.StreamResponse:
    """The stream of one completion, at the clock's pace however late a token was."""
    loop = asyncio.get_running_loop()
    due_s = loop.time() + FIRST_S
    body = await request.json()
    count = body["max_tokens"]
    answer = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await answer.prepare(request)
    for place in range(count):
        await asyncio.sleep(due_s + place * GAP_S - loop.time())
        choice = {"index": 0, "text": " the", "finish_reason": "length" if place == count - 1 else None}
        await answer.write(b"data: %s\n\n" % json.dumps({"id": "cmpl-1", "object": "text_completion", "choices": [choice]}).encode())
    usage = {"prompt_tokens": PROMPT, "completion_tokens": count, "total_tokens": PROMPT + count}
    await answer.write(b"data: %s\n\ndata: [DONE]\n\n" % json.dumps({"id": "cmpl-1", "choices": [], "usage": usage}).encode())
    return answer


def models_answer() -> bytes:
    return json.dumps({"object": "list", "data": [{"id": DEMO_MODEL.name, "object": "model", "root": str(DEMO_MODEL)}]}).encode()


async def models(request: web.Request) -> web.Response:
    return web.json_response(body=models_answer())


@contextlib.contextmanager
def paced_server(frozen_after_s: float = 0.0, frozen_s: float = 0.0) -> Iterator[str]:
    """Yields the URL of a server in a thread of its own, which stands still once for `frozen_s`, so long behind its first answer's
    beginning."""
    app, loop, begun, frozen = web.Application(), asyncio.new_event_loop(), threading.Event(), list[asyncio.TimerHandle]()

    async def answer(request: web.Request) -> web.StreamResponse:
        if frozen_s and not frozen:
            frozen.append(loop.call_later(frozen_after_s, time.sleep, frozen_s))
        return await paced(request)

    app.add_routes([web.post("/v1/completions", answer), web.get("/v1/models", models), web.get("/health", models)])
    runner, ports = web.AppRunner(app), list[int]()

    async def begin() -> None:
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        ports.append(runner.addresses[0][1])
        begun.set()

    def run() -> None:
        loop.run_until_complete(begin())
        loop.run_forever()

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    begun.wait()
    try:
        yield f"http://127.0.0.1:{ports[0]}"
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()


def bench_options(url: str, folder: Path) -> list[str]:
    """What `vnext-bench serve` and `vllm bench serve` both understand."""
    return [
        "--backend", "openai", "--base-url", url, "--tokenizer", str(DEMO_MODEL), "--dataset-name", "random", "--ignore-eos",
        "--random-input-len", str(PROMPT), "--random-output-len", str(ANSWER), "--num-prompts", str(REQUESTS), "--max-concurrency", str(STREAMS),
        "--save-result", "--result-dir", str(folder), "--result-filename", "found.json",
    ]  # fmt: skip


def of_vllms_form(folder: Path) -> dict[str, float]:
    found = json.loads((folder / "found.json").read_text())
    assert found["completed"] == REQUESTS, found
    return {name: found[theirs] for name, theirs in NAMES.items()}


def asked_vnext(url: str, model: str, folder: Path, peers: Path) -> dict[str, float]:
    run([sys.executable, "-m", "vnext.commands.bench.cli", "serve", *bench_options(url, folder)])
    return of_vllms_form(folder)


def asked_vllm(url: str, model: str, folder: Path, peers: Path) -> dict[str, float]:
    run([str(peers / "bin/python"), "-c", VLLM, *bench_options(url, folder), "--model", model, "--endpoint", "/v1/completions"])
    return of_vllms_form(folder)


def asked_guidellm(url: str, model: str, folder: Path, peers: Path) -> dict[str, float]:
    run([
        str(peers / "bin/guidellm"), "run", "--disable-console-interactive", "--backend",
        f"kind=openai_http,target={url},request_format=/v1/completions", "--profile", f"kind=concurrent,streams={STREAMS}",
        "--data", f"kind=synthetic_text,prompt_tokens={PROMPT},output_tokens={ANSWER}", "--constraint", f"kind=max_requests,count={REQUESTS}",
        "--tokenizer", f"kind=huggingface_auto,model={DEMO_MODEL}", "--output", f"kind=json,path={folder}/found.json",
    ])  # fmt: skip
    (benchmark,) = json.loads((folder / "found.json").read_text())["benchmarks"]
    found, counts = benchmark["metrics"], benchmark["metrics"]["request_totals"]
    assert counts["successful"] == REQUESTS, counts
    names = {"ttft_ms": "time_to_first_token_ms", "itl_ms": "inter_token_latency_ms"}
    medians = {name: found[theirs]["successful"]["median"] for name, theirs in names.items()}
    return medians | {"tokens_s": found["output_tokens_per_second"]["successful"]["mean"]}


CLIENTS = {"vnext-bench": asked_vnext, "vllm": asked_vllm, "guidellm": asked_guidellm}


def run(command: list[str]) -> None:
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH" or command[0] == sys.executable}
    done = subprocess.run(command, env=env | {"HF_HUB_OFFLINE": "1"}, capture_output=True, text=True, timeout=600)
    if done.returncode:
        raise SystemExit(f"{command[0]} failed:\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}")


def main() -> int:
    parser = parser_of(__doc__)
    parser.add_argument("--peers", type=Path, required=True, help="a virtual environment with guidellm and vLLM")
    parser.add_argument("--url", default="", help="a server with the bundled model's tokenizer (default: one that is paced by a clock)")
    parser.add_argument("--rounds", type=int, default=3)
    options, before = parser.parse_args(), machine()
    rounds: dict[str, list[dict[str, float]]] = {name: [] for name in CLIENTS}
    with contextlib.nullcontext(options.url) if options.url else paced_server() as url, tempfile.TemporaryDirectory() as folder:
        model = BlockingClient(url.removeprefix("http://"), timeout_s=60).ask("/v1/models", None, dict[str, Any])["data"][0]["id"]
        for _ in range(options.rounds):
            for name, asked in CLIENTS.items():
                rounds[name].append(asked(url, model, Path(folder), options.peers))
    found = {name: {figure: statistics.median(each[figure] for each in many) for figure in NAMES} for name, many in rounds.items()}
    apart = {
        name: {figure: round(100 * (found["vnext-bench"][figure] / theirs[figure] - 1), 1) for figure in NAMES}
        for name, theirs in found.items() if name != "vnext-bench"
    }  # fmt: skip
    measured = {"medians": found, "vnext_bench_differs_percent": apart, "rounds": rounds}
    print(json.dumps(measured, indent=2))
    if options.json:
        write_record(options.json, record_of("python -m perf.clients" + f" --rounds {options.rounds}", before, measured))
    return 0


if __name__ == "__main__":
    sys.exit(main())
