"""vLLM's control plane as control_plane.py measures it: its scheduler, cache manager and hashing, without a GPU.

Written for 0.8.5 and 0.33; between them the constructors changed, and only `construct*` knows how. Defaults of `vllm serve`
throughout (statistics on, the version's default hash), blocks of 16, prefix cache on. There are no workers: this module makes
the results, outside the clock. The model configuration is that of a tiny Llama; a scheduler does not read it.
"""

from __future__ import annotations

import json
import random
import tempfile
from pathlib import Path
from typing import Any

import control_measuring
import torch
import vllm
from vllm.config import CacheConfig, DeviceConfig, ModelConfig, SchedulerConfig, VllmConfig
from vllm.distributed.device_communicators import shm_broadcast
from vllm.sampling_params import SamplingParams
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager

OLD = vllm.__version__.startswith("0.8.")
# As perf/bench_state.py has them; that file cannot be imported here.
BLOCK_SIZE, VOCABULARY, PROMPT_LENGTH, STEPS_MAX, LONG_PROMPT = 16, 32_000, 512, 1_200, 4_096
BATCH_TOKENS_MAX = MODEL_LEN_MAX = 8_192
POOL_BLOCKS = 20_000
MODEL = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 64, "intermediate_size": 128,
    "num_hidden_layers": 1, "num_attention_heads": 1, "num_key_value_heads": 1, "vocab_size": VOCABULARY,
    "max_position_embeddings": MODEL_LEN_MAX,
}  # fmt: skip


class Vllm:
    """State that is created once: the model's configuration and the block hash function."""

    def __init__(self, folder: Path) -> None:
        (folder / "config.json").write_text(json.dumps(MODEL))
        place = {"model": str(folder), "tokenizer": str(folder), "skip_tokenizer_init": True, "seed": 0}
        old: dict[str, Any] = {"task": "generate", "tokenizer_mode": "auto", "trust_remote_code": False}
        old = old | {"use_async_output_proc": False} if OLD else {}  # its other value asks the platform, and there is none
        self._model = ModelConfig(**place, **old, max_model_len=MODEL_LEN_MAX, dtype="float32")
        self._hasher: dict[str, Any] = {}
        self.hash = ""

    def scheduler(self, max_num_seqs: int, page_count: int, ahead: bool) -> Scheduler:
        """`ahead`: asynchronous scheduling, where the version has it."""
        sizes = {"max_num_seqs": max_num_seqs, "max_num_batched_tokens": BATCH_TOKENS_MAX}
        new = {} if OLD else {"is_encoder_decoder": False, "async_scheduling": ahead}
        cache = CacheConfig(block_size=BLOCK_SIZE, enable_prefix_caching=True)
        cache.num_gpu_blocks = page_count
        config = VllmConfig(
            model_config=self._model,
            scheduler_config=SchedulerConfig(**sizes, **new, max_model_len=MODEL_LEN_MAX, enable_chunked_prefill=True),
            cache_config=cache,
            device_config=DeviceConfig("cpu"),
        )
        self._set_hash(config)
        return self._construct(config, page_count)

    def _set_hash(self, config: VllmConfig) -> None:
        """As vllm/v1/engine/core.py sets it up; 0.8.5 hashes inside of its cache manager."""
        self.hash = config.cache_config.prefix_caching_hash_algo
        if not OLD and not self._hasher:
            from vllm.utils.hashing import get_hash_fn_by_name
            from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash

            function = get_hash_fn_by_name(self.hash)
            init_none_hash(function)
            self._hasher = {"block_hasher": get_request_block_hasher(BLOCK_SIZE, function)}

    def _construct(self, config: VllmConfig, page_count: int) -> Scheduler:
        spec = FullAttentionSpec(
            block_size=BLOCK_SIZE, num_kv_heads=1, head_size=64, dtype=torch.float32, **({"use_mla": False} if OLD else {})
        )
        tensors: dict[str, Any] = {"tensors": {}} if OLD else {"kv_cache_tensors": []}
        cache = KVCacheConfig(num_blocks=page_count, kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)], **tensors)
        parts = {"vllm_config": config, "kv_cache_config": cache, "structured_output_manager": StructuredOutputManager(config)}
        if OLD:
            return Scheduler(**parts, log_stats=True)
        make = config.scheduler_config.get_scheduler_cls()
        return make(**parts, log_stats=True, block_size=BLOCK_SIZE, hash_block_size=BLOCK_SIZE)

    def request(self, index: int, prompt: list[int], length: int) -> Request:
        """A request as the engine core makes it of a client's message; from 0.10 or so on its blocks are hashed here."""
        sampling = SamplingParams(seed=0, max_tokens=length, ignore_eos=True)
        multimodal = ("multi_modal_inputs", "multi_modal_hashes", "multi_modal_placeholders")
        own = {**dict.fromkeys(multimodal), "eos_token_id": 2} if OLD else {"pooling_params": None, **self._hasher}
        return Request(request_id=client_name(index), prompt_token_ids=prompt, sampling_params=sampling, arrival_time=0.0, **own)


def client_name(index: int) -> str:
    """As long as `vllm serve` makes the name of a chat: it travels in every step's message."""
    return f"chatcmpl-{index:032x}" if OLD else f"chatcmpl-{index:016x}-{index:08x}"


def results(scheduler: Scheduler, planned: Any) -> ModelRunnerOutput:
    """A token for each request of a step whose prompt is done, right after the step was scheduled."""
    names = list(planned.num_scheduled_tokens)
    requests = [scheduler.requests[name] for name in names]
    tokens = [[7] if request.num_computed_tokens >= request.num_prompt_tokens else [] for request in requests]
    places = {name: place for place, name in enumerate(names)}
    old = {"spec_token_ids": None} if OLD else {}
    return ModelRunnerOutput(
        req_ids=names, req_id_to_index=places, sampled_token_ids=tokens, logprobs=None, prompt_logprobs_dict={}, **old
    )


def fresh_prompt(rng: random.Random, length: int) -> list[int]:
    return [rng.randrange(3, VOCABULARY) for _ in range(length)]


class Steady:
    """With `ahead` a step is scheduled before the results of the one before are applied."""

    def __init__(self, engine: Vllm, request_count: int, ahead: bool) -> None:
        length = PROMPT_LENGTH + BLOCK_SIZE + STEPS_MAX
        self._scheduler = engine.scheduler(request_count, request_count * (length // BLOCK_SIZE + 2), ahead)
        rng = random.Random(0)
        for index in range(request_count):
            prompt = fresh_prompt(rng, PROMPT_LENGTH + index % BLOCK_SIZE)
            self._scheduler.add_request(engine.request(index, prompt, STEPS_MAX))
        self._steps_in_flight: list[tuple[Any, ModelRunnerOutput]] = []
        self._lead = 1 if ahead else 0
        while len(self._scheduler.waiting) or not self._all_decode():
            self._fill()
        self._results = results(self._scheduler, self._planned)

    def _fill(self) -> None:
        """A step whose results depend on how far the prompts are."""
        self._planned = self._scheduler.schedule()
        self._steps_in_flight.append((self._planned, results(self._scheduler, self._planned)))
        if len(self._steps_in_flight) > self._lead:
            self._scheduler.update_from_output(*self._steps_in_flight.pop(0))

    def _all_decode(self) -> bool:
        requests = self._scheduler.requests.values()
        return all(request.num_output_tokens > 1 for request in requests)

    def step(self) -> object:
        """The results of a steady step are always the same, so that nothing is made of them here."""
        self._planned = self._scheduler.schedule()
        self._steps_in_flight.append((self._planned, self._results))
        return self._scheduler.update_from_output(*self._steps_in_flight.pop(0))

    def message(self) -> bytes:
        self.step()
        return self.encode()

    def encode(self) -> bytes:
        """What MultiprocExecutor puts into its queue, by the serialiser of that queue."""
        reported = ("execute_model", (self._planned,), {}, 0)
        return shm_broadcast.pickle.dumps(reported, protocol=shm_broadcast.pickle.HIGHEST_PROTOCOL)

    def running(self) -> int:
        return len(self._scheduler.running)


class Prompts:
    """Prompts of 4,096 tokens, one after the other; with `shared` always the same one."""

    def __init__(self, engine: Vllm, shared: bool, ahead: bool) -> None:
        self._engine, self._scheduler = engine, engine.scheduler(256, POOL_BLOCKS, ahead)
        self._rng, self._shared, self._count = random.Random(1), shared, 0
        self._prompt = fresh_prompt(self._rng, LONG_PROMPT)

    def next(self) -> None:
        scheduler = self._scheduler
        if self._count and scheduler.has_requests() and self._planned is not None:
            scheduler.update_from_output(self._planned, results(scheduler, self._planned))
        while scheduler.has_requests():
            planned = scheduler.schedule()
            if planned.total_num_scheduled_tokens:
                scheduler.update_from_output(planned, results(scheduler, planned))
        self._count, self._planned = self._count + 1, None
        if not self._shared:
            self._prompt = fresh_prompt(self._rng, LONG_PROMPT)

    def arrive(self) -> object:
        return self._scheduler.add_request(self._engine.request(self._count, self._prompt, 2))

    def first(self) -> int:
        self._planned = self._scheduler.schedule()
        return self._planned.total_num_scheduled_tokens


class Pool:
    """Blocks of a pool that nothing else uses."""

    def __init__(self) -> None:
        self._pool = BlockPool(POOL_BLOCKS, True) if OLD else BlockPool(POOL_BLOCKS, True, BLOCK_SIZE)

    def turn(self, count: int) -> None:
        self._pool.free_blocks(self._pool.get_new_blocks(count))


def main() -> None:
    channel = control_measuring.private_output()
    with tempfile.TemporaryDirectory() as folder:
        engine = Vllm(Path(folder))
    version, ahead = vllm.__version__, not OLD
    rows = control_measuring.measured_loop() | control_measuring.measured_blocks(Pool().turn)
    rows |= control_measuring.measured_prompts(lambda shared: Prompts(engine, shared, ahead), tokens_hit=16, tokens_miss=LONG_PROMPT)
    modes: dict[str, dict[str, float]] = {"asynchronous": {}, "synchronous": {}} if ahead else {"synchronous": {}}
    for mode, steps in modes.items():
        for request_count in control_measuring.RUNNING:
            steady = Steady(engine, request_count, mode == "asynchronous")
            steps |= control_measuring.measured_steps(steady, request_count)
    default, *others = modes
    figures = {f"vllm-{version}": rows | modes[default]}
    figures |= {f"vllm-{version}-{mode}": modes[mode] for mode in others}
    about = {"version": version, "mode": default, "hash": engine.hash, "torch": torch.__version__}
    control_measuring.tell(channel, about, figures)


if __name__ == "__main__":
    main()
