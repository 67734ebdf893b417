"""Settings of one engine: everything a user may choose, and the part of it that each rank receives. Frozen and passed on.

Owns the fields, their defaults and their bounds. Reads neither argv nor the environment (vnext/options/reader.py does), opens
no file and knows nothing of HTTP. Fields carry the names of the command-line options.
"""

from __future__ import annotations

from typing import Literal, Self

import msgspec

from vnext.kernels.attention_backends import ATTENTION_BACKENDS
from vnext.kernels.format import ACTIVATIONS, QUANTIZATIONS
from vnext.routing.policies import DEFAULT_POLICY

DeviceName = Literal["cpu", "cuda", "auto"]
Dtype = Literal["auto", "float32", "bfloat16", "float16"]
Quantization = Literal[QUANTIZATIONS]  # type: ignore[valid-type]  # derived from the table of formats
Activations = Literal[ACTIVATIONS]  # type: ignore[valid-type]
LoadFormat = Literal["auto", "safetensors", "dummy"]
ModelImpl = Literal["auto", "vnext", "vllm", "transformers"]
KvCacheDtype = Literal["auto", "int8", "fp8"]
Isa = Literal["auto", "portable", "avx2", "avx512", "avx512_bf16", "amx", "neon", "neon_bf16"]
"""Instruction sets of the CPU kernels, each with all before it; auto is the best one of the machine."""
ExecutorName = Literal["mp", "inproc", "ray"]
Role = Literal["both", "prefill", "decode", "encode"]
"""What an engine does of a request: all, its prompt, which another engine then has, its answer, or its images and sounds."""
CPU_STEP_TOKENS, GPU_STEP_TOKENS = 2048, 8192
"""The most tokens of a step where the settings do not say: a GPU computes more of a prompt at once."""
HandoverTransport = Literal["auto", "shm", "tcp", "nixl"]
LogPrivacy = Literal["shape", "full", "off"]
LogFormat = Literal["text", "json"]
OFF = "off"
"""What keeps a log or packed weights from being written."""
GenerationConfig = Literal["auto", "none"]
AttentionName = Literal[tuple(ATTENTION_BACKENDS)]  # type: ignore[valid-type]  # derived from the table


class Roles(msgspec.Struct, frozen=True):
    """Which of several engines do what: the first `prefill` compute prompts for the others, the last `encode` images and sounds."""

    prefill: int = 0
    encode: int = 0


NO_ROLES = Roles()
"""Each engine does all."""


class EngineSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One engine. None means "decide from the model and the machine".

    `model` is a folder, a name or a hub id, "" for the bundled demo model; named models lie in `models_dir`, "" for the default.
    `kv_cache_memory` is in bytes; `num_blocks_override`
    takes precedence over it. `input_tokens` bound what a step beside requests that decode computes of images and sounds, and the
    encoder's work, in as many tokens of the decoder; 0 for no limit.
    `digest_interval` is in steps. `log_dir` is the parent of this start's own folder, "" for the
    default. `log_max_bytes` and `log_max_age_s` bound that folder; 0 means no bound. `log_keep` and `log_keep_bytes`
    bound the logs of all starts in their parent: the number of starts, this one included, and their bytes. With `log_durable`
    each step waits for the disk. `log_compress` compresses closed segments. `log_index` builds the log tool's index beside long
    segments. With `log_required` an engine that cannot write its log ends. `log_weights_digest`: it has a digest of every
    byte of the weights. `log_format` is that of the lines on stderr (log_lines.py).
    `quantization` says in which format weights are kept (kernels/format.py), `activations` what meets those of few bits;
    `kv_cache_dtype` "int8" keeps keys and values as MXINT8 (kernels/mxint8.py). `packed_weights_dir` is the folder in which ranks
    on a CPU keep their weights as they are packed, "off" for none, "" for that of a GGUF file. `deterministic`: tokens do not
    depend on the batch; None turns it on where it costs little. `seed` roots the keys of unseeded requests. `threads` is the
    number per rank. `pipeline_microbatches`: parts of the requests that decode, for stages that compute at once; 0 means one for
    each stage.
    `numa` "auto" binds ranks to cores and nodes where that helps, "off" never; a list of nodes such as "0,2-3" keeps the
    engine there. `data_parallel_size` engines of these settings run beside one another and share the machine's cores, or have
    GPUs of their own; `data_parallel_policy` (routing/policies.py) chooses one for each request. `generation_config` "none" ignores
    the checkpoint's generation_config.json.
    `revision` is a branch, tag or commit on the hub; `tokenizer` a folder or hub id whose tokenizer replaces the model's;
    `mmproj` the tower of a GGUF model, "" for the one beside it.
    `hf_overrides` and `override_generation_config` are JSON objects whose members replace those of config.json and of
    generation_config.json ("" for none). `load_format` "dummy" takes random numbers for the weights, which need no files.
    `model_impl`: whose code computes the model; "vllm" means vnext's own. `family`: a Python file with a family
    of the user's own, "" for none; `sampler`, `attention_function`: of an installed package (sampling/outside.py,
    models/hosted/own_attention.py), "" for vnext's.
    `speculative_config` is a JSON object (runtime/protocol/speculation.py), "" for no drafts.
    `device` "auto" selects a GPU where one works. On a GPU, `gpu_memory_utilization` is the share of its memory that the
    engine may take; `enforce_eager` captures no graphs; `graph_sizes` lists the row counts that are captured (() decides);
    `compile` compiles the captured forwards with torch.compile; `attention` selects our kernels or FlashInfer's.
    `step_timeout_s`: ranks are treated as dead when a step has no result for this long, and for far longer than steps of its size
    take; 0 disables this. `max_restarts`: processes that end are started again, until this many have ended in a row without
    progress; 0 starts none again. With `standby` others that have imported everything wait to take their place.
    `ipc_bytes_max`: up to this size, ranks on GPUs exchange tensors through memory that they map of each other; above it, over
    NCCL. The default has not been measured yet.
    With `enable_lora` up to `max_loras` LoRA adapters of at most `max_lora_rank` are in memory at once; others wait.
    `enable_return_routed_experts`: requests get the expert ids of their tokens. `enable_expert_parallel`: the ranks that share a
    layer have whole experts each, in place of a part of every one. `enable_expert_load`: the metrics have the experts' load.
    `enable_guidance`: requests may have guidance, and every block takes twice the memory.
    The ranks are on `nnodes` hosts, and this is number `node_rank`; number 0 runs the engine and listens at `master_addr` and
    `master_port`. `cluster_secret_file` holds what all of them know. With the executor "ray" the other hosts are nodes of a Ray
    cluster, where Ray places them; port and secret are then new at each start.
    `kv_disk_dir` is the folder of the disk tier ("" for none), which holds at most `kv_disk_bytes` of all ranks, and no block
    that was last used longer than `kv_disk_max_age_s` ago when an engine starts (0: whatever its age).
    `pinned_kv_fraction` is the share of the cache's blocks that requests may keep for a time (cache_control and the like).
    `snapshot_interval`: after so many tokens, at a block's edge, the prefix cache keeps a snapshot of recurrent layers' states; 0
    for no snapshots, and no hits.
    `role` is that of a server's engines; of those of `data_parallel_size` the first `prefill_engines` have the role prefill and
    the others decode, 0 for engines that do both; the last `encode_engines` have the role encode. Blocks that are handed over take
    at most `handover_bytes` of shared memory, of all ranks; at `handover_address` ("host:port", the port of the first rank) they
    are served to other hosts, over `handover_transport`.
    """

    model: str = ""
    models_dir: str = ""
    revision: str = ""
    tokenizer: str = ""
    mmproj: str = ""
    hf_overrides: str = ""
    generation_config: GenerationConfig = "auto"
    override_generation_config: str = ""
    load_format: LoadFormat = "auto"
    model_impl: ModelImpl = "auto"
    family: str = ""
    sampler: str = ""
    attention_function: str = ""
    device: DeviceName = "auto"
    dtype: Dtype = "auto"
    quantization: Quantization = "auto"
    activations: Activations = "auto"
    kv_cache_dtype: KvCacheDtype = "auto"
    packed_weights_dir: str = ""
    isa: Isa = "auto"
    deterministic: bool | None = None
    seed: int | None = None
    max_model_len: int | None = None
    max_num_seqs: int = 256
    max_num_batched_tokens: int | None = None
    long_prefill_token_threshold: int = 0
    input_tokens: int | None = None
    block_size: int = 16
    num_blocks_override: int | None = None
    kv_cache_memory: int | None = None
    kv_disk_dir: str = ""
    kv_disk_bytes: int = 8 * 2**30
    kv_disk_max_age_s: float = 0.0
    pinned_kv_fraction: float = 0.25
    snapshot_interval: int = 1024
    enable_prefix_caching: bool = True
    enable_chunked_prefill: bool = True
    async_scheduling: bool = True
    speculative_config: str = ""
    scheduling_policy: str = "fair"
    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    pipeline_microbatches: int = 0
    data_parallel_size: int = 1
    data_parallel_policy: str = DEFAULT_POLICY
    role: Role = "both"
    prefill_engines: int = 0
    encode_engines: int = 0
    handover_address: str = ""
    handover_bytes: int = 2**30
    handover_transport: HandoverTransport = "auto"
    threads: int | None = None
    numa: str = "auto"
    gpu_memory_utilization: float = 0.9
    enforce_eager: bool = False
    graph_sizes: tuple[int, ...] = ()
    compile: bool = False
    attention: AttentionName = "auto"  # type: ignore[valid-type]
    executor: ExecutorName = "mp"
    log_dir: str = ""
    log: LogPrivacy = "shape"
    log_max_bytes: int = 4 * 2**30
    log_max_age_s: float = 0.0
    log_keep: int = 0
    log_keep_bytes: int = 0
    log_durable: bool = False
    log_compress: bool = False
    log_index: bool = True
    log_required: bool = False
    log_weights_digest: bool = False
    log_format: LogFormat = "text"
    digest_interval: int = 64
    check_laws: bool = False
    step_timeout_s: float = 300.0
    max_restarts: int = 10
    standby: bool = False
    ipc_bytes_max: int = 2 * 2**20
    enable_lora: bool = False
    max_loras: int = 4
    max_lora_rank: int = 16
    enable_return_routed_experts: bool = False
    nnodes: int = 1
    node_rank: int = 0
    master_addr: str = "127.0.0.1"
    master_port: int = 29500
    cluster_secret_file: str = ""
    enable_expert_parallel: bool = False
    enable_expert_load: bool = False
    enable_guidance: bool = False

    @property
    def is_held_ready(self) -> bool:
        """Whether processes stand by for those that end."""
        return self.standby and self.max_restarts > 0

    @property
    def local_world_size(self) -> int:
        """The number of ranks on each host."""
        return self.world_size // self.nnodes

    @property
    def world_size(self) -> int:
        return self.tensor_parallel_size * self.pipeline_parallel_size

    def core_name(self, replica: int) -> str:
        """That of an engine's core, for people."""
        return "engine core" if self.data_parallel_size == 1 else f"engine core {replica}"

    def step_tokens(self, on_gpu: bool) -> int:
        return self.max_num_batched_tokens or (GPU_STEP_TOKENS if on_gpu else CPU_STEP_TOKENS)

    @property
    def roles(self) -> Roles:
        """Those of the engines of these settings."""
        return Roles(self.prefill_engines, self.encode_engines)


def reads_generation_config(settings: EngineSettings) -> bool:
    """Whether generation_config.json counts: the checkpoint's own, or what `override_generation_config` puts in its place."""
    return settings.generation_config == "auto" or bool(settings.override_generation_config)


class Predecessor(msgspec.Struct, frozen=True, kw_only=True):
    """The engine core that ended before the one that starts: how it ended, the folder of its log ("" without one), the request
    that it was about to begin ("" where that is unknown), and its number among those of this run directory. `replaced`: it ended
    in order, because its operator wants other settings, maybe another model.
    """

    cause: str
    log: str
    blamed: str = ""
    number: int = 0
    replaced: bool = False


class CoreSettings(msgspec.Struct, frozen=True, kw_only=True):
    """What launch.py decides: `model_path` is a folder, and `draft_path` that of the draft model or head ("" for none); `log_dir`
    belongs to this start, `run_dir` holds the socket of the clients, and `inputs_dir` the vectors of inputs that engines of one
    server share, "" for none. `predecessor`: None for the first engine core. `replica`:
    which of the engines of these settings it is, from 0."""

    engine: EngineSettings
    model_path: str
    address: str
    run_dir: str
    log_dir: str
    draft_path: str = ""
    predecessor: Predecessor | None = None
    replica: int = 0
    inputs_dir: str = ""

    @property
    def name(self) -> str:
        """The engine core's, for people."""
        return self.engine.core_name(self.replica)

    @property
    def role(self) -> Role:
        """This engine's."""
        roles = self.engine.roles
        if self.replica >= self.engine.data_parallel_size - roles.encode:
            return "encode"
        if not roles.prefill:
            return self.engine.role
        return "prefill" if self.replica < roles.prefill else "decode"

    @property
    def ranks_dir(self) -> str:
        """The folder of the ranks' sockets: ranks of an engine core that has ended must not find its successor."""
        return self.run_dir if self.predecessor is None else f"{self.run_dir}/{self.predecessor.number + 1}"


class GpuSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Further settings of a rank on a GPU; `tokens_max` and `rows_max` bound one step, `drafts_max` the drafts of a row, and
    `adapters_max` the adapters in memory."""

    memory_utilization: float = 0.9
    enforce_eager: bool = False
    graph_sizes: tuple[int, ...] = ()
    compile: bool = False
    attention: AttentionName = "auto"  # type: ignore[valid-type]
    tokens_max: int = 2048
    rows_max: int = 256
    drafts_max: int = 0
    adapters_max: int = 0

    @property
    def samples_max(self) -> int:
        """The most samples of a step: one behind each row's last token, and one behind each draft."""
        return min(self.rows_max * (1 + self.drafts_max), max(self.tokens_max, self.rows_max))


class ModelSettings(msgspec.Struct, frozen=True, kw_only=True):
    """How a rank keeps and computes a model, by the options of these names. `max_lora_rank` 0 means no adapters;
    `packed_weights_dir`: of packed weights (loading/packed_file.py)."""

    dtype: str = "auto"
    quantization: str = "none"
    activations: str = "auto"
    kv_cache_dtype: KvCacheDtype = "auto"
    deterministic: bool | None = None
    max_lora_rank: int = 0
    packed_weights_dir: str = ""

    @property
    def bare(self) -> Self:
        """Without adapters, and with a cache of the activations' type: for a draft model, or a tower alone."""
        return msgspec.structs.replace(self, max_lora_rank=0, kv_cache_dtype="auto")


class RankSettings(ModelSettings, frozen=True, kw_only=True):
    """One rank's part of the engine's settings. `kv_cache_bytes` is this rank's memory for keys and values; 0 decides it.

    `measures_draft_costs`: the engine asks what drafts cost a step. `draft_path`: the folder of the draft model or head, "" for
    none; `draft_method`: the method, "" without drafts. `returns_routed_experts`: requests get the expert ids of their tokens;
    `prefix_caching`: of hits too. `digests_weights`: the environment has a digest of every byte of the weights. `stack_file`: where
    the rank writes its stacks when it is asked for them. `pipeline_parallel_size`: in how many stages the `world_size` ranks are.
    `replica` of `replica_count`: which engine of its server has the rank.
    `nnodes`: on how many hosts; `store`: where ranks of several meet, as address:port; `host_address`: where this one is reached;
    `link_key`: what stages on two hosts prove to each other.
    `kv_disk_dir`: the folder of the disk tier, "" for none. `follows`: it takes the
    place of a rank that was lost. `handover_dir`: that of blocks for other engines, in shared memory; the rank has at most
    `handover_bytes` there. `enable_expert_parallel`: ranks that share a layer have whole experts each. `enable_expert_load`: it is
    measured. `enable_guidance`: steps have rows for unconditional halves. `media_dir`: where clients put images, `inputs_dir`
    where their vectors are, of at most `inputs_bytes`, "" for nowhere.
    """

    rank: int
    world_size: int
    ring: str
    results_address: str
    rendezvous: str
    model_path: str
    device: str
    threads: int
    block_size: int
    kv_cache_bytes: int
    generation_config: GenerationConfig = "auto"
    max_model_len: int | None = None
    gpu: GpuSettings = GpuSettings()
    ipc_bytes_max: int = 2 * 2**20
    measures_draft_costs: bool = False
    draft_path: str = ""
    isa: Isa = "auto"
    draft_method: str = ""
    returns_routed_experts: bool = False
    prefix_caching: bool = True
    numa: str = "auto"
    digests_weights: bool = False
    stack_file: str = ""
    kv_disk_dir: str = ""
    kv_disk_max_age_s: float = 0.0
    follows: bool = False
    pipeline_parallel_size: int = 1
    replica: int = 0
    replica_count: int = 1
    nnodes: int = 1
    store: str = ""
    host_address: str = ""
    link_key: bytes = b""
    role: Role = "both"
    handover_dir: str = ""
    handover_address: str = ""
    handover_bytes: int = 2**30
    cluster_secret_file: str = ""
    family: str = ""
    sampler: str = ""
    attention_function: str = ""
    enable_expert_parallel: bool = False
    enable_expert_load: bool = False
    enable_guidance: bool = False
    media_dir: str = ""
    inputs_dir: str = ""
    inputs_bytes: int = 0

    @property
    def place(self) -> int:
        """The number of the rank among those of all engines of its server."""
        return self.replica * self.local_world_size + self.local_rank

    @property
    def place_count(self) -> int:
        """The ranks of all engines of its server."""
        return self.replica_count * self.local_world_size

    @property
    def local_world_size(self) -> int:
        """The number of ranks on this host."""
        return self.world_size // self.nnodes

    @property
    def local_rank(self) -> int:
        """This rank among those of its host."""
        return self.rank % self.local_world_size


class SettingsError(Exception):
    """A setting that cannot work: one sentence with the value and the remedy."""
