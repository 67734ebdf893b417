"""Loading a rank: the model's weights, this rank's place in its group and among the machine's cores and nodes, and the number of
blocks that fit its memory.

Modules for a GPU are imported only for a GPU, and torch only where something needs it: a rank on the CPU starts sooner.
"""

from __future__ import annotations

import ctypes
import logging
import os
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from msgspec.structs import replace

from vnext.base.version import __version__
from vnext.kernels.cpu import memory, native
from vnext.kernels.format import INT8
from vnext.kernels.shards import SHARDS_MAX
from vnext.models.config.folder import is_dummy
from vnext.models.config.model_config import load_config
from vnext.models.config.stages import of_stage
from vnext.models.config.tower_config import THEIRS
from vnext.models.errors import ModelError
from vnext.models.layers.kv_cache import kv_groups
from vnext.models.layers.sharding import Parallel, sums_alike, with_whole_experts
from vnext.models.loading.checkpoint import fingerprint, weights_digest
from vnext.models.loading.held import scheme
from vnext.models.loading.unread import has_tower, unread
from vnext.models.outside import use_file
from vnext.runtime.hosts.handover.page_files import HEADER_BYTES, PageFolder, open_files
from vnext.runtime.hosts.handover.publishing import Publisher, Shelf, VectorOffer, block_server
from vnext.runtime.hosts.handover.receiving import Receiver
from vnext.runtime.hosts.wire import secret_of
from vnext.runtime.processes.determinism import describe_process, limit_torch
from vnext.runtime.processes.proc import available_memory_bytes, usual_cache_bytes
from vnext.runtime.processes.thread_plan import NOWHERE, TEAM_SPIN_US, Place, here, places
from vnext.runtime.protocol.messages import ModelFacts, RankReady
from vnext.runtime.protocol.reasons import ENCODES, IMAGES, NO_HEAD, NORMALIZED, SCORES, SOUNDS, WRITTEN_PAIRS
from vnext.runtime.protocol.settings import Isa, RankSettings, SettingsError
from vnext.runtime.rank.draft_costs import SECONDS, draft_costs
from vnext.runtime.rank.draft_model import load_draft_model
from vnext.runtime.rank.load_progress import LoadProgress
from vnext.runtime.rank.replica import Rank
from vnext.runtime.rank.runner import ModelRunner, Routes
from vnext.runtime.rank.stage import EarlierSteps, StageModel
from vnext.runtime.rank.stage_links import StageLinks, stage_place
from vnext.runtime.rank.steps import HostSteps
from vnext.runtime.rank.tier import HostPages, PageMemory, RankTier, Snapshots
from vnext.runtime.rank.together import HEADS, load_own, require_device, require_model
from vnext.runtime.rank.weights import RankWeights
from vnext.runtime.transport.collectives.group import StoreAddress, join_group

if TYPE_CHECKING:
    import torch


SPLITS = "splits.json"  # in the engine's folder, for ranks that follow lost ones
log = logging.getLogger(__name__)


def load_rank(settings: RankSettings, rendezvous: Path) -> tuple[Rank, ModelRunner]:
    """This rank with its weights loaded. Raises ModelError, SettingsError."""
    use_isa(settings.isa)
    if settings.family:
        use_file(Path(settings.family))
    if device_of(settings) == "cpu":
        return _load_cpu_rank(settings, rendezvous)
    start_threads(settings.threads)
    require_device(settings, "cuda")
    from vnext.runtime.rank.gpu_loading import device_pages, device_rank, enough_memory, open_device

    device = open_device(settings.place)
    parallel = join_group(
        settings.rank, settings.world_size, rendezvous, device.torch_device, settings.ipc_bytes_max
    )
    with enough_memory("the model's weights do"):
        runner = load_runner(settings, device.torch_device, parallel)
    if settings.kv_cache_dtype == "fp8" and runner.dtype == "float32":
        raise SettingsError("--kv-cache-dtype is fp8, which is read beside 16 bits, and the dtype is float32: add --dtype bfloat16")
    with enough_memory("the draft model or head does"):
        load_drafter(settings, runner)
    runner.steps_device = device
    pages = device_pages(settings, runner, device, HEADER_BYTES) if settings.kv_disk_dir else None
    return device_rank(settings, runner, device, open_tier(settings, runner, pages), pages), runner


def _load_cpu_rank(settings: RankSettings, rendezvous: Path) -> tuple[Rank, ModelRunner]:
    start_threads(settings.threads, place_of(settings))
    if settings.kv_cache_dtype == "fp8":
        if settings.rank == 0:
            log.warning("--kv-cache-dtype fp8 is for a GPU: on this CPU they are kept in int8, which takes as much room")
        settings = replace(settings, kv_cache_dtype="int8")
    if settings.pipeline_parallel_size > 1:
        return _load_stage(settings)
    meeting = StoreAddress(settings.store, settings.host_address) if settings.store else rendezvous
    parallel = join_group(settings.rank, settings.world_size, meeting, "cpu", settings.ipc_bytes_max)
    if settings.role == "encode":
        return _load_tower_alone(settings, parallel)
    runner = load_runner(settings, "cpu", parallel)
    runner.measure_splits(rendezvous.parent / SPLITS)
    if settings.returns_routed_experts:
        from vnext.runtime.rank.routed_experts import RoutedExperts  # of steps in torch

        runner.routes = Routes(RoutedExperts(runner.config, settings.prefix_caching))
    if settings.enable_expert_load:
        runner.measure_load()
    load_drafter(settings, runner)
    load_tower(settings, runner)
    weights = RankWeights(settings.rank, settings.world_size, runner)
    tier, publisher = open_tier(settings, runner), open_publisher(settings, runner)
    shelf = runner.inputs.shelf if runner.inputs else None
    return Rank(settings.rank, HostSteps(runner), weights, tier, publisher, shelf), runner


def _load_tower_alone(settings: RankSettings, parallel: Parallel) -> tuple[Rank, ModelRunner]:
    from vnext.runtime.rank.tower_alone import TowerRunner
    if not reads_inputs(settings, runner := TowerRunner(settings, parallel)):
        raise SettingsError("--role encode (or --encode-engines): this model reads no images and no sounds: leave it out")
    if settings.rank == 0:
        load_tower(settings, runner)
    shelf, offer = runner.inputs.shelf if runner.inputs else None, None
    if shelf is not None:
        server = block_server(settings, secret_for(settings), {shelf.files.identity: shelf.files.raw})
        offer = VectorOffer(str(shelf.files.folder), server)
    weights = RankWeights(settings.rank, settings.world_size, runner)
    return Rank(settings.rank, HostSteps(runner), weights, publisher=offer, shelf=shelf), runner


def open_tier(settings: RankSettings, runner: ModelRunner, memory: PageMemory | None = None) -> RankTier | None:
    """This rank's part of the disk tier, and of what other engines hand over; None with neither. `memory`: of the pages, None for
    the runner's on the host. Raises SettingsError where it cannot be had."""
    files = behind = receiver = receiver_behind = snapshots = None
    page_bytes, state_bytes = runner.block_bytes(settings.block_size), runner.state_bytes()
    if settings.kv_disk_dir:
        folder, age_s = Path(settings.kv_disk_dir).expanduser(), settings.kv_disk_max_age_s
        identity = page_identity(settings, runner, f"{settings.place} of {settings.place_count}")
        files = open_files(settings, folder, identity, page_bytes, age_s)
        if files is not None and state_bytes:
            behind = open_files(settings, folder, identity | {"state_bytes": state_bytes}, state_bytes, age_s)
    if settings.role == "decode":
        pages, secret = handover_identity(settings, runner), secret_for(settings)
        receiver = Receiver(settings.rank, secret, lambda folder: PageFolder(Path(folder), pages, page_bytes))
        own = pages | {"state_bytes": state_bytes}
        receiver_behind = Receiver(settings.rank, secret, lambda folder: PageFolder(Path(folder), own, state_bytes))
    if state_bytes:
        snapshots = Snapshots(behind, HostPages(runner.state_rows, HEADER_BYTES + state_bytes), receiver_behind)
    if files is None and receiver is None:
        return None
    return RankTier(settings.rank, files, memory or HostPages(runner.page_rows, HEADER_BYTES + page_bytes), receiver, snapshots)


def open_publisher(settings: RankSettings, runner: ModelRunner) -> Publisher | None:
    """What hands this rank's blocks over; None in an engine that keeps them. Raises SettingsError where it cannot be had."""
    if settings.role != "prefill":
        return None
    page_bytes, state_bytes = runner.block_bytes(settings.block_size), runner.state_bytes()
    folder, identity, behind = Path(settings.handover_dir), handover_identity(settings, runner), None
    try:
        files = open_files(settings, folder, identity, page_bytes)
        if files is not None and state_bytes:
            behind = open_files(settings, folder, identity | {"state_bytes": state_bytes}, state_bytes)
    except SettingsError as error:
        why = f"blocks for other engines belong into {settings.handover_dir}, which cannot be written"
        raise SettingsError(f"{why}: make room in shared memory, or leave --role out") from error
    if files is None:
        return None
    server = block_server(settings, secret_for(settings), {each.identity: each.raw for each in (files, behind) if each is not None})
    room = settings.handover_bytes // (1 + (behind is not None))
    snapshots = None if behind is None else Shelf(behind, runner.state_rows, room)
    return Publisher(settings.rank, settings.handover_dir, Shelf(files, runner.page_rows, room), server, snapshots)


def secret_for(settings: RankSettings) -> bytes:
    """The secret that the hosts of two engines share, b"" where all is on one. Raises SettingsError."""
    return secret_of(settings.cluster_secret_file) if settings.cluster_secret_file else b""


def handover_identity(settings: RankSettings, runner: ModelRunner) -> dict[str, object]:
    """That of ranks of one number in two engines."""
    return page_identity(settings, runner, f"{settings.rank} of {settings.world_size}")


def page_identity(settings: RankSettings, runner: ModelRunner, rank: str) -> dict[str, object]:
    """All that the bits of a page depend on beside its tokens. `rank`: what part of a block it is."""
    drafted = "" if runner.draft is None else fingerprint(settings.draft_path)
    return gpu_identity(settings, runner) | ({"form": runner.inputs.form} if runner.inputs else {}) | {
        "model": fingerprint(settings.model_path), "draft_model": drafted, "version": __version__, "rank": rank,
        "block_size": settings.block_size, "page_bytes": runner.block_bytes(settings.block_size),
        "kv_cache_dtype": runner.settings.kv_cache_dtype, "dtype": runner.dtype, "quantization": runner.quantization,
        "activations": runner.activations, "kernels": kernels_of(runner.device_type), "numbers": str(runner.invariance),
    }  # fmt: skip


def gpu_identity(settings: RankSettings, runner: ModelRunner) -> dict[str, object]:
    """What the bits of a GPU's page depend on beside: the GPU, its libraries, which come with torch, and how steps are made."""
    if runner.device_type == "cpu":
        return {}
    here, gpu = describe_process(runner.device), settings.gpu
    return {"gpu": here["device"], "torch": here["torch"], "attention": gpu.attention, "compile": gpu.compile}


def _load_stage(settings: RankSettings) -> tuple[Rank, ModelRunner]:
    """A rank of a pipeline. The ranks that share its stage are a group of their own."""
    place = stage_place(settings)
    links = StageLinks(settings)
    parallel = join_group(place.rank, place.size, Path(f"{settings.rendezvous}-stage-{place.stage}"))
    runner = load_runner(settings, "cpu", parallel)
    runner.stage = StageModel(runner, links)
    load_tower(settings, runner)
    steps = HostSteps(runner) if runner.config.is_last else EarlierSteps(runner, runner.stage, links)
    return Rank(settings.rank, steps, RankWeights(settings.rank, settings.world_size, runner)), runner


def load_tower(settings: RankSettings, runner: ModelRunner) -> None:
    """Give the runner the tower of a model that reads images or sounds, where this rank embeds tokens. Raises ModelError."""
    config = runner.config
    tower, listens = config.tower, config.sound is not None and config.sound.leads
    if config.stage is not None and (listens or (tower is not None and tower.is_mutual)):
        kind = "listens" if listens else "sees images to both sides"
        raise ModelError(f"A model that {kind} is not cut into stages: leave --pipeline-parallel-size out.")
    count = 0 if tower is None else len(tower.deep_layers)
    if config.stage is not None and config.is_first and config.layer_count < count:
        raise ModelError(f"Images join {count} layers, the first stage has {config.layer_count}: lower --pipeline-parallel-size.")
    if reads_inputs(settings, runner) and config.is_first:
        from vnext.runtime.rank.images import open_inputs  # computes in torch

        numbers = {"dtype": runner.dtype, "kernels": kernels_of(runner.device_type), "numbers": str(runner.invariance)}
        if tower is not None and tower.form in THEIRS:
            from vnext.runtime.rank.their_images import open_their_inputs  # loads transformers

            runner.parts.inputs = open_their_inputs(settings, runner.path, config, numbers)
        else:
            runner.parts.inputs = open_inputs(settings, runner.path, config, numbers)


def reads_inputs(settings: RankSettings, runner: ModelRunner) -> bool:
    """Whether the engine takes images or sounds: its ranks compute on one host's CPU, so that all find them in one folder."""
    may = runner.device_type == "cpu" and settings.nnodes == 1 and settings.media_dir != ""
    return may and has_tower(runner.path, runner.config)


def load_drafter(settings: RankSettings, runner: ModelRunner) -> None:
    """Load the draft model or head that the settings name, if any, on the runner's device. Raises ModelError, SettingsError."""
    if settings.draft_method in HEADS:
        from vnext.runtime.rank.heads import load_head  # heads compute in torch

        runner.head = load_head(settings, runner)
    elif settings.draft_path:
        runner.draft = load_draft_model(settings, runner)


def device_of(settings: RankSettings) -> str:
    """The kind of device that the settings mean. Raises SettingsError."""
    if settings.device == "cpu" or (settings.device == "auto" and not driver_finds_gpu()):
        return "cpu"
    from vnext.runtime.gpu.auto import resolved_device  # asks torch for GPUs

    return resolved_device(settings.device, settings.place_count)


def driver_finds_gpu() -> bool:
    """Whether NVIDIA's driver finds a GPU that this process may see; a torch built for CUDA takes three seconds to say so."""
    try:
        return bool(ctypes.CDLL("libcuda.so.1").cuInit(0) == 0)
    except OSError:
        return False


def load_runner(settings: RankSettings, device: torch.device | str, parallel: Parallel) -> ModelRunner:
    """Load the weights; the first rank shows a progress bar."""
    progress, path = LoadProgress(settings.stack_file) if settings.rank == 0 else None, Path(settings.model_path)
    config = load_config(path, settings.generation_config == "auto", settings.max_model_len)
    require_model(settings, config, str(device))
    parallel = with_whole_experts(config, parallel) if settings.enable_expert_parallel else parallel
    config = of_stage(config, stage_place(settings).stage, settings.pipeline_parallel_size)
    if settings.rank == 0 and is_dummy(path):
        log.warning("The weights are random, as --load-format dummy asks: answers mean nothing.")
    if settings.rank == 0 and config.hosted is not None:
        name = config.architecture.partition("/")[2]
        log.warning("The code of transformers computes %s, with vnext's attention and products: slower than a family's.", name)
    for sentence in (unread(path), native.why_incomplete() if str(device) == "cpu" else ""):
        if settings.rank == 0 and sentence:
            log.warning("%s", sentence)
    runner = ModelRunner(path, settings, device, parallel, progress, config)
    runner.own = load_own(settings, config, parallel, runner.dtype, runner.device)
    return runner


def use_isa(isa: Isa) -> None:
    """Compute with this instruction set from now on. Raises SettingsError where there is none such."""
    if isa == "auto":
        return
    try:
        native.set_level(native.Level[isa.upper()])
    except (ValueError, RuntimeError) as error:
        raise SettingsError(f"--isa is {isa}: {error}") from error


def start_threads(threads: int, place: Place = NOWHERE) -> None:
    """Start the kernels' own thread pool if it was built, bound to a place. torch then uses one thread, so the two never compete
    for cores."""
    bind(place)
    if native.is_built():
        native.start(threads, TEAM_SPIN_US)
        bind_members(place)
        threads = 1
    limit_torch(threads)


def ready_message(settings: RankSettings, runner: ModelRunner, rank: Rank | None = None) -> RankReady:
    """The facts that the engine core needs to size the cache, what is on disk, and where the rank hands blocks over."""
    budget = settings.kv_cache_bytes or default_cache_bytes(settings, runner)
    return RankReady(
        model=ModelFacts(
            vocab_size=runner.config.vocab_size,
            position_count_max=runner.config.position_count_max,
            eos_token_ids=runner.config.eos_token_ids,
            windows=kv_groups(runner.config).windows,
            whole_prompts=runner.config.encoder is not None,
            reads_inputs=runner.config.tower is not None or runner.config.sound is not None,
            mutual_inputs=runner.config.tower is not None and runner.config.tower.is_mutual,
            input_cost=runner.input_cost * runner.parallel.world_size,
            grids=runner.config.rope.axes != (),
            listens=runner.config.sound is not None and runner.config.sound.leads,
        ),
        rank=settings.rank, keeps_inputs=rank is not None and rank.shelf is not None,
        page_count_max=budget // runner.block_bytes(settings.block_size),
        block_bytes=runner.block_bytes(settings.block_size),
        model_digest=fingerprint(settings.model_path),
        environment=describe_process(runner.device) | describe_numbers(settings, runner),
        draft_costs=_draft_costs(settings, runner) if settings.measures_draft_costs else (0, 0, 0),
        linear_layers=runner.adapters.layers if runner.adapters else {},
        disk=None if rank is None or rank.tier is None else rank.tier.found(),
        handover=None if rank is None or rank.publisher is None else rank.publisher.place,
        state_bytes=runner.state_bytes(),
    )


def _draft_costs(settings: RankSettings, runner: ModelRunner) -> tuple[int, int, int]:
    if runner.stage is not None:
        return 0, 0, 0  # a stage's own time says little: the engine drafts as much as it may
    if runner.steps_device is None:
        return draft_costs(runner, HostSteps, seconds=SECONDS if settings.world_size == 1 else 0.0)
    from vnext.runtime.rank.gpu_loading import device_draft_costs

    return device_draft_costs(settings, runner, runner.steps_device)


def describe_numbers(settings: RankSettings, runner: ModelRunner) -> dict[str, str]:
    """How this rank stores and multiplies numbers. A replay needs the same, and the same checkpoint digest."""
    numbers = {"dtype": runner.dtype, "quantization": runner.quantization, "kernels": kernels_of(runner.device_type)}
    if settings.pipeline_parallel_size > 1:
        numbers["stages"] = str(settings.pipeline_parallel_size)
    if runner.activations != INT8:
        numbers["activations"] = runner.activations
    if runner.settings.kv_cache_dtype != "auto":
        numbers["kv_cache_dtype"] = runner.settings.kv_cache_dtype
    if settings.digests_weights and settings.rank == 0:
        numbers["weights_digest"] = weights_digest(settings.model_path)
    found, has_head = runner.config.pooling, runner.weights.kept.has_head and runner.config.encoder is None
    if not has_head or (found and found.scores not in ("", WRITTEN_PAIRS)):
        numbers["head"] = NO_HEAD
    if found:
        numbers |= {"pooling": found.kind + NORMALIZED * found.normalize} | ({SCORES: found.scores} if found.scores else {})
    numbers["sums"] = describe_sums(runner)
    sound, forms = runner.config.sound, [each.sizes for each in (runner.config.tower, runner.config.sound) if each is not None]
    if forms and reads_inputs(settings, runner):
        kind = SOUNDS if sound is not None and sound.leads else IMAGES
        numbers |= {kind: ", ".join(forms)} | ({ENCODES: "alone"} if settings.role == "encode" else {})
        numbers |= {"inputs": str(Path(settings.kv_disk_dir).expanduser().absolute())} if settings.kv_disk_dir else {}
    if runner.routes.ids:
        numbers["routed_experts"] = "{} layers, {} of each token".format(*runner.routes.ids.shape)
    if runner.device_type == "cpu":
        cores = f"{here()}, {place_of(settings)}"
        numbers |= {"threads": str(settings.threads), "token_bytes": str(runner.token_bytes()), "cores": cores}
    if runner.config.recurrent is not None:
        numbers["state_bytes"] = str(runner.state_bytes())
    named = {"sampler": settings.sampler, "attention_function": settings.attention_function}
    numbers |= {what: name for what, name in named.items() if name}
    if runner.weights.kept.codes:
        numbers["codes"] = scheme(name for name, _ in runner.weights.kept.codes.most_common())
    return numbers | {"batch_invariant": str(runner.invariance)}


def describe_sums(runner: ModelRunner) -> str:
    """By what order ranks sum products. Engines in which it is the same give the same bits on any of these numbers of ranks."""
    ranks = runner.parallel.world_size
    if not (runner.parallel.is_exact and sums_alike(runner.config, ranks)):
        return f"of {ranks} ranks" if ranks > 1 else "of one rank"
    return "alike for ranks: " + ", ".join(str(size) for size in range(1, SHARDS_MAX + 1) if sums_alike(runner.config, size))


def kernels_of(device_type: str) -> str:
    """The kernels that compute on a kind of device, as a log names them."""
    if device_type == "cpu" and native.is_built():
        return native.level().name
    from vnext.kernels.backends import backend_for  # asks torch

    return backend_for(device_type).describe()


def default_cache_bytes(settings: RankSettings, runner: ModelRunner) -> int:
    """On the CPU, a quarter of the available memory, at most 4 GiB, shared by this machine's ranks. On a GPU, the rest of its
    share beside the largest step."""
    if runner.steps_device is not None:
        from vnext.runtime.rank.gpu_loading import fitting_cache_bytes

        return fitting_cache_bytes(settings, runner, runner.steps_device)
    return usual_cache_bytes(available_memory_bytes()) // settings.place_count


# ---- the machine's cores and nodes -------------------------------------------------------------------------------


def place_of(settings: RankSettings) -> Place:
    """Where this rank computes. Raises SettingsError."""
    try:
        return places(here(), settings.place_count, settings.threads, settings.numa)[settings.place]
    except ValueError as error:
        raise SettingsError(str(error)) from error


def bind(place: Place) -> None:
    """Bind the calling thread, and all that it will start, to the place. The threads of the kernels' pool follow by `bind_members`,
    once there are any. Where the system refuses, they run anywhere."""
    if place.cpus and hasattr(os, "sched_setaffinity"):
        with suppress(OSError):
            os.sched_setaffinity(0, place.cpus)
    memory.spread_over(place.nodes)


def bind_members(place: Place) -> None:
    """Bind the threads of the kernels' pool, the caller being the first."""
    for member, cpus in enumerate(place.members):
        native.bind_member(member, cpus)
