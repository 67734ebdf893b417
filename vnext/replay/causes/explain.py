"""explain: why a log was slow, the true cause first, in ten lines: what it cost, the evidence, what would have helped.

Owns the words. part.py reads what is asked about, ledger.py collects, charging.py judges, helping.py tries.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

import msgspec
import numpy as np
from rich.console import Console

from vnext.replay.causes.charging import Charge, Charges, charges, deadline_us, is_slow, usual_us
from vnext.replay.causes.helping import Help, helping
from vnext.replay.causes.ledger import Counted, Ledger, Life, ledger
from vnext.replay.causes.part import Asked, part_of
from vnext.replay.console.commands import how_ended, print_answer
from vnext.replay.console.ended import COMPLETE, Ended, ended
from vnext.replay.console.render import counted, printable
from vnext.replay.reading.source import Log, open_log
from vnext.replay.reading.times import timestamps_of
from vnext.replay.reading.window import Window, add_at
from vnext.state.config import SchedulerConfig

LOST_SHARE = 0.1
"""Where less of the requests' time is lost, nothing stands out."""
ALSO_SHARE = 0.05
SHOWN = 3
FAILURES = ("drift", "damage", "lost")
"""What ends a log before its time; the other causes make requests slow."""

HEADLINES = {
    "drift": "rank {rank} had drifted by step {step}: {what}, and the engine ended with it",
    "damage": "the log is damaged behind step {step}: what the engine did then is not known",
    "lost": "the disk had no room for a part of the log: what the engine did there is not known",
    "client": "client {client} filled the engine, with {share} of its time; the others waited behind it",
    "pause": "the engine was paused",
    "crash": "the ranks had ended, and others took their place: everyone computed again",
    "memory": "memory ran short: steps were cut in halves and took fewer tokens for a while, and everyone computed some again",
    "weights": "the weights were changed: the engine stood, and everyone computed again",
    "flush": "the prefix cache was emptied: prompts were computed again that it had held",
    "evicted": "the prefix cache is too small: prompts were computed again that it had evicted",
    "off": "the prefix cache is off: prompts were computed again that it would have held",
    "prefix": "prompts differ in their first tokens, so the prefix cache does not have the long part that is the same",
    "salt": "prompts begin the same behind other cache salts, as of other keys, so the prefix cache keeps them apart",
    "holder": "request {holder} held most of the cache: the others waited for its pages",
    "blocks": "the cache has too few pages: requests waited for the pages of others",
    "preemption": "the cache has too few pages: requests were preempted {preemptions} times, and computed again",
    "long": "long prompts held the others up; the longest is request {long}, of {prompt} tokens",
    "budget": "the tokens of a step are too few (--max-num-batched-tokens {budget}): prompts waited for their share",
    "sequences": "too few requests may run at once (--max-num-seqs {sequences}), though more would have fit",
    "load": "more came than this engine can serve: no single client, prompt or limit stands out",
    "aborts": "clients gave up {aborted} requests, whose work was in vain",
    "deadline": "{aborted} requests were given up after {age} s, their deadline (--request-timeout or their own)",
    "errors": "{failed} requests ended with an error, such as a grammar that fails",
    "stall": "a step hung for {worst} s: {who}",
    "slow": "steps took {times} times as long as usual for their size: {who}",
    "drafts": "drafts were hardly ever right, and made steps longer",
    "adapter": "requests waited until a slot held their adapter (--max-loras {loras})",
    "disk": "requests waited for blocks to be read from disk",
    "priority": "requests of less priority waited while later ones were served",
    "inputs": "requests waited for images and sounds before them: a step encodes {inputs} at most",
    "microbatch": "requests waited for the turn of their part of the batch",
    "order": "requests waited behind others",
}
COMMANDS = {
    "drift": ("ranks {log}",), "damage": ("verify {log}",), "lost": ("verify {log}",),
    "client": ("clients {log}",), "long": ("req {log} {long}",), "holder": ("req {log} {holder}",),
    "flush": ("cache {log}",), "evicted": ("cache {log}",), "prefix": ("cache {log}",), "salt": ("cache {log}",),
    "load": ("what-if {log} --replicas 1,2 --slo ttft=1s",), "none": ("slow {log}",),
}  # fmt: skip


class Cause(msgspec.Struct, frozen=True, kw_only=True):
    """One cause: its word, the time of requests that it cost in ms, its share of all their time, the steps and the times (seconds
    since 1970, UTC, None where the log has none) between which it did."""

    cause: str
    lost_ms: float
    share: float
    first_step: int
    last_step: int
    from_s: float | None
    to_s: float | None


class Explained(msgspec.Struct, frozen=True, kw_only=True):
    """`headline` is the answer, `causes` all of them, the costliest first; `helps` is what would have helped most. `clock` and
    `ended` as in `trace`."""

    headline: str
    lived_ms: float
    causes: list[Cause]
    evidence: list[str]
    helps: Help | None
    commands: list[str]
    clock: str
    ended: str


def explained(path: Path, asked: Asked = Asked(), end: Ended | None = None) -> Explained:
    """Why the requests asked for were slow; `end` is how the log ends, if that is known. Raises UnusableLog."""
    end = end or ended(open_log(path))
    with part_of(path, asked) as (log, counts, window):
        written = ledger(log, counts)
        return explained_by(written, path, log, window, failure(written, end, asked, counts, window))


def failure(written: Ledger, end: Ended, asked: Asked, counts: Counted, window: Window) -> Charge | None:
    """What ended a log before its time, a rank's drift or damage; None where the requests and times that are asked about do not
    reach so far."""
    last = written.entries[-1] if written.entries else None
    if asked.request or asked.client:
        reaches = any(not life.end and counts(id_) for id_, life in written.lives.items())
    else:
        reaches = last is None or window.to_us >= last.end_us
    if not reaches:
        return None
    us, step = (last.end_us, last.step) if last is not None else (np.nan, 0)
    if written.drift is not None:
        us, report = written.drift
        return Charge("drift", 0.0, report.step, report.step, us, us)
    if end.is_sound and written.ended == COMPLETE.line:
        return None
    return Charge("lost" if end.kind == "lost" else "damage", 0.0, step, step, us, us)


def explained_by(written: Ledger, path: Path, log: Log, window: Window, failed: Charge | None = None) -> Explained:
    """What the ledger of `log`, a part of the one at `path`, says of a time. What has `failed` is the first cause."""
    found = charges(written, window)
    lost = [each for each in found.found if each.ms >= ALSO_SHARE * found.lived_ms]
    top = lost[0] if lost and lost[0].ms >= LOST_SHARE * found.lived_ms else None
    words, first = _Words(log, written, found), failed or top
    cause, headline = first.cause if first else "none", words.headline(first)
    command_words = words.words | {"log": str(path)}
    return Explained(
        headline=headline,
        lived_ms=found.lived_ms,
        causes=[words.cause(each) for each in (*([failed] if failed else []), *(lost if top else []))],
        evidence=words.evidence(first) if first else [],
        helps=helping(log, written, top.cause, found.client) if top else None,
        commands=[f"vnext-replay {each.format_map(command_words)}" for each in COMMANDS.get(cause, ("slow {log}",))]
        + ([f"vnext-replay show {path} {words.words.get('step', first.first_step)}"] if first else []),
        clock=written.clock,
        ended=written.ended,
    )


def _weight(lives: dict[int, Life], client: int) -> str:
    """A client's weight in turns, where it has one."""
    last = max((id_ for id_, life in lives.items() if life.client == client), default=-1)
    return f" (weight {lives[last].weight})" if last in lives and lives[last].weight != 1 else ""


class _Words:
    """A log's facts, in words."""

    def __init__(self, log: Log, written: Ledger, found: Charges) -> None:
        timestamps = timestamps_of(log)
        self._wall_us = timestamps.wall_minus_monotonic_ns / 1e3 if timestamps is not None else None
        self._written, self._found, self.seen = written, found, ""
        config, lives = log.header.started.config, written.lives
        ends = [life.end for life in lives.values()]
        self.words: dict[str, object] = {
            "client": f"{found.client:016x}"[:8] + _weight(lives, found.client),
            "share": f"{100 * found.client_share:.0f}%", "long": found.long, "holder": found.holder,
            "prompt": f"{lives[found.long].prompt:,}" if found.long in lives else "?", "preemptions": f"{written.preemptions:,}",
            "age": f"{deadline_us(lives) / 1e6:.1f}", "aborted": ends.count("abort (client)"),
            "failed": f"{sum('error' in end for end in ends)} of {len(ends)}",
            **_limits(config), "worst": "", "times": "", "who": "",
        }  # fmt: skip

    def headline(self, top: Charge | None) -> str:
        if top is None and not self._written.entries:
            came = counted(len(self._written.lives), "request")
            return f"no step was computed: {came} came, and none was served" if self._written.lives else "no request came"
        if top is None:
            return "nothing stands out: the engine served its requests at its usual pace; look at clients and the network"
        if top.cause in ("stall", "slow"):
            self._slowness(top)
        elif top.cause in FAILURES:
            self.words |= {"step": top.first_step} | self._drift()
        return HEADLINES[top.cause].format_map(self.words)

    def _drift(self) -> dict[str, object]:
        if self._written.drift is None:
            return {}
        _, report = self._written.drift
        what = "its state or its tokens were others"
        if report.fed:
            what = f"it gave the model other inputs ({', '.join(report.fed)})"
        elif report.requests:
            what = f"it had other tokens for request {', '.join(map(str, report.requests))}"
        return {"rank": report.rank, "what": printable(what)}

    def _slowness(self, top: Charge) -> None:
        """How slow steps were, and whether the device or the engine's process was."""
        entries = self._written.entries
        usual = [0.0 if entry.stopped else float(us) for entry, us in zip(entries, usual_us(entries)[0])]
        slow = [
            place for place, entry in enumerate(entries)
            if top.from_us <= entry.end_us <= top.to_us and is_slow(entry.us, usual[place])
        ]  # fmt: skip
        worst = max(slow, key=lambda place: entries[place].us - usual[place])
        all_us, busy_us = (sum(getattr(entries[place], name) for place in slow) for name in ("us", "busy_us"))
        busy = busy_us > 0.5 * all_us
        who = "the device was busy with it" if busy else "not the device, the engine's process was held up (disk, processor)"
        times = all_us / max(sum(usual[place] for place in slow), 1.0)
        self.words |= {"worst": f"{entries[worst].us / 1e6:.1f}", "times": f"{times:.1f}", "who": who, "step": entries[worst].step}
        self.seen = f"{len(slow):,} of {counted(len(entries), 'step')} were slow, step {entries[worst].step} most"

    def cause(self, each: Charge) -> Cause:
        return Cause(
            cause=each.cause, lost_ms=each.ms, share=each.ms / max(self._found.lived_ms, 1e-9), first_step=each.first_step,
            last_step=each.last_step, from_s=self._wall_s(each.from_us), to_s=self._wall_s(each.to_us),
        )  # fmt: skip

    def _wall_s(self, us: float) -> float | None:
        return None if self._wall_us is None or np.isnan(us) else (us + self._wall_us) / 1e6

    def evidence(self, top: Charge) -> list[str]:
        if top.cause in FAILURES:
            living = sum(not life.end for life in self._written.lives.values())
            return [f"{counted(living, 'request')} had no whole answer yet{_at(self._wall_s(top.from_us))}"]
        loud = [
            f"{_clock(self._wall_s(us))} step {step}: {printable(line)}" for us, step, line in self._written.loud
            if top.from_us - 1e6 <= us <= top.to_us + 1e6
        ]  # fmt: skip
        if top.cause in ("pause", "crash", "memory", "weights", "flush") and loud:
            more = [f"and {len(loud) - 2} more"] if len(loud) > SHOWN else []
            return [*loud[: 2 if more else SHOWN], *more]
        tokens = sum(entry.again.get(top.cause, 0) for entry in self._written.entries)
        most = max((entry.queue for entry in self._written.entries if top.from_us <= entry.end_us <= top.to_us), default=0)
        lines = [self.seen] if self.seen else []
        lines += [f"{tokens:,} tokens were computed in vain or again"] if tokens else []
        if top.cause == "client":
            own = [id_ for id_, life in self._written.lives.items() if life.client == self._found.client]
            lines.append(f"it sent {counted(len(own), 'request')}, the first is {min(own)}")
        return [*lines, *([f"up to {counted(most, 'request')} waited at once"] if most else [])]


def _at(seconds: float | None) -> str:
    return "" if seconds is None else f" at {_clock(seconds)} UTC"


def _limits(config: SchedulerConfig) -> dict[str, object]:
    return {
        "budget": config.max_num_batched_tokens, "sequences": config.max_num_seqs, "loras": config.max_loras,
        "inputs": config.inputs_a_step,
    }  # fmt: skip


def _clock(seconds: float | None) -> str:
    return "-" if seconds is None else f"{datetime.fromtimestamp(seconds, UTC):%H:%M:%S}"


# ---- the command -------------------------------------------------------------------------------------------------


def add_command(command: Callable[..., argparse.ArgumentParser]) -> None:
    asking = command(
        "explain", run, "say in ten lines why requests were slow, and what would have helped",
        "Charges the time of requests to causes, and runs the arrivals again with what helps.",
    )  # fmt: skip
    add_at(asking)
    asking.add_argument("--request", metavar="ID", default="", help="only this request")
    asking.add_argument("--client", metavar="CLIENT", default="", help="only the requests of this client")


def run(arguments: argparse.Namespace, console: Console) -> None:
    end = arguments.ended = how_ended(arguments)
    answer = explained(arguments.log, Asked(at=arguments.at, request=arguments.request, client=arguments.client), end)
    print_answer(arguments, console, answer, print_explained)


def print_explained(console: Console, answer: Explained) -> None:
    """Ten lines at most."""
    console.print(answer.headline, style="bold", soft_wrap=True)
    for word, line in lines_of(answer):
        console.print(f"  {word:7}  {line}", soft_wrap=True)


def lines_of(answer: Explained) -> list[tuple[str, str]]:
    """What stands below the headline: a word ("" for the one before) and what is said of it."""
    lines = list[tuple[str, str]]()
    if top := next((each for each in answer.causes if each.lost_ms), None):
        when = f", {_clock(top.from_s)} to {_clock(top.to_s)} UTC" if top.from_s is not None else ""
        lived = f"{top.lost_ms / 1e3:,.1f} of the {answer.lived_ms / 1e3:,.1f} s that requests lived, {top.share:.0%}"
        lines.append(("cost", f"{lived}{when}, steps {top.first_step} to {top.last_step}"))
    lines += [("" if place else "seen", each) for place, each in enumerate(answer.evidence)]
    if also := [f"{each.cause} {each.share:.0%}" for each in answer.causes[1 : 1 + SHOWN]]:
        lines.append(("also", ", ".join(also)))
    if answer.helps is not None:
        lines.append(("helps", _helps(answer.helps)))
    return [*lines, *(("" if place else "ask", each) for place, each in enumerate(answer.commands))]


def _helps(found: Help) -> str:
    names = {"first_99": "first tokens at 99 %", "gap_99": "gaps between tokens at 99 %", "whole": "requests in the mean"}
    before, after = (getattr(each, found.name) for each in (found.now, found.then))
    return f"{found.what}: {names[found.name]} take {after:,.0f} ms instead of {before:,.0f}"
