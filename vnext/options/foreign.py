"""Foreign options: what vLLM, SGLang, llama.cpp and Ollama have and vnext does not, and what each option means here.

Owns the tables, of which docs/migration.md shows a part. An option is ignored, with the reason, if its value requests what
vnext does anyway. Any other is refused with the reason and the remedy, because the server would not behave as the user asked.
Options with the same meaning as a vnext option are alternative names of it, in table.py.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from types import MappingProxyType
from typing import NamedTuple

from vnext.base.spelling import close_to

ON, OBJECT = "on", "{}"
ANY = ("*",)
"""Marks options of which every value requests what vnext does anyway."""


class Foreign(NamedTuple):
    """`takes` is argparse's nargs, 0 for a switch. `fine`: the values to ignore ("on" for a switch); ANY for all; behind OBJECT the
    members of a JSON object that may be ignored together."""

    takes: int | str
    fine: tuple[str, ...]
    reason: str
    remedy: str

    def is_fine(self, value: str) -> bool:
        """Whether `value` requests what vnext does anyway."""
        if self.fine[:1] == (OBJECT,):
            return _members(value) <= set(self.fine[1:])
        return self.fine == ANY or value.lower() in self.fine

    def sentence(self, name: str, value: str = "") -> str:
        """Why the option `name` with `value` is refused, and what to do instead."""
        if self.fine and value:
            return f"{name} is {value!r}: {self.reason}; {self.remedy}."
        return f"there is no option {name}: {'; '.join(filter(None, (self.reason, self.remedy)))}."


def _members(text: str) -> set[str]:
    """The names of a JSON object's members that say something; the text itself where it is no object."""
    try:
        found = json.loads(text)
    except ValueError:
        return {text}
    return {name for name, value in found.items() if value not in (None, False, "", "auto")} if isinstance(found, dict) else {text}


def _switches(reason: str, *names: str) -> Iterator[tuple[str, Foreign]]:
    """Switches that request what vnext does anyway."""
    return ((name, Foreign(0, ANY, reason, "")) for name in names)


def _values(fine: str, reason: str, remedy: str, *names: str, takes: int | str = 1) -> Iterator[tuple[str, Foreign]]:
    """Options with a value; `fine` lists the values to ignore, separated by blanks, "*" for all."""
    return ((name, Foreign(takes, tuple(fine.split()), reason, remedy)) for name in names)


def _refused(reason: str, remedy: str, *names: str, takes: int | str = 1) -> Iterator[tuple[str, Foreign]]:
    """Options that request a feature that vnext does not have."""
    return ((name, Foreign(takes, (), reason, remedy)) for name in names)


def _renamed(ours: str, *names: str, takes: int | str = 1) -> Iterator[tuple[str, Foreign]]:
    """Options whose meaning an option of ours has, with values of its own."""
    return _refused("", f"see {ours}", *names, takes=takes)


TOOLS = "the server reads tool calls in the format that the model's chat template teaches"
PROXY = "the server listens on a port"
MEDIA = "images and sounds are read as the model's files say"
GRAMMARS = "llguidance keeps every schema and grammar"
BY_REQUEST = "each request says how its JSON is written"
FIGURES = "/metrics and --log-level provide what there is to see"
THOUGHTS = "the server shows reasoning apart, by the marks that the model's chat template uses"
EXPERTS = "each rank holds its share of the experts from start to end"
LOCAL = "the engines of a server are on one machine"
REPLICAS = "see --data-parallel-size, or start several servers behind a proxy"
SEVERAL = "start several servers, each on its own port, behind a proxy"

VLLM: Mapping[str, Foreign] = MappingProxyType(
    dict(
        [
            # switches that request what vnext does anyway
            *_switches("vnext never runs a checkpoint's code; it has its own model families", "--trust-remote-code"),
            *_switches(TOOLS, "--enable-auto-tool-choice"),
            *_switches("the model never sees tools when tool_choice is none", "--exclude-tools-when-tool-choice-none"),
            *_switches("requests are logged only with --log-level info", "--disable-log-requests"),
            *_switches("access lines are logged only with --log-level info", "--disable-uvicorn-access-log"),
            *_switches("/docs and /openapi.json show the API and nothing of what is served", "--disable-fastapi-docs"),
            *_switches("the API server and the engine core are always separate processes", "--disable-frontend-multiprocessing"),
            *_switches("there is one cache manager", "--use-v2-block-manager", "--disable-hybrid-kv-cache-manager"),
            *_switches("usage includes them anyway", "--enable-prompt-tokens-details"),
            *_switches("loading shows a progress bar in a terminal", "--use-tqdm-on-load"),
            *_switches("attention shares a prefix only where that is faster, with the same result", "--disable-cascade-attn"),
            *_switches(MEDIA, "--disable-mm-preprocessor-cache", "--skip-mm-profiling", "--disable-chunked-mm-input",
                       "--interleave-mm-strings"),
            *_switches(THOUGHTS, "--enable-reasoning"),
            *_switches("every answer has its X-Request-Id", "--enable-request-id-headers"),
            *_switches("/load always counts", "--enable-server-load-tracking"),
            *_switches("steps overlap as --async-scheduling says", "--disable-async-output-proc", "--multi-step-stream-outputs"),
            *_switches(GRAMMARS, "--guided-decoding-disable-fallback"),
            *_switches(FIGURES, "--kv-cache-metrics", "--cudagraph-metrics", "--aggregate-engine-logging", "--log-error-stack"),
            # options of which some values request what vnext does anyway
            *_values("auto hf", "config.json describes the model", "convert the checkpoint", "--config-format"),
            *_values("auto generate embed embedding pooling none", "the server generates text and answers /v1/embeddings and "
                     "/score", "leave it out", "--task", "--runner", "--convert"),
            *_values("auto slow", "the tokenizer is the model folder's tokenizer.json", "make one there", "--tokenizer-mode"),
            *_values("*", "a preempted request is computed again and never swapped", "", "--swap-space"),
            *_values("0", "weights stay on the device that computes with them", "see --quantization", "--cpu-offload-gb"),
            *_values("recompute", "a preempted request is computed again", "leave it out", "--preemption-mode"),
            *_values("mp", "ranks are processes", "see --executor, and docs/ray.md for Ray", "--distributed-executor-backend"),
            *_values("1", "each token is streamed as soon as it is sampled", "leave it out", "--stream-interval"),
            *_values("1", "a step samples one token per request", "leave it out", "--num-scheduler-steps"),
            *_values("0 0.0", "a request waits only for room", "leave it out", "--scheduler-delay-factor"),
            *_values("1", "prompts share a step as tokens allow", "see --long-prefill-token-threshold",
                     "--max-num-partial-prefills", "--max-long-partial-prefills"),
            *_values("20", "a request may ask for up to 20", "leave it out", "--max-logprobs"),
            *_values("raw_logprobs", "log-probabilities are the model's own", "leave it out", "--logprobs-mode"),
            *_values("auto openai string", "both texts and lists of parts are accepted", "leave it out",
                     "--chat-template-content-format"),
            *_values("assistant", "answers have the role assistant", "leave it out", "--response-role"),
            *_values("*", "block hashes are BLAKE2b, keyed if there is a salt", "", "--prefix-caching-hash-algo"),
            *_values("*", "graphs are captured by batch size, see --graph-sizes", "",
                     "--max-seq-len-to-capture", "--max-cudagraph-capture-size"),
            *_values("*", "weights are read from the mapped file, rank by rank", "", "--max-parallel-loading-workers"),
            *_values("*", GRAMMARS, "", "--guided-decoding-backend", "--structured-outputs-backend"),
            *_values("*", MEDIA, "", "--limit-mm-per-prompt", "--mm-processor-cache-gb", "--mm-processor-cache-type",
                     "--mm-encoder-tp-mode", "--mm-encoder-attn-backend", "--mm-processor-kwargs", "--media-io-kwargs",
                     "--video-pruning-rate"),
            *_values("*", "weights are read from mapped safetensors", "", "--model-loader-extra-config", "--ignore-patterns",
                     "--pt-load-map-location", "--safetensors-load-strategy"),
            *_values("*", FIGURES, "", "--show-hidden-metrics-for-version", "--max-log-len"),
            *_values("*", "the server limits headers itself", "", "--h11-max-incomplete-event-size", "--h11-max-header-count"),
            *_values("auto", "recurrent layers keep their sums in float32", "leave it out", "--mamba-cache-dtype",
                     "--mamba-ssm-cache-dtype", "--mamba-block-size"),
            *_values("1", "each rank holds a part of the cache", "see --tensor-parallel-size", "--decode-context-parallel-size",
                     "-dcp"),
            *_values("0", EXPERTS, "leave it out", "--num-redundant-experts"),
            # features that vnext does not have, with the remedy
            *_switches("requests are logged with --log-level info", "--enable-log-requests"),
            *_refused("the log keeps texts on request", "see --log full", "--enable-log-outputs", takes=0),
            *_refused("a request asks for it", "send return_tokens_as_token_ids", "--return-tokens-as-token-ids", takes=0),
            *_refused("a request asks for it", "send stream_options.include_usage", "--enable-force-include-usage", takes=0),
            *_refused("requests cannot bring a chat template", "see --chat-template", "--trust-request-chat-template", takes=0),
            *_refused("the server reads and writes text", "see /tokenize and /detokenize", "--skip-tokenizer-init",
                      "--tokens-only", "--enable-prompt-embeds", "--enable-tokenizer-info-endpoint", takes=0),
            *_refused("the client calls tools", "leave it out", "--tool-server"),
            *_values("main", "vnext never runs a checkpoint's code", "leave it out", "--code-revision"),
            *_values("main", "a tokenizer is read at its repository's head", "give --tokenizer the folder of the revision",
                     "--tokenizer-revision"),
            *_refused("the hub's cache is used", "set HF_HOME to move it", "--download-dir"),
            *_refused("the hub's own login is used", "set HF_TOKEN", "--hf-token"),
            *_refused("config.json describes the model", "see --hf-overrides", "--hf-config-path", "--rope-scaling",
                      "--rope-theta"),
            *_refused("one option says all of speculative decoding", "see --speculative-config", "--speculative-model",
                      "--num-speculative-tokens", "--num-lookahead-slots"),
            *_refused(BY_REQUEST, "send disable_any_whitespace in structured_outputs", "--guided-decoding-disable-any-whitespace",
                      takes=0),
            *_refused(BY_REQUEST, "send disable_additional_properties in structured_outputs",
                      "--guided-decoding-disable-additional-properties", takes=0),
            *_values("{} backend disable_fallback reasoning_parser enable_in_reasoning", GRAMMARS,
                     f"{BY_REQUEST}, in structured_outputs", "--structured-outputs-config"),
            *_values("*", GRAMMARS, "", "--structured-outputs-config.backend", "--structured-outputs-config.disable-fallback",
                     "--structured-outputs-config.reasoning-parser", "--structured-outputs-config.enable-in-reasoning"),
            *_refused("adapters with biases are not supported", "merge this one into the weights", "--enable-lora-bias", takes=0),
            *_refused("adapters are cut as the weights are", "leave it out", "--fully-sharded-loras", takes=0),
            *_refused("adapters are computed in float32", "leave it out", "--lora-dtype"),
            *_refused("adapters that no slot holds stay on disk", "see --max-loras", "--max-cpu-loras"),
            *_refused("adapters with embeddings are not supported", "leave it out", "--default-mm-loras",
                      "--lora-extra-vocab-size", takes="*"),
            *_refused(PROXY, "let a proxy in front of it listen there", "--uds"),
            *_refused("the server runs no third-party code", "leave it out", "--middleware", "--tool-parser-plugin",
                      "--reasoning-parser-plugin", "--worker-cls", "--worker-extension-cls", "--io-processor-plugin",
                      "--logits-processor-pattern", "--additional-config"),
            *_refused("policies are functions", "see --scheduling-policy", "--scheduler-cls"),
            *_refused("images come as files", "leave it out", "--enable-mm-embeds", takes=0),
            *_refused("the model's folder says how it pools", "leave it out", "--override-pooler-config"),
            *_refused("tokens are chosen by a sampler of an installed package", "see --sampler", "--logits-processors"),
            *_refused("prefill and decode are apart by role", "see --role and --prefill-engines", "--kv-transfer-config",
                      "--disaggregation-bootstrap-port"),
            *_refused("blocks go through shared memory or TCP, not between GPUs", "see --handover-transport",
                      "--disaggregation-transfer-backend"),
            *_refused("caches stay in one engine", SEVERAL, "--kv-events-config", "--ec-transfer-config"),
            *_refused("blocks that leave the cache go to a disk", "see --kv-disk-dir and --kv-disk-bytes", "--kv-offloading-size"),
            *_values("native", "blocks that leave the cache go to a disk", "see --kv-disk-dir", "--kv-offloading-backend"),
            *_refused(LOCAL, REPLICAS, "--data-parallel-rank", "--data-parallel-address",
                      "--data-parallel-size-local", "--data-parallel-start-rank", "--data-parallel-rpc-port",
                      "--data-parallel-backend"),
            *_refused(LOCAL, REPLICAS, "--data-parallel-hybrid-lb", "--data-parallel-external-lb",
                      "--headless", takes=0),
            *_switches("an engine can always sleep, see LLM.sleep and --enable-rl-routes", "--enable-sleep-mode"),
            *_values("*", EXPERTS, "", "--all2all-backend", "--expert-placement-strategy"),
            *_refused(EXPERTS, "leave it out", "--enable-eplb", "--enable-dbo", takes=0),
            *_refused(EXPERTS, "leave it out", "--eplb-config", "--dbo-decode-token-threshold"),
            *_refused("GPUs exchange tensors over mapped memory", "see --ipc-bytes-max", "--disable-custom-all-reduce", takes=0),
            *_switches("keys and values of 8 bits have scales of their own, see --kv-cache-dtype", "--calculate-kv-scales"),
            *_refused("--log-level says how much is written", "redirect standard error", "--log-config-file"),
            *_refused("traces of steps are made of the log", "see vnext-replay trace", "--collect-detailed-traces"),
            *_values("*", "graphs and compiled code change no answer, see --compile, --graph-sizes and --enforce-eager", "",
                     "--compilation-config", "-O", "--optimization-level", "--compile-sizes"),
            *_refused("attention reads what the model's windows say", "leave it out", "--disable-sliding-window", takes=0),
            # of vllm bench
            *_renamed("--url", "--base-url"),
            *_renamed("--input-len", "--random-input-len"),
            *_renamed("--output-len", "--random-output-len"),
            *_refused("prompts are running text", "see --random for random tokens", "--dataset-name"),
        ]
    )
)
SGLANG: Mapping[str, Foreign] = MappingProxyType(
    dict(
        [
            *_refused("", "name the model itself, as in `vnext serve MODEL`", "--model-path"),
            *_renamed("--tokenizer", "--tokenizer-path"),
            *_renamed("--max-model-len", "--context-length"),
            *_renamed("--max-num-batched-tokens", "--chunked-prefill-size", "--max-prefill-tokens"),
            *_renamed("--max-num-seqs", "--max-running-requests"),
            *_renamed("--gpu-memory-utilization", "--mem-fraction-static"),
            *_renamed("--tensor-parallel-size", "--tp", "--tp-size"),
            *_renamed("--data-parallel-size", "--dp", "--dp-size"),
            *_renamed("--pipeline-parallel-size", "--pp-size"),
            *_renamed("--enable-expert-parallel", "--ep", "--ep-size"),
            *_renamed("--master-addr and --master-port", "--dist-init-addr"),
            *_renamed("--scheduling-policy", "--schedule-policy"),
            *_renamed("--block-size", "--page-size"),
            *_renamed("--seed", "--random-seed"),
            *_renamed("--hf-overrides", "--json-model-override-args"),
            *_renamed("--speculative-config", "--speculative-algorithm", "--speculative-draft-model-path",
                      "--speculative-num-steps", "--speculative-eagle-topk", "--speculative-num-draft-tokens"),
            *_renamed("--lora-modules", "--lora-paths"),
            *_renamed("--max-loras", "--max-loras-per-batch"),
            *_renamed("--no-enable-prefix-caching", "--disable-radix-cache", takes=0),
            *_renamed("--no-async-scheduling", "--disable-overlap-schedule", takes=0),
            *_renamed("--enforce-eager", "--disable-cuda-graph", takes=0),
            *_renamed("--graph-sizes", "--cuda-graph-max-bs"),
            *_renamed("--graph-sizes", "--cuda-graph-bs", takes="*"),
            *_renamed("--compile", "--enable-torch-compile", takes=0),
            *_renamed("--deterministic", "--enable-deterministic-inference", takes=0),
            *_renamed("--kv-disk-dir", "--enable-hierarchical-cache", takes=0),
            *_renamed("--log-level info", "--log-requests", takes=0),
            *_values("*", GRAMMARS, "", "--grammar-backend"),
            *_switches(FIGURES, "--enable-metrics"),
            *_switches("usage includes them anyway", "--enable-cache-report"),
        ]
    )
)
LLAMA_CPP: Mapping[str, Foreign] = MappingProxyType(
    dict(
        [
            *_refused("", "name the model itself, as in `vnext serve owner/name:Q4_K_M`", "-hf", "-hfr", "--hf-repo"),
            *_renamed("--max-model-len", "-c", "--ctx-size"),
            *_renamed("--max-num-batched-tokens", "-b", "--batch-size", "-ub", "--ubatch-size"),
            *_renamed("--max-num-seqs", "-np", "--parallel"),
            *_renamed("--threads", "-tb", "--threads-batch"),
            *_renamed("--api-server-count", "--threads-http"),
            *_renamed("--kv-cache-dtype", "-ctk", "--cache-type-k", "-ctv", "--cache-type-v"),
            *_renamed("--served-model-name", "-a", "--alias"),
            *_renamed("--lora-modules", "--lora"),
            *_renamed("--speculative-config", "-md", "--model-draft", "--draft", "--draft-max", "--draft-min"),
            *_renamed("--hf-overrides", "--rope-freq-base", "--rope-scale"),
            *_renamed("--chat-template", "--chat-template-file"),
            *_renamed("--reasoning-parser", "--reasoning-format"),
            *_renamed("--override-generation-config", "--top-k", "--top-p", "--min-p", "--repeat-penalty"),
            *_refused("a request says how long its answer may be", "send max_tokens", "-n", "--predict", "--n-predict"),
            *_refused("a model is computed in one place", "see --device", "-ngl", "--gpu-layers", "--n-gpu-layers"),
            *_refused("attention is chosen by the machine", "`vnext doctor` says which", "--flash-attn", "-fa", takes="?"),
            *_switches("the model's chat template is always used", "--jinja"),
            *_switches("a request joins the batch as soon as there is room", "-cb", "--cont-batching"),
            *_switches(FIGURES, "--metrics", "--slots"),
            *_switches("these routes always answer", "--embedding", "--embeddings", "--rerank", "--reranking"),
        ]
    )
)
OLLAMA: Mapping[str, str] = MappingProxyType({
    "OLLAMA_HOST": "--host and --port", "OLLAMA_MODELS": "--models-dir", "OLLAMA_CONTEXT_LENGTH": "--max-model-len",
    "OLLAMA_NUM_PARALLEL": "--max-num-seqs", "OLLAMA_MAX_QUEUE": "--max-waiting-tokens", "OLLAMA_KEEP_ALIVE": "--keep-alive",
    "OLLAMA_MAX_LOADED_MODELS": "--max-loaded-models", "OLLAMA_KV_CACHE_TYPE": "--kv-cache-dtype",
    "OLLAMA_ORIGINS": "--allowed-origins", "OLLAMA_DEBUG": "--log-level debug",
})  # fmt: skip
"""Its variables, which are not read, and what says the same here."""
FOREIGN: Mapping[str, Foreign] = MappingProxyType({**VLLM, **SGLANG, **LLAMA_CPP})
"""Options by name."""


def unknown_option(given: str, known: Iterable[str], command: str) -> str:
    """The sentence about an argument that `command`, with the options `known`, does not take."""
    name = given.partition("=")[0]
    if not name.startswith("-"):
        if command == "vnext router":
            return f"nothing takes {given!r}: name each server with --backend URL."
        return f"nothing takes {given!r}: models stand side by side, and options begin with two dashes."
    if foreign := FOREIGN.get(name):
        return foreign.sentence(name)
    if close := close_to(name, known):
        return f"there is no option {name}: did you mean {close}?"
    return f"there is no option {name}; `{command} --help` lists all options."


def unknown_setting(name: str, known: Iterable[str]) -> str:
    """The sentence about a keyword that `LLM(...)`, with the keywords `known`, does not take."""
    if foreign := FOREIGN.get("--" + name.replace("_", "-")):
        return f"There is no setting {name}: {foreign.reason}; {foreign.remedy}."
    remedy = f"did you mean {close}?" if (close := close_to(name, known)) else "see vnext serve --help."
    return f"There is no setting {name}: {remedy}"
