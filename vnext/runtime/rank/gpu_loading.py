"""Loading a rank on a GPU: its device, its kernels, the size of its cache, and its steps.

Owns the choices that `vnext doctor` prints: which steps are captured, and why others are not.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from importlib import import_module

import numpy as np
import torch
from msgspec.structs import replace

from vnext.kernels import batch_index
from vnext.kernels.arrays import Array, torch_dtype
from vnext.kernels.attention_backends import ATTENTION_BACKENDS, LONG_PROMPTS, AttentionBackend
from vnext.kernels.backends import backend_for, why_not_cuda
from vnext.kernels.cuda import attention, compiled, flashinfer, flex
from vnext.kernels.table import operations
from vnext.kernels.thin_tiles import ThinTiles, make_tiles
from vnext.models.config.model_config import ModelConfig
from vnext.models.layers.batch import ForwardBatch, GroupPlaces, HostBatch
from vnext.models.layers.kv_cache import kv_groups
from vnext.models.layers.sharding import Parallel, local_heads, local_kv_heads
from vnext.models.loading.adapter import Base, adapted_products
from vnext.runtime.batch.draft_batch import DraftBatch
from vnext.runtime.gpu.adapter_regions import AdaptedProduct, AdapterRegions
from vnext.runtime.gpu.auto import has_gpu, why_cpu
from vnext.runtime.gpu.buckets import Shapes, checked_rows, default_rows, default_tokens
from vnext.runtime.gpu.cascade import Costs
from vnext.runtime.gpu.cuda import CudaDevice
from vnext.runtime.gpu.decode_graphs import Wrap
from vnext.runtime.gpu.device import Device, Memory
from vnext.runtime.gpu.head_drafts import DeviceHeadDrafts
from vnext.runtime.gpu.model import why_not_captured
from vnext.runtime.gpu.model_drafts import ModelDrafts
from vnext.runtime.gpu.pages import DevicePages
from vnext.runtime.gpu.row_parameters import parameter_bytes
from vnext.runtime.gpu.steps import DeviceSteps, DeviceVariants, PendingStep
from vnext.runtime.protocol.settings import GpuSettings, RankSettings, SettingsError
from vnext.runtime.rank.adapters import AdapterSlots
from vnext.runtime.rank.draft_costs import BLOCK_SIZE, MANY_ROWS, SECONDS, draft_costs
from vnext.runtime.rank.replica import Rank
from vnext.runtime.rank.runner import ModelRunner
from vnext.runtime.rank.steps import LOOK_S, Computed, with_drafts
from vnext.runtime.rank.tier import RankTier
from vnext.runtime.rank.weights import RankWeights
from vnext.runtime.transport.collectives.group import require_whole_group
from vnext.sampling.inputs import SamplingInputs
from vnext.sampling.sampling import Choose, logits_processor_for, masking_for, report_in_parts, sampler_for
from vnext.state.config import SchedulerConfig
from vnext.state.events import pack_tokens
from vnext.state.params import CHOOSING, LOGPROBS_MAX, PARAMETERS, ROW_DTYPES
from vnext.state.state import State

log = logging.getLogger(__name__)

PIECE_TOKENS_MAX = 512
"""Above this size the device takes longer to compute a step than the host takes to launch it."""

QUERY_ROWS_MAX = 512
"""The most query rows of a graph where drafts make them more than the engine's rows."""

COPIED_PAGES = 16
"""The memory that a disk tier's copies to the host take: eight blocks (runtime/engine/tiers.py), gathered and joined."""

PROGRAMS_MAX = 1024
"""The most sizes for which one engine may compile its forward."""


def captured_shapes(gpu: GpuSettings, why_not: str) -> Shapes:
    """The shapes that are captured of an engine's steps; none where there is a reason in `why_not`."""
    if gpu.enforce_eager or why_not:
        return Shapes((), ())
    row_max = max(gpu.rows_max, min(gpu.samples_max, QUERY_ROWS_MAX))
    rows = checked_rows(gpu.graph_sizes, row_max) if gpu.graph_sizes else default_rows(row_max)
    return Shapes(rows, default_tokens(min(gpu.tokens_max, PIECE_TOKENS_MAX)))


def why_eager(config: ModelConfig, parallel: Parallel, dtype: torch.dtype, is_fixed: bool = False) -> str:
    """Why no step of a model is captured on a GPU; "" where steps are captured."""
    if not backend_for("cuda").can_capture:
        return "the CUDA kernels cannot be compiled without CuPy, and torch's forms have no fixed shape"
    heads = torch.empty((0, config.head_dim), dtype=dtype)
    if not attention.serves(heads, heads):
        return f"the attention kernel does not know heads of {config.head_dim}"
    if config.form.has_sinks:
        return "the attention kernel does not know sinks"
    return why_not_captured(config, parallel, dtype, is_fixed)


def device_variants(runner: ModelRunner, gpu: GpuSettings) -> DeviceVariants:
    """The device operations that serve a model on a GPU. Raises SettingsError."""
    config, parallel = runner.config, runner.parallel
    costs = Costs(runner.own_block_bytes(1), config.layer_count) if backend_for("cuda").can_capture else None
    variants = DeviceVariants(
        operations=operations("cuda"),
        choose=sampler_for("cuda"),
        adjust=logits_processor_for("cuda"),
        keep=masking_for("cuda"),
        shapes=captured_shapes(gpu, why_eager(config, parallel, torch_dtype(runner.dtype), runner.invariance.form == "fixed")),
        cascade=costs,
        wrap=compiler() if gpu.compile else None,
    )
    return with_attention(variants, runner, ATTENTION_BACKENDS[gpu.attention])


def draft_variants(runner: ModelRunner, gpu: GpuSettings) -> DeviceVariants | None:
    """As device_forms, of the draft model or the head; None where neither drafts."""
    if runner.head is None:
        return device_variants(runner.draft, gpu) if runner.draft else None
    why = why_eager(runner.head.config, runner.parallel, torch_dtype(runner.dtype), runner.invariance.form == "fixed")
    return replace(device_variants(runner, gpu), shapes=captured_shapes(gpu, why), wrap=None)


def with_attention(variants: DeviceVariants, runner: ModelRunner, backend: AttentionBackend) -> DeviceVariants:
    """The device operations with a backend's attention where it can do the same, or with a user's own. Raises SettingsError."""
    if own := runner.own.attention:
        return replace(variants, operations=own.among(variants.operations), shapes=Shapes((), variants.shapes.tokens), cascade=None)
    if backend.name == "auto":
        backend = for_long_prompts(runner) or backend
    elif reason := why_not_attention(backend, runner):
        raise SettingsError(f"--attention is {backend.name}, but {reason}: leave the option out")
    if not backend.module:
        return variants
    attend = {name: getattr(import_module(backend.module), name) for name in ("attention_metadata", "paged_attention")}
    shapes = variants.shapes if backend.can_capture else Shapes((), variants.shapes.tokens)
    cascade = variants.cascade if backend.shares_prefix else None
    return replace(variants, operations=variants.operations._replace(**attend), shapes=shapes, cascade=cascade)


def why_not_attention(backend: AttentionBackend, runner: ModelRunner) -> str:
    """Why a backend cannot serve a model here; "" where it can. What torch compiles is tried last."""
    if not backend.module:
        return ""
    dtype, config, ranks = torch_dtype(runner.dtype), runner.config, runner.parallel.world_size
    if reason := import_module(backend.module).why_not(dtype, config.head_dim):
        return str(reason)
    if runner.invariance.holds and not backend.invariant:
        return "its results depend on the batch, and --deterministic is asked for"
    if config.form.has_sinks:
        return "it does not know sinks"
    if runner.settings.kv_cache_dtype != "auto" and not backend.reads_int8:
        return "it does not read keys and values in 8 bits"
    if backend.name != "flex" or not torch.cuda.is_available():
        return ""
    heads = local_heads(config, ranks), local_kv_heads(config, ranks), config.head_dim
    return flex.why_not_here(torch.device("cuda", torch.cuda.current_device()), dtype, heads)


def for_long_prompts(runner: ModelRunner) -> AttentionBackend | None:
    """What serves long prompts beside our kernel; None where that serves all. Says why where a record names another."""
    name = LONG_PROMPTS.get(capability())
    if name is None or runner.invariance.holds:
        return None
    if reason := why_not_attention(backend := ATTENTION_BACKENDS[name], runner):
        log.info("vnext's own kernel serves the attention of long prompts, and not %s: %s", name, reason)
        return None
    return backend


def capability() -> tuple[int, int]:
    """Of the current device; (0, 0) without one."""
    return torch.cuda.get_device_capability() if torch.cuda.is_available() else (0, 0)


def copied_bytes(runner: ModelRunner, gpu: GpuSettings) -> int:
    """Bytes of keys and values that attention copies in a step beside the cache."""
    backend = for_long_prompts(runner) if gpu.attention == "auto" else ATTENTION_BACKENDS[gpu.attention]
    if backend is None or backend.name != "flex":
        return 0
    config = runner.config
    heads = local_kv_heads(config, runner.parallel.world_size)
    return flex.copied_bytes(heads, config.head_dim, torch_dtype(runner.dtype), config.position_count_max, gpu.tokens_max)


def compiler() -> Wrap:
    """torch's compiler for captured forwards, with room for one program per size."""
    import torch._dynamo.config as limits  # a second to import

    limits.recompile_limit = limits.accumulated_recompile_limit = PROGRAMS_MAX
    return partial(torch.compile, dynamic=False, fullgraph=True)


def compile_batch_kernels() -> None:
    """Compile Numba's kernels, before anything is captured or measured; where that fails, plain torch does their work."""
    if reason := batch_index.why_not_compiled():
        log.warning("Plain torch does the index work of steps, which takes longer: %s", reason)


def device_pages(settings: RankSettings, runner: ModelRunner, device: Device, header_bytes: int) -> DevicePages:
    """The pages of a rank for its disk tier, whose files have a header of `header_bytes`."""
    with enough_memory("the buffers of --kv-disk-dir do", "leave it out, or lower --block-size"):
        return DevicePages(device, header_bytes, runner.block_bytes(settings.block_size))


def device_rank(
    settings: RankSettings, runner: ModelRunner, device: Device, tier: RankTier | None = None, pages: DevicePages | None = None
) -> Rank:
    """The rank. Its steps are made when the engine reports the size of its cache, which `pages` then learns of."""
    if settings.max_lora_rank:
        with enough_memory("the adapters do", "lower --max-loras or --max-lora-rank"):
            keep_adapters(runner, device, settings.gpu.adapters_max, settings.max_lora_rank)
    make = step_maker(runner, device, device_variants(runner, settings.gpu), draft_variants(runner, settings.gpu), pages)
    weights = RankWeights(settings.rank, settings.world_size, runner)
    return Rank(settings.rank, LaterSteps(make, runner.adapters), weights, tier)


def keep_adapters(runner: ModelRunner, device: Device, adapters_max: int, rank_max: int) -> None:
    """Make the memory of the adapters, and the slots that lead there."""
    base = Base(runner.config, runner.parallel, runner.weights.kept.targets, runner.path)
    products = [AdaptedProduct(*each) for each in adapted_products(base)]
    runner.regions = AdapterRegions(device, products, adapters_max, rank_max)
    runner.adapters = AdapterSlots(runner.parallel.rank, base, rank_max, runner.regions)


def step_maker(
    runner: ModelRunner, device: Device, variants: DeviceVariants, draft_variants: DeviceVariants | None = None,
    pages: DevicePages | None = None,
) -> Callable[[State], DeviceSteps]:  # fmt: skip
    """A function that makes the cache and the steps, and captures the graphs that most steps need. `draft_variants`: those of what
    drafts; without them it does not draft. `pages`: learns of the caches."""

    def make(state: State) -> DeviceSteps:
        sizes = (state.config.page_count, state.config.block_size)
        model, draft = runner.device_model(*sizes), None
        drafts_of: Callable[..., DraftBatch] | None = None
        if draft_variants is not None and state.config.speculation is not None:
            if runner.head is not None:
                drafts_of = partial(DeviceHeadDrafts, device, runner.head, draft_variants)
            elif runner.draft is not None:
                draft = runner.draft.device_model(*sizes)
                drafts_of = partial(ModelDrafts, device, draft, draft_variants)
        if pages is not None:
            pages.use([each.kv for each in (model, draft) if each is not None])
        vocabulary = runner.vocabulary(state.config.eos_token_ids)
        steps = DeviceSteps(device, model, state, variants, vocabulary, drafts_of, runner.adapters)
        steps.prepare()
        return steps

    return make


def device_draft_costs(settings: RankSettings, runner: ModelRunner, device: Device) -> tuple[int, int, int]:
    """As `draft_costs`, by steps on the device, one of them launched ahead."""
    gpu = replace(settings.gpu, rows_max=MANY_ROWS, drafts_max=0, graph_sizes=(), tokens_max=MANY_ROWS * BLOCK_SIZE, compile=False)

    def make_steps(of: ModelRunner) -> LaterSteps:
        return LaterSteps(step_maker(of, device, device_variants(of, gpu), draft_variants(of, gpu)))

    return draft_costs(runner, make_steps, pipeline_depth=2, seconds=SECONDS if settings.world_size == 1 else 0.0)


def fitting_cache_bytes(settings: RankSettings, runner: ModelRunner, device: Device) -> int:
    """Bytes for this rank's cache, measured by a trial of the largest step. Raises SettingsError."""
    gpu, choose = settings.gpu, sampler_for(device.torch_device.type)
    with enough_memory("the largest step (--max-num-batched-tokens) does"):
        memory, trial = try_largest_step(runner, device, choose, gpu.tokens_max, gpu.samples_max, settings.block_size)
    graph_rows = max(captured_shapes(gpu, "").rows, default=0)
    reserve = reserved_bytes(gpu.rows_max, runner.config.vocab_size, graph_rows)
    reserve += copied_bytes(runner, gpu)
    if settings.kv_disk_dir:
        reserve += COPIED_PAGES * runner.block_bytes(settings.block_size)
    return cache_bytes(memory, gpu.memory_utilization, trial, reserve)


def describe() -> dict[str, str]:
    """The parts of a rank on this machine's GPU, for people."""
    rows, tokens = captured_shapes(GpuSettings(), "")
    usable = not (reason := why_not_cuda())
    graphs = "none"
    if usable:
        graphs = f"decodes of {sizes(rows)} rows whole, other steps of {sizes(tokens)} tokens in pieces"
    return {
        "device": "can be used" if has_gpu() else f"none: {why_cpu(1)}",
        "kernels": "cuda/*.cu by NVRTC and CuPy" if usable else f"plain torch: {reason}",
        "launches": compiled.describe(),
        "attention": "our kernels" + (", or FlashInfer (--attention flashinfer)" if flashinfer.is_installed() else ""),
        "index kernels": f"plain torch: {numba_lacks}" if (numba_lacks := batch_index.why_not_compiled()) else "Numba",
        "sampling": "cuda/sampling.cu" if usable else "plain torch",
        "graphs": graphs,
        "cascade": "where it pays (runtime/gpu/cascade.py)" if usable else "none",
    }


def sizes(numbers: tuple[int, ...]) -> str:
    """A short text for a list of sizes."""
    return f"{numbers[0]} to {numbers[-1]} ({len(numbers)} sizes)"


@contextmanager
def enough_memory(what: str, remedy: str = "use a smaller --dtype, more GPUs, or fewer tokens a step") -> Iterator[None]:
    """Raise SettingsError where a GPU has too little memory. `what` is subject and verb, as in "the weights do"."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise SettingsError(f"{what} not fit into the GPU's memory: {remedy}") from error


def open_device(index: int) -> CudaDevice:
    """The GPU of this index. Raises SettingsError."""
    device = CudaDevice(index)
    compile_batch_kernels()
    return device


# ---- steps that are launched and waited for ----------------------------------------------------------------------
# Steps on a device: launched now, waited for later. Owns the pending steps.


class LaterSteps:
    """As Steps, but `launch` does not wait for the device."""

    look_s = LOOK_S
    made: DeviceSteps
    _config: SchedulerConfig

    def __init__(self, make_steps: Callable[[State], DeviceSteps], adapters: AdapterSlots | None = None) -> None:
        """`make_steps` gets the engine's first state, takes the cache's memory and captures graphs."""
        self._make_steps, self.adapters = make_steps, adapters
        self._pending_steps: deque[PendingStep] = deque()

    def start(self, state: State) -> None:
        self.made, self._config = self._make_steps(state), state.config

    def launch(self, state: State) -> None:
        self._pending_steps.append(self.made.launch(state))

    def is_there(self) -> bool:
        return bool(self._pending_steps) and self._pending_steps[0].is_there()

    def wait(self) -> Computed:
        pending_step = self._pending_steps.popleft()
        outputs = pending_step.outputs()
        require_whole_group()
        words = () if pending_step.fed is None else pending_step.fed.words(self._config)
        seconds = time.perf_counter() - pending_step.asked_s
        found = pending_step.samples and pending_step.samples.kept
        tokens = pack_tokens(found.tokens if found else outputs.tokens)
        done = Computed(tokens, outputs.logprobs, seconds, words, pending_step.failures(outputs), outputs.prompts)
        return with_drafts(done, found) if found else done

    def give_up(self, error: Exception) -> None:
        if self.made.is_one_of_many:
            raise error
        self.made.give_up()

    def drop(self) -> None:
        self._pending_steps.clear()
        self.made.drop_steps()


# ---- memory of a GPU ---------------------------------------------------------------------------------------------
# Memory of a GPU: how much of it the cache may take, from a trial of the largest step.
#
# Owns the rule, which is pure, and the trial. Memory that is neither free nor held by torch belongs to others: other programs,
# the driver, libraries.


GRAPH_BYTES = 512 * 2**20
"""Reserved for graphs: their results, and the nodes of each graph on the device."""
GIB = 2**30
LOGIT_BYTES = 4


def reserved_bytes(row_count: int, vocab_size: int, graph_rows: int) -> int:
    """Bytes that a rank's steps hold beside the model: row parameters and, with graphs of at most `graph_rows` query rows, their
    memory and one step's logits."""
    graphs = GRAPH_BYTES + graph_rows * vocab_size * LOGIT_BYTES if graph_rows else 0
    return parameter_bytes(row_count, vocab_size) + graphs


def cache_bytes(memory: Memory, utilization: float, trial_bytes: int, reserve: int) -> int:
    """Bytes for keys and values: the share of the memory, less other programs' memory, the step's peak and a reserve.

    `trial_bytes` is the trial's own cache, which the peak includes. Raises SettingsError where nothing is left.
    """
    others = memory.total - memory.free - memory.cached
    left = int(memory.total * utilization) - others - (memory.peak - trial_bytes) - reserve
    if left <= 0:
        raise SettingsError(
            f"--gpu-memory-utilization {utilization:g} of {memory.total / GIB:.1f} GiB leaves no memory for the cache: other "
            f"programs hold {others / GIB:.1f}, the model and its largest step {(memory.peak - trial_bytes) / GIB:.1f}, rows and "
            f"graphs {reserve / GIB:.1f}; raise it, lower --max-num-batched-tokens, or use more GPUs"
        )
    return left


@torch.inference_mode()
def try_largest_step(
    runner: ModelRunner, device: Device, choose: Choose, tokens: int, rows: int, block_size: int
) -> tuple[Memory, int]:
    """Compute a step of `tokens` tokens in `rows` rows, all of them sampled from adjusted logits and reported. Returns the
    memory it took and the bytes of its own cache."""
    rows = min(rows, tokens)
    device.begin_peak()
    batch, pages = trial_batch(tokens, rows, block_size, len(kv_groups(runner.config).windows), device.torch_device)
    model = runner.device_model(pages, block_size)
    if runner.regions is not None:  # an empty one, for which the kernels take as much memory as for any
        parts = make_tiles([(0, np.arange(tokens))])
        batch = batch._replace(tiles=ThinTiles(*(torch.from_numpy(part).to(device.torch_device) for part in parts)))
    logits = model.logits(model.hidden(batch))
    changed = logits.clone()
    report_in_parts(logits, choose(changed, trial_sampling(rows, device.torch_device)), LOGPROBS_MAX)
    del logits, changed
    page_bytes = runner.own_block_bytes(block_size) + (runner.head.block_bytes(block_size) if runner.head else 0)
    return device.memory(), (pages + 1) * page_bytes


def trial_batch(tokens: int, rows: int, block_size: int, groups: int, device: torch.device) -> tuple[ForwardBatch, int]:
    """`tokens` tokens shared among `rows` rows, from position 0 on, and the number of pages they need."""
    counts = np.full(rows, tokens // rows, dtype=np.int64)
    counts[: tokens % rows] += 1
    starts = np.concatenate(([0], np.cumsum(counts)))
    positions = np.arange(tokens) - np.repeat(starts[:-1], counts)
    width = -(-int(counts.max()) // block_size)
    owners = np.repeat(np.arange(rows), counts)

    def places(group: int) -> GroupPlaces:
        table = (np.arange(rows * width).reshape(rows, width) * groups + group).astype(np.int32)
        slots = table[owners, positions // block_size].astype(np.int64) * block_size + positions % block_size
        return GroupPlaces(sent(slots), sent(table))

    def sent(array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(array).to(device)

    first, *others = [places(group) for group in range(groups)]
    host = HostBatch(starts.astype(np.int32), counts.astype(np.int32))
    ids = torch.zeros(tokens, dtype=torch.int64, device=device)
    batch = ForwardBatch(
        ids, sent(positions), first.slots, sent(host.query_starts), sent(host.context_lengths), first.block_table,
        sent(starts[1:] - 1), host=host, groups=tuple(others),
    )  # fmt: skip
    return batch, rows * width * groups


def trial_sampling(rows: int, device: torch.device) -> SamplingInputs:
    """Sampling inputs in which every row uses all filters."""

    def column(value: float, dtype: str) -> Array:
        return torch.full((rows,), value, dtype=torch_dtype(dtype), device=device)

    usual = {name: PARAMETERS[name].tried for name in CHOOSING} | {"seed": 1, "position": 1}
    return SamplingInputs(**{name: column(value, ROW_DTYPES[name]) for name, value in usual.items()})
