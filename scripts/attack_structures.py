"""Attack a private server with what agents send: `python scripts/attack_structures.py --json RECORD`.

Owns schemas, grammars, tools, texts and conversations that are as bad as one client can make them, sent again and again to a real
`vnext serve` over the bundled model. Meanwhile a separate process reads STREAMS ordinary streams. The table shows the time
between two of their tokens in the quiet seconds before an attack and during it (ms: median, 99th percentile, longest), the
longest time that an answer to the attacker took, and the answers' statuses.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

sys.path.insert(0, str(Path(__file__).resolve().parent))

from attack_server import ROOT, SLOW, serving, spread

from vnext.base.version import __version__
from vnext.commands.bench.load.client import COMPLETIONS, Client
from vnext.commands.bench.load.generator import Request, keep_sending
from vnext.commands.machine import machine

STREAMS, SENDERS = 8, 2
TIMEOUT_S = 60.0
STREAM = json.dumps({"prompt": "Once upon a time", "stream": True, "max_tokens": 400, "ignore_eos": True}).encode()

TEMPLATE = (
    "{% if tools %}{% for tool in tools[:3] %}{{ tool | tojson }}{% endfor %}<tool_call></tool_call>{% endif %}"
    "{% if 'raise' in messages[-1].content %}{{ raise_exception('no such roles') }}{% endif %}" + SLOW
)

Body = tuple[str, bytes]


def chat(text: str = "hi", **more: Any) -> Body:
    return "/v1/chat/completions", json.dumps({"messages": [{"role": "user", "content": text}], "max_tokens": 4} | more).encode()


def schema(value: Any) -> Body:
    return chat(response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": value}})


def structured(**kind: Any) -> Body:
    return chat(structured_outputs=kind)


def nested(depth: int) -> Body:
    path, body = schema("HERE")
    return path, body.replace(b'"HERE"', b'{"properties": {"a": ' * depth + b"{}" + b"}}" * depth)


def doubling(levels: int) -> Any:
    twice = {f"d{at}": {"anyOf": [{"$ref": f"#/$defs/d{at + 1}"}] * 2, "type": "object"} for at in range(levels)}
    return {"$ref": "#/$defs/d0", "$defs": {**twice, f"d{levels}": {"type": "string"}}}


def circle() -> Any:
    return {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}}


def doubled_rules(count: int) -> str:
    return "start: r0\n" + "".join(f"r{at}: r{at + 1} r{at + 1}\n" for at in range(count)) + f'r{count}: "a"'


def ambiguous(count: int) -> str:
    return "start: item\nitem: " + " | ".join(['item item "b"?'] * count) + ' | "a"'


def tools(count: int, text: str = "", **more: Any) -> Body:
    arguments = {"type": "object", "properties": {"path": {"type": "string", "description": text}}, "required": ["path"]}
    listed = [{"type": "function", "function": {"name": f"f{at}", "parameters": arguments}} for at in range(count)]
    return chat(tools=listed, **more)


def broken_arguments(text: str) -> Body:
    call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": text}}
    messages = [{"role": "user", "content": "x"}, {"role": "assistant", "tool_calls": [call]}]
    return chat(messages=[*messages, {"role": "tool", "tool_call_id": "a", "content": "y"}])


BODIES: dict[str, Callable[[], Body]] = {
    "a schema 10,000 deep": lambda: nested(10_000),
    "a schema 400 deep": lambda: nested(400),
    "an enum of 1 MB": lambda: schema({"enum": [f"value {at}" for at in range(70_000)]}),
    "an enum of 250 kB": lambda: schema({"enum": [f"value {at}" for at in range(16_000)]}),
    "5,000 properties": lambda: schema({"anyOf": [{"properties": {f"{at} {n}": {} for n in range(999)}} for at in range(5)]}),
    "a reference to itself": lambda: schema({"$ref": "#"}),
    "references in a circle": lambda: schema(circle()),
    "references that double 200 times": lambda: schema(doubling(200)),
    "a catastrophic regex": lambda: structured(regex="(x+x+)+y(a|a?){400}b{400}"),
    "a regex of 10^9 repetitions": lambda: structured(regex="(([a-z]{1,1000}){1,1000}){1,1000}"),
    "patterns that intersect": lambda: schema({"allOf": [{"pattern": f"(a|b)*a(a|b){{{at}}}"} for at in range(9, 19)]}),
    "a left-recursive grammar": lambda: structured(grammar='start: start start | start "a" | "a" |'),
    "a grammar of 500 ambiguous alternatives": lambda: structured(grammar=ambiguous(500)),
    "a grammar of 149 ambiguous alternatives": lambda: structured(grammar=ambiguous(149)),
    "a grammar of 900 rules": lambda: structured(grammar=doubled_rules(900)),
    "2,000 functions": lambda: tools(2_000),
    "1,000 functions, a forced call": lambda: tools(1_000, tool_choice="required"),
    "1,000 functions of 25 kB, a forced call": lambda: tools(1_000, "word " * 5_000, tool_choice="required"),
    "one function of 25 MB, a forced call": lambda: tools(1, "word " * 5_000_000, tool_choice="required"),
    "lone surrogates": lambda: chat("\ud800", structured_outputs={"regex": "\udc00"}, tools=[]),
    "lone surrogates in a schema": lambda: schema({"enum": ["\ud800"]}),
    "arguments that are no JSON": lambda: broken_arguments('{"a": ' * 5_000),
    "a template that raises": lambda: chat("raise"),
    "a template that never ends": lambda: chat("slow"),
}


async def attack(url: str, body: Body, seconds: float) -> tuple[Counter[str], list[float], str]:
    """Send the body from SENDERS clients for some seconds: statuses, times (ms) and the last answer."""
    answers: list[bytes] = []
    async with Client(url, timeout_s=TIMEOUT_S) as client:
        request = Request(path=body[0], body=body[1])
        statuses, took_s = await keep_sending(client, [request], SENDERS, seconds, answers.append)
    return statuses, [1e3 * each for each in took_s], answers[-1].decode()[:300] if answers else ""


async def probe(url: str) -> None:
    """Read STREAMS streams until SIGTERM, then print when each token came and how long after the one before (ms)."""
    gaps: list[tuple[float, float]] = []

    async def read(client: Client) -> None:
        while True:
            last_s = 0.0
            async for chunk in client.stream(COMPLETIONS, STREAM):
                if last_s:
                    gaps.append((chunk.at_s, (chunk.at_s - last_s) * 1e3))
                last_s = chunk.at_s

    async with Client(url) as client:
        reading = asyncio.gather(*(read(client) for _ in range(STREAMS)))
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, reading.cancel)
        print("ready", flush=True)
        with contextlib.suppress(asyncio.CancelledError):
            await reading
    print(json.dumps(gaps), flush=True)


def attacked(url: str, names: list[str], seconds: float) -> dict[str, dict[str, Any]]:
    """Run the attacks in turn, each after as many quiet seconds, and return their lines of the record."""
    probing = subprocess.Popen([sys.executable, __file__, "--probe", url], stdout=subprocess.PIPE, text=True)
    phases, found = [], {}
    try:
        assert probing.stdout.readline() == "ready\n"
        for name in names:
            quiet_s = time.perf_counter()
            time.sleep(seconds)
            begun_s = time.perf_counter()
            statuses, took, last = asyncio.run(attack(url, BODIES[name](), seconds))
            phases.append((name, quiet_s, begun_s, time.perf_counter()))
            found[name] = {"got": dict(statuses), "answer": spread(took), "last_answer": last}
            print(f"{name}: {dict(statuses)}, at most {max(took):.0f} ms; {last[:150]}", flush=True)
    finally:
        probing.terminate()
        gaps = json.loads(probing.communicate(timeout=TIMEOUT_S)[0])
    for name, quiet_s, begun_s, end_s in phases:
        found[name]["before"] = spread([gap for at, gap in gaps if quiet_s < at <= begun_s])
        found[name]["during"] = spread([gap for at, gap in gaps if begun_s < at <= end_s])
    return found


def line(name: str, found: dict[str, Any]) -> str:
    cells = "".join(f"{found[when][at]:>8.1f}" for when in ("before", "during") for at in ("p50", "p99", "max"))
    return f"{name:42}{cells}{found['answer']['max']:>9.0f}  " + ", ".join(f"{n} x {what}" for what, n in found["got"].items())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=3.0, help="of each attack, and of the quiet before it")
    parser.add_argument("--only", default="", help="attacks whose names contain this")
    parser.add_argument("--root", type=Path, default=ROOT, help="the checkout whose server is attacked")
    parser.add_argument("--json", type=Path, help="where the record is written")
    parser.add_argument("--probe", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.probe:
        asyncio.run(probe(options.probe))
        return 0
    before = machine()
    names = [name for name in BODIES if options.only in name]
    with tempfile.TemporaryDirectory() as folder, serving(options.root, Path(folder), TEMPLATE) as (url, _):
        found = attacked(url, names, options.seconds)
    print(f"{'attack':42}{'quiet: p50, p99, max':>24}{'attacked':>24}{'answer':>9}")
    for name in names:
        print(line(name, found[name]))
    if options.json:
        record = {
            "command": "python scripts/attack_structures.py --json RECORD",
            "measured_at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            "vnext": __version__, "machine": msgspec.to_builtins(before), "load_after": machine().load,
            "unit": "ms", "streams": STREAMS, "senders": SENDERS, "attacks": found,
        }  # fmt: skip
        options.json.write_text(json.dumps(record, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
