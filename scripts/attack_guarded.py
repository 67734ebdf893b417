"""Attack a private server that has API keys, batches and hand-over: `python scripts/attack_guarded.py --json RECORD`.

Owns the attacks of those who have no key, one with limits, or no secret. attack_server.py measures what the others notice.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import socket
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import aiohttp
import psutil

sys.path[:0] = [str(Path(__file__).resolve().parent), str(Path(__file__).resolve().parents[1])]

from attack_server import SLOW, Attack, Outcome, Serve, nothing, posted, raw, run, serving  # noqa: E402  (needs the path above)

from tests.run.ports import held_port  # noqa: E402
from vnext.commands.bench.load.client import COMPLETIONS, Client  # noqa: E402
from vnext.commands.bench.load.generator import Request, keep_sending  # noqa: E402

KEY, GUEST, LIMITED = "key-of-the-others", "key-of-the-attacker", "key-with-limits"
REQUESTS_PER_MINUTE = 3
KEYS = f"""
- {{key: {KEY}, name: others, admin: true}}
- {{key: {GUEST}, name: guest}}
- {{key: {LIMITED}, name: limited, requests_per_minute: {REQUESTS_PER_MINUTE}}}
"""
SENDERS = 16
CONNECTIONS = 1_200
BATCH_LINES = 500
UPLOADS, UPLOAD_BYTES, LINE_BYTES = 4, 100_000_000, 190_000_000
LINE_ENDS = 10_000_000
READERS = 48
FLOOD, FEW_ROWS, ANSWER_S = 1_000, ("--max-num-seqs", "16"), 60.0
TICKET = {"folder": "/x", "addresses": ["127.0.0.1:9"], "seal": "\u00e9"}
BODY = json.dumps({"prompt": "Once upon a time", "max_tokens": 4}).encode()


async def pages(url: str, seconds: float) -> Outcome:
    """Ask for the pages that need no key, without one."""
    async with Client(url) as client:
        requests = [Request(path=path) for path in ("/openapi.json", "/docs", "/")]
        return (await keep_sending(client, requests, SENDERS, seconds))[0]


async def tickets(url: str, seconds: float) -> Outcome:
    """Send tickets whose seal is not ASCII: once its characters are, as JSON writes them, and once they are not."""
    end_s, outcome = time.monotonic() + seconds, Counter()
    async with Client(url, GUEST) as client:
        while time.monotonic() < end_s:
            for is_ascii in (True, False):
                ticket = {"X-Vnext-Handover": json.dumps(TICKET, ensure_ascii=is_ascii)}
                async with client.asking(COMPLETIONS, BODY, ticket) as answer:
                    await answer.read()
                    outcome[str(answer.status)] += 1
    return outcome


def connecting(port: int) -> Attack:
    """Connects to the port where ranks serve blocks, and proves nothing: some send nothing, some a few bytes at intervals."""

    async def attack(url: str, seconds: float) -> Outcome:
        opened = []
        for _ in range(CONNECTIONS):
            with contextlib.suppress(OSError):
                opened.append(await asyncio.open_connection("127.0.0.1", port))
        end_s = time.monotonic() + max(seconds, 5)  # the server waits 3 s for a proof
        while time.monotonic() < end_s:
            await asyncio.sleep(0.2)
            for reader, writer in opened[::2]:
                if not (reader.at_eof() or writer.is_closing()):
                    writer.write(b"x")
        outcome = Counter(await asyncio.gather(*(_outcome(reader) for reader, _ in opened)))
        for _, writer in opened:
            writer.close()
        return outcome

    return attack


async def _outcome(reader: asyncio.StreamReader) -> str:
    try:
        async with asyncio.timeout(0.5):
            await reader.read()
    except TimeoutError:
        return "open"
    except ConnectionError:
        pass
    return "closed"


async def batch(url: str, seconds: float) -> Outcome:
    """Have a batch answer more requests than its key may ask in a minute."""
    request = {"method": "POST", "url": "/v1/completions", "body": json.loads(BODY)}
    lines = "\n".join(json.dumps({"custom_id": str(number)} | request) for number in range(BATCH_LINES))
    async with Client(url, LIMITED) as client:
        begun = await _begin_batch(client, await _upload(client, lines.encode()))
        await asyncio.sleep(seconds)
        found = await client.ask(f"/v1/batches/{begun['id']}", None, dict)
    return Counter({found["status"]: 1, "answered": found["request_counts"]["completed"]})


async def uploads(url: str, seconds: float) -> Outcome:
    """Upload large files again and again, and delete them."""
    end_s, outcome = time.monotonic() + seconds, Counter()
    data = b"x" * UPLOAD_BYTES

    async def send(client: Client) -> None:
        while time.monotonic() < end_s:
            file = await _upload(client, data)
            async with client.session.delete(f"{url}/v1/files/{file}") as answer:
                outcome[str(answer.status)] += 1

    async with Client(url, GUEST) as client:
        await asyncio.gather(*(send(client) for _ in range(UPLOADS)))
    return outcome


async def long_line(url: str, seconds: float) -> Outcome:
    """Have a batch read a file of one long line, again and again."""
    outcome: Outcome = Counter()
    async with Client(url, GUEST) as client:
        file = await _upload(client, b'{"custom_id":"' + b"x" * LINE_BYTES)
        end_s = time.monotonic() + seconds
        while time.monotonic() < end_s:
            found = await _begin_batch(client, file)
            while found["status"] in ("validating", "in_progress"):
                await asyncio.sleep(0.05)
                found = await client.ask(f"/v1/batches/{found['id']}", None, dict)
            outcome[found["status"]] += 1
    return outcome


def begun_late() -> bytes:
    """The upload of a form whose first boundary comes late."""
    body = b"\n" * LINE_ENDS + b"--x--\r\n"
    head = f"Authorization: Bearer {KEY}\r\nContent-Length: {len(body)}\r\n"
    return posted("/v1/files", "multipart/form-data; boundary=x", body, head)


async def unread(url: str, seconds: float) -> Outcome:
    """Ask for long streams and read nothing of them."""
    host, port = url.removeprefix("http://").split(":")
    asked = {"prompt": "Once upon a time", "stream": True, "max_tokens": 1_000, "ignore_eos": True, "logprobs": 5}
    body = json.dumps(asked).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {GUEST}\r\nContent-Type: application/json\r\n"
    opened = [socket.create_connection((host, int(port))) for _ in range(READERS)]
    for each in opened:
        each.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
    await asyncio.sleep(seconds)
    outcome = Counter(each.recv(12)[-3:].decode() for each in opened)
    for each in opened:
        each.close()
    return outcome


async def flood(url: str, seconds: float) -> Outcome:
    """Have one key wait for many answers at any time."""
    outcome, asked = Counter(), {"prompt": "Once upon a time", "max_tokens": 64, "ignore_eos": True}
    answered = asyncio.Event()

    async def send(client: Client) -> None:
        while True:
            status, _ = await client.answer(COMPLETIONS, asked)
            outcome[str(status)] += 1
            answered.set()

    async with Client(url, GUEST) as client:
        senders = [asyncio.create_task(send(client)) for _ in range(FLOOD)]
        await asyncio.wait(senders, timeout=seconds)
        await asyncio.wait_for(answered.wait(), ANSWER_S)  # a short attack on a slow machine has none yet
        for each in senders:
            each.cancel()
    return outcome


async def _upload(client: Client, data: bytes) -> str:
    form = aiohttp.FormData({"purpose": "batch"})
    form.add_field("file", io.BytesIO(data), filename="in.jsonl")
    async with client.session.post(f"{client.url}/v1/files", data=form) as answer:
        answer.raise_for_status()
        return (await answer.json())["id"]


async def _begin_batch(client: Client, file: str) -> dict[str, Any]:
    return await client.ask("/v1/batches", {"input_file_id": file, "endpoint": COMPLETIONS, "completion_window": "24h"}, dict)


@contextmanager
def guarded(more: Sequence[str], root: Path, folder: Path) -> Iterator[tuple[str, psutil.Process]]:
    """A server with keys, batches and these options, as attack_server's."""
    (folder / "keys.yaml").write_text(KEYS)
    (folder / "secret").write_text("a secret of all servers")
    files = "--api-key-file", str(folder / "keys.yaml"), "--cluster-secret-file", str(folder / "secret")
    with serving(root, folder, SLOW, (*files, "--batch-dir", str(folder / "kept"), *more)) as running:
        yield running


BLOCKS_AT = held_port()
decoding = partial(guarded, ("--role", "decode"))
prefilling = partial(guarded, ("--role", "prefill", "--handover-transport", "tcp", "--handover-address", f"127.0.0.1:{BLOCKS_AT}"))
ATTACKS: dict[str, tuple[Serve, Attack]] = {
    "none": (decoding, nothing),
    f"pages without a key from {SENDERS} senders": (decoding, pages),
    "tickets with a seal that is not ASCII": (decoding, tickets),
    f"{CONNECTIONS:,} connections that prove no secret": (prefilling, connecting(BLOCKS_AT)),
    f"a batch of {BATCH_LINES} for a key of {REQUESTS_PER_MINUTE} a minute": (decoding, batch),
    f"{UPLOADS} uploads of {UPLOAD_BYTES // 10**6} MB at once": (decoding, uploads),
    f"a batch's line of {LINE_BYTES // 10**6} MB": (decoding, long_line),
    f"forms behind {LINE_ENDS // 10**6} M empty rows": (decoding, raw(begun_late, 1)),
    f"{READERS} readers that read nothing": (decoding, unread),
    f"{FLOOD:,} answers of one key, fcfs": (partial(guarded, (*FEW_ROWS, "--scheduling-policy", "fcfs")), flood),
    f"{FLOOD:,} answers of one key, fair": (partial(guarded, FEW_ROWS), flood),
}

if __name__ == "__main__":
    sys.exit(run("attack_guarded.py", ATTACKS, KEY))
