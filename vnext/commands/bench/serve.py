"""`vnext-bench serve`: a load on a running server, with the options and the result file of `vllm bench serve`."""

from __future__ import annotations

import asyncio
import os
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from importlib import import_module
from math import isinf
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import msgspec

from vnext.commands.bench.client_watch import LoopWatch, client_notes
from vnext.commands.bench.datasets import (
    RandomLengths,
    Sample,
    agent_samples,
    agent_traces,
    custom_samples,
    dataset_path,
    random_samples,
    sharegpt_samples,
    text_of,
    texts,
)
from vnext.commands.bench.energy import FIGURES, EnergyWatch, Meter, meters
from vnext.commands.bench.figures import server_figures
from vnext.commands.bench.load.answers import Models, RequestFailed
from vnext.commands.bench.load.client import Client
from vnext.commands.bench.load.generator import (
    Pace,
    Request,
    Timeline,
    at_once,
    poisson,
    ramp,
    recorded,
    send_all,
    send_until_cut,
)
from vnext.commands.bench.options import ENDPOINTS, SENT
from vnext.commands.bench.report import Result, Wrong, progress, require_writable, written
from vnext.commands.bench.server_runs import model_of, wrong_in
from vnext.commands.bench.vllm_figures import (
    Interval,
    Value,
    details_of,
    interval_lines,
    intervals_of,
    result_of,
    table,
    wanted_of,
)
from vnext.commands.bench.workload import plain_ids
from vnext.options.parser import Given
from vnext.options.reader import server_url
from vnext.replay.answers.convert import answers_of, arrivals_in
from vnext.replay.reading.source import UnusableLog
from vnext.runtime.processes.launch import DEMO_MODEL, model_folder
from vnext.runtime.protocol.settings import SettingsError
from vnext.state.events import RequestArrived, unpack_tokens
from vnext.text.tokenizer import Tokenizer

WHOLE = frozenset({"openai-embeddings", "vllm-rerank"})
"""Backends whose answers are no streams."""
QUERY_CHARACTERS = 100
"""Of a prompt that is also the query of its reranking."""


def serve(given: Given) -> Result:
    """Send the load. Raises SettingsError, ServerUnusable and MeasurementFailed; writes the result where that is asked for."""
    values = given.values
    wanted = wanted_of(values["percentile_metrics"], values["percentiles"], values["goodput"])
    extra: dict[str, Value] = {**metadata_of(values["metadata"])}
    require_effect(values)
    if values["ramp_up_strategy"]:
        extra |= dict(zip(("ramp_up_start_rps", "ramp_up_end_rps"), ramp_of(values)), ramp_up_strategy=values["ramp_up_strategy"])
    if values["save_result"]:
        require_writable(result_path(values, f".vnext-bench-{os.getpid()}"), f"--result-dir {values['result_dir'] or '.'}")
    energy = meters(urlsplit(url_of(values)).hostname or "") if values["energy"] else []
    samples = samples_of(values, tokenizer_of(values))
    name, timelines, begin_s, elapsed_s, seen = asyncio.run(measured(values, samples, energy))
    wrong = wrong_in(timelines, len(samples), url_of(values))
    spent = {figure: seen[figure] for figure in FIGURES if figure in seen}
    rate = 0.0 if isinf(values["request_rate"]) else values["request_rate"]
    asked = 0.0 if any(each.follows for each in samples) else rate  # that of agents is not that of requests
    result: dict[str, Value] = {
        "date": time.strftime("%Y%m%d-%H%M%S"), "endpoint_type": values["backend"], "backend": values["backend"], "label": None,
        "model_id": name, "tokenizer_id": tokenizer_name(values), "num_prompts": len(samples), **extra,
        "request_rate": rate or "inf", "burstiness": values["burstiness"], "max_concurrency": values["concurrency"] or None,
        **result_of(timelines, elapsed_s, wanted), **spent,
    }  # fmt: skip
    intervals = intervals_of(timelines, wanted)
    whole = {**result, "confidence_95": intervals, **(details_of(timelines) if values["save_detailed"] else {})}
    lost = lost_notes(values["from_log"], f"{len(samples)} requests")
    notes = [*filter(None, [wrong.sentence]), *lost, *client_notes(seen), *failure_notes(timelines)]
    unwritten = save(values, whole) if values["save_result"] else ""
    return Result(
        figures=server_figures(timelines, elapsed_s, asked, begin_s) | seen,
        workload=workload_of(values),
        load={"concurrency": values["concurrency"], "request_rate": rate, "burstiness": values["burstiness"]},
        notes=tuple(notes),
        wrong=Wrong("\nvnext-bench: ".join(filter(None, (wrong.sentence, unwritten))), wrong.is_cut),
        shown="\n".join([
            table(result, wanted), *(f"{name}: {value:,}" for name, value in spent.items()), *interval_lines(intervals),
            *(f"note: {note}" for note in notes),
        ]),
    )


def failure_notes(timelines: Sequence[Timeline]) -> list[str]:
    """A note on each kind of failure, with its first sentence."""
    counts = Counter(each.kind for each in timelines if each.error)
    first = {each.kind: each.error for each in reversed(timelines)}
    return [f"{count} requests failed ({kind}), the first with: {first[kind]}" for kind, count in counts.most_common()]


def workload_of(values: Mapping[str, Any]) -> dict[str, Value]:
    """What a report says of the prompts."""
    found = {option.name: values[option.name] for option in SENT}
    return {name: value if isinstance(value, int | float | str) else str(value) for name, value in found.items()}


def tokenizer_name(values: Mapping[str, Any]) -> str:
    return str(values.get("tokenizer") or values.get("model") or DEMO_MODEL)


def tokenizer_of(values: Mapping[str, Any]) -> Tokenizer:
    """That of the prompts. Raises ModelError, CheckpointUnreadable."""
    return Tokenizer.load(model_folder(tokenizer_name(values), models_dir=values.get("models_dir", ""), with_weights=False))


def metadata_of(words: Sequence[str]) -> dict[str, str]:
    """Raises SettingsError."""
    if wrong := [word for word in words if "=" not in word]:
        raise SettingsError(f"--metadata has {wrong[0]!r}: write KEY=VALUE.")
    return {word.partition("=")[0]: word.partition("=")[2] for word in words}


def samples_of(values: Mapping[str, Any], tokenizer: Tokenizer) -> list[Sample]:
    """The requests of the dataset; of a chat they are messages. Raises SettingsError."""
    name, count, seed = values["dataset_name"], values["num_prompts"], values["seed"]
    is_chat = values["backend"] in ("openai-chat", "openai-responses", "anthropic")
    if name == "agent" and values["backend"] not in ("openai", "vllm", "openai-chat"):
        raise SettingsError(f"--dataset-name agent has no form for --backend {values['backend']}: take openai-chat.")
    path, output_tokens = dataset_path(values["dataset_path"]), values["dataset_output_len"]
    lengths = RandomLengths(
        input=values["random_input_len"], output=values["random_output_len"], prefix=values["random_prefix_len"],
        range_ratio=values["random_range_ratio"],
    )  # fmt: skip
    if values["dataset_path"] and (values["from_log"] or name == "random"):
        other = "--from-log brings its own requests" if values["from_log"] else "--dataset-name random has no file"
        raise SettingsError(f"{other}: take --dataset-path out, or name a dataset that has one: sharegpt, custom or agent.")
    if values["from_log"]:
        samples = log_samples(Path(values["from_log"]).expanduser(), count, tokenizer)
    elif name == "random":
        samples = random_samples(count, lengths, tokenizer, seed)
    elif name == "agent" and not values["dataset_path"]:
        samples = agent_samples(count, lengths, values["agent_turns"], values["agent_result_len"], tokenizer, seed, is_chat)
    elif not values["dataset_path"]:
        raise SettingsError(f"--dataset-name {name} needs its file: add --dataset-path.")
    elif name == "agent" and not is_chat:
        raise SettingsError("--dataset-name agent: the messages of a file are a chat's: add --backend openai-chat.")
    elif name == "agent":
        samples = agent_traces(path, count, tokenizer, output_tokens)
    elif name == "sharegpt":
        samples = sharegpt_samples(path, count, tokenizer, output_tokens, seed)
    else:
        samples = custom_samples(path, count, tokenizer, output_tokens)
    if values["backend"] == "vllm-rerank":
        return [msgspec.structs.replace(each, prompt=text_of(each, tokenizer)) for each in samples]
    return list(texts(samples, tokenizer)) if is_chat else samples


async def measured(
    values: Mapping[str, Any], samples: Sequence[Sample], energy: Sequence[Meter] = ()
) -> tuple[str, list[Timeline], float, float, dict[str, float]]:
    """Warm up and send the load: the model's name, the timelines, the start and the seconds it took, and what the client itself
    took and the machine's meters counted."""
    url = url_of(values)
    path = values["endpoint"] or ENDPOINTS[values["backend"]]
    async with Client(url, values["api_key"]) as client:
        name = values["served_name"] or await name_of(client, str(values.get("model", "")))
        requests = [request_of(name, path, values["backend"], each, values["ignore_eos"]) for each in samples]
        count, times_s = len(requests), due_s(values, samples)
        pace = Pace(times_s=times_s, concurrency=values["concurrency"], is_closed=values["concurrency"] > 0 and not any(times_s))
        await send_all(client, requests[:1] * values["num_warmups"], Pace(times_s=at_once(values["num_warmups"])), 0.0)
        with progress("requests", total=count) as bar:
            watch, spent, begin_s = LoopWatch(), EnergyWatch(energy), time.perf_counter()
            timelines = await send_until_cut(client, requests, pace, begin_s, bar.update)
            elapsed_s, seen = time.perf_counter() - begin_s, watch.stop()
            seen |= spent.stop(sum(each.output_tokens for each in timelines if not each.error))
    return name, timelines, begin_s, elapsed_s, seen


def url_of(values: Mapping[str, object]) -> str:
    return server_url(str(values["base_url"])) or f"http://{values['bench_host']}:{values['port']}"


def due_s(values: Mapping[str, Any], samples: Sequence[Sample]) -> list[float]:
    """When each request is due, in seconds after the start."""
    rate, count = values["request_rate"], sum(not each.follows for each in samples)
    if values.get("ramp_up_strategy"):
        return ramp(count, ramp_of(values), values["ramp_up_strategy"] == "exponential", values["seed"], values["burstiness"])
    if not isinf(rate) and rate:
        return poisson(count, rate, values["seed"], values["burstiness"])
    if values["from_log"] and not values["concurrency"]:
        return recorded([each.due_s for each in samples], values["log_speed"])
    return at_once(count)


def require_effect(values: Mapping[str, object]) -> None:
    """Raises SettingsError for an option that has no effect without another one."""
    needs = {"save_detailed": "save_result", "ramp_up_start_rps": "ramp_up_strategy", "ramp_up_end_rps": "ramp_up_strategy"}
    for name, other in needs.items():
        if values[name] and not values[other]:
            raise SettingsError(f"--{name.replace('_', '-')} has no effect without --{other.replace('_', '-')}: add that one.")


def ramp_of(values: Mapping[str, float]) -> tuple[float, float]:
    """The first and the last rate. Raises SettingsError."""
    first, last = values["ramp_up_start_rps"], values["ramp_up_end_rps"]
    if not isinf(values["request_rate"]):
        raise SettingsError("--ramp-up-strategy says what --request-rate would: leave one of the two out.")
    if min(first, last) <= 0:
        raise SettingsError("--ramp-up-strategy needs --ramp-up-start-rps and --ramp-up-end-rps: from which rate to which.")
    return first, last


async def name_of(client: Client, model: str) -> str:
    """`model` where the server lists it, its first one otherwise. Raises ServerUnusable."""
    first = await model_of(client)
    try:
        listed = [each.id for each in (await client.ask("/v1/models", None, Models)).data]
    except RequestFailed:
        return first
    return model if model in listed else first


def request_of(name: str, path: str, backend: str, sample: Sample, ignore_eos: bool) -> Request:
    """The body of one request, made before the clock starts."""
    own, count = {"model": name}, sample.output_tokens
    drawn = own | {"temperature": 0, "stream": True} | ({"ignore_eos": True} if ignore_eos and backend != "anthropic" else {})
    counted = drawn | {"stream_options": {"include_usage": True, "continuous_usage_stats": True}}
    body: dict[str, object]
    if backend == "openai-embeddings":
        body = own | {"input": sample.prompt}
    elif backend == "vllm-rerank":
        body = own | {"query": str(sample.prompt)[:QUERY_CHARACTERS], "documents": [sample.prompt]}
    elif backend == "openai-responses":
        body = drawn | {"input": sample.prompt, "max_output_tokens": count, "store": False}
    elif backend == "anthropic":
        body = drawn | {"messages": sample.prompt, "max_tokens": count}
    elif backend == "openai-chat":
        tools = {"tools": sample.tools} if sample.tools else {}
        body = {**counted, "messages": sample.prompt, "max_completion_tokens": count, **tools}
    else:
        body = counted | {"prompt": sample.prompt, "max_tokens": count}
    return Request(
        path=path, body=msgspec.json.encode(body), input_tokens=sample.input_tokens, follows=sample.follows, delay_s=sample.delay_s,
        is_whole=backend in WHOLE,
    )  # fmt: skip


def save(values: Mapping[str, Any], result: Mapping[str, Value | Mapping[str, Interval]]) -> str:
    """Write the result file, as `written` does."""
    bound = f"-concurrency{result['max_concurrency']}" if result["max_concurrency"] else ""
    model = str(result["model_id"]).rpartition("/")[2]
    path = result_path(values, f"{result['backend']}-{result['request_rate']}qps{bound}-{model}-{result['date']}.json")
    return written(path, msgspec.json.encode(result))


def result_path(values: Mapping[str, Any], usual: str) -> Path:
    """Where the result file lies; `usual` is its name if none was given."""
    return Path(values["result_dir"]).expanduser() / (values["result_filename"] or usual)


# ---- --from-log ----------------------------------------------------------------------------------------------------
# `--from-log`: the requests of a recorded log, or of a file of `vnext-replay convert`, at their times.
# Owns what a tokenizer makes of another one's tokens: a log without texts has pseudonyms, equal where the texts were, and a
# trace has lengths. Such tokens become tokens with some text, equal ones equal, so that prompts share what they shared.


def lost_notes(path: str, read: str) -> list[str]:
    """What was `read` of a log, where the log has lost something."""
    log = arrivals_in(Path(path).expanduser())[0] if path else None
    if log is None:
        return []
    found = import_module("vnext.replay.console.ended").ended(log)  # brings rich, which no other measurement needs
    return [] if found.is_sound else [f"--from-log {path} gave {read} up to where it is whole; {found.line}"]


def log_samples(path: Path, count: int, tokenizer: Tokenizer) -> list[Sample]:
    """The first `count` requests, each due as long after the first one as in the log, with an answer as long as there. Raises
    SettingsError."""
    try:
        log, arrivals = arrivals_in(path)
        lengths, found = answers_of(log) if log is not None else {}, list(arrivals)[:count]
    except UnusableLog as error:
        raise SettingsError(f"--from-log: {error}.") from error
    if not found:
        raise SettingsError(f"--from-log {path} holds no request.")
    pool = plain_ids(tokenizer)
    found.sort(key=lambda each: each.arrival_ns)
    return [_sample(each, lengths, tokenizer, pool, found[0].arrival_ns) for each in found]


def _sample(
    event: RequestArrived, lengths: dict[int, int], tokenizer: Tokenizer, pool: list[int], began_ns: int
) -> Sample:
    tokens = unpack_tokens(event.prompt).tolist()
    if max(tokens) >= tokenizer.vocab_size:
        tokens = [pool[token % len(pool)] for token in tokens]
    output_tokens = lengths.get(event.id, event.sampling.max_tokens)
    return Sample(tokens, len(tokens), output_tokens, (event.arrival_ns - began_ns) / 1e9)
