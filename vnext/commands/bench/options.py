"""The options of `vnext-bench`: those of each command, and the parser of all. Imports nothing that measures, so that --help needs
none of it.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import inf
from types import MappingProxyType
from typing import Literal, NamedTuple

from vnext.base.version import __version__
from vnext.options.parser import Parser
from vnext.options.reader import add_engine_options
from vnext.options.table import API_KEY_VARIABLE, Option

MEASURES = "serve", "throughput", "latency", "startup", "sweep"
"""Commands whose measurements share a module with others."""

# ---- a load on a running server --------------------------------------------------------------------------------------

ENDPOINTS = {
    "openai": "/v1/completions", "vllm": "/v1/completions", "openai-chat": "/v1/chat/completions",
    "openai-responses": "/v1/responses", "anthropic": "/v1/messages", "openai-embeddings": "/v1/embeddings",
    "vllm-rerank": "/v1/rerank",
}  # fmt: skip
DATASETS = Literal["random", "sharegpt", "custom", "agent"]
RAMPS = Literal["", "linear", "exponential"]
TARGET = (
    Option("backend", ("--backend",), Literal[tuple(ENDPOINTS)], "openai", "the API"),
    Option("base_url", ("--base-url", "--url"), str, "", "the server (default: http://HOST:PORT)"),
    Option("bench_host", ("--host",), str, "127.0.0.1", "the server's host"),
    Option("port", ("--port",), int, 8000, "the server's port"),
    Option("endpoint", ("--endpoint",), str, "", "the path (default: the backend's)"),
    Option("api_key", ("--api-key",), str, "", f"the server's key; prefer {API_KEY_VARIABLE}"),
    Option("tokenizer", ("--tokenizer",), str, "", "a folder or a hub id (default: MODEL)"),
    Option("served_name", ("--served-model-name",), str, "", "the model to ask for (default: the server's first)"),
)
SENT = (
    Option("dataset_name", ("--dataset-name",), DATASETS, "random", "where prompts come from"),
    Option("dataset_path", ("--dataset-path",), str, "", "JSON of sharegpt, JSONL of custom or agent; Parquet; a hub id"),
    Option("agent_turns", ("--agent-turns",), int, 8, "requests of an agent without a file, one after another"),
    Option("agent_result_len", ("--agent-result-len",), int, 256, "tokens of the tool's result between two of them"),
    Option("from_log", ("--from-log",), str, "", "a recorded log, or a file of vnext-replay convert: its requests at their times"),
    Option("log_speed", ("--log-speed",), float, 1.0, "times as fast as they came"),
    Option("num_prompts", ("--num-prompts",), int, 1000, "number of requests"),
    Option("random_input_len", ("--random-input-len", "--input-len"), int, 1024, "tokens of a random prompt"),
    Option("random_output_len", ("--random-output-len", "--output-len"), int, 128, "tokens of its answer"),
    Option("random_prefix_len", ("--random-prefix-len",), int, 0, "tokens before it that all prompts share"),
    Option("random_range_ratio", ("--random-range-ratio",), float, 0.0, "share by which both lengths vary"),
    Option("dataset_output_len", ("--sharegpt-output-len", "--custom-output-len"), int, 0, "tokens of an answer; 0 for the file's"),
    Option("ignore_eos", ("--ignore-eos",), bool, True, "answers have their whole length"),
    Option("seed", ("--seed",), int, 0, "seed of prompts and arrivals"),
)
ARRIVALS = (
    Option("request_rate", ("--request-rate",), float, inf, "requests per second; inf for all at once"),
    Option("burstiness", ("--burstiness",), float, 1.0, "shape of the gaps: 1 is a Poisson process, less is more bursty"),
    Option("ramp_up_strategy", ("--ramp-up-strategy",), RAMPS, "", "let the rate rise by equal steps, or by equal factors"),
    Option("ramp_up_start_rps", ("--ramp-up-start-rps",), float, 0.0, "requests per second at the beginning of such a ramp"),
    Option("ramp_up_end_rps", ("--ramp-up-end-rps",), float, 0.0, "requests per second at its end"),
    Option("concurrency", ("--max-concurrency", "--concurrency"), int, 0, "maximum requests at a time; 0 for no limit"),
    Option("num_warmups", ("--num-warmups",), int, 0, "requests before the clock starts"),
)
RESULTS = (
    Option("percentile_metrics", ("--percentile-metrics",), str, "ttft,tpot,itl", "of ttft, tpot, itl, e2el"),
    Option("percentiles", ("--metric-percentiles",), str, "99", "as 50,90,99"),
    Option("goodput", ("--goodput",), tuple[str, ...], (), "bounds of a good request in ms, as ttft:500 e2el:5000"),
    Option("energy", ("--energy",), bool, False, "also joules of this machine's processors (RAPL) and GPUs (NVML)"),
    Option("save_result", ("--save-result",), bool, False, "write a JSON file with vLLM's names"),
    Option("save_detailed", ("--save-detailed",), bool, False, "with each request's lengths, times, text and error"),
    Option("result_dir", ("--result-dir",), str, "", "its folder (default: this one)"),
    Option("result_filename", ("--result-filename",), str, "", "its name (default: BACKEND-RATEqps-MODEL-TIME.json)"),
    Option("metadata", ("--metadata",), tuple[str, ...], (), "members of the file, as KEY=VALUE"),
)
GROUPS = {"server": TARGET, "workload": SENT, "arrivals": ARRIVALS, "result": RESULTS}
RATES = Option("rates", ("--rates",), str, "", "requests per second, a run each, as 1,2,4 (default: doubled up to the knee)")
LOADS = (
    RATES,
    Option("concurrencies", ("--concurrencies",), str, "", "maximum requests at a time in place of rates, as 1,8,32"),
)

# ---- commands ----------------------------------------------------------------------------------------------------------

URL = (
    Option("url", ("--url",), str, "", "a running server; MODEL then provides the tokenizer"),
    Option("api_key", ("--api-key",), str, "", f"the server's key; prefer {API_KEY_VARIABLE}"),
    Option("concurrency", ("--concurrency", "--max-concurrency"), int, 0, "maximum requests at a time, with --url; 0 for no limit"),
    Option("request_rate", ("--request-rate",), float, 0.0, "requests per second, with --url; 0 for all at once"),
)
REPEATS = Option("repeats", ("--repeats",), int, 5, "number of batches")
STARTS = Option("repeats", ("--repeats",), int, 3, "number of starts")
WORKLOAD = (
    Option("input_len", ("--input-len",), int, 128, "tokens of each prompt"),
    Option("output_len", ("--output-len",), int, 64, "tokens of each answer"),
    Option("shared_len", ("--shared-len",), int, 0, "tokens that all prompts share at the beginning"),
    Option("workload_seed", ("--workload-seed",), int, 0, "seed of the prompts"),
)


ASSERTED = Option(
    "asserted", ("--assert",), tuple[str, ...], (), "bounds on figures, as 'ttft.p99<500ms' 'failed<=0'; status 1 where one fails"
)


BATCHES = Option("batches", ("--batches",), str, "32,64,128,256,512", "requests in decode, one line each")
ROUNDS = Option("rounds", ("--rounds",), int, 64, "steps of each measurement")
STEP_MS = Option("step_ms", ("--step-ms",), float, 10.0, "milliseconds in which the ranks compute a step")
GPU_PRICE = Option("gpu_price", ("--gpu-price",), float, 2.0, "dollars for a GPU for an hour")
CACHE = (
    Option("hit_rates", ("--hit-rates",), str, "0,25,50,75,100", "percentages of a prompt that all share"),
    Option("num_prompts", ("--num-prompts",), int, 16, "number of prompts of each rate"),
    Option("input_len", ("--input-len",), int, 256, "tokens of each prompt"),
    Option("output_len", ("--output-len",), int, 16, "tokens of each answer"),
    Option("workload_seed", ("--workload-seed",), int, 0, "seed of the prompts"),
)
PROMPTS = (
    Option("num_prompts", ("--num-prompts",), int, 200, "number of requests of a run"), *WORKLOAD,
    Option("max_num_batched_tokens", ("--max-num-batched-tokens",), int, 8192, "tokens in a step"),
    Option("bench_device", ("--device",), str, "h100", "the GPU: a100, h100, h200, b200, l40s, l4 or rtx4090"), GPU_PRICE,
)
LOAD = (
    RATES, Option("goodput", ("--goodput",), tuple[str, ...], (), "bounds of a good request in ms, as ttft:500 tpot:50"),
    *PROMPTS, Option("max_num_seqs", ("--max-num-seqs",), int, 256, "requests in the batch"),
    Option("tensor_parallel_size", ("--tensor-parallel-size", "-tp"), int, 1, "GPUs that share the model"),
    Option("from_log", ("--from-log",), str, "", "learn step times from this log, in place of the roofline"),
)
SIZE = (
    Option("slo", ("--slo",), str, "", "what must hold, as ttft.p99<500ms,itl.p99<50ms"),
    Option("request_rate", ("--request-rate",), float, 10.0, "requests a second of all replicas together"), *PROMPTS,
    Option("gpus_each", ("--gpus-each",), str, "1,2,4,8", "numbers of GPUs that may share the model"),
)
OVERLAP = (
    Option("batches", ("--batches",), str, "1,8,32", "requests in decode, one line each"),
    Option("input_len", ("--input-len",), int, 32, "tokens of each prompt"),
    Option("output_len", ("--output-len",), int, 128, "tokens of each answer"),
    Option("workload_seed", ("--workload-seed",), int, 0, "seed of the prompts"),
)
SUMS = (
    Option("ranks", ("--ranks",), str, "2", "numbers of ranks, as 2,4"),
    Option("sizes", ("--sizes",), str, "2,8,32,128,512,2048", "KiB of a rank's tensor"),
    Option("rounds", ("--rounds",), int, 30, "rounds of each size"),
    Option("bench_device", ("--device",), Literal["auto", "cpu", "cuda"], "auto", "auto takes GPUs where each rank has one"),
)


class Own(NamedTuple):
    """A command with a module of its own, which no other command loads."""

    module: str
    help: str
    options: tuple[Option, ...]
    has_model: bool = False
    has_engine: bool = False


OWN = MappingProxyType({
    "cache": Own("cache", "measure throughput by the hit rate of the prefix cache, and what attention reads", CACHE, True, True),
    "allreduce": Own("all_reduce", "measure sums over ranks by size: the library's and ours, and where to switch", SUMS),
    "comm": Own("control.comm", "measure what a step sends to the ranks, beside a broadcast of everything", (BATCHES, ROUNDS)),
    "sched": Own(
        "control.sched", "measure what deciding a step takes, and what it costs", (BATCHES, ROUNDS, STEP_MS, GPU_PRICE)
    ),
    "overlap": Own("overlap", "measure which share of the control plane compute hides, by batch", OVERLAP, True, True),
    "size": Own("control.size", "say how many GPUs hold a load to --slo, by the model of `simulate` (`vnext size`)", SIZE, True),
    "simulate": Own("control.simulate", "run the scheduler alone on modelled steps of a GPU, of 8b, 70b or any MODEL", LOAD, True),
})  # fmt: skip
FORM = Option("form", ("--format",), Literal["md", "csv", "html"], "md", "Markdown, CSV or a page of HTML")


def make_parser() -> Parser:
    parser = Parser(prog="vnext-bench", description="Measure an engine or a server.")
    parser.add_argument("--version", action="version", version=f"vnext-bench {__version__}")
    commands = parser.add_commands(" | ".join([*MEASURES, *OWN, "compare", "report"]))
    running = commands.add_parser("serve", help="measure a running server as `vllm bench serve` does")
    add_load(running, GROUPS)
    swept = commands.add_parser("sweep", help="measure a running server at one load after another, and find the knee")
    without = {option.name for option in GROUPS["result"]} - {"goodput"}
    without |= {option.name for option in GROUPS["arrivals"]} - {"burstiness", "num_warmups"}
    kept = {title: tuple(option for option in options if option.name not in without) for title, options in GROUPS.items()}
    add_load(swept, kept | {"loads": LOADS})
    fast = commands.add_parser("throughput", help="measure the throughput of many requests")
    add_workload(fast, Option("num_prompts", ("--num-prompts",), int, 64, "number of prompts"))
    for option in URL:
        fast.add_option(fast, option, stays_out=False)
    add_engine_options(fast)
    quick = commands.add_parser("latency", help="measure the time of one batch")
    add_workload(quick, Option("num_prompts", ("--batch-size",), int, 1, "number of prompts"))
    quick.add_option(quick, REPEATS, stays_out=False)
    add_engine_options(quick)
    began = commands.add_parser("startup", help="measure the time from the start of an engine to its first token")
    began.add_model()
    began.add_option(began, STARTS, stays_out=False)
    add_result(began)
    add_engine_options(began)
    for name, own in OWN.items():
        add_own(commands.add_parser(name, help=own.help), own)
    both = commands.add_parser("compare", help="compare two reports or result files")
    both.add_argument("before", nargs="?", default="", help="a file of --json or --save-result; --save-detailed adds intervals")
    both.add_argument("after", nargs="?", default="", help="another one")
    both.add_option(both, ASSERTED, stays_out=False)
    many = commands.add_parser("report", help="print reports and result files as one table")
    many.add_argument("files", nargs="*", default=(), help="files as of compare")
    many.add_option(many, FORM, stays_out=False)
    return parser


def add_own(parser: Parser, own: Own) -> None:
    if own.has_model:
        parser.add_model()
    group = parser.add_argument_group("workload")
    for option in own.options:
        parser.add_option(group, option, stays_out=False)
    add_result(parser)
    if own.has_engine:
        add_engine_options(parser)


def add_load(parser: Parser, groups: Mapping[str, tuple[Option, ...]]) -> None:
    parser.add_model()
    for title, options in groups.items():
        group = parser.add_argument_group(title)
        for option in options:
            parser.add_option(group, option, stays_out=False)
    add_result(parser)


def add_workload(parser: Parser, count: Option) -> None:
    parser.add_model()
    group = parser.add_argument_group("workload")
    for option in (count, *WORKLOAD):
        parser.add_option(group, option, stays_out=False)
    group.add_argument("--random", action="store_true", help="use random tokens instead of text")
    add_result(parser)


def add_result(parser: Parser) -> None:
    parser.add_argument("--json", default="", metavar="FILE", help="also write the report to FILE")
    parser.add_option(parser, ASSERTED, stays_out=False)
