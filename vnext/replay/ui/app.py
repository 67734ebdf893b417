"""The page's server: files of the page and answers about one or two logs, or one that grows.

Owns routes, bounds and answers. It only reads, except for the caches beside a log. Who may ask decides
vnext/server/http/static_files.py.
"""

from __future__ import annotations

import asyncio
import base64
import re
from collections.abc import Callable, Mapping
from importlib import resources
from typing import Any

import msgspec
import numpy as np
from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

from vnext.replay.answers.diff import diff
from vnext.replay.answers.render_request_life import reason as wait_words, reported, spans
from vnext.replay.answers.request_life import RequestLife, life
from vnext.replay.answers.seen_inputs import SeenInput, hear, in_a_line, inputs_of
from vnext.replay.answers.slow import slow
from vnext.replay.reading.between import between
from vnext.replay.reading.naming import request_of
from vnext.replay.reading.show import Json
from vnext.replay.reading.source import Log, UnusableLog
from vnext.replay.reading.step_counts import percentiles
from vnext.replay.reading.window import Window, step_at
from vnext.replay.ui.live import LiveLog
from vnext.replay.ui.opened import Indexing, Opened
from vnext.replay.ui.overview import COLUMNS, PARTS_MAX
from vnext.replay.ui.walk import Kind, Moment, Walk
from vnext.sched.admission import Wait
from vnext.sched.explain import Explanation, explain
from vnext.sched.policies import is_built_in
from vnext.server.http.static_files import StaticFiles, isolate, new_token, refusal
from vnext.state.digest import digest, hexadecimal
from vnext.state.state import Request, State, Waiting
from vnext.state.traits import line_of
from vnext.state.windows import row_blocks

POINTS_MAX = 4000
SLOWEST = 6
TIME = re.compile(r"\+\d+(\.\d+)?|(\d{4}-\d\d-\d\d[T ])?\d\d?:\d\d(:\d\d(\.\d+)?)?Z?")
WHOLE_MAX = 1 << 53
"""The largest number in a question: what the page's own numbers can hold."""

Shown = Opened | LiveLog


class Pages:
    """The answers, each a JSON object."""

    def __init__(self, opened: list[Shown]) -> None:
        self.opened = opened

    async def logs(self, request: web.Request) -> web.Response:
        """All logs; while one is read for the first time, only the progress: {"opening": [done, total bytes]}."""
        opening = [each.indexed for each in self.opened if each.opening]
        if opening:
            return _json({"opening": opening[0]})
        for each in self.opened:
            if each.error:
                raise UnusableLog(each.error)
        return _json({"logs": [await _about(each) for each in self.opened], "columns": COLUMNS})

    async def overview(self, request: web.Request) -> web.Response:
        found = self._log(request)
        first, last = _whole(request, "first", found.walk.first_step), _whole(request, "last", found.walk.last_step)
        points = max(1, min(POINTS_MAX, _whole(request, "points", 1000)))
        return _json(found.overview.points(first, last, points))

    async def step(self, request: web.Request) -> web.Response:
        found, step = self._log(request), _whole(request, "step")
        return _json(await found.ask(lambda walk: step_view(walk.moment(step))))

    async def lanes(self, request: web.Request) -> web.Response:
        found, first = self._log(request), _whole(request, "first")
        last = min(_whole(request, "last"), first + WINDOW_MAX - 1)
        environment = found.log.header.started.environment
        return _json({"lanes": await found.ask(lambda walk: lanes(walk.moments(first, last), environment))})

    async def find(self, request: web.Request) -> web.Response:
        """Find a step by `event`, by `request` (its arrival), as the next one with something in `column`, or by a `text`: a time,
        or a request as people call it; where nothing is called so, the answer says `why`."""
        found = self._log(request)
        if text := request.query.get("text", "").strip():
            try:
                return _json({"step": await found.ask(lambda walk: _step_called(walk, found.log, text))})
            except UnusableLog as error:
                return _json({"step": None, "why": str(error)})
        if "column" in request.query:
            column, step = request.query["column"], _whole(request, "step")
            if column not in COLUMNS:
                raise UnusableLog(f"there is no column {column}: ask for one of {', '.join(COLUMNS)}")
            return _json({"step": found.overview.next_with(column, step, "back" not in request.query)})
        what: Kind
        if "request" in request.query:
            what, wanted, last = "request", _whole(request, "request"), found.walk.requests
        else:
            what, wanted, last = "event", _whole(request, "event"), found.walk.events
        if not 0 <= wanted < last:
            raise UnusableLog(f"{what} {wanted} is not in this log: it has {last} of them")
        return _json({"step": await found.ask(lambda walk: _step_after(walk, what, wanted))})

    async def slow(self, request: web.Request) -> web.Response:
        """The slowest first tokens, gaps and steps; none of a log that grows."""
        found = self._log(request)
        if isinstance(found, LiveLog):
            return _json({"firsts": [], "gaps": [], "steps": []})
        return _json(await found.ask(lambda walk: slow(walk.indexed(), SLOWEST)))

    async def part(self, request: web.Request) -> web.Response:
        """What happened in the steps `first` to `last`, with the percentiles 50 and 99 of first tokens and gaps (ms)."""
        found = self._log(request)
        part = found.overview.part(_whole(request, "first"), _whole(request, "last"))
        if part["window"] is not None and not isinstance(found, LiveLog) and part["last"] - part["first"] < PARTS_MAX:
            latency = (await found.ask(lambda walk: between(walk.indexed(), Window(*part["window"])))).latency
            part |= {name: _percentiles(kind) for name, kind in (("firsts", latency.first_us), ("gaps", latency.gap_us))}
        return _json(part)

    async def request(self, request: web.Request) -> web.Response:
        """A request's life: its first line, what it waited for, and each thing that happened, with its step."""
        found, number = self._log(request), _whole(request, "id")
        if not 0 <= number < found.walk.requests:
            raise UnusableLog(f"request {number} is not in this log: it has {found.walk.requests} of them")
        if isinstance(found, LiveLog):
            raise UnusableLog("lives of requests are told of logs that have ended: open this one without --live")
        its = await found.ask(lambda walk: life(walk.indexed(), number))
        return _json({
            "id": its.id, "name": its.name, "line": its.waited.line, "end": its.finish, "reasons": its.waited.by_reason,
            "facts": {"prompt tokens": its.prompt_tokens, "from the cache": its.cached_tokens, "tokens": its.generated_tokens,
                      "steps waited": its.waited_steps, "preemptions": its.preemptions},
            "waits": [{"step": each.first_step, "last": each.last_step, "words": wait_words(each)} for each in its.waits],
            "inputs": [_place(each, its) | {"words": in_a_line(each)} for each in its.inputs],
            "moments": [{"step": each.first.step, "last": each.last.step, "words": reported(each)} for each in spans(its.moments)],
        })  # fmt: skip

    async def aligned(self, request: web.Request) -> web.Response:
        """For each log, the step that is as long after its first one as `step` is in log 0."""
        one, *others = (each.overview for each in self.opened)
        step = _whole(request, "step")
        since_us = one.since_us(step)
        return _json({"steps": [step, *(each.step_since(since_us) for each in others)], "since_s": since_us / 1e6})

    async def difference(self, request: web.Request) -> web.Response:
        """The first step in which two logs differ, None if they are equal."""
        if len(self.opened) < 2:
            raise UnusableLog("one log has nothing to differ from: open a second one beside it")
        one, other = (each.log for each in self.opened[:2])
        found = await asyncio.to_thread(diff, one, other)
        return _json({"step": None if found.same else found.step})

    def _log(self, request: web.Request) -> Shown:
        number = _whole(request, "log", 0)
        if not 0 <= number < len(self.opened):
            raise UnusableLog(f"there is no log {number}: {len(self.opened)} are open, counted from 0")
        return self.opened[number]


def _step_after(walk: Walk, what: Kind, wanted: int) -> int:
    """The first step whose state has passed an event or a request; the last one if none has."""
    for number in range(max(walk.place(what, wanted).state.planned, walk.first_step), walk.last_step + 1):
        after = walk.moment(number).after
        if (after.next_id if what == "request" else after.sequence) > wanted:
            return number
    return walk.last_step


def _step_called(walk: Walk, log: Log, text: str) -> int:
    """Raises UnusableLog if there is no such time or request, or more than one."""
    if TIME.fullmatch(text):
        if walk.index is None:
            raise UnusableLog("times are not known yet in a log that grows")
        return min(max(step_at(walk.index, text, is_clamped=True), walk.first_step), walk.last_step)
    number = request_of(log, text)
    if number >= walk.requests:
        raise UnusableLog(f"request {number} is not in this log: it has {walk.requests} of them")
    return _step_after(walk, "request", number)


async def _about(shown: Shown) -> Json:
    found: Json = await shown.ask(lambda _: shown.about())
    return found


def _whole(request: web.Request, name: str, default: int | None = None) -> int:
    text = request.query.get(name)
    if text is None and default is not None:
        return default
    try:
        found = int(text or "")
    except ValueError:
        found = WHOLE_MAX + 1
    if abs(found) > WHOLE_MAX:
        raise UnusableLog(f"{name} must be a whole number, not {(text or '')[:40]!r}")
    return found


def _place(each: SeenInput, its: RequestLife) -> Json:
    """The steps of an input: the request's first one while none has reached it."""
    if each.runs:
        return {"step": each.runs[0][0], "last": max(last for _, last, _ in each.runs)}
    return dict.fromkeys(("step", "last"), its.moments[0].step if its.moments else 0)


def _percentiles(times_us: dict[int, int]) -> list[float]:
    """The percentiles 50 and 99 in ms; none of no times."""
    return [us / 1e3 for us in percentiles(times_us, (50, 99))] if times_us else []


def _json(value: object) -> web.Response:
    return web.Response(body=msgspec.json.encode(value), content_type="application/json")


def guard(token: str) -> Middleware:
    """The middleware: admits loopback hosts with the token only, answers errors with one sentence, and reports the
    index's progress for questions that must wait."""

    @web.middleware
    async def guarded(request: web.Request, handler: Handler) -> web.StreamResponse:
        if (refused := refusal(request, token)) is not None:
            return refused
        try:
            return await handler(request)
        except UnusableLog as error:
            return web.json_response({"error": str(error)}, status=400)
        except Indexing as waiting:
            return web.json_response({"indexing": [waiting.done, waiting.total]}, status=202)

    return guarded


def page_files() -> StaticFiles:
    return StaticFiles(resources.files("vnext.replay.ui") / "page")


def make_app(opened: list[Shown], token: str) -> web.Application:
    """The application for these logs. All paths begin with /TOKEN/."""
    pages, app = Pages(opened), web.Application(middlewares=[guard(token)])
    app.on_response_prepare.append(isolate)
    for name in ("logs", "overview", "step", "lanes", "find", "slow", "part", "request", "aligned", "difference"):
        app.router.add_get(f"/{token}/api/{name}", getattr(pages, name))
    page_files().add_to(app, f"/{token}/")
    return app


async def serve(opened: list[Shown], port: int, ready: Callable[[str], None]) -> None:
    """Serve until cancelled. `ready` gets the address once it can be opened. Raises UnusableLog if the port is taken."""
    token = new_token()
    runner = web.AppRunner(make_app(opened, token), access_log=None)
    await runner.setup()
    try:
        site = web.TCPSite(runner, "127.0.0.1", port)
        try:
            await site.start()
        except OSError as error:
            raise UnusableLog(f"port {port} cannot be used ({error.strerror}): choose another with --port") from error
        ready(f"http://127.0.0.1:{runner.addresses[0][1]}/{token}/")
        await asyncio.Event().wait()
    finally:
        await runner.cleanup()


WINDOW_MAX = 240
Span = tuple[int, int, str, Json | None]


def lanes(moments: list[Moment], environment: Mapping[str, str]) -> list[dict[str, Any]]:
    """Lanes in order of arrival: {"id", "name", "client", "runs": [[first, last, kind, reason or None], ...], "inputs"}.

    Kinds: `prompt` (positions that were known), `answer` (one token), `wait` (in the queue, or running without work). `inputs`: all
    of its prompt, with what became of them in these steps (seen_inputs.py).
    """
    found: dict[int, list[Span]] = {}
    names: dict[int, dict[str, str]] = {}
    inputs: dict[int, list[SeenInput]] = {}
    for moment in moments:
        scheduled = moment.after.in_flight[-1]
        for id_, count, samples in zip(scheduled.ids.tolist(), scheduled.counts.tolist(), scheduled.samples.tolist()):
            _extend(found, id_, moment.step, "answer" if samples and count == 1 else "prompt", None)
        for wait in explained(moment).waits:
            _extend(found, wait.id, moment.step, "wait", reason(wait))
        for id_ in found.keys() - names.keys():
            request = moment.after.requests[id_]
            names[id_], inputs[id_] = named(request), inputs_of(request.prompt, moment.after.config, environment)
        for id_, its in inputs.items():
            for event in (*(event for _, event in moment.since), moment.plan) if its else ():
                hear(its, id_, event, moment.before, moment.after)
    return [{"id": id_, **names[id_], "runs": runs, "inputs": inputs[id_]} for id_, runs in sorted(found.items())]


def _extend(found: dict[int, list[Span]], id_: int, step: int, kind: str, why: Json | None) -> None:
    runs = found.setdefault(id_, [])
    if runs and runs[-1][1] == step - 1 and runs[-1][2] == kind and _same(runs[-1][3], why):
        runs[-1] = runs[-1][0], step, kind, why
    else:
        runs.append((step, step, kind, why))


def _same(one: Json | None, other: Json | None) -> bool:
    return bool((one and one["why"]) == (other and other["why"]))


# ---- one step for the page ---------------------------------------------------------------------------------------
# The plan, the batch, the queue with its reasons, the blocks, and the events since the last step, as plain values: numbers, names
# and flags, but no token and no text.

FREE, KEPT, HELD, SHARED = range(4)
NOBODY = -1


def step_view(moment: Moment) -> dict[str, Any]:
    """The step as the page shows it. Positions are tokens, ids count arrivals."""
    state = moment.after
    scheduled = state.in_flight[-1]
    work = {
        id_: (start, count, samples)
        for id_, start, count, samples in zip(
            scheduled.ids.tolist(), scheduled.starts.tolist(), scheduled.counts.tolist(), scheduled.samples.tolist()
        )
    }
    waits = {wait.id: wait for wait in explained(moment).waits}
    return {
        "step": moment.step,
        "event": moment.event,
        "digest": hexadecimal(digest(state)),
        "tokens": scheduled.tokens,
        "budget": state.config.max_num_batched_tokens,
        "in_flight": len(state.in_flight),
        "rows": [_row(state, row, work, waits) for row in range(len(state.rows))],
        "queue": [_queued(entry, state.requests[entry.id], waits.get(entry.id)) for entry in state.waiting],
        "admitted": len(moment.plan.admitted),
        "preempted": [int(moment.before.rows.id[row]) for row in moment.plan.preempted],
        "expected": not (moment.plan.admitted or moment.plan.preempted or moment.plan.changed),
        "blocks": block_map(state),
        "since": [{"event": number, "line": line_of(event)} for number, event in moment.since],
        "counters": {name: getattr(state.counters, name) for name in state.counters.__struct_fields__},
    }


def explained(moment: Moment) -> Explanation:
    """Why requests wait in this step. Empty if the policy is the engine's own, which would have to be imported."""
    return explain(moment.before) if is_built_in(moment.before.config.policy) else Explanation(moment.plan, ())


def reason(wait: Wait | None) -> dict[str, Any] | None:
    return None if wait is None else {"why": wait.why, "need": wait.need, "have": wait.have, "behind": wait.behind}


def _row(state: State, row: int, work: dict[int, tuple[int, int, bool]], waits: dict[int, Wait]) -> dict[str, Any]:
    id_ = int(state.rows.id[row])
    start, count, samples = work.get(id_, (0, 0, False))
    request = state.requests[id_]
    return {
        "id": id_,
        **named(request),
        "prompt": request.prompt_length,
        "known": int(state.rows.known[row]),
        "start": start,
        "count": count,
        "samples": samples,
        "blocks": int(state.rows.blocks[row]),
        "limit": int(state.rows.limit[row]),
        "wait": reason(waits.get(id_)),
    }


def named(request: Request) -> dict[str, str]:
    """What people may call it by: its name, and its client's number (hexadecimal, "" where none is known)."""
    return {"name": request.name, "client": f"{request.client:016x}" if request.client else ""}


def _queued(entry: Waiting, request: Request, wait: Wait | None) -> dict[str, Any]:
    return {
        "id": entry.id,
        **named(request),
        "known": entry.known,
        "priority": entry.priority,
        "weight": request.weight,
        "epoch": entry.preemption_count,
        "wait": reason(wait),
    }


def block_map(state: State) -> dict[str, Any]:
    """Every block: `kinds` u8[N] (free, kept, held, shared) and `owners` i32[N] (a holder's id), base64."""
    status = state.pool.status.values()
    kinds = np.where(status < -1, SHARED, np.where(status < 0, HELD, FREE)).astype(np.uint8)
    kept = np.array(list(state.pool.prefix_index.blocks().values()), dtype=np.int64)
    kinds[kept[status[kept] >= 0]] = KEPT
    owners = np.full(len(status), NOBODY, dtype="<i4")
    for row in range(len(state.rows)):
        owners[row_blocks(state, row)] = state.rows.id[row]
    return {"count": len(status), "kinds": _text(kinds), "owners": _text(owners)}


def _text(values: np.ndarray) -> str:
    return base64.b64encode(values.tobytes()).decode()
