"""Settings of one engine: everything a user may choose, and what each rank is told of it. Frozen and passed on.

Owns the fields, their defaults and their bounds. Reads neither argv nor environment (vnext/options.py does), opens no
file and knows nothing of HTTP. Field names are those of the command-line options.
"""

from __future__ import annotations

from typing import Literal

import msgspec

DeviceName = Literal["cpu", "cuda", "auto"]
Dtype = Literal["auto", "float32", "bfloat16", "float16"]
Quantization = Literal["none", "int8"]
ExecutorName = Literal["mp", "inproc"]
LogPrivacy = Literal["shape", "full", "off"]
GenerationConfig = Literal["auto", "none"]
AttentionName = Literal["auto", "flashinfer"]


class EngineSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One engine. None means "decide from the model and the machine".

    `model` is a folder or a hub id, "" for the bundled demo model. `kv_cache_memory` is in bytes; `num_blocks_override`
    wins over it. `digest_interval` is in steps. `log_dir` is the parent of this start's own folder, "" for the default;
    `log_max_bytes` and `log_max_age_s` bound that folder, 0 for no such bound; with `log_durable` each step waits for the disk;
    with `log_compress` closed parts are made smaller.
    `quantization` "int8" rounds weights as they are loaded and computes in bfloat16. `deterministic`: tokens do
    not depend on the batch; None where that costs little. `seed` roots the keys of unseeded requests. `threads` are
    those of each rank. `generation_config` "none" looks away from the checkpoint's generation_config.json.
    `device` "auto" is a GPU where torch can use one. On a GPU: `gpu_memory_utilization` is the share of its
    memory that all of this may take, `enforce_eager` captures no graphs, `graph_sizes` are the numbers of rows they are
    captured for (() decides), `compile` fuses what they capture by torch's compiler, `attention` is whose: our kernels' or
    FlashInfer's.
    `ipc_bytes_max`: up to here ranks on GPUs exchange tensors through memory that they map of each
    other, above over NCCL; the default has not been measured yet.
    """

    model: str = ""
    generation_config: GenerationConfig = "auto"
    device: DeviceName = "cpu"
    dtype: Dtype = "auto"
    quantization: Quantization = "none"
    deterministic: bool | None = None
    seed: int | None = None
    max_model_len: int | None = None
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 2048
    long_prefill_token_threshold: int = 0
    block_size: int = 16
    num_blocks_override: int | None = None
    kv_cache_memory: int | None = None
    enable_prefix_caching: bool = True
    enable_chunked_prefill: bool = True
    async_scheduling: bool = True
    scheduling_policy: str = "fcfs"
    tensor_parallel_size: int = 1
    threads: int | None = None
    gpu_memory_utilization: float = 0.9
    enforce_eager: bool = False
    graph_sizes: tuple[int, ...] = ()
    compile: bool = False
    attention: AttentionName = "auto"
    executor: ExecutorName = "mp"
    log_dir: str = ""
    log: LogPrivacy = "shape"
    log_max_bytes: int = 4 * 2**30
    log_max_age_s: float = 0.0
    log_durable: bool = False
    log_compress: bool = False
    digest_interval: int = 64
    check_laws: bool = False
    ipc_bytes_max: int = 2 * 2**20


class CoreSettings(msgspec.Struct, frozen=True, kw_only=True):
    """What launch.py decided: `model_path` is a folder, `log_dir` this start's own, `run_dir` holds the sockets."""

    engine: EngineSettings
    model_path: str
    address: str
    run_dir: str
    log_dir: str


class GpuSettings(msgspec.Struct, frozen=True, kw_only=True):
    """What a rank on a GPU needs beside; `tokens_max` and `rows_max` are those of a step."""

    memory_utilization: float = 0.9
    enforce_eager: bool = False
    graph_sizes: tuple[int, ...] = ()
    compile: bool = False
    attention: AttentionName = "auto"
    tokens_max: int = 2048
    rows_max: int = 256


class RankSettings(msgspec.Struct, frozen=True, kw_only=True):
    """One rank's part of the engine's settings. `kv_cache_bytes` is this rank's memory for keys and values, 0: decide."""

    rank: int
    world_size: int
    ring: str
    results_address: str
    rendezvous: str
    model_path: str
    dtype: str
    quantization: str
    deterministic: bool | None
    device: str
    threads: int
    block_size: int
    kv_cache_bytes: int
    generation_config: GenerationConfig = "auto"
    max_model_len: int | None = None
    gpu: GpuSettings = GpuSettings()
    ipc_bytes_max: int = 2 * 2**20


class SettingsError(Exception):
    """A setting that cannot work: one sentence with the value and the remedy."""
