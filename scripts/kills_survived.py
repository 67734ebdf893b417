"""Kill parts of a server under load and compare what its streams give with an undisturbed run: see kill_under_load.py.

Owns the streams (the `openai` client: completions and chats, greedy and seeded, with tools, schemas, log-probabilities, several
answers), the instants, and the comparison. Each stream asks one request again and again; its token ids, text and log-probabilities
must be those of the first run, before anything was killed.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
import openai
import psutil

from vnext.replay.reading.source import open_log
from vnext.replay.reading.verify import verify

OPTIONS = (
    "--dtype", "float32", "--threads", "1", "--digest-interval", "4", "--max-num-batched-tokens", "256", "--log", "full",
    "--durable", "--max-restarts", "30", "--standby",
)  # fmt: skip
CORE, RANK, SERVER = "vnext.runtime.engine.main", "vnext.runtime.rank.main", "vnext.server"
KINDS = {"core": (CORE,), "rank": (RANK,), "ranks": (RANK, RANK), "all but the API server": (CORE, RANK, RANK)}
MOMENTS = ("random", "prefill", "log write", "recovery")
FLOW_TIMEOUT_S = 120.0
REST_S = 40.0
WRITES = {"1", "20", "74", "75"}  # write, writev, fsync, fdatasync of x86-64, as /proc/PID/syscall has them
TOOL = {
    "type": "function",
    "function": {
        "name": "find",
        "parameters": {
            "type": "object", "properties": {"words": {"type": "string", "maxLength": 24}, "count": {"type": "integer"}},
            "required": ["words", "count"], "additionalProperties": False,
        },
    },
}  # fmt: skip
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 30}, "years": {"type": "array", "items": {"type": "integer"}, "maxItems": 6},
    },
    "required": ["name", "years"], "additionalProperties": False,
}  # fmt: skip


class Survived(msgspec.Struct, frozen=True, kw_only=True):
    """One kill. `moment` is what was hit in truth. `flowing_after_s`: until every stream had got something from what was started
    again; `gaps_s`: each stream's longest time without a chunk until then."""

    kind: str
    moment: str
    processes: int
    flowing_after_s: float
    gaps_s: list[float]


class Answer(msgspec.Struct):
    """What a stream gave, by choice. Mutable while it comes."""

    tokens: dict[int, list[int]] = {}
    text: dict[int, str] = {}
    logprobs: list[float] = []


def bodies(count: int, seed: int) -> Iterator[tuple[str, dict[str, Any]]]:
    """(API, arguments) of each stream. Half are greedy; some share a beginning; one in four has a long prompt."""
    rng = random.Random(seed)
    shared = [7 + 11 * place % 400 for place in range(90)]
    for number in range(count):
        extra = {"return_token_ids": True, "ignore_eos": True}
        sampled = {"temperature": 0.8, "seed": rng.getrandbits(31)} if number % 2 else {"temperature": 0}
        common = {"model": "demo", "stream": True, "max_tokens": rng.randint(40, 160), **sampled}
        length = 600 if number % 4 == 0 else rng.randint(1, 60)
        prompt = shared * (number % 3 == 0) + [rng.randrange(5, 3000) for _ in range(length)]
        messages = [{"role": "user", "content": f"Write function {number} that sorts {rng.randint(2, 99)} numbers."}]
        match number % 8:
            case 0 | 1 | 4:
                yield "completions", common | {"prompt": prompt, "extra_body": extra}
            case 2:
                yield "completions", common | {"prompt": prompt, "logprobs": 2, "extra_body": extra}
            case 3:
                yield "completions", common | {"prompt": prompt, "n": 2, "extra_body": extra}
            case 5:
                forced = {"type": "function", "function": {"name": "find"}}
                yield "chat", common | {
                    "messages": messages, "tools": [TOOL], "tool_choice": forced, "extra_body": {"return_token_ids": True}
                }  # fmt: skip
            case 6:
                shape = {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}}
                yield "chat", common | {"messages": messages, "response_format": shape, "extra_body": {"return_token_ids": True}}
            case 7:
                yield "chat", common | {"messages": messages, "logprobs": True, "top_logprobs": 2, "extra_body": extra}


class Load:
    """Streams that ask their requests again and again. `compared` answers were compared; `wrong` says what was not as it was."""

    def __init__(self, url: str, count: int, seed: int) -> None:
        self._url = url
        self._client = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=FLOW_TIMEOUT_S)
        self._bodies = list(bodies(count, seed))
        self._expected: list[Answer] = []
        self.compared = self.tokens = 0
        self.wrong: list[str] = []
        self.heard_s = [0.0] * count  # each stream's latest chunk
        self.begun: asyncio.Queue[int] = asyncio.Queue()  # streams that have just sent a long prompt
        self.has_tokens = [False] * count
        self._waits_s = [0.0] * count  # until the first token of each stream's latest request
        self.waits_s: list[float] = []  # of the undisturbed run
        self.on_chunk: Callable[[int, float, float], None] = lambda number, before_s, now_s: None
        self.stops = False

    async def expect(self) -> None:
        """The undisturbed run."""
        self._expected = list(await asyncio.gather(*map(self._ask, range(len(self._bodies)))))
        self.waits_s = list(self._waits_s)

    async def recoveries(self) -> float:
        """vnext_recoveries_total of /metrics."""
        text = (await self._client._client.get(f"{self._url}/metrics")).text
        return sum(float(line.rsplit(" ", 1)[1]) for line in text.splitlines() if line.startswith("vnext_recoveries_total"))

    async def run(self) -> None:
        await asyncio.gather(*map(self._repeat, range(len(self._bodies))))

    async def _repeat(self, number: int) -> None:
        while not self.stops and not self.wrong:
            try:
                answer = await self._ask(number)
            except (openai.OpenAIError, AttributeError, TypeError) as error:  # the second and third: an error within a stream
                self.wrong.append(f"stream {number}: {type(error).__name__}: {error}")
                return
            self.compared += 1
            if answer != (expected := self._expected[number]):
                self.wrong.append(f"stream {number}: {answer} instead of {expected}")

    async def _ask(self, number: int) -> Answer:
        api, arguments = self._bodies[number]
        calls = self._client.completions if api == "completions" else self._client.chat.completions
        answer = Answer(tokens={}, text={}, logprobs=[])
        self.has_tokens[number] = False
        self.heard_s[number] = began_s = time.monotonic()
        if len(arguments.get("prompt", ())) > 500:
            self.begun.put_nowait(number)
        async for chunk in await calls.create(**arguments):
            taken = sum(self._take(answer, choice) for choice in chunk.choices)
            now_s, before_s = time.monotonic(), self.heard_s[number]
            self.heard_s[number] = now_s
            if taken and not self.has_tokens[number]:
                self.has_tokens[number], self._waits_s[number] = True, now_s - began_s
            self.on_chunk(number, before_s, now_s)
        return answer

    def _take(self, answer: Answer, choice: Any) -> int:
        """Take in a choice of a chunk; returns how many tokens it has."""
        ids = getattr(choice, "token_ids", None) or []
        answer.tokens.setdefault(choice.index, []).extend(ids)
        self.tokens += len(ids)
        text = getattr(choice, "text", None)
        if text is None:
            delta = choice.delta
            calls = (call.function.arguments or "" for call in delta.tool_calls or () if call.function is not None)
            text = (delta.content or "") + "".join(calls)
        answer.text[choice.index] = answer.text.get(choice.index, "") + text
        if (logprobs := choice.logprobs) is not None:
            answer.logprobs += getattr(logprobs, "token_logprobs", None) or [each.logprob for each in logprobs.content or ()]
        return len(ids)


class Killer:
    """Kills processes of the server `pid` at instants drawn from `rng`, and watches the streams of `load` go on."""

    def __init__(self, load: Load, pid: int, rng: random.Random) -> None:
        self._load, self._pid, self._rng = load, pid, rng
        self._killed_s, self._gaps = float("inf"), dict[int, float]()
        load.on_chunk = self._heard

    def _heard(self, number: int, before_s: float, now_s: float) -> None:
        if now_s >= self._killed_s:
            self._gaps[number] = max(self._gaps.get(number, 0.0), now_s - before_s)

    async def rest(self, count: int) -> None:
        """Wait until `count` processes stand by, at most REST_S."""
        until_s = time.monotonic() + REST_S
        while time.monotonic() < until_s and not self._load.wrong:
            waiting = 0
            for process in psutil.Process(self._pid).children(recursive=True):
                with suppress(psutil.Error):  # it has ended meanwhile
                    waiting += process.name() == "vnext-standby"
            if waiting == count:
                return
            await asyncio.sleep(0.1)

    async def kill(self, kind: str, moment: str) -> Survived:
        """Kill once, or twice for the moment "recovery", and wait until each stream has got something again."""
        await asyncio.sleep(self._rng.uniform(0.0, 1.0))
        hit = {"prefill": self._in_prefill, "log write": self._in_log_write}.get(moment)
        moment = await hit() if hit else moment
        recoveries = await self._load.recoveries()
        count = self._kill(kind)
        self._killed_s, self._gaps = time.monotonic(), {}
        if moment == "recovery":
            count += await self._kill_again(kind)
        while await self._load.recoveries() == recoveries and not self._is_over(kind):
            await asyncio.sleep(0.01)
        recovered_s = time.monotonic()
        while any(heard_s < recovered_s for heard_s in self._load.heard_s) and not self._is_over(kind):
            await asyncio.sleep(0.005)
        gaps = [round(gap, 3) for gap in self._gaps.values()]
        flowing_s, self._killed_s = round(time.monotonic() - self._killed_s, 3), float("inf")
        return Survived(kind=kind, moment=moment, processes=count, flowing_after_s=flowing_s, gaps_s=gaps)

    def _is_over(self, kind: str) -> bool:
        """Whether there is nothing to wait for any more."""
        if time.monotonic() > self._killed_s + FLOW_TIMEOUT_S:
            self._load.wrong.append(f"{kind}: nothing flows after {FLOW_TIMEOUT_S:.0f} s")
        return bool(self._load.wrong)

    def _processes(self, module: str) -> list[psutil.Process]:
        found = []
        for process in psutil.Process(self._pid).children(recursive=True):
            try:
                found += [process] if module in process.cmdline() and not stands_by(process) else []
            except psutil.Error:
                continue
        return found

    def _kill(self, kind: str) -> int:
        """SIGKILL the processes of a kind, in any order; returns how many there were."""
        wanted = Counter(KINDS[kind])
        victims = [each for module, count in wanted.items() for each in self._processes(module)[:count]]
        self._rng.shuffle(victims)
        for process in victims:
            try:
                process.kill()
            except psutil.NoSuchProcess:
                continue
        return len(victims)

    async def _kill_again(self, kind: str) -> int:
        """Kill what has been started again, somewhere in its start."""
        module, count = KINDS[kind][0], 0
        before = {process.pid for process in self._processes(module)}
        while not (set(each.pid for each in self._processes(module)) - before) and time.monotonic() < self._killed_s + 5.0:
            await asyncio.sleep(0.002)
        await asyncio.sleep(self._rng.uniform(0.0, 0.4))
        count += self._kill(kind)
        return count

    async def _in_prefill(self) -> str:
        """Wait until a stream has sent a long prompt and its answer has not begun."""
        while not self._load.begun.empty():
            self._load.begun.get_nowait()
        number = await self._load.begun.get()
        await asyncio.sleep(self._rng.uniform(0.005, 0.04))
        return "random" if self._load.has_tokens[number] else "prefill"

    async def _in_log_write(self) -> str:
        """Wait until the engine core is in a system call that writes."""
        [core, *_] = self._processes(CORE)
        call = Path(f"/proc/{core.pid}/syscall")
        for _ in range(20_000):
            if call.read_text().split(" ", 1)[0] in WRITES:
                return "log write"
            if _ % 50 == 49:
                await asyncio.sleep(0)
        return "random"


async def survive(
    url: str, pid: int, kills: int, streams: int, seed: int, kinds: tuple[str, ...],
    note: Callable[[Load, list[Survived]], None] = lambda load, kills: None, stand_by: int = 0,
) -> tuple[Load, list[Survived]]:
    """Kill that many times, each kind and moment in turn; `note` gets what was found so far, after each kill.
    `stand_by`: before each, so many processes stand by again."""
    load, rng = Load(url, streams, seed), random.Random(seed)
    await load.expect()
    killer, survived = Killer(load, pid, rng), []
    running = asyncio.create_task(load.run())
    await asyncio.sleep(0.5)
    for number in range(kills):
        moment = MOMENTS[(number + number // len(kinds)) % len(MOMENTS)]
        kind = kinds[number % len(kinds)]
        if stand_by:
            await killer.rest(stand_by)
        survived.append(each := await killer.kill(kind, moment))
        print(f"{number:4} {each.kind:24} {each.moment:10} flows after {each.flowing_after_s:6.2f} s", *load.wrong[:1], flush=True)
        note(load, survived)
        if load.wrong:
            break
    load.stops = True
    await running
    note(load, survived)
    return load, survived


def stands_by(process: psutil.Process) -> bool:
    """Whether a process has been started ahead and waits for its settings. Raises psutil.Error."""
    return process.cmdline()[-1] == "standby" and process.name() not in ("vnext-core", "vnext-rank")


def logs_verified(folder: Path) -> tuple[int, list[str]]:
    """How many logs there are below `folder`, and what is wrong with those that do not verify. An engine core that was killed
    before its first segment has left an empty folder."""
    wrong = []
    logs = sorted(path for path in folder.iterdir() if path.is_dir() and any(path.iterdir()))
    for path in logs:
        verdict = verify(open_log(path), all_laws=False)
        if verdict.difference is not None:
            wrong.append(f"{path.name}: {verdict.difference.message}")
    return len(logs), wrong


def percentile(values: list[float], share: float) -> float:
    """0 of none."""
    return sorted(values)[min(len(values) - 1, int(share * len(values)))] if values else 0.0
