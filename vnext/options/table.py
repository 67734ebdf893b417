"""Option table: every option of the command `vnext`, once.

Each row is an option of the command line, a key of the YAML file, a variable VNEXT_... and, for engine options, a keyword of
`LLM(...)`. To add an option, add a field to EngineSettings or ServerSettings, a line of help here, and its bounds, if any, in
settings_check.py. Types and defaults come from the structs. Reads and parses nothing.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from functools import cache
from typing import Any, NamedTuple, get_type_hints

import msgspec

from vnext.gateway.settings import PolicyName
from vnext.kernels.format import QUANTIZATION_HELP
from vnext.routing.policies import DEFAULT_POLICY
from vnext.runtime.protocol.settings import EngineSettings
from vnext.server.settings import API_KEY_VARIABLE as API_KEY_VARIABLE, ServerSettings

PREFIX = "VNEXT_"
ENGINE_HELP = {
    "models_dir": "folder of models by name, which `vnext pull` fills (default: vnext/models in $XDG_DATA_HOME or ~/.local/share)",
    "revision": "branch, tag or commit of a model on the hub (default: its head)",
    "tokenizer": "a folder or hub id whose tokenizer replaces the model's",
    "mmproj": "the tower's GGUF file (default: that beside the model's)",
    "hf_overrides": """JSON object whose members replace those of config.json, such as '{"rope_theta": 1e6}'""",
    "generation_config": "auto takes default sampling and end tokens from the model's generation_config.json; vllm means none",
    "override_generation_config": "JSON object whose members replace those of generation_config.json",
    "load_format": "dummy draws random weights from config.json alone, for benchmarks; auto and safetensors read files",
    "model_impl": "whose code computes the model; auto is transformers' where no file of vnext's knows the architecture",
    "family": "a Python file with a model family; see docs/models.md#adding-a-family",
    "attention_function": "attention of an installed package, by its name",
    "sampler": "a sampler of an installed package, by its name; see docs/models.md#adding-a-sampler",
    "device": "where the model runs; auto is a GPU if one works, else the CPU",
    "dtype": "data type of weights and cache; auto uses the checkpoint's, but on a CPU bfloat16 for float16",
    "quantization": QUANTIZATION_HELP,
    "activations": "what meets weights of few bits on a CPU: int8 (auto), or bf16, more exact and slower",
    "kv_cache_dtype": "int8 and, on a GPU, fp8 keep keys and values in 8 bits: about twice the tokens in the same memory",
    "packed_weights_dir": "folder of weights as a CPU's ranks pack them, for later starts; off for none (default: GGUF only)",
    "isa": "the instruction set of the CPU kernels (default: the best one of the machine)",
    "deterministic": "make a request's tokens independent of its batch (default: where that is free, and in float32)",
    "seed": "derives a seed for each request that has none (default: a new one at each start)",
    "max_model_len": "maximum tokens of a request, answer included (default: the model's)",
    "max_num_seqs": "maximum requests in the batch",
    "max_num_batched_tokens": "maximum tokens of a step (default: 2,048 on a CPU, 8,192 on a GPU)",
    "long_prefill_token_threshold": "maximum tokens of one prompt in one step; 0 for no limit",
    "input_tokens": "maximum tokens of images and sounds, and as much encoding, beside answers; 0: any (default: 8, Whisper 0)",
    "block_size": "tokens in a cache block",
    "num_blocks_override": "number of cache blocks, regardless of memory",
    "kv_cache_memory": "memory for one rank's cache; 512M is binary, 512MB decimal (default: chosen for the machine)",
    "kv_disk_dir": "folder of a disk tier: the prefix cache then outgrows memory and survives a restart (default: none)",
    "kv_disk_bytes": "maximum size of the disk tier, of all ranks together; 8G is binary; the oldest blocks are deleted",
    "kv_disk_max_age_s": "seconds after which a block that was not used is deleted when an engine starts; 0 for never",
    "pinned_kv_fraction": "share of the cache blocks that requests may keep for a time, by cache_control or prompt_cache_retention",
    "snapshot_interval": "tokens between two states of recurrent layers in the prefix cache; 0: none",
    "enable_prefix_caching": "share cache blocks between requests with equal beginnings",
    "enable_chunked_prefill": "allow a long prompt to take several steps",
    "async_scheduling": "plan the next step while this one runs",
    "speculative_config": """JSON object that turns drafts on, such as '{"method": "ngram", "num_speculative_tokens": 4}'""",
    "scheduling_policy": "which goes first: fair (clients in turns), fcfs, priority, deadline:MS or package.module:function",
    "tensor_parallel_size": "number of ranks that share each layer",
    "enable_expert_parallel": "give each rank whole experts in place of a part of each, with the same bits",
    "enable_expert_load": "measure how evenly experts are used, for /metrics and the load in the log",
    "enable_guidance": "let requests have guidance_scale and negative_prompt; every block of the cache takes twice the memory",
    "pipeline_parallel_size": "number of stages that the layers are cut into, each with --tensor-parallel-size ranks",
    "pipeline_microbatches": "parts of the requests that decode, so that stages compute at once; 0 for one a stage, 1 for none",
    "data_parallel_size": "number of engines that share the requests, each with its own ranks, cache and log",
    "data_parallel_policy": "which engine a request goes to: prefix, least_loaded, round_robin or consistent_hash",
    "role": "prefill computes prompts, encode images, for servers that decode and answer; see docs/disaggregation.md",
    "prefill_engines": "number of the engines of --data-parallel-size that compute prompts for the others; 0 for none",
    "encode_engines": "number of them that only encode images and sounds for the others; 0 for none",
    "handover_address": "host:port at which prefill engines serve blocks to other hosts, one port for each rank (default: none)",
    "handover_bytes": "maximum size of the blocks that an engine offers to others, in shared memory; 1G is binary",
    "handover_transport": "how blocks get to another engine: auto is shared memory on one host and TCP between hosts",
    "nnodes": "number of hosts, each with an equal part of the ranks; all but the first are agents of the first",
    "node_rank": "number of this host, from 0; the first one serves",
    "master_addr": "address at which the first host listens for the others",
    "master_port": "port at which the first host listens for the others",
    "cluster_secret_file": "file with the secret that all hosts share, the same on each",
    "threads": "threads per rank (default: chosen for the machine)",
    "numa": "auto binds ranks to their own cores and NUMA nodes where it helps, off never; or the nodes to use, such as 0,2-3",
    "gpu_memory_utilization": "fraction of a GPU's memory for weights, working memory and cache",
    "enforce_eager": "on a GPU: capture no graphs",
    "graph_sizes": "on a GPU: batch sizes, drafts included, for which decode steps are captured (default: up to --max-num-seqs)",
    "compile": "on a GPU: use torch's compiler for captured steps; the start then takes minutes",
    "attention": "on a GPU: vnext's kernel alone (vnext), with torch's flex attention for prompts of 1,024 tokens on (flex), or "
    "FlashInfer if installed; auto is flex where it was measured to be faster, and vnext with --deterministic",
    "executor": "mp runs each rank as a process; inproc one inside the engine core; ray places --nnodes hosts in a Ray cluster",
    "log_dir": "folder in which each start creates its log folder (default: ~/.local/state/vnext/logs)",
    "log": "what the log keeps: decisions without texts, everything, or nothing",
    "log_max_bytes": "maximum size of a log; its oldest parts are deleted; 512M is binary, 0 for no limit",
    "log_max_age_s": "seconds after which old parts of the log are deleted; 0 for never",
    "log_keep": "number of starts, this one included, whose logs stay in --log-dir; older ones are deleted; 0 for all",
    "log_keep_bytes": "maximum size of the logs of all starts in --log-dir; the oldest are deleted; 0 for no limit",
    "log_durable": "wait in each step until its record is on disk: a power cut then costs no more of the log than a kill",
    "log_compress": "compress completed parts of the log in the background",
    "log_index": "index the log in the background, so that a long log opens at once; counts toward --log-max-bytes",
    "log_required": "stop rather than serve without a log when the disk is full or fails",
    "log_format": "how the server and the engine write their lines: text, or one JSON object a line",
    "log_weights_digest": "keep a digest of every byte of the weights in the log, for audits; the start reads them all",
    "digest_interval": "steps between two comparisons of the ranks' states",
    "step_timeout_s": "seconds without a step's result after which the engine stops; 0 for never; see docs/server.md",
    "max_restarts": "how often in a row, without progress between, processes that end are started again; 0 for never",
    "standby": "hold an engine core and ranks ready for when others end: 25 MB each, and streams wait only for the model",
    "check_laws": "check every law of the state after every event (slow, for debugging)",
    "enable_lora": "serve LoRA adapters beside the model",
    "max_loras": "LoRA adapters in memory at once; requests for others wait until one is not in use",
    "max_lora_rank": "largest rank of a LoRA adapter",
    "enable_return_routed_experts": "report the expert ids of each request's tokens, for trainers that repeat the routing",
    "ipc_bytes_max": "largest tensor, such as 2M, that ranks on GPUs exchange through mapped memory; NCCL takes larger ones",
}
SERVER_HELP = {
    "host": "address to listen on; 0.0.0.0 for every interface",
    "port": "port to listen on; 0 lets the system choose",
    "api_server_count": "number of API servers, which accept connections from one port (default: one for each engine, or 1)",
    "api_keys": f"key that clients must send as a bearer token, once for each; prefer {API_KEY_VARIABLE}, which `ps` does not show",
    "api_key_file": "YAML file of further keys, each with limits and a weight; see docs/operations.md",
    "key_requests_per_minute": "requests that each key may begin a minute; 0 for no limit",
    "key_tokens_per_minute": "tokens, of prompts and answers, that each key may use a minute; 0 for no limit",
    "key_answers_max": "maximum answers in progress of each key; 0 for no limit",
    "shared_prefix_cache": "share the prefix cache among several API keys, whose requests then tell what others have asked",
    "served_model_names": "names that requests may use for the model (default: the folder's name and MODEL as given)",
    "chat_template_path": "a Jinja file that replaces the checkpoint's chat template",
    "tool_call_parser": "how the model writes tool calls, by vLLM's name (default: found in its chat template)",
    "reasoning_parser": "the marks around the model's reasoning, by vLLM's name (default: found in its chat template)",
    "allowed_local_media_path": "folder below which requests may name images and videos as file: URLs",
    "allowed_media_domains": "a host from which images and videos are fetched by http(s), once for each; * for any public one",
    "show_log": "let viewers with the --api-key, or on this machine, read the growing log (vnext-replay ui --live URL)",
    "show_events": "let routers with the --api-key, or on this machine, follow the engine's events with all tokens (GET /events)",
    "enable_rl_routes": "let clients change the weights, pause the engine and put it to sleep: /update_weights, /sleep and others",
    "allowed_origins": "origins whose pages may use the server, such as https://chat.example; * for any (default: its own)",
    "allowed_methods": "HTTP methods that such a page may use",
    "allowed_headers": "headers that such a page may send",
    "allow_credentials": "let such a page send cookies and other credentials",
    "body_bytes_max": "largest body of a request, such as 32M",
    "other_models": "a further model, also written behind MODEL, loaded when a request names it; once for each",
    "keep_alive_s": "seconds without a request after which one of several models is unloaded; -1 for never",
    "max_loaded_models": "how many of several models are loaded; the least recently used one makes room",
    "live_requests_max": "maximum answers in progress, waiting or running, of all clients",
    "request_answers_max": "maximum answers of one request (prompts times n); 0: 2048, a sixteenth of --max-answers at a time",
    "client_answers_max": "maximum answers in progress of one client; 0 means three quarters of --max-answers",
    "waiting_tokens_max": "maximum prompt tokens, such as 200k, of answers that have not begun; 0 for no bound",
    "request_timeout_s": "seconds after which a request ends with an error, waiting included; 0 for never",
    "template_limit_s": "seconds that a chat template may take for one request",
    "connections_max": "maximum open connections; one address may have three quarters of them",
    "keepalive_timeout_s": "seconds after which an idle connection is closed",
    "write_timeout_s": "seconds after which a client that does not read its answer is disconnected",
    "sse_ping_interval_s": "seconds of silence after which a stream shows that it lives, its head first; 0 for never",
    "drain_s": "seconds for running requests to finish when the server stops",
    "lora_modules": "LoRA adapters to serve as models, each as name=folder",
    "lora_root": "folder under which /v1/load_lora_adapter may find further adapters (default: none)",
    "batch_dir": "folder for /v1/files and /v1/batches (default: neither is served)",
    "responses_bytes_max": "memory for stored responses of /v1/responses, such as 64M; 0 stores none",
    "root_path": "a prefix, such as /llm, behind which all paths exist too, for a proxy that keeps it",
    "ssl_certfile": "PEM file of the server's certificate; the server then speaks HTTPS",
    "ssl_keyfile": "PEM file of its key (default: in --ssl-certfile)",
    "ssl_ca_certs": "PEM file of the authorities whose certificates clients may show",
    "ssl_cert_reqs": "whether clients must show a certificate: 0 no, 1 optional, 2 required",
    "log_level": "lowest level of log lines; info adds one line for each HTTP request",
    "otlp_traces_endpoint": "URL of an OpenTelemetry collector for a trace of each request; needs vnext[otel] (default: none)",
    "disable_log_stats": "do not print a line every few seconds under load about requests, tokens per second and the cache",
    "log_stats_interval_s": "seconds between two lines about the load",
}
FLAGS = {
    "model": ("--model", "-m"),
    "quantization": ("--quantization", "-q"),
    "graph_sizes": ("--graph-sizes", "--cuda-graph-sizes", "--cudagraph-capture-sizes"),
    "attention": ("--attention", "--attention-backend"),
    "served_model_names": ("--served-model-name",),
    "chat_template_path": ("--chat-template",),
    "body_bytes_max": ("--max-body-size",),
    "other_models": ("--other-model",),
    "keep_alive_s": ("--keep-alive",),
    "responses_bytes_max": ("--max-stored-responses",),
    "live_requests_max": ("--max-answers",),
    "request_answers_max": ("--max-answers-per-request",),
    "client_answers_max": ("--max-answers-per-client",),
    "api_server_count": ("--api-server-count", "-asc"),
    "api_keys": ("--api-key",),
    "key_answers_max": ("--max-answers-per-key",),
    "waiting_tokens_max": ("--max-waiting-tokens",),
    "request_timeout_s": ("--request-timeout",),
    "template_limit_s": ("--chat-template-timeout",),
    "connections_max": ("--max-connections",),
    "keepalive_timeout_s": ("--keep-alive-timeout", "--timeout-keep-alive"),
    "write_timeout_s": ("--slow-reader-timeout",),
    "sse_ping_interval_s": ("--sse-ping-interval",),
    "drain_s": ("--drain-timeout", "--shutdown-timeout"),
    "log_level": ("--log-level", "--uvicorn-log-level"),
    "log_max_age_s": ("--log-max-age",),
    "log_stats_interval_s": ("--log-stats-interval",),
    "kv_disk_max_age_s": ("--kv-disk-max-age",),
    "step_timeout_s": ("--step-timeout",),
    "log_durable": ("--log-durable", "--durable"),
    "tensor_parallel_size": ("--tensor-parallel-size", "-tp"),
    "enable_expert_parallel": ("--enable-expert-parallel", "-ep"),
    "pipeline_parallel_size": ("--pipeline-parallel-size", "-pp"),
    "data_parallel_size": ("--data-parallel-size", "-dp"),
    "master_addr": ("--master-addr", "--master-address"),
    "num_blocks_override": ("--num-blocks-override", "--num-gpu-blocks-override"),
    "threads": ("--threads", "-t"),
    "kv_cache_memory": ("--kv-cache-memory", "--kv-cache-memory-bytes"),
    "role": ("--role", "--disaggregation-mode"),
}


TORCHRUN = {"nnodes": ("NNODES",), "node_rank": ("NODE_RANK",), "master_addr": ("MASTER_ADDR",), "master_port": ("MASTER_PORT",)}
"""Further variables, which torchrun's users know; our own ones come first."""


class Option(NamedTuple):
    """One option: the field it fills, its flags, the field's type, its default and its line of help."""

    name: str
    flags: tuple[str, ...]
    hint: Any
    default: Any
    words: str

    @property
    def variables(self) -> tuple[str, ...]:
        own = tuple(PREFIX + flag[2:].replace("-", "_").upper() for flag in self.flags if flag.startswith("--"))
        return (*TORCHRUN.get(self.name, ()), *own)


MODEL = Option("model", FLAGS["model"], str, "", "a folder, a name (`vnext list`) or a hub id (default: the bundled demo model)")
CONFIG = Option("config", ("--config",), str, "", "a YAML file with options as keys; the command line overrides it")
CHAT = (
    Option("url", ("--url",), str, "", "a running server; without it, vnext starts an engine for this chat"),
    Option("api_key", ("--api-key",), str, "", f"the server's key; prefer {API_KEY_VARIABLE}"),
    Option("system", ("--system",), str, "", "system message at the beginning of the chat"),
    Option("temperature", ("--temperature",), float | None, None, "sampling temperature; 0 is greedy (default: the model's own)"),
    Option("max_tokens", ("--max-tokens",), int | None, None, "maximum length of an answer (default: what fits)"),
    Option("sampling_seed", ("--sampling-seed",), int | None, None, "seed that makes answers repeatable"),
    Option("history", ("--history",), str, "", "file for the history of typed lines, or none (default: in ~/.local/state/vnext)"),
)
BATCH = (
    Option("file", ("--input-file", "-i"), str, "", "the requests: JSON lines as in /v1/batches"),
    Option("output", ("--output-file", "-o"), str, "", "the file for the answers; one that exists is continued"),
)
ROUTER = (
    Option("backends", ("--backend",), tuple[str, ...], (), "a server, as http://HOST:PORT, once for each"),
    Option("routing_policy", ("--policy",), PolicyName, DEFAULT_POLICY, "which server a request goes to; see docs/routing.md"),
    Option("backend_api_key", ("--backend-api-key",), str, "", "key that the router sends to servers (default: the client's)"),
    Option("admin_key", ("--admin-key",), str, "", "key of the routes below /router, which are closed without one"),
    Option("decisions_dir", ("--decisions-dir",), str, "", "folder that gets a record of every decision (default: none)"),
)
ROUTER_HTTP = (
    "host", "port", "api_keys", "api_key_file", "key_requests_per_minute", "key_answers_max", "allowed_origins", "allowed_methods",
    "allowed_headers", "allow_credentials", "body_bytes_max", "live_requests_max", "client_answers_max", "connections_max",
    "keepalive_timeout_s", "write_timeout_s", "drain_s", "ssl_certfile", "ssl_keyfile", "ssl_ca_certs", "ssl_cert_reqs",
    "log_level",
)  # fmt: skip
"""Options of a server that a router has too, with their meaning there: an answer in progress is a request."""
RESTART_PORT = Option("restart_port", ("--port",), int, 0, "port of the server; without it, the only one of yours that runs")
STATE_VARIABLE = "XDG_STATE_HOME"


def flags_of(name: str) -> tuple[str, ...]:
    """The flags of a field; the first is the primary one."""
    return FLAGS.get(name, ("--" + name.replace("_", "-"),))


@cache
def options_of(struct: type[msgspec.Struct]) -> tuple[Option, ...]:
    """The options that fill a struct's fields."""
    hints = get_type_hints(struct)
    defaults = {field.name: field.default for field in msgspec.structs.fields(struct)}
    words = ENGINE_HELP if struct is EngineSettings else SERVER_HELP
    return tuple(Option(name, flags_of(name), hints[name], defaults[name], text) for name, text in words.items())


def every_option() -> Iterable[Option]:
    return (MODEL, CONFIG, *options_of(EngineSettings), *options_of(ServerSettings), *CHAT, *BATCH, *ROUTER)


def as_flags(message: str, labels: Mapping[str, str] | None = None) -> str:
    """The sentence with flags in place of field names: any name at its beginning and names with an underscore anywhere, but not
    in a path, a file name or a quoted value. `labels`: field -> the text to use in place of its first flag."""
    labels, names = labels or {}, (*ENGINE_HELP, *SERVER_HELP)
    with_underscore = "|".join(name for name in names if "_" in name)
    pattern = rf"^(?:{'|'.join((*names, *labels))})\b(?![/.]\w)|(?<![\w/.'\"-])(?:{with_underscore})\b(?![/'\"-]|\.\w)"
    return re.sub(pattern, lambda match: labels.get(match[0], flags_of(match[0])[0]), message)
