"""Settings check: decides whether settings can work; the error for each is one sentence with the value and the remedy.

The command line and `LLM(...)` use it, so that both give the same errors. Knows fields and numbers; opens and starts
nothing: code that knows the model or the machine checks what depends on them.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Mapping
from math import isfinite
from pathlib import Path
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import msgspec

from vnext.kernels.attention_backends import ATTENTION_BACKENDS
from vnext.kernels.format import AUTO, NO_FORMAT, only_dtype
from vnext.options.foreign import FOREIGN, ON, unknown_setting
from vnext.options.spellings import plain_value, size_text
from vnext.options.table import ENGINE_HELP, flags_of
from vnext.routing.policies import RoutingPolicyError, require_policy
from vnext.runtime.hosts.handover.source import PORTS, split_address
from vnext.runtime.protocol.settings import EngineSettings, SettingsError
from vnext.runtime.protocol.speculation import WITH_LAYERS, speculation_of
from vnext.sched.policies import PolicyError, require_name
from vnext.server.settings import ServerSettings

log = logging.getLogger(__name__)
LOG_BYTES_MIN = 2**20
COUNT_MAX = 2**31 - 1
LENGTH_MAX = 2**24  # tokens of a prompt that is made up: more than any model takes
BOUNDS = {
    "seed": (0, 2**64 - 1),
    "max_model_len": (2, COUNT_MAX),
    "max_num_seqs": (1, 2**20),
    "max_num_batched_tokens": (1, 2**24),
    "long_prefill_token_threshold": (0, COUNT_MAX),
    "input_tokens": (0, COUNT_MAX),
    "block_size": (1, 2**12),
    "num_blocks_override": (1, COUNT_MAX),
    "kv_cache_memory": (1, 2**50),
    "log_max_bytes": (0, 2**50),
    "kv_disk_bytes": (0, 2**60),
    "kv_disk_max_age_s": (0, 10**9),
    "pinned_kv_fraction": (0.0, 0.9),
    "snapshot_interval": (0, COUNT_MAX),
    "prefill_engines": (0, 2**10),
    "encode_engines": (0, 2**10),
    "handover_bytes": (0, 2**60),
    "ipc_bytes_max": (0, 2**40),
    "log_keep": (0, 2**20),
    "log_keep_bytes": (0, 2**60),
    "log_max_age_s": (0, 10**9),
    "step_timeout_s": (0, 10**9),
    "max_restarts": (0, COUNT_MAX),
    "tensor_parallel_size": (1, 2**10),
    "pipeline_parallel_size": (1, 2**10),
    "pipeline_microbatches": (0, 2**10),
    "data_parallel_size": (1, 2**10),
    "nnodes": (1, 2**10),
    "node_rank": (0, 2**10),
    "master_port": (1, 2**16 - 1),
    "max_loras": (1, 1024),
    "max_lora_rank": (1, 256),
    "gpu_memory_utilization": (0.01, 1.0),
    "graph_sizes": (1, 2**20),
    "digest_interval": (1, COUNT_MAX),
    "threads": (1, 2**12),
    "port": (0, 2**16 - 1),
    "api_server_count": (1, 256),
    "ssl_cert_reqs": (0, 2),
    "log_stats_interval_s": (0.1, 86_400),
    "drain_s": (0, 86_400),
    "body_bytes_max": (2**10, 2**31),
    "responses_bytes_max": (0, 2**40),
    "keep_alive_s": (-1, 10**9),
    "max_loaded_models": (1, 256),
    "live_requests_max": (1, 2**20),
    "request_answers_max": (0, 2**20),
    "client_answers_max": (0, 2**20),
    "key_requests_per_minute": (0, COUNT_MAX),
    "key_tokens_per_minute": (0, COUNT_MAX),
    "key_answers_max": (0, 2**20),
    "waiting_tokens_max": (0, COUNT_MAX),
    "request_timeout_s": (0, 10**6),
    "template_limit_s": (0.01, 3_600),
    "connections_max": (1, 2**20),
    "write_timeout_s": (1, 86_400),
    "sse_ping_interval_s": (0, 3_600),
    "keepalive_timeout_s": (1, 86_400),
    "num_prompts": (1, COUNT_MAX),
    "input_len": (1, LENGTH_MAX),
    "output_len": (1, LENGTH_MAX),
    "shared_len": (0, LENGTH_MAX),
    "repeats": (1, COUNT_MAX),
    "rounds": (1, COUNT_MAX),
    "concurrency": (0, COUNT_MAX),
    "request_rate": (0, float("inf")),
    "burstiness": (0.001, 10**6),
    "agent_turns": (1, COUNT_MAX),
    "agent_result_len": (1, LENGTH_MAX),
    "ramp_up_start_rps": (0.0, 10**6),
    "ramp_up_end_rps": (0.0, 10**6),
    "log_speed": (0.001, 10**9),
    "num_warmups": (0, COUNT_MAX),
    "random_input_len": (1, LENGTH_MAX),
    "random_output_len": (1, LENGTH_MAX),
    "random_prefix_len": (0, LENGTH_MAX),
    "random_range_ratio": (0.0, 0.999),
    "dataset_output_len": (0, LENGTH_MAX),
    "metric_percentiles": (0.0, 100.0),
}
REMEDIES = {
    "generation_config": "; another file's values go into the model folder's generation_config.json",
    "quantization": "; how a checkpoint is quantised already stands in its files, so leave it out",
    "activations": "; auto is int8",
    "kv_cache_dtype": "; auto keeps keys and values in the dtype of the activations, int8 and fp8 in half of it",
    "dtype": "; for weights of 8 bits see --quantization",
    "device": "; CUDA_VISIBLE_DEVICES chooses among several GPUs",
    "attention": "; our kernels serve every model, so leave it at auto",
}
"""Field -> the remedy for a value that is none of its choices."""
PLACES = ("_dir", "_file", "_root", "_path", "certfile", "keyfile", "ca_certs", "history", "file", "output")
"""Ends of the names of fields that are paths."""
POLICY_CHECKS = {"scheduling_policy": require_name, "data_parallel_policy": require_policy}


def engine_settings(**values: Any) -> EngineSettings:
    """Checked settings from keywords. Raises SettingsError, with a sentence for each that is unknown or cannot work; warns about
    vLLM's keywords that request what vnext does anyway, and ignores them."""
    hints, usual = get_type_hints(EngineSettings), EngineSettings()
    good, wrong = {}, []
    for name, value in _by_field(values).items():
        try:
            if name in hints:
                good[name] = checked(name, value, hints[name], getattr(usual, name))
            else:
                log.warning("ignored: %s (%s)", name, ignored_setting(name, value, hints))
        except SettingsError as error:
            wrong.append(str(error))
    if wrong:
        raise SettingsError(" ".join(wrong))
    settings = EngineSettings(**good)
    _check_together(settings)
    return settings


def _by_field(values: Mapping[str, Any]) -> dict[str, Any]:
    """Keywords by field name; resolves alternative names. Raises SettingsError for a field that is given twice."""
    other_names = {
        flag[2:].replace("-", "_"): name for name in ENGINE_HELP for flag in flags_of(name) if flag.startswith("--")
    }
    named: dict[str, Any] = {}
    for given, value in values.items():
        name = other_names.get(given, given)
        if name in named:
            raise SettingsError(f"{name} is given twice, as {given} too: leave one of the two out.")
        named[name] = value
    return named


def ignored_setting(name: str, value: Any, known: Iterable[str]) -> str:
    """Why a foreign keyword is ignored. Raises SettingsError for a keyword that would change something."""
    foreign = FOREIGN.get("--" + name.replace("_", "-"))
    if foreign is None or not (value in (None, False) or foreign.is_fine(ON if value is True else str(value))):
        raise SettingsError(unknown_setting(name, known))
    return foreign.reason


def checked(name: str, given: Any, hint: Any, default: Any = None) -> Any:
    """`given`, in any spelling that spellings.py knows, as a value of the field `name` of type `hint`. Raises SettingsError for
    a wrong type or size."""
    _check_text(name, given)
    value = plain_value(name, given, hint, default)
    try:
        value = msgspec.convert(value, hint)
    except msgspec.ValidationError as error:
        raise SettingsError(f"{name} is {given!r}: it must be {_expected(hint)}{REMEDIES.get(name, '')}.") from error
    _check_bounds(name, value)
    if isinstance(value, str) and value[:1] == "~" and name.endswith(PLACES) and not os.path.isabs(os.path.expanduser(value)):
        raise SettingsError(f"{name} is {value!r}, and there is no such user or home: write the whole path.")
    if name in POLICY_CHECKS:
        _check_policy(name, value)
    return value


def _check_text(name: str, given: Any) -> None:
    """Raise SettingsError for bytes of the command line that are no UTF-8, which Python hands on as half characters."""
    for text in given if isinstance(given, (list, tuple)) else (given,):
        if isinstance(text, str) and any(0xD800 <= ord(each) < 0xE000 for each in text):
            shown = text.encode("utf-8", "backslashreplace").decode()
            raise SettingsError(
                f"{name} is '{shown}', which is no UTF-8: rename it, or start with a locale of UTF-8, as LC_ALL=C.UTF-8."
            )


def _check_policy(field: str, name: str) -> None:
    """Check a policy's name, of a scheduling policy its syntax alone: the engine core imports it in its own process."""
    try:
        POLICY_CHECKS[field](name)
    except (PolicyError, RoutingPolicyError) as error:
        raise SettingsError(f"{field}: {error}.") from error


def _check_bounds(name: str, value: Any) -> None:
    low, high = BOUNDS.get(name, (None, None))
    for each in value if isinstance(value, tuple) else (value,):
        if low is None and isinstance(each, float) and not isfinite(each):
            raise SettingsError(f"{name} is {each}: it must be a number.")
        if low is not None and each is not None and not low <= each <= high:
            raise SettingsError(f"{name} is {each}: it must lie between {low} and {high}.")


def _expected(hint: Any) -> str:
    """A type in words: `one of 'a', 'b'`, `a whole number or None`."""
    if get_origin(hint) is Literal:
        return "one of " + ", ".join(repr(choice) for choice in get_args(hint))
    if get_origin(hint) in (Union, UnionType):
        return " or ".join(_expected(part) for part in get_args(hint))
    if get_origin(hint) is tuple:
        return f"a list, each {_expected(get_args(hint)[0])}"
    words = {int: "a whole number", str: "a text", bool: "True or False", float: "a number", type(None): "auto"}
    return words.get(hint, str(hint))


def _check_together(settings: EngineSettings) -> None:
    """Raise SettingsError for values that are valid alone but cannot work together."""
    tokens, length = settings.step_tokens(settings.device != "cpu"), settings.max_model_len
    for name in ("long_prefill_token_threshold", "input_tokens"):
        if not settings.enable_chunked_prefill and (bound := getattr(settings, name)):
            raise SettingsError(f"{name} is {bound} and chunked prefill is off: a prompt is never split; leave one of the two out.")
    if not settings.enable_chunked_prefill and length is not None and length > tokens:
        raise SettingsError(
            f"max_model_len is {length} and without chunked prefill a prompt must fit into one step of "
            f"max_num_batched_tokens, which is {tokens}: raise that to {length}, or leave chunked prefill on."
        )
    if 0 < settings.log_max_bytes < LOG_BYTES_MIN:
        raise SettingsError(
            f"log_max_bytes is {settings.log_max_bytes}: a log of less than {size_text(LOG_BYTES_MIN)} forgets too "
            "much at once; give it more, or 0 for no such bound."
        )
    for name in ("log_durable", "log_compress", "log_required", "log_keep", "log_keep_bytes"):
        if getattr(settings, name) and settings.log == "off":
            raise SettingsError(f"{name} is on and the log is off: leave one of the two out.")
    if settings.kv_disk_dir and not settings.enable_prefix_caching:
        raise SettingsError(f"kv_disk_dir is {settings.kv_disk_dir} and prefix caching is off: leave one of the two out.")
    if settings.kv_disk_dir and settings.pipeline_parallel_size > 1:
        raise SettingsError("kv_disk_dir serves no stages so far: leave it or pipeline_parallel_size out.")
    if (only := only_dtype(settings.quantization)) and settings.dtype not in ("auto", only):
        both = f"quantization is {settings.quantization}, which computes in {only}, and dtype is {settings.dtype}"
        raise SettingsError(f"{both}: leave one of the two out.")
    if settings.activations != AUTO and settings.quantization == NO_FORMAT:
        both = f"quantization is none, which keeps no weights of few bits, and activations is {settings.activations}"
        raise SettingsError(f"{both}: leave one of the two out.")
    own = settings.attention_function
    if settings.kv_cache_dtype != "auto" and (own or not ATTENTION_BACKENDS[settings.attention].reads_int8):
        both = f"attention is {own or settings.attention}, which does not read keys and values in 8 bits, and kv_cache_dtype is"
        raise SettingsError(f"{both} {settings.kv_cache_dtype}: leave one of the two out.")
    if settings.device == "cpu" and (given := gpu_settings_given(settings)):
        raise SettingsError(f"{given[0]} is for a GPU, and device is cpu: use --device cuda, or leave it out.")
    speculation_of(settings.speculative_config)
    _check_ranks(settings)
    _check_roles(settings)
    _check_handover(settings)


def _check_ranks(settings: EngineSettings) -> None:
    """Raise SettingsError for what so many ranks cannot do."""
    stages = settings.pipeline_parallel_size
    sizes = {"tensor_parallel_size": settings.tensor_parallel_size, "pipeline_parallel_size": stages}
    if settings.executor == "inproc" and (several := [name for name, size in sizes.items() if size > 1]):
        raise SettingsError(f"{several[0]} is {sizes[several[0]]} and the executor inproc has one rank: use mp.")
    _check_hosts(settings)
    if stages == 1 and settings.pipeline_microbatches > 1:
        raise SettingsError(
            f"pipeline_microbatches is {settings.pipeline_microbatches}, and pipeline_parallel_size 1: one stage computes one step "
            "at a time, so raise pipeline_parallel_size or leave the microbatches out."
        )
    if stages == 1:
        return
    for name in ("enable_lora", "enable_return_routed_experts", "enable_expert_load", "enable_guidance"):
        if getattr(settings, name):
            raise SettingsError(
                f"pipeline_parallel_size is {stages}, and {name} needs ranks that have all layers: leave one of the two out."
            )
    speculation = speculation_of(settings.speculative_config)
    if speculation is not None and speculation.method in WITH_LAYERS:
        raise SettingsError(
            f"pipeline_parallel_size is {stages}, and drafts by {speculation.method} need ranks that have all layers: take "
            "another method, or leave one of the two out."
        )


def _check_roles(settings: EngineSettings) -> None:
    """Raise SettingsError for engines that cannot share the work on a request."""
    _check_encoding(settings)
    count, size, role = settings.prefill_engines, settings.data_parallel_size - settings.encode_engines, settings.role
    if count and role != "both":
        raise SettingsError(f"role is {role}, and prefill_engines gives each engine its own: leave one of the two out.")
    if count >= size:
        raise SettingsError(f"prefill_engines is {count} of data_parallel_size {size}: leave at least one to decode.")
    if not count and role in ("both", "encode"):
        return
    given = f"prefill_engines is {count}" if count else f"role is {role}"
    if not settings.enable_prefix_caching:
        raise SettingsError(f"{given}, and blocks come by the prefix cache, which is off: leave one of the two out.")
    for name in ("pipeline_parallel_size", "nnodes"):
        if getattr(settings, name) > 1:
            why = "needs ranks on one host that have all layers"
            raise SettingsError(f"{name} is {getattr(settings, name)}, and a hand-over {why}: leave {given.split()[0]} out.")
    if role != "both" and not settings.cluster_secret_file:
        raise SettingsError(f"{given}, and cluster_secret_file is missing: give the servers of all roles the same file.")


def _check_encoding(settings: EngineSettings) -> None:
    """Raise SettingsError for engines that cannot encode for others."""
    count, size = settings.encode_engines, settings.data_parallel_size
    if not count and settings.role != "encode":
        return
    given = f"encode_engines is {count}" if count else "role is encode"
    if count and settings.role != "both":
        raise SettingsError(f"{given}, which gives engines their roles, and role is {settings.role}: leave one of the two out.")
    if count >= size:
        raise SettingsError(f"{given} of data_parallel_size {size}: leave at least one to answer.")
    if not count and not settings.cluster_secret_file:
        raise SettingsError(f"{given}, and cluster_secret_file is missing: give the servers of all roles the same file.")
    for name in ("pipeline_parallel_size", "nnodes"):
        if getattr(settings, name) > 1:
            why = "vectors of inputs go to ranks of one host"
            raise SettingsError(f"{name} is {getattr(settings, name)}, and {why}: leave {given.split()[0]} out.")


def _check_handover(settings: EngineSettings) -> None:
    """Raise SettingsError for a hand-over that goes no way, or not that way."""
    address, transport, usual = settings.handover_address, settings.handover_transport, EngineSettings()
    if transport == "nixl":
        why = "which moves blocks between GPUs, and vnext hands blocks over on CPUs so far"
        raise SettingsError(f"handover_transport is nixl, {why}: use auto.")
    if not (settings.prefill_engines or settings.encode_engines) and settings.role not in ("prefill", "encode"):
        for name in ("handover_address", "handover_bytes", "handover_transport"):
            if (value := getattr(settings, name)) != getattr(usual, name):
                remedy = "add --role prefill or --prefill-engines, or leave it out"
                raise SettingsError(f"{name} is {value}, and no engine here hands blocks over: {remedy}.")
    if transport == "tcp" and not address:
        raise SettingsError("handover_transport is tcp, and handover_address is missing: name an address to serve blocks at.")
    if not address:
        return
    if transport == "shm":
        raise SettingsError(f"handover_address is {address}, and handover_transport is shm: leave one of the two out.")
    if not settings.cluster_secret_file:
        raise SettingsError(f"handover_address is {address}, and cluster_secret_file is missing: give both hosts the same file.")
    _check_ports(address, settings.world_size * settings.data_parallel_size)


def _check_ports(address: str, ranks: int) -> None:
    """Raise SettingsError for an address from which not every rank has one."""
    try:
        _, port = split_address(address)
    except ValueError as error:
        raise SettingsError(f"handover_address: {error}.") from error
    if port + ranks > PORTS:
        raise SettingsError(f"handover_address is {address}, and {ranks} ranks have a port each: take a smaller one.")


def _check_hosts(settings: EngineSettings) -> None:
    """Raise SettingsError for ranks that cannot be on so many hosts."""
    count = settings.nnodes
    if settings.data_parallel_size > 1 and (count > 1 or settings.executor == "ray"):
        where = "executor is ray" if settings.executor == "ray" else f"nnodes is {count}"
        raise SettingsError(
            f"{where}, and all engines of data_parallel_size are on one host: for engines on several, use vnext.ray.app(replicas="
            f"{settings.data_parallel_size}) in Ray Serve, or start `vnext serve` on each host and `vnext router` in front of them."
        )
    if settings.executor == "ray" and (count == 1 or settings.node_rank):
        raise SettingsError(
            f"executor is ray, nnodes {count} and node_rank {settings.node_rank}: Ray starts all hosts but this one, so give "
            "nnodes from 2 on and no node_rank."
        )
    if settings.node_rank >= count:
        raise SettingsError(f"node_rank is {settings.node_rank}, and nnodes {count}: hosts are numbered from 0.")
    if count == 1:
        return
    stages = settings.pipeline_parallel_size
    if stages > 1 and stages % count:
        raise SettingsError(
            f"nnodes is {count}, and pipeline_parallel_size {stages}: each host has as many whole stages, so take a multiple of "
            f"{count}."
        )
    if stages == 1 and settings.tensor_parallel_size % count:
        raise SettingsError(
            f"nnodes is {count}, and tensor_parallel_size {settings.tensor_parallel_size}: each host has as many ranks, so take a "
            f"multiple of {count}."
        )
    speculation = speculation_of(settings.speculative_config)
    if speculation is not None and speculation.model:
        raise SettingsError(f"nnodes is {count}, and the other hosts do not know the draft model: take a method without one.")
    if not settings.cluster_secret_file and settings.executor != "ray":
        raise SettingsError(f"nnodes is {count}, and cluster_secret_file is missing: give all hosts the same file.")


def gpu_settings_given(settings: EngineSettings) -> list[str]:
    """The settings for GPUs that are not at their defaults."""
    names, usual = ("gpu_memory_utilization", "enforce_eager", "graph_sizes", "compile", "attention"), EngineSettings()
    return [name for name in names if getattr(settings, name) != getattr(usual, name)]


def check_media(folder: str, domains: Iterable[str]) -> None:
    """Raise SettingsError for what images and videos cannot come from: the folder of files, "" for none, and hosts of the web."""
    if folder and not Path(folder).is_dir():
        raise SettingsError(f"allowed_local_media_path is {folder}, which is no folder: name that of the images and videos.")
    for each in domains:
        if not each or "/" in each or each.count(":") == 1:
            raise SettingsError(f"allowed_media_domains has {each!r}: name a host alone, such as images.example, or * for any.")


def check_models(engine: EngineSettings, server: ServerSettings) -> None:
    """Raise SettingsError for what a server with several models cannot do."""
    if not engine.model:
        raise SettingsError("other_models has models and there is no first one: name it first, as in `vnext serve A B`.")
    models, names = 1 + len(server.other_models), len(server.served_model_names)
    if names not in (0, models):
        raise SettingsError(f"served_model_names has {names} names for {models} models: give one for each, in their order.")
    for name in ("batch_dir", "lora_modules", "lora_root", "root_path", "enable_rl_routes"):
        if getattr(server, name):
            raise SettingsError(f"{name} is about one model, and this server has {models}: leave it out, or serve one model.")
    if engine.nnodes > 1:
        raise SettingsError(f"nnodes is {engine.nnodes}, and several models are served by one host: serve one model.")
    if (len(server.api_keys) > 1 or server.api_key_file) and not server.shared_prefix_cache:
        raise SettingsError(
            "shared_prefix_cache is off, and a server with several models keeps no prefix cache for each of several keys: turn it "
            "on, or give one key."
        )
