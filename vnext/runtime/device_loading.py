"""Loading a rank on a GPU: its device, what serves there, how much cache fits, and its steps.

Owns the choices that `vnext doctor` prints: which steps are captured, and why not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import torch
from msgspec.structs import replace

from vnext.kernels import batch_index
from vnext.kernels.cuda import attention, backends, compiled, flashinfer
from vnext.kernels.table import operations
from vnext.models.config import ModelConfig
from vnext.models.sharding import Parallel
from vnext.runtime.buckets import Shapes, checked_rows, default_rows, default_tokens
from vnext.runtime.cascade import Costs
from vnext.runtime.device import Device
from vnext.runtime.device_cuda import CudaDevice, has_gpu
from vnext.runtime.device_model import why_not_captured
from vnext.runtime.device_steps import DeviceForms, DeviceSteps
from vnext.runtime.memory import cache_bytes, reserved_bytes, try_largest_step
from vnext.runtime.rank_device import DeviceRank
from vnext.runtime.runner import ModelRunner
from vnext.runtime.sampling import adjuster, chooser
from vnext.runtime.settings import GpuSettings, RankSettings, SettingsError
from vnext.state.state import State

PIECE_TOKENS_MAX = 512
"""Larger steps take longer on the device than their launches do here."""

PROGRAMS_MAX = 1024
"""Sizes that one engine may compile its forward for."""


def resolved_device(name: str) -> str:
    """ "cpu" or "cuda" for an option's value."""
    if name == "auto":
        return "cuda" if has_gpu() else "cpu"
    return name


def captured_shapes(gpu: GpuSettings, why_not: str) -> Shapes:
    """What is captured of an engine's steps; nothing where there is a reason."""
    if gpu.enforce_eager or why_not:
        return Shapes((), ())
    rows = checked_rows(gpu.graph_sizes, gpu.rows_max) if gpu.graph_sizes else default_rows(gpu.rows_max)
    return Shapes(rows, default_tokens(min(gpu.tokens_max, PIECE_TOKENS_MAX)))


def why_eager(config: ModelConfig, parallel: Parallel, dtype: torch.dtype, is_fixed: bool = False) -> str:
    """Why no step of a model is captured on a GPU; "" where they are."""
    if not backends.is_usable():
        return "the CUDA kernels cannot be compiled without CuPy, and torch's forms have no fixed shape"
    heads = torch.empty((0, config.head_dim), dtype=dtype)
    if not attention.serves(heads, heads):
        return f"the attention kernel does not know heads of {config.head_dim}"
    return why_not_captured(config, parallel, dtype, is_fixed)


def device_forms(runner: ModelRunner, gpu: GpuSettings) -> DeviceForms:
    """What serves a model on a GPU. Raises SettingsError."""
    config, parallel = runner.config, runner.parallel
    costs = Costs(runner.block_bytes(1), config.layer_count) if backends.is_usable() else None
    forms = DeviceForms(
        operations=operations("cuda"),
        choose=chooser("cuda"),
        adjust=adjuster("cuda"),
        shapes=captured_shapes(gpu, why_eager(config, parallel, runner.dtype, runner.invariance.form == "fixed")),
        cascade=costs,
        wrap=compiler() if gpu.compile else None,
    )
    return with_flashinfer(forms, runner) if gpu.attention == "flashinfer" else forms


def with_flashinfer(forms: DeviceForms, runner: ModelRunner) -> DeviceForms:
    """Attention by FlashInfer, outside of graphs: it plans on the host, and shares no prefix. Raises SettingsError."""
    if reason := why_no_flashinfer(runner):
        raise SettingsError(f"--attention is flashinfer, but {reason}: leave the option out")
    attend = {name: getattr(flashinfer, name) for name in ("attention_metadata", "paged_attention")}
    shapes = Shapes((), forms.shapes.tokens)
    return replace(forms, operations=forms.operations._replace(**attend), shapes=shapes, cascade=None)


def why_no_flashinfer(runner: ModelRunner) -> str:
    """Why it cannot be a model's attention here; "" where it can."""
    if not flashinfer.is_installed():
        return "it is not installed here (package flashinfer-python)"
    if not flashinfer.serves(runner.dtype, runner.config.head_dim):
        return f"it does not know heads of {runner.config.head_dim} in {str(runner.dtype).removeprefix('torch.')}"
    return "its results depend on the batch, and --deterministic is asked for" if runner.invariance.holds else ""


def compiler() -> Callable[..., Callable]:
    """torch's compiler for forwards that are captured, with room for a program of each size."""
    import torch._dynamo.config as limits  # a second to import

    limits.recompile_limit = limits.accumulated_recompile_limit = PROGRAMS_MAX
    return partial(torch.compile, dynamic=False, fullgraph=True)


def compile_batch_kernels() -> None:
    """Numba's kernels, before anything is captured or measured."""
    if batch_index.batch_operations("cuda") != batch_index.plain_batch_operations():
        from vnext.kernels import batch_numba

        batch_numba.compile_all()


def device_rank(settings: RankSettings, runner: ModelRunner, device: Device) -> DeviceRank:
    """The rank, whose steps are made when the engine says how large its cache is."""
    return DeviceRank(settings.rank, step_maker(runner, device, device_forms(runner, settings.gpu)))


def step_maker(runner: ModelRunner, device: Device, forms: DeviceForms) -> Callable[[State], DeviceSteps]:
    """Makes the cache and the steps, and captures what most of them need."""

    def make(state: State) -> DeviceSteps:
        model = runner.device_model(state.config.block_count, state.config.block_size)
        steps = DeviceSteps(device, model, state, forms)
        steps.prepare()
        return steps

    return make


def fitting_cache_bytes(settings: RankSettings, runner: ModelRunner, device: Device) -> int:
    """Bytes for this rank's cache, by a trial of the largest step. Raises SettingsError."""
    gpu, choose = settings.gpu, chooser(device.torch_device.type)
    with enough_memory("the largest step (--max-num-batched-tokens) does"):
        memory, trial = try_largest_step(runner, device, choose, gpu.tokens_max, gpu.rows_max, settings.block_size)
    reserve = reserved_bytes(gpu.rows_max, runner.config.vocab_size, not gpu.enforce_eager)
    return cache_bytes(memory, gpu.memory_utilization, trial, reserve)


def describe() -> dict[str, str]:
    """What a rank on a GPU is made of here, for people."""
    rows, tokens = captured_shapes(GpuSettings(), "")
    kernels = "cuda/*.cu by NVRTC and CuPy" if backends.is_usable() else f"plain torch: {why_no_kernels()}"
    numba = batch_index.batch_operations("cuda") != batch_index.plain_batch_operations()
    graphs = "none"
    if backends.is_usable():
        graphs = f"decodes of {sizes(rows)} rows whole, other steps of {sizes(tokens)} tokens in pieces"
    return {
        "device": "can be used" if has_gpu() else why_no_gpu(),
        "kernels": kernels,
        "launches": compiled.describe(),
        "attention": "our kernels" + (", or FlashInfer (--attention flashinfer)" if flashinfer.is_installed() else ""),
        "index kernels": "Numba" if numba else "plain torch: Numba is missing",
        "sampling": "cuda/sampling.cu" if backends.is_usable() else "plain torch",
        "graphs": graphs,
        "cascade": "where it pays (runtime/cascade.py)" if backends.is_usable() else "none",
    }


def sizes(numbers: tuple[int, ...]) -> str:
    """A list of sizes in few words."""
    return f"{numbers[0]} to {numbers[-1]} ({len(numbers)} sizes)"


def why_no_kernels() -> str:
    """Why the CUDA kernels cannot be compiled here."""
    return "this torch was built without CUDA" if torch.version.cuda is None else "CuPy is missing: pip install 'vnext[cuda]'"


def why_no_gpu() -> str:
    """Why torch can use no GPU here."""
    return "none: this torch was built without CUDA" if torch.version.cuda is None else "none that torch finds"


@contextmanager
def enough_memory(what: str) -> Iterator[None]:
    """Raise SettingsError where a GPU's memory does not suffice. `what`: subject and verb, as "the weights do"."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise SettingsError(
            f"{what} not fit into the GPU's memory: use a smaller --dtype, more GPUs, or fewer tokens a step"
        ) from error


def open_device(rank: int) -> CudaDevice:
    """This rank's GPU: the one of its number. Raises SettingsError."""
    device = CudaDevice(rank)
    compile_batch_kernels()
    return device
