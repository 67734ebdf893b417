"""Model runner: one rank's parameters and cache, and the execution of its steps.

Owns the tensors of a rank. Knows arrays, not requests; decides nothing.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np
from msgspec.structs import replace

from vnext.kernels.arrays import Array, as_array, host_dtype, torch_dtype
from vnext.kernels.cpu.packed import serves, serves_all
from vnext.kernels.format import AUTO, CODES, INT8, NO_FORMAT, WeightFormats, weight_formats
from vnext.models.config.model_config import ModelConfig, load_config
from vnext.models.layers.batch import ForwardBatch
from vnext.models.layers.expert_load import ExpertLoad
from vnext.models.layers.kv_cache import cache_dtype, kv_bytes_per_page, make_kv_cache, page_rows
from vnext.models.layers.recurrent import state_bytes_per_page
from vnext.models.layers.sharding import Parallel
from vnext.models.layers.tensors import host_tensors_of, tensors_of, token_bytes
from vnext.models.layers.whole_step import whole_step
from vnext.models.loading.checkpoint import Checkpoint
from vnext.models.loading.held import is_quantised
from vnext.models.loading.kept import Kept
from vnext.models.loading.packed_file import PackedFile, packed_folder
from vnext.models.loading.tail import Tail, load_tail
from vnext.models.loading.weights import Progress, choose_numbers, load_params, refill_params
from vnext.models.registry import family
from vnext.runtime.batch.step_inputs import StepInputs
from vnext.runtime.batch.step_outputs import StepOutputs
from vnext.runtime.processes.determinism import Invariance, cpu_flags, gpu_invariance, has_strict_path, invariance
from vnext.runtime.protocol.settings import OFF, ModelSettings, SettingsError
from vnext.runtime.rank.host_cache import HostCache, StatePools
from vnext.runtime.rank.together import Own
from vnext.sampling.constraint import Vocabulary
from vnext.sampling.inputs import SamplingInputs

if TYPE_CHECKING:
    import torch

    from vnext.kernels.cpu.stack import AuxStates
    from vnext.runtime.gpu.adapter_regions import AdapterRegions
    from vnext.runtime.gpu.device import Device
    from vnext.runtime.gpu.model import DeviceModel
    from vnext.runtime.rank.adapters import AdapterSlots
    from vnext.runtime.rank.by_parts import ByParts
    from vnext.runtime.rank.images import Inputs
    from vnext.runtime.rank.routed_experts import RoutedExperts

log = logging.getLogger(__name__)


class Head(Protocol):
    """A draft head (draft_head.py)."""

    @property
    def config(self) -> ModelConfig: ...

    @property
    def query_group(self) -> int: ...

    @property
    def kv_head_count(self) -> int: ...

    def block_bytes(self, block_size: int) -> int: ...

    def make_cache(self, page_count: int, block_size: int) -> None: ...

    def with_room(self, batch: ForwardBatch) -> ForwardBatch: ...

    def room(self, token_count: int) -> AuxStates: ...

    def keep(self, batch: ForwardBatch) -> None: ...

    def write(self, slots: torch.Tensor, aux: AuxStates) -> None: ...

    def logits(self, rows: ForwardBatch, before: torch.Tensor) -> torch.Tensor | None: ...

    def run(self, rows: ForwardBatch, before: np.ndarray, sampling: SamplingInputs | None) -> np.ndarray: ...

    def step_seconds(self) -> float: ...


class Routes(NamedTuple):
    """What notes where tokens go in layers with experts: `ids` for the requests that get them, `load` for the metrics."""

    ids: RoutedExperts | None = None
    load: ExpertLoad | None = None


class StagePart(Protocol):
    """A rank's stage of a pipeline (stage.py)."""

    counts: dict[str, int]

    def run(self, inputs: StepInputs) -> StepOutputs: ...

    def close(self) -> None: ...


class Weights:
    """A rank's weights. `folder`: what the model is; `source`: where its values come from now. `params` are computed with. `kept`:
    what adapters and an update have to know. Mutable."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.source = folder, str(folder)
        self.params: Any = None
        self.kept = Kept()


class ModelRunner:
    """Parameters and cache of one rank. Call `make_cache` before the first `run`.

    Where the CPU kernels serve, parameters and cache are arrays of the host, and torch is imported by the first step that no single
    call computes; it then gets tensors of the same memory.
    """

    def __init__(
        self,
        path: Path,
        settings: ModelSettings,
        device: torch.device | str,
        parallel: Parallel,
        progress: Progress | None = None,
        config: ModelConfig | None = None,
    ) -> None:
        """`config` defaults to the folder's own. Raises ModelError, and SettingsError where `deterministic` is impossible."""
        self.weights = Weights(path)
        self.config = config or load_config(path)
        self.device = str(device)
        dtype, quantization = choose_numbers(settings.dtype, self.config, settings.quantization, self.device_type)
        activations = INT8 if settings.activations == AUTO else settings.activations
        self.settings = replace(settings, dtype=dtype, quantization=quantization, activations=activations)
        self.invariance = self._invariance()
        self.parallel = parallel = replace(parallel, is_exact=self.invariance.holds)
        self._load(progress)
        self.adapters = self.adapter_slots(settings.max_lora_rank) if settings.max_lora_rank else None
        self.regions: AdapterRegions | None = None  # of a device: where the adapters are
        self.cache = HostCache(())
        self.draft: ModelRunner | None = None  # computes drafts, under the same page numbers
        self.head: Head | None = None  # does, and reads hidden states of this model
        self.routes = Routes()
        self.own = Own()
        self.stage: StagePart | None = None  # computes this rank's part of a pipeline's steps
        self.steps_device: Device | None = None  # the interface of `gpu/steps.py` to a device other than the CPU

    @property
    def path(self) -> Path:
        """The model's folder or file."""
        return self.weights.folder

    @property
    def device_type(self) -> str:
        return self.device.partition(":")[0]

    @property
    def dtype(self) -> str:
        return self.settings.dtype

    @property
    def _dtype(self) -> np.dtype | torch.dtype:
        """Of numpy where the CPU kernels compute, else of torch."""
        return host_dtype(self.dtype) if self._is_host else torch_dtype(self.dtype)

    @property
    def _is_host(self) -> bool:
        """Whether the CPU kernels compute."""
        return self.device_type == "cpu" and serves(self.dtype, weight_formats(self.settings.quantization).products)

    @property
    def _kv_dtype(self) -> Any:
        return cache_dtype(self.settings.kv_cache_dtype, self._dtype)

    def _invariance(self) -> Invariance:
        asked, quantization = self.settings.deterministic, self.settings.quantization
        if self.device_type != "cpu":
            return gpu_invariance(asked, quantization)
        compiled = serves_all(self.config.head_dim_max, weight_formats(quantization).products)
        strict_mkl = not (compiled and self._is_host) and has_strict_mkl()
        return invariance(asked, self.dtype, compiled=compiled, strict_mkl=strict_mkl)

    @property
    def quantization(self) -> str:
        """How the weights are kept: a value of --quantization, "codes" where some are."""
        chosen = self.settings.quantization
        return NO_FORMAT if chosen == CODES and not self.weights.kept.codes else chosen

    @property
    def activations(self) -> str:
        """What these become where weights of few bits are multiplied by them: a value of --activations."""
        return INT8 if self.quantization == NO_FORMAT else self.settings.activations

    @property
    def _formats(self) -> WeightFormats:
        return weight_formats(self.settings.quantization, self.invariance.form, self.settings.activations)

    def _load(self, progress: Progress | None) -> None:
        weights, file = self.weights, self._packed_file()
        weights.kept = kept = Kept(progress, file)
        weights.params = load_params(
            self.path, self.config, self.parallel, self._dtype, self.device, self._formats, kept=kept
        )
        if file is not None:
            file.write_soon()

    def _packed_file(self) -> PackedFile | None:
        """This rank's file of packed weights; None without a folder, or where the CPU kernels do not compute. Raises ModelError."""
        given = self.settings.packed_weights_dir
        folder = Path(given).expanduser() if given else packed_folder(self.path) if self._is_host else None
        if folder is None or given == OFF:
            return None
        if not self._is_host:
            log.warning("--packed-weights-dir is ignored: the CPU kernels do not compute in %s here.", self.dtype)
            return None
        rank, stage = f"{self.parallel.rank} of {self.parallel.world_size}", str(self.config.stage)
        is_float = self.settings.quantization == CODES and not is_quantised(self.path)
        kept = NO_FORMAT if is_float else self.settings.quantization  # with codes or without, floats are the same
        kinds = {"quantization": kept, "form": self.invariance.form}
        if self.settings.activations != INT8:
            kinds["activations"] = self.settings.activations
        numbers = {"dtype": self.dtype, "is_exact": str(self.parallel.is_exact)} | kinds
        return PackedFile(folder, self.path, {"rank": rank, "stage": stage} | numbers)

    def let_go(self) -> None:
        """The memory of the weights is about to change."""
        if (file := self.weights.kept.packed_file) is not None:
            file.let_go()

    def close(self) -> None:
        """Finish what is written in the background, if it takes no longer than a moment."""
        for each in (self, self.draft):
            if each is not None and (file := each.weights.kept.packed_file) is not None:
                file.close()

    def measure_splits(self, known: Path) -> None:
        """Choose which products' sums travel beside the work, where the group can. `known`: the file of what was chosen before.
        Every rank calls this. Raises RankLost."""
        if self.parallel.begin_all_reduce is not None:
            from vnext.runtime.transport.collectives.split_products import measured  # such ranks have torch

            self.parallel = measured(host_tensors_of(self.weights.params), torch_dtype(self.dtype), self.parallel, known)

    def adapter_slots(self, rank_max: int) -> AdapterSlots:
        """Slots for adapters of at most this rank, on the host."""
        from vnext.models.loading.adapter import Base  # adapters need torch
        from vnext.runtime.rank.adapters import AdapterSlots

        return AdapterSlots(self.parallel.rank, Base(self.config, self.parallel, self.weights.kept.targets, self.path), rank_max)

    def refill(self, tensors: Checkpoint) -> None:
        """Compute with the values of these tensors from now on, which `update.py` has checked. They go into the memory of the old
        ones, which all that refers to it keeps."""
        self.let_go()
        weights = self.weights
        refill_params(weights.params, weights.kept, tensors, self.config, self.parallel, self._dtype, self.device, self._formats)

    def cache_memory(self) -> list[Array]:
        return [each for pair in self.cache.kv for each in pair]

    def page_rows(self) -> list[np.ndarray]:
        """The memory of the pages on the host, the draft model's too: uint8 [page_count, bytes] each."""
        return [page_rows(self.cache.kv), *(self.draft.page_rows() if self.draft else ())]

    def state_rows(self) -> list[np.ndarray]:
        """The memory of the state pages on the host: uint8 [page_count, bytes] each."""
        return [] if self.cache.states is None else self.cache.states.rows()

    def block_bytes(self, block_size: int) -> int:
        """Bytes of one page of the cache on this rank, the draft model's and the head's too."""
        drafts = sum(drafter.block_bytes(block_size) for drafter in (self.draft, self.head) if drafter)
        return self.own_block_bytes(block_size) + drafts

    def own_block_bytes(self, block_size: int) -> int:
        """Bytes of one page of the cache of this model alone."""
        beside = self.routes.ids.slot_bytes * block_size if self.routes.ids else 0
        return kv_bytes_per_page(self.config, block_size, self._kv_dtype, self.parallel) + beside

    def token_bytes(self) -> int:
        """Bytes of weights that this rank reads for a decoded token."""
        return token_bytes(self.weights.params, self.config)

    def measure_load(self) -> None:
        """Count from now on how many tokens each expert gets. Raises SettingsError for a model without experts."""
        if self.config.experts is None:
            raise SettingsError("--enable-expert-load: this model has no experts: leave the option out")
        self.routes = self.routes._replace(load=(load := ExpertLoad(self.config, self.parallel)))
        if self.weights.params.stack is not None:
            load.watch(self.weights.params.stack)

    def vocabulary(self, end_tokens: Sequence[int]) -> Vocabulary:
        """What constraints are matched with."""
        return Vocabulary(self.path, self.config.vocab_size, end_tokens)

    def state_bytes(self) -> int:
        """Bytes of the states that this rank's recurrent layers keep of one request."""
        return state_bytes_per_page(self.config, host_dtype(self.dtype), self.parallel.world_size)

    def make_cache(self, page_count: int, block_size: int, state_pages: int = 0, drafts: int = 0) -> None:
        """Allocate the cache, pages for recurrent states, with those of a step of so many `drafts`, and the cache of what drafts.
        Raises MemoryError (RuntimeError on CUDA) if memory does not suffice."""
        together = self.device_type == "cpu"
        is_whole = together and self.routes.ids is None and self.own == Own()  # a whole step tells no ids, attends and draws itself
        pages = page_count + (self.parts.spare_pages(block_size) if self.config.tower is not None else 0)
        kv = make_kv_cache(self.config, pages, block_size, self._kv_dtype, self.device, self.parallel, together)
        made = (self.config, state_pages, drafts, self.dtype, self.parallel.world_size)
        states = StatePools(*made) if state_pages else None
        pools = states.pools if states else ()
        whole = whole_step(self.weights.params, kv, self.config, self.parallel, self.adapters, pools) if is_whole else None
        self.cache = HostCache(kv, whole, self.tail, states)
        for drafter in (self.draft, self.head):
            if drafter is not None:
                drafter.make_cache(page_count, block_size)
        if self.routes.ids is not None:
            self.routes.ids.make(page_count, block_size)

    def device_model(self, page_count: int, block_size: int) -> DeviceModel:
        """The model with a cache of its own for steps on a device, the head's too: `page_count` pages and one null page for
        padding."""
        from vnext.runtime.gpu.model import DeviceModel  # a device needs torch

        dtype, whole = torch_dtype(self._kv_dtype), replace(self.parallel, begin_all_reduce=None)
        kv = make_kv_cache(self.config, page_count + 1, block_size, dtype, self.device, self.parallel)
        if self.head is not None:
            self.head.make_cache(page_count + 1, block_size)
        params = tensors_of(self.weights.params)
        return DeviceModel(
            family(self.config.architecture), params, kv, self.config, self.parallel, self.regions, whole, self.head, self.tail
        )

    def run(self, inputs: StepInputs) -> StepOutputs:
        """Compute one step: write its keys and values to the cache and sample a token for each sampled row.

        The next step may overwrite the outputs.
        """
        if self.stage is not None:
            return self.stage.run(inputs)
        states, head = self.cache.states, self.head
        if head is not None:
            inputs = inputs._replace(forward=head.with_room(inputs.forward))
        if states is not None:
            inputs = states.begin(inputs)
        outputs = self.cache.run(inputs) or self.run_by_parts(inputs)
        if states is not None:
            states.end(inputs.copies)
        if head is not None:
            head.keep(inputs.forward)
        return outputs

    @property
    def inputs(self) -> Inputs | None:
        """What reads images or sounds, None where nothing does."""
        return self.parts.inputs if "parts" in self.__dict__ else None

    @property
    def input_cost(self) -> float:
        """As ModelConfig's, or as the tower itself tells."""
        return self.config.input_cost if self.inputs is None else self.inputs.cost(self.config)

    @cached_property
    def parts(self) -> ByParts:
        """The model for steps that no single call computes."""
        from vnext.runtime.rank.by_parts import ByParts  # torch, which other steps do without

        params = host_tensors_of(self.weights.params)
        params = params._replace(stack=None) if self.own.attention else params  # one call of layers has its own
        made = (family(self.config.architecture), params, self.config, self.parallel, self.adapters, self.routes.ids, self.tail)
        parts = ByParts(*made)
        parts.own, parts.load = self.own, self.routes.load
        return parts

    @cached_property
    def tail(self) -> Tail | None:
        """What a text's vector goes through; None for nothing. Raises ModelError."""
        return load_tail(self.path, self.config)

    def run_by_parts(self, inputs: StepInputs) -> StepOutputs:
        """As `run`, with the same bits, for every model and kind of sampling; not fused."""
        return self.parts.run(inputs, self.cache.tensors)

    def states(self, batch: ForwardBatch) -> np.ndarray:
        """The layers' hidden states of the step's tokens [T, hidden], which the next stage of a pipeline goes on with."""
        return as_array(self.parts.states(batch, self.cache.tensors, torch_dtype(self.dtype)))


def has_strict_mkl() -> bool:
    """Whether torch multiplies with MKL by one code path for any number of rows."""
    import torch  # computes what no kernel of ours does

    return bool(torch.backends.mkl.is_available()) and has_strict_path(cpu_flags())
