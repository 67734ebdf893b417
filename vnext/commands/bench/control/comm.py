"""`vnext-bench comm`: what a decode step sends to the ranks, and what sending, receiving and building the batch take.

vnext sends what changed, and each rank folds it into a state of its own. Beside it stands the full broadcast that it replaces:
every step all of each request, its tokens, blocks and parameters, from which a rank without a state builds the same batch.
The channel is the ring, written and read by one process: no other wakes up for it.
"""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter_ns
from typing import Any, NamedTuple, cast

import msgspec
import numpy as np

from vnext.commands.bench.control.steady import STEPS_MAX, VOCABULARY, committed, planned, steady_decode
from vnext.commands.bench.report import Result, progress, runs_table, until_cut
from vnext.commands.bench.workload import numbers_of
from vnext.options.parser import Given
from vnext.runtime.batch.batch import PersistentBatch
from vnext.runtime.transport.ring.broadcast import decode_events, encode_events
from vnext.runtime.transport.ring.reader import RingReader
from vnext.runtime.transport.ring.writer import RingWriter
from vnext.state.events import AnyEvent
from vnext.state.params import Sampling
from vnext.state.preempt import row_tokens
from vnext.state.reduce import reduce
from vnext.state.state import State, StepInFlight
from vnext.state.windows import row_table

ROUNDS_MAX = STEPS_MAX // 2
RING_BYTES = 64 * 2**20
COLUMNS = {
    "batch": "batch", "form": "broadcast", "bytes": "bytes/step", "encode_us": "encode us", "channel_us": "channel us",
    "receipt_us": "receipt us", "build_us": "build us", "total_us": "total us",
}  # fmt: skip


class Whole(msgspec.Struct, frozen=True, array_like=True):
    """All of one request, as a rank without a state needs it; `tokens` and `pages` are int32."""

    id: int
    start: int
    tokens: bytes
    pages: bytes
    sampling: Sampling


class Arrays(NamedTuple):
    """A decode batch: int64 [R] tokens, positions and slots, int32 [R, width] pages of each request, 0 behind its last."""

    tokens: np.ndarray
    positions: np.ndarray
    slots: np.ndarray
    table: np.ndarray


_decode = msgspec.msgpack.Decoder(list[Whole]).decode


def measure(given: Given) -> Result:
    """Both forms at each batch. Raises SettingsError."""
    rounds, batches = min(given.values["rounds"], ROUNDS_MAX), batches_of(given.values["batches"])
    runs: list[dict[str, Any]] = []
    with until_cut(runs) as cut:
        for count in progress("batches", batches):
            state = steady_decode(count)
            runs += [measured(form(state), count, rounds) for form in FORMS]
    figures = {f"{name}_{run['form']}_{run['batch']}": run[name] for run in runs for name in ("bytes", "total_us")}
    return Result(
        figures=figures, workload={"rounds": rounds}, runs=tuple(runs), shown=runs_table(COLUMNS, runs),
        wrong=cut.wrong(len(runs) // len(FORMS), len(batches), "batches"),
    )  # fmt: skip


def batches_of(text: str) -> list[int]:
    """Raises SettingsError."""
    return numbers_of(text, "--batches", 1, 4096)


class Form(NamedTuple):
    """The parts of a broadcast. `next`: what a step has to tell, outside of the clock."""

    name: str
    next: Callable[[], Any]
    encode: Callable[[Any], bytes]
    receive: Callable[[bytes], Any]
    build: Callable[[Any], object]


def incremental(state: State) -> Form:
    """The events of steady steps, folded by a rank into its own state, which its rows follow."""
    batch, now = PersistentBatch(state.config, VOCABULARY), [state]
    batch.step_inputs(state)

    def events() -> tuple[AnyEvent, AnyEvent]:
        return planned(now[0]), committed(now[0])

    def receive(message: bytes) -> StepInFlight:
        before = now[0].in_flight[0]
        plan, _ = decode_events(message)  # ranks know themselves what they sampled
        now[0] = reduce(reduce(now[0], cast(AnyEvent, plan)), committed(now[0]))
        return before

    def build(before: StepInFlight) -> object:
        batch.take_sampled(before, np.full(len(before.samples), 7))
        return batch.step_inputs(now[0])

    return Form("incremental", events, encode_events, receive, build)


def full(state: State) -> Form:
    """Everything about every request, every step."""
    return Form("full", lambda: state, whole_message, _decode, lambda found: arrays_of(found, state.config.block_size))


FORMS = (incremental, full)


def measured(form: Form, count: int, rounds: int) -> dict[str, Any]:
    """The figures of a form: medians over so many steps."""
    spent: list[list[int]] = []
    sizes = []
    with RingWriter.create(capacity_bytes=RING_BYTES, reader_count=1) as writer:
        reader = RingReader.attach(writer.name, 0, spin_us=0)
        for _ in range(rounds):
            content, marks = form.next(), [perf_counter_ns()]
            message = form.encode(content)
            marks.append(perf_counter_ns())
            writer.write(message)
            arrived = reader.read(0)
            marks.append(perf_counter_ns())
            found = form.receive(arrived or b"")
            marks.append(perf_counter_ns())
            form.build(found)
            marks.append(perf_counter_ns())
            sizes.append(len(message))
            spent.append(np.diff(marks).tolist())
        reader.close()
    medians = (np.median(spent, axis=0) / 1e3).round(2).tolist()
    named = dict(zip(("encode_us", "channel_us", "receipt_us", "build_us"), medians))
    return {"batch": count, "form": form.name, "bytes": int(np.median(sizes)), **named, "total_us": round(sum(medians), 2)}


def whole_message(state: State) -> bytes:
    """The newest step of a decode batch, with all of its requests."""
    scheduled = state.in_flight[-1]
    requests = [state.requests[id_] for id_ in state.rows.id.tolist()]
    return msgspec.msgpack.encode([
        Whole(request.id, start, row_tokens(state, row).tobytes(), row_table(state, row).tobytes(), request.sampling)
        for row, (request, start) in enumerate(zip(requests, scheduled.starts.tolist()))
    ])  # fmt: skip


def arrays_of(requests: list[Whole], block_size: int) -> Arrays:
    """The batch of a full message, whose newest tokens the rank has sampled itself."""
    positions = np.array([each.start for each in requests])
    pages = [np.frombuffer(each.pages, np.int32) for each in requests]
    tokens = [np.frombuffer(each.tokens, np.int32) for each in requests]
    table = np.zeros((len(requests), max(map(len, pages))), np.int32)
    for row, own in enumerate(pages):
        table[row, : len(own)] = own
    newest = np.array([int(own[min(start, len(own) - 1)]) for own, start in zip(tokens, positions.tolist())])
    slots = table[np.arange(len(requests)), positions // block_size] * block_size + positions % block_size
    return Arrays(newest, positions, slots.astype(np.int64), table)
