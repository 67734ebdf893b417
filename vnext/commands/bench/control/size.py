"""`vnext size` and `vnext-bench size`: how many GPUs and replicas hold a load to its objectives, with which batch and which memory.

The scheduler on a roofline's clock, as in `simulate`. For each number of GPUs that share the model, the fewest replicas are looked
for from what the products and bytes take alone on, each with its part of the requests; they are taken as a Poisson process, as a
router that looks at nothing leaves them. Of all answers the one with the fewest GPUs counts, then the one with fewer replicas.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil
from typing import NamedTuple

from msgspec.structs import replace

from vnext.commands.bench.bounds import Bound, UnknownFigure, bounds_of, broken, require_measured
from vnext.commands.bench.control.roofline import FREE_SHARE, Device, Form, Roofline, device_named, form_of
from vnext.commands.bench.control.simulate import BLOCK_SIZE, Asked, Clock, config_of, simulated
from vnext.commands.bench.figures import server_figures
from vnext.commands.bench.report import Result, progress, runs_table, until_cut
from vnext.commands.bench.server_runs import MeasurementFailed
from vnext.commands.bench.vllm_figures import concurrent_max
from vnext.commands.bench.workload import numbers_of
from vnext.options.parser import Given
from vnext.runtime.protocol.settings import SettingsError

LIVES = 8
"""The load lasts so many times the life of a lone request: what is over before its first answer shows no queue."""
REPLICAS_MAX, BATCHES = 256, (512, 128, 32, 8)
"""Batches are tried from the largest on: a smaller one keeps the time between tokens short and lets requests wait."""
COLUMNS = {
    "gpus_each": "GPUs each", "replicas": "replicas", "gpus": "GPUs", "price": "$/hour", "max_num_seqs": "max_num_seqs",
    "blocks": "blocks", "cache_tokens": "cache tokens", "ttft_p99_ms": "TTFT p99 ms", "itl_p99_ms": "ITL p99 ms",
}  # fmt: skip
MEMORY = {"gpus_each": "GPUs each", "weights": "weights GB", "cache": "cache GB", "kept": "kept free GB", "memory": "of GB"}


class Load(NamedTuple):
    """What all replicas together get, and what must hold for each. `life_s`: of a lone request, 0 where that is not known."""

    asked: Asked
    bounds: Sequence[Bound]
    max_num_batched_tokens: int
    life_s: float = 0.0


class Found(NamedTuple):
    """Replicas of so many requests at once that hold the load, and what their clients see."""

    replicas: int
    max_num_seqs: int
    figures: dict[str, float]


def measure(given: Given) -> Result:
    """Every number of GPUs that holds the weights. Raises SettingsError, ModelError."""
    values = given.values
    form, device = form_of(values.get("model", "")), device_named(values["bench_device"])
    load = load_of(given)
    shared = numbers_of(values["gpus_each"], "--gpus-each", 1, 64)
    rooms = [each for each in (Roofline(form, device, ranks) for ranks in sorted(set(shared))) if each.cache_tokens]
    if not rooms:
        size = f"{form.weight_bytes / 1e9:.0f} GB of weights"
        raise SettingsError(f"{size} do not fit on {max(shared)} x {values['bench_device']}: give more --gpus-each.")
    runs, tried = list[dict[str, float]](), list[Roofline]()
    with until_cut(runs) as cut:
        for room in progress("numbers of GPUs", rooms):
            if (found := fewest(load, room)) is not None:
                runs.append(line(room, found, values["gpu_price"]))
            tried.append(room)
    if not runs:
        raise SettingsError(f"--slo {values['slo']} holds with no number of replicas up to {REPLICAS_MAX}: {why_not(load, rooms)}")
    best = min(runs, key=lambda run: (run["gpus"], run["replicas"]))
    memory = [memory_line(form, device, room) for room in tried]
    serve = f"-tp {best['gpus_each']} --max-num-seqs {best['max_num_seqs']}"
    answer = f"{best['gpus']} x {values['bench_device']}: {best['replicas']} times vnext serve MODEL {serve}"
    note = "steps by a roofline: nothing was run"
    shown = "\n".join([answer, "", runs_table(COLUMNS, runs, best, "fewest"), "", runs_table(MEMORY, memory), f"note: {note}"])
    wrong = cut.wrong(len(tried), len(rooms), "numbers of GPUs")
    return Result(figures=best, workload=dict(values), runs=tuple(runs), shown=shown, notes=(answer, note), wrong=wrong)


def load_of(given: Given) -> Load:
    """Raises SettingsError."""
    values = given.values
    if not values["slo"]:
        raise SettingsError("name what must hold: --slo 'ttft.p99<500ms,itl.p99<50ms'.")
    if values["request_rate"] <= 0:
        raise SettingsError(f"--request-rate is {values['request_rate']}: give the requests a second that all replicas get.")
    asked = Asked(count=values["num_prompts"], rate=values["request_rate"], input=values["input_len"], output=values["output_len"],
                  shared=values["shared_len"], seed=values["workload_seed"])  # fmt: skip
    bounds = bounds_of(values["slo"].split(","), "--slo")
    require_measured(bounds, given, "--slo")
    return Load(asked, bounds, values["max_num_batched_tokens"])


def fewest(load: Load, room: Roofline) -> Found | None:
    """The fewest replicas that hold the load; None where REPLICAS_MAX do not. Looks around the number that the work alone takes.
    Raises SettingsError."""
    load = load._replace(life_s=life_s(load, room))
    low, best = 0, None  # `low` do not hold it
    high = min(least(load, room), REPLICAS_MAX)
    stride, back = max(1, high // 8), 1
    while best is None and (best := held(load, room, high)) is None:
        if high == REPLICAS_MAX:
            return None
        low, high, stride = high, min(high + stride, REPLICAS_MAX), 2 * stride
    while best.replicas - low > 1:
        half = (low + best.replicas) // 2 if low else max(best.replicas - back, 1)
        if (found := held(load, room, half)) is None:
            low = half
        else:
            best, back = found, 2 * back
    return best


def least(load: Load, room: Roofline) -> int:
    """How many replicas the products and bytes of the load take with the largest batch, without any waiting; at least 1."""
    asked, batch, chunk = load.asked, BATCHES[0], load.max_num_batched_tokens
    read, context = asked.input - asked.shared, asked.input + asked.output / 2
    prompt_s = read / chunk * room.seconds(chunk, chunk, chunk * asked.input / 2)
    decode_s = (asked.output - 1) / batch * room.seconds(batch, batch * context, batch * context)
    return max(1, ceil(asked.rate * (prompt_s + decode_s)))


def held(load: Load, room: Roofline, replicas: int) -> Found | None:
    """Whether so many hold it, and with which batch: the largest that does. Raises SettingsError."""
    most = BATCHES[0] + 1
    for batch in BATCHES:
        if most <= batch:
            continue  # no more requests were there at once: a smaller batch decides the same
        figures, most = seen(load, room, replicas, batch)
        try:
            if not broken(load.bounds, figures, "--slo"):
                return Found(replicas, min(batch, 1 << (most - 1).bit_length()), figures)
        except MeasurementFailed as error:
            raise UnknownFigure(str(error)) from error
    return None


def life_s(load: Load, room: Roofline) -> float:
    """How long a lone request takes. Raises SettingsError."""
    asked = replace(load.asked, count=1, rate=1e9)
    (lone,) = simulated(asked, config_of(asked, clock_of(room), BATCHES[0], load.max_num_batched_tokens), room.step_s)
    return lone.ended_s


def clock_of(room: Roofline) -> Clock:
    return Clock(step_s=room.step_s, cache_tokens=room.cache_tokens)


def seen(load: Load, room: Roofline, replicas: int, batch: int) -> tuple[dict[str, float], int]:
    """What the clients of one replica see, and the most requests that it had at once. Raises SettingsError."""
    asked = load.asked.at(load.asked.rate / replicas)
    asked = replace(asked, count=max(asked.count, ceil(LIVES * (load.life_s or life_s(load, room)) * asked.rate)))
    timelines = simulated(asked, config_of(asked, clock_of(room), batch, load.max_num_batched_tokens), room.step_s)
    return server_figures(timelines, max(each.ended_s for each in timelines), asked.rate), concurrent_max(timelines)


def why_not(load: Load, rooms: Sequence[Roofline]) -> str:
    """What a replica does that has next to nothing to do."""
    figures, _ = seen(load, rooms[-1], REPLICAS_MAX, BATCHES[0])
    return f"{broken(load.bounds, figures, '--slo')[0]} on the most GPUs even when they are idle."


def line(room: Roofline, found: Found, price: float) -> dict[str, float]:
    """A line of the table, whose figures are those of one replica but for GPUs and dollars."""
    gpus = room.ranks * found.replicas
    return {
        "gpus_each": room.ranks, "replicas": found.replicas, "gpus": gpus, "price": round(gpus * price, 2),
        "max_num_seqs": found.max_num_seqs, "blocks": room.cache_tokens // BLOCK_SIZE, "cache_tokens": room.cache_tokens,
    } | found.figures  # fmt: skip


def memory_line(form: Form, device: Device, room: Roofline) -> dict[str, float]:
    """10^9 bytes of one GPU: weights, cache, and what is left for activations, graphs and the driver."""
    weights, cache = form.weight_bytes / room.ranks, room.cache_tokens * form.token_bytes / room.ranks
    parts = {"weights": weights, "cache": cache, "kept": (1 - FREE_SHARE) * device.memory, "memory": device.memory}
    return {"gpus_each": room.ranks} | {name: round(each / 1e9, 1) for name, each in parts.items()}
